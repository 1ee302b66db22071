"""The engine's process in `kvtier demo`: reads JSON lines on stdin and answers them until it is killed."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams
from kvtier.tiers import TIERS, ConfigError, KVTierError
from kvtier.tiers.config import Config

BLOCK_SIZE: Final = 16
_L1_BLOCKS: Final = 200  # one document and its conversation; the next document overwrites it
_LEAST_BYTES: Final = 64 << 20  # of L2, and of the slab
_STORE_DEADLINE: Final = 60.0  # seconds for the background writes to reach the disk
_OPTIONS: Final = EngineConfig(block_size=BLOCK_SIZE, num_blocks=_L1_BLOCKS, exact=True, exact_rows=128)


def demo_model() -> LlamaConfig:
    """A Llama of some 50 M parameters: large enough that prefilling a long prompt takes seconds on two cores."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=5,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answered prompt: its tokens, a digest of all their logits, and the tiers that had the prompt's KV."""

    tokens: list[int]
    logits: str
    ttft_ms: float
    cached_tokens: dict[str, int]
    bytes_moved: dict[str, int]


class DemoEngine:
    """One model with two engines: one with kvtier, and one without, which shares only the weights."""

    def __init__(self, model: Model, config: Config, options: EngineConfig) -> None:
        self.engine = Engine(model, options, LocalConnector.connect(config))
        bare = {name: getattr(options, name) for name in ("block_size", "num_blocks", "exact", "exact_rows")}
        self.bare = Engine(model, EngineConfig(**bare, enable_prefix_caching=False))

    @property
    def connector(self) -> LocalConnector:
        assert isinstance(self.engine.connector, LocalConnector)
        return self.engine.connector

    def ask(
        self, prompt: list[int], max_tokens: int, *, bare: bool = False, progress: Callable[[int], object] = int
    ) -> DemoAnswer:
        """Answer greedily. `progress` is called with the number of prompt tokens computed or loaded."""
        engine = self.bare if bare else self.engine
        before = {} if bare else self.connector.hierarchy.stats()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, keep_logits=True)
        request_id = engine.add_request(prompt, params)
        request = engine.request(request_id)
        tokens: list[int] = []
        digest = hashlib.sha256()
        while engine.has_unfinished:
            for output in engine.step():
                assert output.token_id is not None
                assert output.logits is not None
                tokens.append(output.token_id)
                digest.update(output.logits.tobytes())
            progress(min(request.num_computed, len(prompt)))
        engine.drain(_STORE_DEADLINE)
        after = {} if bare else self.connector.hierarchy.stats()
        assert request.ttft is not None
        return DemoAnswer(
            tokens,
            digest.hexdigest(),
            request.ttft * 1000,
            {tier: request.cached_tokens[TIERS[tier].label] for tier in TIERS},
            _bytes_moved(before, after),
        )

    def settle(self) -> bool:
        return self.connector.hierarchy.drain(_STORE_DEADLINE)


def _bytes_moved(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """Payload bytes by series, as in `l2 load`."""
    moved = {}
    for series, value in after.items():
        if series.startswith("kvtier_bytes_total{") and (count := int(value - before.get(series, 0))):
            tier, direction = (part.split('"')[1] for part in series.split(","))
            moved[f"{tier} {direction}"] = count
    return moved


Verb = Callable[..., dict[str, Any]]
"""Gets `done`, which reports its progress in tokens or questions, and the other fields of its request."""


def serve(open_engines: Callable[[], tuple[dict[str, Any], Mapping[str, Verb]]]) -> None:
    """Answer the JSON lines on stdin until it ends. The first is `open`, whose reply comes with the other verbs."""
    verbs: Mapping[str, Verb] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if (verb := request.pop("verb")) == "open":
                reply, verbs = open_engines()
            else:
                reply = verbs[verb](done=lambda number: _reply({"done": number}), **request)
        except KVTierError as error:
            reply = {"error": str(error), "is_usage": isinstance(error, ConfigError)}
        _reply(reply)


def main(home: Path, model_dir: Path | None) -> None:
    with ExitStack() as opened:

        def open_() -> tuple[dict[str, Any], Mapping[str, Verb]]:
            engines = _open(home, model_dir)
            opened.callback(engines.engine.close)
            verbs: dict[str, Verb] = {
                "settle": lambda done: {"settled": engines.settle()},
                "ask": lambda done, **given: asdict(engines.ask(**given, progress=done)),
            }
            return {"max_model_len": engines.engine.max_model_len}, verbs

        serve(open_)


def _open(home: Path, model_dir: Path | None) -> DemoEngine:
    if model_dir:
        model = Model.from_pretrained(model_dir, device="auto")
    else:
        shape = demo_model()
        shape.max_position_embeddings = _L1_BLOCKS * BLOCK_SIZE  # a longer request has no room in L1
        model = Model.from_config(shape, seed=0, device="auto")
    l1_bytes = _L1_BLOCKS * model.shape(BLOCK_SIZE).block_bytes
    config = Config.load(
        host={"size": max(3 * l1_bytes, _LEAST_BYTES)},
        file={"path": str(home), "size": max(4 * l1_bytes, _LEAST_BYTES)},
        cache={"load_or_recompute": "load", "prefetch_deadline": "30s"},
        service={"socket": None},  # it shows tiers of its own
    )
    engines = DemoEngine(model, config, _OPTIONS)
    for bare in (True, False):  # warm up: the first forward pass of a process is slow
        engines.ask([1, 2, 3], 2, bare=bare)
    return engines


def _reply(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
