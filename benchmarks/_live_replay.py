"""Replays a trace through live tiers, a hierarchy's or a daemon's: what a simulation of it is held against."""

import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.service.simulation import Capacity, SimulatedTiers, TraceReplay
from kvtier.service.traces import RequestTrace
from kvtier.tiers import L2, BlockRecord, KVTierError
from kvtier.tiers.hierarchy import CacheTiers, Pending, Wanted
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.reuse import RequestEnd

FINGERPRINT: Final = bytes(range(32))
_LOOK: Final = 0.1  # seconds between looks at a claim that is under way


@dataclass(eq=False, slots=True)
class ReplayClock:
    """A clock that stands still until it is moved. A policy that reads it orders blocks by the trace's own times."""

    now: float = 0.0  # seconds

    def __call__(self) -> float:
        return self.now


class LiveRun(NamedTuple):
    """What each prompt found, in blocks from L2 and from below, and when it came and ended (seconds, of one clock)."""

    found: list[tuple[int, int]]
    begun: list[float]
    ended: list[float]


def replay_live(tiers: CacheTiers, trace: RequestTrace, deadline: float, clock: ReplayClock | None = None) -> LiveRun:
    """Ask for a trace's blocks and store what is missing, request by request, as an engine does.

    The next request comes when all that was stored has reached every tier, as in a simulation: a burst would fill the
    queue to the tiers below, which holds a quarter of L2, and be dropped in part. KVTierError: `deadline` seconds were
    not enough for one request. `clock`: that of L2's policy, moved to the trace's times; None: it has its own, the
    monotonic one.
    """
    found, begun, ended = [], [], []
    for request in range(len(trace)):
        chain = TokenChain(root_hash(FINGERPRINT), trace.block_size)
        for block in trace.chain(request).tolist():
            chain.extend([block] * trace.block_size)
        names, num_prompt = list(chain.hashes), int(trace.num_prompt[request])
        if clock is not None:
            clock.now = float(trace.begun[request])
        begun.append(time.monotonic() if clock is None else clock.now)
        until = time.monotonic() + deadline
        claim = tiers.submit(names[:num_prompt], chain.root, block_size=trace.block_size)
        while isinstance(promised := tiers.poll(claim), Pending):
            if time.monotonic() > until:
                raise KVTierError(f"request {request}: no answer within {deadline:g} s")
            tiers.wait_progress(_LOOK)
        from_l2 = 0 if claim.found is None else min(promised, claim.found.by_tier.get(L2, 0))
        found.append((from_l2, promised - from_l2))
        lease = tiers.lease(claim)
        _store(tiers, chain, promised)
        ended.append(time.monotonic() if clock is None else clock.now)
        tiers.ended(RequestEnd(names, num_prompt, int(trace.num_output[request])))
        lease.release()  # as in a simulation: until then nothing of the request makes room for its own stores
        if not tiers.drain(max(0.0, until - time.monotonic())):
            raise KVTierError(f"request {request}: its blocks did not reach every tier within {deadline:g} s")
    return LiveRun(found, begun, ended)


def simulated_beside(run: LiveRun, trace: RequestTrace, capacity: Capacity, block_bytes: int) -> list[tuple[int, int]]:
    """What a simulation says of the same requests, at the times at which they came."""
    tiers, replay = SimulatedTiers(capacity, block_bytes, trace.block_size), TraceReplay(trace, block_bytes)
    times = enumerate(zip(run.begun, run.ended, strict=True))
    return [tiers.request(replay.end(request), *both)[:2] for request, both in times]


def _store(tiers: CacheTiers, chain: TokenChain, first: int) -> None:
    names = list(chain.hashes)
    if first == len(names):
        return
    (reservation,) = tiers.reserve([Wanted(names[first:], chain.parent(first), chain.tenant)])
    if reservation is None:
        return
    region, at = tiers.region, {name: i for i, name in enumerate(names)}
    assert region is not None
    for slot, name in zip(reservation.slots, reservation.hashes, strict=True):
        region.slot(slot)[: len(name)] = name
    records = [
        BlockRecord(each, chain.parent(at[each]), chain.block_tokens(at[each]), 0) for each in reservation.hashes
    ]
    tiers.seal(reservation, records, tiers.epoch)
