"""Ray Serve's KVAwareRouter on our application: Dynamo's index reads our engines' events, and chooses by it."""

import random
from pathlib import Path
from typing import Any

from ray.llm._internal.serve.routing_policies.kv_aware.constants import REQUEST_TOKEN_IDS_KWARG
from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import KVTokenTracker, set_kv_token_tracker

from kvtier.service.openai import Prompts, json_object
from kvtier.service.ray import EngineRequest
from kvtier.service.router import READ, read_prompt


class KVAware(KVAwareRouter):
    """What Ray's `LLMRouter` does around it: builds the tracker in this process, and reads prompts.

    Ray's engine tells when a prompt is computed and when an answer has ended; here both are told at the end.
    """

    def initialize_state(self, model: str) -> None:
        self._prompts = Prompts.open(Path(model))
        self._tracker = KVTokenTracker(serve_deployment_id=self._deployment_id)
        set_kv_token_tracker(self._tracker)
        self._ids: dict[str, str] = {}
        super().initialize_state()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        pending_request.routing_context.should_backoff = True
        request = next((each for each in pending_request.args if isinstance(each, EngineRequest)), None)
        if request is None or request.path not in READ:
            return [[random.choice(candidate_replicas)]]
        known = await read_prompt(request.path, json_object(request.body), len(request.body), self._prompts)
        metadata = pending_request.metadata
        self._ids[metadata.internal_request_id] = metadata.request_id
        pending_request.kwargs[REQUEST_TOKEN_IDS_KWARG] = known.tokens
        try:
            chosen: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
            return chosen
        finally:
            del pending_request.kwargs[REQUEST_TOKEN_IDS_KWARG]

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        if (name := self._ids.pop(internal_request_id, None)) is not None:
            self._tracker._schedule(self._ended(name))

    async def _ended(self, name: str) -> None:
        await self._tracker.on_prefill_complete(name)
        await self._tracker.on_request_completed(name)
