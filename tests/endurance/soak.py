"""A node under load with a fault every few seconds: every answer and every block is checked, every process watched.

`python tests/endurance/soak.py --minutes 120`: answers are compared with those of an engine without tiers, a client's
blocks with their keys. Exit status 1 where anything was wrong: bytes, an answer, a hang, a leak.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from endurance import within

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs"), str(ROOT / "benchmarks")]

import httpx2  # noqa: E402
from block_client import BlockClient  # noqa: E402
from crowd_rig import HANG, Crowd, conversations  # noqa: E402
from endurance import options, origin, tell  # noqa: E402
from growth import Samples  # noqa: E402
from node_members import NodeUnderTest, Reviver, Start, by_python, size_of  # noqa: E402
from soak_faults import ALWAYS, EARLY  # noqa: E402

PERIOD: Final = 5.0  # seconds from one fault to the next
_SAMPLE: Final = 10.0  # seconds between two looks at the processes
_REPORT: Final = 60.0  # seconds between two lines of progress
_EXTRA: Final = 180.0  # seconds a short run may go on until every tier was hit
_LEAST: Final = 3  # faults, however slow the machine is
_TIERS: Final = ("l1", "l2", "file", "redis")  # that must have been hit


class Soak:
    """One run: `step` until its time is over, `finish`, and then `report`."""

    def __init__(self, node: NodeUnderTest, crowd: Crowd, client: BlockClient, seed: int, minutes: float) -> None:
        self.node, self.crowd, self.client, self.seed = node, crowd, client, seed
        self.faults: Counter[str] = Counter()
        self.errors: list[str] = []  # what a fault itself, a restart or an end went wrong with
        self.leaks: list[str] = []  # what somebody held at the end
        self.samples = Samples()
        self.hits: Counter[str] = Counter()  # blocks looked up, by the tier that had them, as engines' metrics say
        self.reviver = Reviver(node)
        self._dice = random.Random(seed)
        self._started = time.monotonic()
        self._seconds = minutes * 60
        self._counted: dict[tuple[str, int, str], float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def run(self, progress: Callable[[], None]) -> None:
        """A fault each period, until the time is over; a little longer where a tier was not hit yet."""
        sampled = reported = 0.0
        while (
            self.elapsed < self._seconds
            or self.faults.total() < _LEAST
            or (self._missing() and self.elapsed < self._seconds + _EXTRA)
        ):
            due = (self.faults.total() + 1) * PERIOD
            is_early = self.elapsed < self._seconds / 3
            fault = self._dice.choice((*ALWAYS, *EARLY) if is_early else ALWAYS)
            self.faults[fault.__name__] += 1
            try:
                fault(self.node, self._dice)
            except Exception as error:  # the soak goes on: this is told at the end
                self.errors.append(f"fault {fault.__name__}: {error!r}")
            if self.elapsed - sampled >= min(_SAMPLE, self._seconds / 3):
                sampled = self.elapsed
                self.sample()
            if self.elapsed - reported >= _REPORT:
                reported = self.elapsed
                progress()
            time.sleep(max(0.0, due - self.elapsed))

    def sample(self) -> None:
        """Look at every process, and read the engines' metrics."""
        for name, (pid, life) in self.node.pids().items():
            if (size := size_of(pid, self.elapsed)) is not None:
                self.samples.add(name, life, size)
            if name.startswith("engine"):
                self._count(name, life)

    def finish(self) -> None:
        """Let everything come up again; nobody may hold anything then, nor end badly."""
        self.node.line_to_redis.heal()
        self.node.line_to_engine.heal()
        self.reviver.end()
        print(f"{self.elapsed:.0f} s: all of the node runs", flush=True)
        goal = [count + 1 for count in self.crowd.num_right]
        if not within(lambda: all(a >= b for a, b in zip(self.crowd.num_right, goal, strict=True))):
            self.errors.append(f"not all clients are answered again: {self.crowd.num_right} of {goal}")
        self.crowd.stop()
        self.client.end()
        print(f"{self.elapsed:.0f} s: all clients were answered", flush=True)
        if not within(lambda: not self._held()):
            self.leaks += self._held()
        self.sample()
        print(f"{self.elapsed:.0f} s: idle", flush=True)
        self.errors += self.reviver.failures
        ended = self.node.close()
        self.errors += [f"{name} ended with status {status}" for name, status in ended.items() if status != 0]
        self.errors += [f"{name}: {text}" for name, text in self.node.tracebacks().items()]

    def report(self) -> dict[str, Any]:
        """All figures, for JSON; those of `WRONG` must be empty."""
        blocks, talk = self.client.tally, list(self.crowd.faults)
        hangs = [fault for fault in talk if fault.startswith(HANG)] + blocks.hangs
        growths = self.samples.growths()
        figures = {
            "minutes": round(min(self.elapsed, self._seconds) / 60, 1),
            "faults": dict(sorted(self.faults.items())),
            "answers": sum(self.crowd.num_right),
            "answers_from": dict(self.crowd.cached),
            "clean_errors": dict(self.crowd.troubles),
            "hits": dict(self.hits),
            "blocks_checked": blocks.blocks_checked,
            "blocks_stored": blocks.blocks_stored,
            "blocks_found": dict(blocks.found),
            "wrong_bytes": blocks.wrong,
            "wrong_answers": [fault for fault in talk if not fault.startswith(HANG)],
            "hangs": hangs,
            "leaks": self.leaks + [leak for growth in growths for leak in growth.leaks],
            "errors": self.errors + blocks.errors,
            "never_hit": self._missing(),
            "growth": [growth.as_dict() for growth in growths],
        }
        return {"program": "soak", **origin(), "seed": self.seed, **figures}

    def _missing(self) -> list[str]:
        return [tier for tier in _TIERS if not self.hits[tier]]

    def _count(self, name: str, life: int) -> None:
        """A counter begins anew with each life."""
        for key, value in self.node.counters(name).items():
            if key.startswith("kvtier_lookup_blocks_total{"):
                tier = key.partition('tier="')[2].partition('"')[0]
                self.hits[tier] += int(value - self._counted.get((name, life, key), 0))
                self._counted[name, life, key] = value

    def _held(self) -> list[str]:
        """Who holds what, though nobody asks for anything (I3)."""
        held = []
        try:
            for name in ("engine-a", "engine-b"):
                page = self.node.page(name)
                if page["l1"]["free"] != page["l1"]["blocks"] or any(
                    page["requests"][state] for state in ("live", "waiting", "running")
                ):
                    held.append(f"{name} holds {page['l1']}, {page['requests']}")
            held += [f"router: {each}" for each in self.node.page("router")["replicas"] if each["in_flight"]]
            held += _held_by_daemon(self.node.page("daemon"))
        except (httpx2.HTTPError, ValueError) as error:
            held.append(f"no answer: {error!r}")
        return held


def _held_by_daemon(page: Mapping[str, Any]) -> list[str]:
    held = [f"a client of the daemon holds {one}" for one in page["clients"]
            if one["leases"] or one["reservations"] or not one["connected"]]  # fmt: skip
    for pool in (model["l2"] for model in page["models"]):
        whole = pool["free"] + pool["filling"] + pool["ready"] + pool["quarantined"]
        if pool["slots"] != whole or any(pool[state] for state in ("filling", "quarantined")):
            held.append(f"L2 of the daemon: {pool}")
    return held


def is_well(report: Mapping[str, Any]) -> bool:
    """Whether a run found nothing wrong."""
    return not any(report[what] for what in WRONG)


WRONG: Final = ("wrong_bytes", "wrong_answers", "hangs", "leaks", "errors", "never_hit")


def line_of(report: Mapping[str, Any]) -> str:
    """One line of progress."""
    wrong = ", ".join(f"{len(report[what])} {what}" for what in WRONG if report[what]) or "nothing wrong"
    hits = ", ".join(f"{tier} {count:,}" for tier, count in report["hits"].items())
    return (
        f"{report['minutes']:6.1f} min: {sum(report['faults'].values())} faults, {report['answers']:,} answers, "
        f"{report['blocks_checked']:,} blocks checked; hits {hits}; {wrong}"
    )


def soak(
    seed: int, minutes: float, save: Path | None, home: Path, num_talks: int = 32, start: Start = by_python
) -> dict[str, Any]:
    """Make a model, compute what it answers, start a node and let faults loose on it; `save` has the figures so far."""
    from server_rig import save_checkpoint  # takes torch along

    model = save_checkpoint(home)
    talks = conversations(model, num_talks, 3)
    node = NodeUnderTest(home / "node", model, start)
    node.start()
    client = BlockClient(node.socket, node.model, seed)
    run = Soak(node, Crowd(node.url("router"), talks, num_clients=8, pause=2.0), client, seed, minutes)

    def progress() -> None:
        report = run.report()
        print(line_of(report), flush=True)
        if save is not None:
            save.write_text(json.dumps({**report, "is_over": False}, indent=1) + "\n")

    try:
        run.run(progress)
    finally:
        run.finish()
    return {**run.report(), "is_over": True}


def main() -> int:
    """See the top."""
    arguments = options(__doc__, "minutes", 2.0).parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvs-") as home:
        report = soak(arguments.seed, arguments.minutes, arguments.json, Path(home))
        print(line_of(report))
        return tell(report, WRONG, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
