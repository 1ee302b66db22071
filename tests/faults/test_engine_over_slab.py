"""Stories of an engine over a real slab: restarts, other models, tenants, corruption, dead disks, a random crowd."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extent import brief
from tiny_models import VOCAB, config_of, prompt

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import FinishReason, SamplingParams
from kvtier.engine.sequence import Completion
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import StoreLocked

KEEP = SamplingParams(max_tokens=6, ignore_eos=True, keep_logits=True)
LONG = SamplingParams(max_tokens=24, ignore_eos=True, keep_logits=True)  # until somebody has to give way
EXACT: dict[str, Any] = {
    "block_size": 16,
    "exact": True,
    "exact_rows": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_blocks": 64,
}


class House:
    """Engines over one directory; closes them all and checks every law at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: list[Engine] = []

    def open(
        self,
        family: str = "llama",
        dtype: str = "float32",
        *,
        seed: int = 0,
        host: str = "8MiB",
        epoch: int = 0,
        **options: Any,
    ) -> Engine:
        config = Config.load(
            host={"size": host},
            file={"path": str(self.directory), "size": "64MiB", "deadline": "60s"},
            cache={"load_or_recompute": "load", "prefetch_deadline": "60s", "epoch": epoch},
            breaker={"retry_after": "50ms"},
        )
        settings = EngineConfig(**EXACT | {"epoch": epoch} | options)
        engine = Engine.from_config(config_of(family), settings, LocalConnector.connect(config), seed=seed, dtype=dtype)
        self.engines.append(engine)
        return engine

    def shut(self, engine: Engine) -> None:
        settle(engine)
        tiers_of(engine).hierarchy.check()
        engine.close()
        engine.pool.check()
        assert engine.pool.num_free_blocks == engine.pool.num_blocks
        self.engines.remove(engine)


@pytest.fixture
def house(disk_dir: Path) -> Iterator[House]:
    house = House(disk_dir)
    yield house
    for engine in list(house.engines):
        house.shut(engine)


def tiers_of(engine: Engine) -> LocalConnector:
    assert isinstance(engine.connector, LocalConnector)
    return engine.connector


def settle(engine: Engine, *, below: bool = True) -> None:
    assert engine.drain(60)
    assert tiers_of(engine).hierarchy.drain(60, below=below)


def found(engine: Engine, tier: str) -> float:
    return tiers_of(engine).hierarchy.stats()[f'kvtier_lookup_blocks_total{{tier="{tier}"}}']


def counted(engine: Engine, series: str) -> float:
    return tiers_of(engine).hierarchy.stats().get(series, 0)


def cache_off(family: str, dtype: str = "float32", seed: int = 0) -> Engine:
    return Engine.from_config(
        config_of(family), EngineConfig(**EXACT, enable_prefix_caching=False), seed=seed, dtype=dtype
    )


def same(a: Completion, b: Completion) -> bool:
    return a.token_ids == b.token_ids and np.array_equal(np.stack(a.logits), np.stack(b.logits))


@pytest.mark.parametrize("dtype", brief(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("family", brief(["llama", "mistral-window"], ["llama", "qwen2", "qwen3", "mistral-window"]))
@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_a_prompt_outlives_l1_l2_and_the_engine_bit_for_bit(
    house: House, family: str, dtype: str, loading: str
) -> None:
    tokens = prompt(1, 100)
    expected = cache_off(family, dtype).generate([tokens], KEEP)[0]
    engine = house.open(family, dtype, loading=loading)
    assert same(engine.generate([tokens], KEEP)[0], expected)  # cold
    hit = engine.generate([tokens], KEEP)[0]
    assert hit.num_l1_tokens == 99  # its unfinished last block, too: the last token alone is computed
    assert same(hit, expected)  # L1
    settle(engine)
    blocks_before = bytes_by_hash(engine)
    engine.pool.reset()  # L1 loses everything, names and bytes
    engine.pool.tensor.fill_(torch.nan)
    hit = engine.generate([tokens], KEEP)[0]
    assert (hit.num_l1_tokens, hit.num_external_tokens) == (0, 99)  # the same of L2
    assert same(hit, expected)  # L2
    house.shut(engine)
    again = house.open(family, dtype, loading=loading)
    hit = again.generate([tokens], KEEP)[0]
    assert (found(again, "file"), hit.num_external_tokens) == (6, 96)
    assert same(hit, expected)  # L3, after a restart
    loaded = bytes_by_hash(again)
    assert loaded  # and what came back is what was stored, byte for byte
    assert all(loaded[chain_hash] == data for chain_hash, data in blocks_before.items() if chain_hash in loaded)
    assert len(loaded.keys() & blocks_before.keys()) >= 6


def bytes_by_hash(engine: Engine) -> dict[bytes, bytes]:
    host = tiers_of(engine).hierarchy.host
    return {
        record.chain_hash: bytes(host.region.slot(slot))
        for slot, record in enumerate(host.records)
        if record is not None and host.pool.lookup([record.chain_hash])
    }


def test_the_test_can_fail_a_corrupt_block_in_l2_changes_the_logits(house: House) -> None:
    tokens = prompt(2, 100)
    engine = house.open()
    expected = engine.generate([tokens], KEEP)[0]
    settle(engine)
    engine.pool.reset()
    host = tiers_of(engine).hierarchy.host
    slot = next(i for i, record in enumerate(host.records) if record is not None)
    host.region.slot(slot)[:] = bytes(host.region.slot_bytes)  # behind kvtier's back, after it was verified
    assert not same(engine.generate([tokens], KEEP)[0], expected)


def test_a_bit_flipped_on_disk_is_a_counted_miss_and_the_answer_is_right(house: House) -> None:
    """FAULTS 6, seen from the engine."""
    tokens = prompt(3, 100)
    engine = house.open()
    expected = engine.generate([tokens], KEEP)[0]
    house.shut(engine)
    (slab,) = house.directory.glob("*.slab")
    data = bytearray(slab.read_bytes())
    payload = len(data) - len(bytes(data).rstrip(b"\0"))
    last = len(data) - payload - 1000  # inside the last block written
    data[last] ^= 4
    slab.write_bytes(data)
    again = house.open()
    answer = again.generate([tokens], KEEP)[0]
    assert same(answer, expected)
    assert counted(again, 'kvtier_corruption_total{tier="file"}') + (answer.num_external_tokens == 96) >= 1


def test_another_models_slab_lies_beside_and_is_never_hit(house: House) -> None:
    """FAULTS 34, 37: other weights, dtype, block size, layout of the cache, epoch: each its own namespace."""
    tokens = prompt(4, 100)
    house.shut(warm(house.open(), tokens))
    house.shut(warm(house.open(seed=1), tokens))  # other weights: a slab of its own …
    assert len(list(house.directory.glob("*.slab"))) == 2
    again = house.open()
    assert again.generate([tokens], KEEP)[0].num_external_tokens == 96  # … beside the first one's
    house.shut(again)
    others = (("dtype", "bfloat16"), ("block_size", 32), ("family", "mistral"), ("hash_scheme", "xxh3"), ("epoch", 1))
    for option, other in others:
        chosen: dict[str, Any] = {option: other}
        engine = house.open(**chosen)
        assert engine.generate([tokens], KEEP)[0].num_external_tokens == 0, other
        house.shut(engine)


def warm(engine: Engine, tokens: list[int]) -> Engine:
    engine.generate([tokens], KEEP)
    settle(engine)
    return engine


def test_tenants_never_share_in_any_tier(house: House) -> None:
    """FAULTS 36."""
    tokens = prompt(6, 100)
    engine = house.open()
    engine.generate([tokens], KEEP, cache_salt="a")
    answer = engine.generate([tokens], KEEP, cache_salt="b")[0]
    assert (answer.num_l1_tokens, answer.num_external_tokens) == (0, 0)
    house.shut(engine)
    again = house.open()
    assert again.generate([tokens], KEEP)[0].num_external_tokens == 0
    assert again.generate([tokens], KEEP, cache_salt="b")[0].num_external_tokens == 96


def test_a_second_engine_on_the_same_slab_is_refused_by_name(house: House) -> None:
    """FAULTS 13."""
    house.open()
    with pytest.raises(StoreLocked, match=r"\d+"):
        house.open()


# What a crowd does to blocks depends on the layout, not on the dtype: one dtype each. All of both are told of above.
@pytest.mark.parametrize(
    ("family", "dtype"), [("mistral-window", "float32"), *brief([], [("llama", "float32"), ("qwen3", "bfloat16")])]
)
def test_a_random_crowd_with_aborts_preemption_and_tiny_tiers(house: House, family: str, dtype: str) -> None:
    """FAULTS 18, 19, 20, 22: every answer is the cache-off run's, bit for bit; nothing leaks."""
    rng = np.random.default_rng(9)
    shared = [prompt(100 + i, 80) for i in range(4)]
    prompts = [
        [*shared[rng.integers(4)][: 16 * rng.integers(1, 6)], *rng.integers(3, VOCAB, rng.integers(1, 40)).tolist()]
        for _ in range(40)
    ]
    expected = cache_off(family, dtype).generate(prompts, LONG)
    for loading, preemption in (("async", "recompute"), ("layerwise", "offload")):
        engine = house.open(family, dtype, host="256KiB", num_blocks=20, loading=loading, preemption=preemption)
        crowd(engine, prompts, expected, rng)
        settle(engine)
        house.shut(engine)


def crowd(engine: Engine, prompts: list[list[int]], expected: list[Completion], rng: np.random.Generator) -> None:
    waiting = list(enumerate(prompts))
    live: dict[str, int] = {}
    answers: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    logits: dict[int, list[Any]] = {i: [] for i in range(len(prompts))}
    aborted: set[int] = set()
    while waiting or engine.has_unfinished:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                i, tokens = waiting.pop(0)
                live[engine.add_request(tokens, LONG)] = i
        if live and rng.random() < 0.04:
            victim = str(rng.choice(list(live)))
            aborted.add(live[victim])
            engine.abort(victim)
        for output in engine.step():
            i = live[output.request_id]
            if output.token_id is not None:
                answers[i].append(output.token_id)
                logits[i].append(output.logits)
            if output.finish_reason is not None:
                assert (output.finish_reason is FinishReason.ABORT) == (i in aborted)
                del live[output.request_id]
    assert aborted
    assert len(aborted) < len(prompts) / 2
    for i, answer in enumerate(expected):
        n = len(answers[i])
        assert answers[i] == answer.token_ids[:n]
        assert n == LONG.max_tokens or i in aborted
        assert all(np.array_equal(a, b) for a, b in zip(logits[i], answer.logits, strict=False))
    stats = engine.stats
    assert stats["l1_tokens"] > 0
    assert stats["external_tokens"] > 0
    assert stats["preempted"] > 0
