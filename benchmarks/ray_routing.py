"""Where requests go on Ray Serve: kvtier's request router beside Ray's own, on one cluster, with one conversation load.

A real Ray cluster of several nodes' processes on this machine, `kvtier engine` as replicas with a model of random
weights, and clients that hold conversations: each begins with one of a few shared documents and is continued in turn.
All together are larger than what one replica keeps. Routers: kvtier's; power of two choices (Ray's default); Ray's
PrefixCacheAffinityRouter, which compares text; and its KVAwareRouter, which reads our engines' KV events through NVIDIA
Dynamo's index. Each has the application started anew. The share of prompt tokens found cached is as the engines' usage
tells; times are of a machine that all share, so only their ratios tell something. Runs in `.venv-ray`
(`.ci/beside-engine ray`).
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
from pathlib import Path
from statistics import median, quantiles
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
    talks: int
    turns: int
    documents: int
    clients: int
    words: int  # of a document, and of a question

    def opening(self, talk: int) -> str:
        """A conversation's first prompt: a document that others ask about, too, and a question."""
        return _text(talk % self.documents, self.words) + f" Question {talk}: {_text(1000 + talk, self.words // 4)}"

    def question(self, talk: int, turn: int) -> str:
        return f"Turn {turn} of {talk}: {_text(5000 + 100 * talk + turn, self.words // 4)}"


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
            order = random.Random(turn).sample(range(load.talks), load.talks)
            for talk in order:
                if turn:
                    talks[talk].append(load.question(talk, turn))
            yield from clients.map(ask, order)


def row_of(name: str, turns: Sequence[AnsweredTurn], load: Load, seconds: float) -> Row:
    def cached(of: Sequence[AnsweredTurn]) -> float:
        return 100 * sum(turn.num_cached for turn in of) / sum(turn.num_prompt for turn in of)

    took = [turn.seconds for turn in turns]
    most = max(Counter(turn.replica for turn in turns).values())
    row: Row = {"router": name, "cached %": cached(turns)}
    row["cached % of later turns"] = cached(turns[load.talks :])
    row["computed tokens"] = sum(turn.num_prompt - turn.num_cached for turn in turns)
    row |= {"median s a turn": median(took), "p90 s a turn": quantiles(took, n=10)[-1], "turns/s": len(turns) / seconds}
    return row | {"most of a replica %": 100 * most / len(turns)}


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

    load = Load(6, 2, 2, 3, 60) if chosen.quick else Load(12, 4, 3, 4, 90)
    names = [OURS, POWER_OF_TWO] if chosen.quick else list(ROUTERS)
    replicas, rows = 2 if chosen.quick else 3, []
    env = {"KVTIER_HOST__SIZE": "128MiB", "KVTIER_CACHE__BLOCK_SIZE": "16", "PYTHONPATH": str(ROOT / "benchmarks")}
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")  # Ray's workers find `_ray_kv_aware` there
    with tempfile.TemporaryDirectory() as home, ray_cluster(replicas) as cluster:
        sizes: Row = {"head_dim": 256, "intermediate_size": 512, "vocab_size": 32000}  # 64 KiB of KV a token
        model = save_checkpoint(Path(home), config=llama(256, 2 if chosen.quick else 4, heads=8, kv_heads=8, **sizes))
        for name in names:
            wanted: dict[str, Any] = {}
            if (router := ROUTERS[name]) is not None:
                given = {"model": str(model)} if router.startswith("_ray") else {}
                wanted = {"router": router, "router_options": given}
            with application(cluster, model, replicas=replicas, env=env, block_size=16, **wanted) as app:
                if router is not None and router.startswith("_ray"):
                    time.sleep(_KNOWN)
                began, turns = time.perf_counter(), []
                for turn in held(app, load):
                    turns.append(turn)
                    progress(f"{name}: {len(turns)} of {load.talks * load.turns} turns")
                rows.append(row_of(name, turns, load, time.perf_counter() - began))
    setup = {"replicas": replicas, "conversations": load.talks, "turns": load.turns, "clients": load.clients}
    return rows, targets_of(rows), setup
