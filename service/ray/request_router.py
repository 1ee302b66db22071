"""KVTierRequestRouter: a request router for Ray Serve that knows from KV events which replica holds which prompt.

Ray Serve makes one in each process that sends requests to the deployment. It sends the class by value, so the
state of the process is in `ranking.py`.
"""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from kvtier.service.ray.ranking import METADATA, Queue, ReplicaRanking, engine_request

_log = logging.getLogger("ray.serve")  # Ray Serve keeps this logger's lines


class KVTierRequestRouter(RequestRouter):
    """Ray Serve calls every method, on the event loop that it routes on."""

    def initialize_state(self, **options: Any) -> None:
        self._ranking = ReplicaRanking(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the events of new replicas, and stop following removed ones."""
        super().update_replicas(replicas)
        metadata = {each.replica_id.unique_id: each.replica_metadata.get(METADATA, {}) for each in replicas}
        self._ranking.change(metadata)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica by itself, the best first: if one is full, Ray Serve tries the next. All at once if all are."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full deployment is retried without a pause
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        queues = [self._queue(name, replica) for name, replica in by_name.items()]
        request = engine_request(pending_request.args)
        try:
            names = await self._ranking.rank(pending_request.metadata.internal_request_id, request, queues)
        except Exception:  # Ray Serve would never give the request a replica
            _log.exception("a request could not be ranked: any replica may get it")
            names = None
        return [candidate_replicas] if names is None else [[by_name[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._ranking.routed(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ranking.completed(internal_request_id, replica_id.unique_id)

    def _queue(self, name: str, replica: RunningReplica) -> Queue:
        length = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return Queue(name, length, replica.max_ongoing_requests)
