"""Where requests go on Ray Serve: kvtier's request router beside Ray's own, on one cluster, with one conversation load.

A real Ray cluster of several nodes' processes on this machine, `kvtier engine` as replicas with a model of random
weights, and clients that hold conversations: each begins with one of a few shared documents and is continued in turn.
All together are larger than what one replica keeps. Routers: kvtier's; power of two choices (Ray's default); Ray's
PrefixCacheAffinityRouter, which compares text; and its KVAwareRouter, which reads our engines' KV events through NVIDIA
Dynamo's index. Each has the application started anew, and then several loads in turn, of other texts and another order;
all routers have the same ones. The share of prompt tokens found cached is as the engines' usage tells: its mean, least
and most over the loads. It is a tie with kvtier if one load had more and another less. Times are of a machine that all
share, so only their ratios tell something. Runs in `.venv-ray` (`.ci/beside-engine ray`).
"""

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from operator import sub
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, Final

from _report import ROOT, Given, Result, Row, Target, program, progress
from _rig import beside, llama

POWER_OF_TWO: Final = "power of two choices"
OURS: Final = "kvtier"
_PRIVATE: Final = "ray.llm._internal.serve.routing_policies"  # `ray.serve.llm` itself wants vLLM to be installed
ROUTERS: Final[Mapping[str, str | None]] = {
    OURS: None,
    POWER_OF_TWO: "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter",
    "prefix affinity": f"{_PRIVATE}.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter",
    "KV-aware (Dynamo)": "_ray_kv_aware.KVAware",
}
_KNOWN: Final = 30.0  # seconds until every replica has told Ray's own routers of itself
_WORDS: Final = ("the", "cache", "holds", "a", "block", "of", "keys", "and", "values", "for", "each", "layer", "again")


@dataclass(frozen=True, slots=True)
class Load:
    seed: int
    talks: int
    turns: int
    documents: int
    clients: int
    words: int  # of a document, and of a question

    def opening(self, talk: int) -> str:
        """A conversation's first prompt: a document that others ask about, too, and a question."""
        document = _text(self.seed + talk % self.documents, self.words)
        return f"{document} Question {talk}: {_text(self.seed + 1000 + talk, self.words // 4)}"

    def question(self, talk: int, turn: int) -> str:
        return f"Turn {turn} of {talk}: {_text(self.seed + 5000 + 100 * talk + turn, self.words // 4)}"


def _text(seed: int, words: int) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(_WORDS) for _ in range(words))


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    num_prompt: int  # tokens
    num_cached: int
    seconds: float  # of the whole answer
    replica: str


def held(app: Any, load: Load) -> Iterator[AnsweredTurn]:
    talks = [[load.opening(talk)] for talk in range(load.talks)]

    def ask(talk: int) -> AnsweredTurn:
        began = time.perf_counter()
        answer = app.ask(talks[talk], stream=True)
        talks[talk] += [answer.text]
        return AnsweredTurn(answer.num_prompt, answer.num_cached, time.perf_counter() - began, answer.replica)

    with ThreadPoolExecutor(load.clients) as clients:
        for turn in range(load.turns):
            order = random.Random(load.seed + turn).sample(range(load.talks), load.talks)
            for talk in order:
                if turn:
                    talks[talk].append(load.question(talk, turn))
            yield from clients.map(ask, order)


def row_of(name: str, runs: Sequence[Sequence[AnsweredTurn]], ours: Sequence[float], load: Load, seconds: float) -> Row:
    """A router's figures; `ours`: the cached share of each load with kvtier's, if that has been measured."""
    shares, took = [*map(cached, runs)], [turn.seconds for turns in runs for turn in turns]
    most = [max(Counter(turn.replica for turn in turns).values()) / len(turns) for turns in runs]
    row: Row = {"router": name, "cached %": mean(shares), "least %": min(shares), "most %": max(shares)}
    row["tie"] = name != OURS and min(map(sub, shares, ours)) <= 0 <= max(map(sub, shares, ours))
    row["cached % of later turns"] = mean(cached(turns[load.talks :]) for turns in runs)
    row |= {"median s a turn": median(took), "p90 s a turn": quantiles(took, n=10)[-1], "turns/s": len(took) / seconds}
    return row | {"most of a replica %": 100 * mean(most)}


def cached(turns: Sequence[AnsweredTurn]) -> float:
    return 100 * sum(turn.num_cached for turn in turns) / sum(turn.num_prompt for turn in turns)


def targets_of(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    found = {row["router"]: row["cached %"] for row in rows}
    ours = max(found.pop(OURS), 1e-9)
    return [Target(f"prompt tokens found cached: {name} ÷ kvtier", 1.0, each / ours) for name, each in found.items()]


@program()
def main(chosen: Given) -> Result:
    beside("ray")
    if find_spec("ray") is None:
        progress("Ray Serve is not installed: .ci/beside-engine ray")
        return 0
    from ray_rig import application, ray_cluster
    from server_rig import save_checkpoint

    sizes = (6, 2, 2, 3, 60) if chosen.quick else (12, 4, 3, 4, 90)
    loads = [Load(100_000 * number, *sizes) for number in range(2 if chosen.quick else 3)]
    names = [OURS, POWER_OF_TWO] if chosen.quick else list(ROUTERS)
    replicas, rows = 2 if chosen.quick else 3, list[Row]()
    ours = list[float]()
    env = {"KVTIER_HOST__SIZE": "64MiB", "KVTIER_CACHE__BLOCK_SIZE": "16", "PYTHONPATH": str(ROOT / "benchmarks")}
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # Ray's workers find `_ray_kv_aware` there
    with tempfile.TemporaryDirectory() as home, ray_cluster(replicas) as cluster:
        form: Row = {"head_dim": 256, "intermediate_size": 512, "vocab_size": 32000}  # 32 KiB of KV a token
        model = save_checkpoint(Path(home), config=llama(256, 2, heads=8, kv_heads=8, **form))
        for name in names:
            wanted: dict[str, Any] = {}
            if (router := ROUTERS[name]) is not None:
                given = {"model": str(model)} if router.startswith("_ray") else {}
                wanted = {"router": router, "router_options": given}
            with application(cluster, model, replicas=replicas, env=env, block_size=16, **wanted) as app:
                if router is not None and router.startswith("_ray"):
                    time.sleep(_KNOWN)
                began, runs = time.perf_counter(), list[list[AnsweredTurn]]()
                for load in loads:
                    runs.append([*held(app, load)])
                    progress(f"{name}: {cached(runs[-1]):.1f} % of load {len(runs)} of {len(loads)}")
                ours = ours or [*map(cached, runs)]
                rows.append(row_of(name, runs, ours, loads[0], time.perf_counter() - began))
    setup: Row = {"replicas": replicas, "loads": len(loads), "conversations": sizes[0], "turns": sizes[1]}
    setup["clients"] = sizes[3]
    return rows, targets_of(rows), setup
