"""The engines' process in `kvtier demo rag`: computes documents, or answers over them one way or another.

Reads JSON lines on stdin and answers them until stdin ends. Each verb has an engine of its own, so L1 and L2 are empty
when it begins; what it finds of earlier ones is on the slab.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvtier.connector import LocalConnector
from kvtier.connector.segments import Repair, Segment
from kvtier.engine import Completion, Engine, EngineConfig, Model, SamplingParams
from kvtier.engine.demo.rag import COUNTED, FULL, RECALL, SEGMENTS, TIMED, TIMED_BLOCK
from kvtier.engine.demo.recall import RECALL_MODEL
from kvtier.engine.demo.worker import Verb, demo_model, serve
from kvtier.tiers.config import Config

_RECALL_BLOCK: Final = 8
_L1_BLOCKS: Final = {RECALL: 1000, TIMED: 400}
_LEAST_BYTES: Final = 64 << 20  # of L2, and of the slab
_DEADLINE: Final = 60.0  # seconds for background writes to reach the disk
_ONE: Final = SamplingParams(max_tokens=1, ignore_eos=True)

Done = Callable[[int], object]


class RagEngines:
    """Two models over one directory: one that knows the answers, and one that is large enough to be timed."""

    def __init__(self, home: Path, model_dir: Path | None) -> None:
        if model_dir:
            timed = Model.from_pretrained(model_dir, device="auto")
        else:
            timed = Model.from_config(demo_model(), seed=0, device="auto")
        recall = Model.from_pretrained(RECALL_MODEL, dtype="float32", device="auto")
        self.models: Final = {RECALL: recall, TIMED: timed}
        self._home = home

    def precompute(self, kind: str, documents: list[list[int]], done: Done) -> dict[str, Any]:
        with self._engine(kind, SEGMENTS) as engine:
            for number, document in enumerate(documents):
                engine.precompute([document])
                done(number + 1)
            return {"settled": _settled(engine)}

    def answer(
        self, kind: str, way: str, repair: dict[str, Any], asked: list[list[list[int]]], done: Done
    ) -> dict[str, Any]:
        """Answer each prompt, given as its documents and its question, with one token."""
        repaired = Repair(**repair) if way == SEGMENTS else None
        with self._engine(kind, way) as engine:
            engine.generate([[1, 2, 3]], _ONE, cache_salt="warm-up")  # the first forward of an engine is slow
            found = []
            for number, texts in enumerate(asked):
                found.append(_completed(engine, texts, repaired))
                done(number + 1)
            behind = 0
            if way == SEGMENTS:
                _settled(engine)
                behind = sum(_named_behind(engine, *each) for each in zip(asked, found, strict=True))
            return {
                "answers": [each.token_ids[0] for each in found],
                "ttft_ms": [1000 * each.ttft for each in found if each.ttft is not None],
                "sources": sources_of(found),
                "named_behind": behind,
                **{name: engine.stats.get(name, 0) for name in COUNTED},
            }

    @contextmanager
    def _engine(self, kind: str, way: str) -> Any:
        model = self.models[kind]
        block = _RECALL_BLOCK if kind == RECALL else TIMED_BLOCK
        l1_bytes = _L1_BLOCKS[kind] * model.shape(block).block_bytes
        config = Config.load(
            host={"size": max(2 * l1_bytes, _LEAST_BYTES)},
            file={"path": str(self._home / kind), "size": max(4 * l1_bytes, _LEAST_BYTES), "deadline": f"{_DEADLINE}s"},
            cache={"block_size": block, "load_or_recompute": "load", "prefetch_deadline": f"{_DEADLINE}s"},
            service={"socket": None},  # it shows tiers of its own
        )
        settings = EngineConfig(
            block_size=block,
            num_blocks=_L1_BLOCKS[kind],
            enable_prefix_caching=way != FULL,
            segments="on" if way == SEGMENTS else "off",
            segment_min_tokens=block,
        )
        with Engine(model, settings, None if way == FULL else LocalConnector.connect(config)) as engine:
            yield engine


def sources_of(found: Iterable[Completion]) -> dict[str, int]:
    """Where the tokens of all prompts came from; each token has one source."""
    counts: Counter[str] = Counter()
    for each in found:
        prefix = each.num_l1_tokens + each.num_external_tokens
        counts["prefix"] += prefix
        counts["segment"] += each.num_segment_tokens - each.num_repaired_tokens
        counts["repaired"] += each.num_repaired_tokens
        counts["computed"] += each.num_prompt_tokens - prefix - each.num_segment_tokens
    return dict(counts)


def _completed(engine: Engine, texts: list[list[int]], repair: Repair | None) -> Completion:
    prompt = [token for text in texts for token in text]
    if repair is None:
        [found] = engine.generate([prompt], _ONE)
        return found
    segments, start = [], 0
    for text in texts[:-1]:
        segments.append(Segment(start, start + len(text)))
        start += len(text)
    [found] = engine.generate([prompt], _ONE, segments=[segments], repair=repair)
    return found


def _settled(engine: Engine) -> bool:
    assert isinstance(engine.connector, LocalConnector)
    return engine.drain(_DEADLINE) and engine.connector.hierarchy.drain(_DEADLINE)


def _named_behind(engine: Engine, texts: list[list[int]], found: Completion) -> int:
    """How many blocks after the first document, an ordinary prefix, are in any tier under the prompt's names."""
    chain = engine.prompt([*(token for text in texts for token in text), *found.token_ids]).chain
    assert chain is not None
    assert isinstance(engine.connector, LocalConnector)
    hierarchy = engine.connector.hierarchy
    behind = chain.hashes[len(texts[0]) // engine.config.block_size :]
    return sum(engine.pool.lookup([name]) or not hierarchy.lookup([name]).miss for name in behind)


def main(home: Path, model_dir: Path | None) -> None:
    def open_() -> tuple[dict[str, Any], Mapping[str, Verb]]:
        engines = RagEngines(home, model_dir)
        timed = engines.models[TIMED]
        sizes = {"max_model_len": timed.max_model_len, "vocab_size": timed.vocab_size}
        return sizes, {"precompute": engines.precompute, "answer": engines.answer}

    serve(open_)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
