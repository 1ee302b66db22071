"""Faults 34, 36 and 37 over a real slab: another model, another tenant, other weights: nothing old is ever found."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import chain_of, fill_slots, record_of, reserve, store, wait_until
from fault_rig import FaultyIO, ask, fetch, forget_l2, over_slab, settle
from tiny_models import config_of, plain, prompt

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine, open_engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers import RequestError
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import PENDING
from kvtier.tiers.naming.identity import ModelIdentity

IDENTITY = ModelIdentity(
    model="tiny",
    revision="0123456789abcdef",
    config_digest="0" * 64,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    compute_dtype="bfloat16",
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    layers=(0, 1),
)
OTHERS: list[dict[str, Any]] = [
    {"revision": "fedcba9876543210"},
    {"dtype": "float16"},
    {"kv_dtype": "fp8_e4m3"},
    {"block_size": 32},
    {"layout": "layer-first"},
    {"tp_size": 2},
    {"tp_size": 2, "tp_ranks": (1, 2)},
    {"hash_scheme": "xxh3"},
    {"epoch": 1},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: "-".join(change))
def test_in_one_directory_each_model_finds_only_its_own_blocks(tmp_path: Path, change: dict[str, Any]) -> None:
    """34: the very same chain hashes, so that only the slab's fingerprint keeps the models apart."""
    chain = chain_of(4)
    models = [IDENTITY.fingerprint(), replace(IDENTITY, **change).fingerprint()]
    for fingerprint in models:
        hierarchy = over_slab(tmp_path, fingerprint=fingerprint)
        assert hierarchy.lookup(chain.hashes).miss == 4  # 0 hits from the old namespace
        store(hierarchy, chain)
        settle(hierarchy)
    for fingerprint in models:
        hierarchy = over_slab(tmp_path, fingerprint=fingerprint)
        assert fetch(hierarchy, chain) == 4
        settle(hierarchy)


def test_a_reset_with_everything_under_way_leaves_nothing_old_not_even_after_a_restart(tmp_path: Path) -> None:
    """37: a store being copied, a write and a read hanging in the disk; the weights change; all of it ends late."""
    io = FaultyIO()
    hierarchy = over_slab(tmp_path, io, slots=64)
    held, writing, copying = (chain_of(4, first_token=first) for first in (0, 1000, 2000))
    store(hierarchy, held)
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    epoch = hierarchy.epoch
    reservation = reserve(hierarchy, copying.hashes, copying.root)
    assert reservation is not None
    io.gate.clear()
    store(hierarchy, writing)
    prefetch = ask(hierarchy, held)
    queue = hierarchy.ports[0].queue
    wait_until(lambda: len(queue.running) == 2)
    io.gate.set()  # a reset waits for storage
    hierarchy.reset()
    fill_slots(hierarchy, reservation.slots, reservation.hashes)
    hierarchy.seal(reservation, [record_of(copying, i) for i in range(4)], epoch)
    wait_until(lambda: hierarchy.poll(prefetch) is not PENDING)
    hierarchy.cancel(prefetch)
    assert hierarchy.drain(60)
    for chain in (held, writing, copying):
        assert hierarchy.lookup(chain.hashes).miss == 4
    settle(hierarchy)
    again = over_slab(tmp_path)
    for chain in (held, writing, copying):
        assert again.lookup(chain.hashes).miss == 4
    settle(again)


def test_new_weights_find_nothing_of_the_old_ones_in_any_tier(tmp_path: Path) -> None:
    """37: L1, L2 and file hold the prompt's blocks when the weights change; a live request would mix old and new."""
    options: dict[str, Any] = {"exact": True, "exact_rows": 32, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    keep = SamplingParams(max_tokens=2, ignore_eos=True, keep_logits=True)
    config = Config.load(
        host={"size": "4MiB"},
        file={"path": str(tmp_path), "size": "8MiB", "deadline": "60s"},
        cache={"load_or_recompute": "load", "prefetch_deadline": "60s"},
    )
    settings = EngineConfig(**options, block_size=16, num_blocks=64)
    engine = Engine.from_config(config_of("llama"), settings, LocalConnector.connect(config))
    cold = Engine.from_config(config_of("llama"), replace(settings, enable_prefix_caching=False))
    assert isinstance(engine.connector, LocalConnector)
    hierarchy, tokens = engine.connector.hierarchy, prompt(1, 120)
    engine.generate([tokens], keep)
    assert engine.drain(60)
    assert hierarchy.drain(60)
    engine.add_request(prompt(2, 90), keep)
    engine.step()
    with pytest.raises(RequestError, match="requests are live"):
        engine.reset_cache()
    while engine.has_unfinished:
        engine.step()
    for one in (engine, cold):
        weights = next(p for name, p in one.model.module.named_parameters() if "k_proj" in name)
        with torch.no_grad():
            weights.mul_(-1.5)
    engine.reset_cache()
    expected = cold.generate([tokens], keep)[0]
    for hits in ((0, 0), (119, 0), (0, 119)):  # cold, from L1, from L2, each with its tail: all of them new
        answer = engine.generate([tokens], keep)[0]
        assert (answer.num_l1_tokens, answer.num_external_tokens) == hits
        assert np.array_equal(answer.logits, expected.logits)
        if hits[0]:
            assert engine.drain(60)
            assert hierarchy.drain(60)
            engine.pool.reset()
    for one in (engine, cold):
        one.close()


def test_a_checkpoint_is_what_its_files_hold_wherever_they_lie(tmp_path: Path) -> None:
    """N1, N2: the same files at another mount point share; other files at the same place, size and time kept, don't."""
    tokens, params = prompt(1, 80), SamplingParams(max_tokens=4, ignore_eos=True)

    def answer(checkpoint: Path, slab: str | None = "slab") -> tuple[list[int], int]:
        file = {} if slab is None else {"file": {"path": str(tmp_path / slab), "size": "64MiB"}}
        cache = {"block_size": 16, "load_or_recompute": "load", "partial_blocks": False}
        with open_engine(checkpoint, {"host": {"size": "8MiB"}, "cache": cache, **file}) as engine:
            [made] = engine.generate([tokens], params)
        return made.token_ids, made.num_external_tokens

    for seed in (0, 1):
        plain("llama", seed=seed).save_pretrained(tmp_path / str(seed))  # type: ignore[operator]
    here, text = shutil.copytree(tmp_path / "0", tmp_path / "here" / "model"), answer(tmp_path / "0", None)[0]
    assert answer(here) == (text, 0)
    # another node's mount point, and another name
    assert answer(shutil.copytree(here, tmp_path / "there" / "renamed")) == (text, 80 - 16)
    # an archive is unpacked over it: of other weights, the same size and the same times
    file = here / "model.safetensors"
    before = file.stat()
    shutil.copyfile(tmp_path / "1" / "model.safetensors", file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = answer(tmp_path / "1", None)[0]
    assert other != text
    assert answer(here) == (other, 0)
    assert answer(tmp_path / "there" / "renamed") == (text, 80 - 16)
