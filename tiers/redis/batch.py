"""A batch over all servers: each gets its share in one pipeline, side by side, before one deadline."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.redis.keyspace import Keyspace
from kvtier.tiers.redis.lanes import DOUBTFUL, UNASKED, Lane, Settle
from kvtier.tiers.redis.nodes import MAX_CONNECTIONS, Endpoint, Nodes
from kvtier.tiers.redis.stream import TooLongError, WireError
from kvtier.tiers.redis.turns import make_turns
from kvtier.tiers.redis.wire import RedisReply, Refusal

_WINDOW_BYTES: Final = 8 << 20  # of blocks under way on one connection, half of them in one call
_MAX_WINDOW: Final = 512  # blocks; the kernel takes 1,024 pieces at once
_MAX_LANES: Final = 16  # servers of a cluster talked to at once

BlockResult = BlockRecord | Outcome | bool
LaneWork = Callable[[Lane, list[int], Settle], None]
"""What to do with a lane and the positions of the batch that are its share."""


class Batches:
    """Runs batches over the servers of a namespace. Thread-safe; once it returns, nobody touches the buffers."""

    def __init__(self, space: Keyspace, nodes: Nodes, ttl_ms: int, in_flight: int) -> None:
        self.space = space
        self.nodes = nodes
        self._ttl_ms = ttl_ms
        self._in_flight = in_flight  # bytes, over all connections
        self._make_turns = None if space.form.stored_bytes else make_turns(space.slot_bytes)
        self._threads = ThreadPoolExecutor(_MAX_LANES, "kvtier-redis")

    def run(
        self, hashes: Sequence[ChainHash], epoch: int, deadline: float, work: LaneWork
    ) -> tuple[list[BlockResult | None], RedisReply]:
        """What became of each block under `work`, and what stands as epoch on its server (UNASKED: not known).

        None for a block that `work` stopped before.
        """
        answers: list[BlockResult | None] = [None] * len(hashes)
        shares: dict[Endpoint, list[int]] = {}
        keys = self.space.keys(hashes, epoch)
        for position, key in enumerate(keys):
            endpoint = self.nodes.endpoint(key)
            if endpoint is None:
                answers[position] = Outcome.IO_ERROR
                self.nodes.refresh()
            else:
                shares.setdefault(endpoint, []).append(position)
        home = self.nodes.endpoint(self.space.epoch_key)
        num_endpoints = max(1, len(self.nodes.endpoints()))
        allowed = self._in_flight // (MAX_CONNECTIONS * num_endpoints * self.space.value_bytes)
        window = max(1, min(allowed, _MAX_WINDOW, max(2, _WINDOW_BYTES // self.space.slot_bytes)))
        seen: list[RedisReply] = []

        def attempt(endpoint: Endpoint, positions: list[int]) -> None:
            with endpoint.borrow(deadline) as wire:
                lane = Lane(wire, self.space, keys, epoch, window, self._ttl_ms, endpoint is home)
                lane.make_turns = self._make_turns
                try:
                    work(lane, positions, answers.__setitem__)
                finally:
                    seen.append(lane.epoch_seen)
                    if lane.doubtful:
                        self.nodes.refresh()

        def share(endpoint: Endpoint, positions: list[int]) -> None:
            while positions:
                try:
                    attempt(endpoint, positions)
                    return
                except TooLongError as error:  # what was asked for behind it is asked for anew
                    bad, *positions = [position for position in positions if answers[position] is None]
                    answers[bad] = error.outcome
                except WireError as error:
                    self._failed(error, answers, positions)
                    return

        self._side_by_side(share, shares, answers)
        return answers, next((epoch for epoch in reversed(seen) if epoch is not UNASKED), UNASKED)

    def ask(self, key: bytes, commands: Sequence[bytes], deadline: float) -> list[RedisReply]:
        """The answers of `key`'s server to short commands. WireError if it gives none."""
        endpoint = self.nodes.endpoint(key)
        if endpoint is None:
            self.nodes.refresh()
            raise WireError(Outcome.IO_ERROR, "no server has its slot")
        try:
            with endpoint.borrow(deadline) as wire:
                wire.send(commands, len(commands))
                replies = [wire.reply() for _ in commands]
        except WireError:
            self.nodes.refresh()
            raise
        if any(isinstance(reply, Refusal) and reply.code in DOUBTFUL for reply in replies):
            self.nodes.refresh()
        return replies

    def close(self) -> None:
        """Close every connection; batches under way end as failures. Idempotent."""
        self.nodes.close()
        self._threads.shutdown(wait=False)

    def _side_by_side(
        self,
        share: Callable[[Endpoint, list[int]], None],
        shares: dict[Endpoint, list[int]],
        answers: list[BlockResult | None],
    ) -> None:
        """One share on this thread, the others on ours. All have ended when it returns: each heeds the deadline."""
        futures: list[Future[None]] = []
        rest = list(shares.items())
        for endpoint, positions in rest[1:]:
            try:
                futures.append(self._threads.submit(share, endpoint, positions))
            except RuntimeError:  # closed meanwhile, or the interpreter is shutting down
                for position in positions:
                    answers[position] = Outcome.CLOSED
        for endpoint, positions in rest[:1]:
            share(endpoint, positions)
        wait(futures)
        for future in futures:
            future.result()

    def _failed(self, error: WireError, answers: list[BlockResult | None], positions: list[int]) -> None:
        """The rest of a share that a connection's failure ended."""
        outcome = error.outcome
        if outcome is not Outcome.CLOSED:
            self.nodes.refresh()  # of a server left alone too: its replica may have its place by now
        if outcome is Outcome.BREAKER_OPEN and not any(endpoint.usable for endpoint in self.nodes.endpoints()):
            outcome = Outcome.IO_ERROR  # not one server is left: the port may know
        for position in positions:
            if answers[position] is None:
                answers[position] = outcome
                if outcome is Outcome.CHECKSUM:  # the value being read is not one of ours; what came behind it is lost
                    outcome = Outcome.IO_ERROR
