"""Where requests go, and what it is worth: a trace replayed to four replicas under each routing policy.

Clocks and hardware are simulated (benchmarks/_fleet.py: continuous batching, chunked prefill, L1 and L2 of given sizes,
an 8 B model on one GPU each); the policy, the prefix index, the events it hears, and the pools with their evictions are
kvtier's own. `--trace` is in Mooncake's form, and each of its blocks is one small block here: 512 tokens of cost, 16 of
content. Requests of one timestamp arrive spread over the time up to the next. The trace says nothing of the text of
answers, so only prompts are cached. The index learns of blocks a tenth of a second late.

A session is known by the first two blocks of its prompt, which is more than a cookie knows. "session cookie" sends its
first turn to the replica with the least to do, and all others to the same; "session hash" is `sticky`. The oracle is
one replica with the memory, the processors and the links of all: its cached share is about what routing can preserve,
its times are out of reach. The policy's two figures were tuned on the first third of the conversation trace. All
figures are of the rest: caches and queues are as the first third left them.
"""

import argparse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from _fleet import FINGERPRINT, SMALL, Hardware, SimulatedReplica, SimulatedRequest, TracePrompt, made_up, read_prompts
from _report import RESULTS, Given, Result, Row, option, program, progress
from _rig import picture
from numpy.typing import NDArray

from kvtier.service.events import AnnouncedBlocks, KVEvent, PrefixIndex
from kvtier.service.router import Candidate, Choice, Reason, choose, sticky
from kvtier.tiers import TIERS, FormatError

OURS: Final = "prefix-aware"
ORACLE: Final = "oracle: one replica"
RUNNING: Final = 1.0  # blocks of work in an answer that has begun, as the router counts
NEVER: Final = float("inf")
QUICK: Final = 300  # requests
BLOCK_SIZE: Final = 512  # tokens of the trace's blocks
EVENT_DELAY: Final = 0.1  # seconds until the index knows of a block
HARDWARE: Final = Hardware()

Policy = Callable[[Sequence[Candidate], TracePrompt, int], Choice]


def prefix_aware(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
    return choose(candidates, len(prompt.blocks), turn=turn)


def round_robin(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
    able = [candidate.name for candidate in candidates if candidate.can_take]
    return Choice(able[turn % len(able)] if able else None, Reason.EQUAL, ())


def least_load(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
    return choose(candidates, len(prompt.blocks), weights={}, crowd=NEVER, turn=turn)


def cookies() -> Policy:
    homes: dict[bytes, str | None] = {}

    def stay(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
        if prompt.session not in homes:
            homes[prompt.session] = least_load(candidates, prompt, turn).name
        return Choice(homes[prompt.session], Reason.SESSION, ())

    return stay


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    OURS: lambda: prefix_aware,
    "session cookie": cookies,
    "session hash": lambda: lambda candidates, prompt, turn: sticky(candidates, prompt.session),
    "least load": lambda: least_load,
    "round robin": lambda: round_robin,
}


class SimulatedRouter:
    """The router's half: the index, the work given and not finished, the policy."""

    def __init__(self, names: Sequence[str], policy: Policy) -> None:
        self.index, self._policy, self._turn = PrefixIndex(SMALL), policy, 0
        self._given: dict[str, list[tuple[SimulatedRequest, float]]] = {name: [] for name in names}

    def choose(self, request: SimulatedRequest) -> str:
        prefixes = self.index.matches(request.prompt.sequence)
        candidates = []
        for name, given in self._given.items():
            load = sum(blocks if each.first_token is None else RUNNING for each, blocks in given)
            candidates.append(Candidate(name, prefixes.get(name, {}), load, num_requests=len(given)))
        choice = self._policy(candidates, request.prompt, self._turn)
        assert choice.name is not None
        self._turn += 1
        cached = sum(prefixes.get(choice.name, {}).values())
        self._given[choice.name].append((request, max(len(request.prompt.blocks) - cached, RUNNING)))
        return choice.name

    def finished(self, name: str) -> None:
        self._given[name] = [(request, blocks) for request, blocks in self._given[name] if not request.done]


def replay(prompts: Sequence[TracePrompt], policy: Policy, fleet: Sequence[SimulatedReplica]) -> list[SimulatedRequest]:
    """Send all prompts through a router to a fleet. Checks everybody's books at the end."""
    replicas = {replica.name: replica for replica in fleet}
    router = SimulatedRouter(list(replicas), policy)
    blocks = {name: AnnouncedBlocks(FINGERPRINT) for name in replicas}
    told: deque[tuple[float, str, list[KVEvent]]] = deque()
    requests = [SimulatedRequest(prompt) for prompt in prompts]
    coming = deque(requests)
    while True:
        arrival = coming[0].prompt.arrival if coming else NEVER
        heard = told[0][0] if told else NEVER
        ending = min(fleet, key=lambda replica: NEVER if replica.wake_at is None else replica.wake_at)
        ended = NEVER if ending.wake_at is None else ending.wake_at
        now = min(arrival, heard, ended)
        if now == NEVER:
            break
        if heard == now:
            _, name, events = told.popleft()
            for event in events:
                router.index.apply(name, event)
        elif ended == now:
            ending.advance(now)
            router.finished(ending.name)
            events = [event for each in ending.events() for event in blocks[ending.name].apply(each)]
            if events:
                told.append((now + EVENT_DELAY, ending.name, events))
        else:
            request = coming.popleft()
            replicas[router.choose(request)].submit(request, now)
    for replica in fleet:
        replica.check()
        held = {TIERS[tier].medium: count for tier, count in replica.holdings().items()}
        assert router.index.holdings(replica.name) == held, "the index is not what the replica holds"
    router.index.check()
    assert not router.index.counts, router.index.counts
    return requests


class Figures(NamedTuple):
    row: dict[str, float]
    ttft: NDArray[np.float64]  # seconds, of each request


def run(prompts: Sequence[TracePrompt], name: str, policy: Policy, replicas: int, *, whole: bool = False) -> Figures:
    """Replay to the replicas, or to the one that is all of them; figures of all but the first third.

    Work is of all requests.
    """
    progress(name)
    hardware = HARDWARE.times(replicas) if whole else HARDWARE
    fleet = [SimulatedReplica(f"replica-{i}", hardware, BLOCK_SIZE) for i in range(1 if whole else replicas)]
    requests = replay(prompts, policy, fleet)[len(prompts) // 3 :]
    ttft = np.array([(request.first_token or NEVER) - request.prompt.arrival for request in requests])
    tokens = sum(request.prompt.num_tokens for request in requests)
    in_l1, in_l2 = (sum(each.cached[m] for each in requests) * BLOCK_SIZE / tokens for m in ("l1", "l2"))
    work = np.array([replica.num_computed for replica in fleet], float)
    row = {"cached": in_l1 + in_l2, "in L1": in_l1, "in L2": in_l2}
    row |= {f"TTFT p{q} s": float(np.percentile(ttft, q)) for q in (50, 90, 99)}
    row |= {"TTFT mean s": float(ttft.mean()), "most / mean work": float(work.max() / work.mean())}
    return Figures(row, ttft)


def plot(runs: Mapping[str, Figures], path: Path) -> None:
    with picture(path, 1, 2, figsize=(9.5, 3.6)) as (_, (left, right)):
        for name, each in runs.items():
            times = np.sort(each.ttft)
            style = {"color": "grey", "linestyle": ":"} if name == ORACLE else {"linewidth": 1.2 + 1.3 * (name == OURS)}
            left.plot(times, np.arange(1, len(times) + 1) / len(times), label=name, **style)
        left.set(xscale="log", xlabel="time to first token, s (simulated)", ylabel="share of requests")
        left.legend(fontsize=7)
        bars = right.barh(list(runs), [100 * each.row["cached"] for each in runs.values()], color="tab:blue")
        right.bar_label(bars, fmt="%.1f", fontsize=8)
        right.invert_yaxis()
        right.margins(x=0.12)  # room for the labels
        right.set_xlabel("prompt tokens that were cached, %")


def read(trace: Path | None, limit: int | None) -> list[TracePrompt]:
    """FormatError if a request alone is more than a replica's L1 holds, or there are too few to measure."""
    prompts = read_prompts(trace, BLOCK_SIZE, limit) if trace else made_up(limit or 4000, BLOCK_SIZE)
    if len(prompts) < 3:
        raise FormatError(f"{len(prompts)} requests: too few to measure; give more, by --requests or another --trace")
    for number, prompt in enumerate(prompts, 1):
        if prompt.num_tokens + prompt.num_answer > (HARDWARE.l1_blocks - 1) * BLOCK_SIZE:
            told = f"more than a replica's {HARDWARE.l1_blocks} blocks of L1; leave it out"
            raise FormatError(f"{trace}:{number}: input_length {prompt.num_tokens}: with its answer {told}")
    return prompts


def _whole(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 on")
    return int(text)


@program(
    option("--trace", type=Path, help="JSON lines in Mooncake's form, .gz or not; without: made up"),
    option("--requests", type=_whole, help="only the first so many"),
    option("--replicas", type=_whole, default=4, help="of the engine (4)"),
)
def main(args: Given) -> Result:
    prompts = read(args.trace, min(args.requests or QUICK, QUICK) if args.quick else args.requests)
    setup: Row = {"trace": args.trace.name if args.trace else "made up", "replicas": args.replicas}
    setup |= {"measured": f"requests {len(prompts) // 3 + 1} to {len(prompts)}", "event delay s": EVENT_DELAY}
    setup |= {"L1 blocks": HARDWARE.l1_blocks, "L2 blocks": HARDWARE.l2_blocks}
    runs = {name: run(prompts, name, make(), args.replicas) for name, make in POLICIES.items()}
    runs[ORACLE] = run(prompts, ORACLE, prefix_aware, args.replicas, whole=True)
    best = runs[ORACLE].row["cached"]
    rows = [{"policy": name, **each.row, "of oracle": each.row["cached"] / best} for name, each in runs.items()]
    if args.save:
        plot(runs, RESULTS / "routing.png")
    return rows, [], setup
