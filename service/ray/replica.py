"""EngineReplica: one replica of the Ray Serve deployment: starts one engine, and forwards requests to it."""

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import ray
from ray import serve

from kvtier.service.openai import OpenAIError
from kvtier.service.ray.child import EngineChild, held_ports
from kvtier.service.ray.options import RayOptions
from kvtier.service.ray.ranking import METADATA, AnswerHead, EngineRequest
from kvtier.service.router import Deadlines, Failure, ReplicaClient, ReplicaFailed, ReplicaProfile
from kvtier.tiers import KVTierError

_PORTS: Final = ("http", "events", "replay")


class EngineReplica:
    """Deployed by `build`; Ray Serve calls every method. The engine is ready once the constructor has ended."""

    def __init__(self, options: RayOptions) -> None:
        self._options, self._node = options, ray.util.get_node_ip_address()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._client: ReplicaClient | None = None
        with held_ports(len(_PORTS)) as numbers:
            self._port = numbers[0]
            ports = {name: str(number) for name, number in zip(_PORTS, numbers, strict=True)} | {"node": self._node}
            self._endpoints = options.endpoints(ports)
            self._engine = EngineChild(options.command(ports), options.environment(ports), self._port)
            self._models = self._engine.wait_ready(options.start_timeout)

    def record_replica_metadata(self) -> dict[str, Any]:
        metadata = {"models": self._models, "node": self._node, "block_size": self._options.fallback_block_size}
        return {METADATA: {**metadata, "endpoints": self._endpoints}}

    def record_routing_stats(self) -> dict[str, Any]:
        """The same for Ray Serve's own `KVAwareRouter`, if the engine publishes KV events."""
        profile = ReplicaProfile.of(self._models)
        events = profile.publishers.reached_at(self._node)
        publish, replay = self._endpoints or (events.events, events.replay)
        if publish is None:
            return {}
        size = profile.block_size or self._options.fallback_block_size
        metadata = {"endpoint": publish, "replay_endpoint": replay, "block_size": size, "dp_rank": 0}
        return {"kv_event_metadata": {**metadata, "max_num_batched_tokens": self._options.max_batched_tokens}}

    async def check_health(self) -> None:
        """Raise if the engine does not answer; Ray Serve then starts another replica."""
        if not await asyncio.to_thread(self._engine.is_healthy):
            raise KVTierError("the engine does not answer, or has ended")

    async def answer(self, request: EngineRequest) -> AsyncIterator[AnswerHead | bytes]:
        """The head of the engine's answer, then its bytes; status 502 without one. ReplicaFailed if it breaks off."""
        options = self._options
        deadlines = Deadlines(options.connect_timeout, options.first_byte_timeout, options.stall_timeout)
        if self._client is None:  # it belongs to the event loop that answers
            self._client = ReplicaClient("127.0.0.1", self._port, lambda: None)
        parts = request.method, request.path, request.headers, request.body
        try:
            answer = await self._client.ask(*parts, deadlines)
        except ReplicaFailed as error:
            is_broken = error.failure is Failure.BROKEN
            yield AnswerHead(http.client.BAD_GATEWAY, [(b"content-type", b"application/json")], self._name, is_broken)
            why = f"the engine of replica {self._name} could not answer; try again"
            yield json.dumps(OpenAIError(http.client.BAD_GATEWAY, why, code=error.failure).content).encode()
            return
        try:
            here = f"http://127.0.0.1:{self._port}".encode()  # a redirect to the engine becomes one to this server
            headers = [
                (bytes(name), bytes(value).removeprefix(here) if name == b"location" else bytes(value))
                for name, value in answer.headers
            ]
            yield AnswerHead(answer.status, headers, self._name)
            piece = await answer.first()
            while piece:
                yield piece
                piece = await answer.piece()
        finally:
            answer.close()

    def __del__(self) -> None:
        """Ray Serve's last call, after requests under way have ended."""
        with contextlib.suppress(AttributeError):  # a constructor that failed
            self._engine.stop(self._options.stop_timeout)
