"""Faults of hits inside a block: the child goes, rots, lies or is another tenant's; every bit is as without a cache."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exact_engines import bits
from service_rig import DaemonProcess, patient
from small_engines import end, settled
from tiny_models import config_of, prompt

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import Claim
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.naming.chain import TokenChain, pack_tokens
from kvtier.tiers.tier import ChainHash, ChildBlock

EXACT: dict[str, Any] = {
    "block_size": 16, "exact": True, "exact_rows": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4,
}  # fmt: skip
CACHE = {"block_size": 16, "load_or_recompute": "load"}
KEEP = SamplingParams(max_tokens=2, ignore_eos=True, keep_logits=True)
HELD = prompt(1, 60)  # three blocks of 16, and some tokens
OWN = 32  # tokens of the request in whole blocks
SHARED = 12  # and in the third one
REQUEST = [*HELD[: OWN + SHARED], (HELD[OWN + SHARED] - 2) % 200 + 3, *prompt(2, 20)]

Opened = Callable[..., Engine]


@pytest.fixture
def opened(disk_dir: Path, at_end: ExitStack) -> Opened:
    """Engines over L2 and a slab that holds `HELD`; at the end their laws hold and nothing leaked."""

    def build(salt: str | None = None) -> Engine:
        sections: dict[str, Any] = {
            "host": {"size": "4MiB", "verify": "always"},
            "file": {"path": str(disk_dir), "size": "16MiB"},
            "cache": CACHE,
        }
        connect = LocalConnector.connect(Config.model_validate(patient(sections)))
        engine = Engine.from_config(config_of("llama"), EngineConfig(num_blocks=64, **EXACT), connect)
        at_end.callback(end, engine)
        engine.generate([HELD], KEEP, cache_salt=salt)
        return engine

    return build


@pytest.fixture(scope="module")
def cold() -> bytes:
    """The request's logits without a cache."""
    engine = Engine.from_config(config_of("llama"), EngineConfig(num_blocks=64, enable_prefix_caching=False, **EXACT))
    return bits(engine.generate([REQUEST], KEEP)[0])


def hierarchy_of(engine: Engine) -> Hierarchy:
    assert isinstance(engine.connector, LocalConnector)
    return engine.connector.hierarchy


def forget(engine: Engine, down_to: str) -> None:
    """Drop the tiers above this one."""
    settled(engine)
    if down_to != "L1":
        engine.pool.reset()
    if down_to == "slab":
        hierarchy_of(engine).host.pool.reset()


def chain_of(engine: Engine, tokens: list[int]) -> TokenChain:
    chain = engine.prompt(tokens).chain
    assert chain is not None
    return chain


def damage(engine: Engine, where: str, name: ChainHash) -> None:
    """One bit of a block's KV changes behind kvtier's back."""
    hierarchy = hierarchy_of(engine)
    if where == "L2":
        with hierarchy.host.pool.lease([name]) as lease:
            hierarchy.host.region.slot(lease.slots[0])[100] ^= 4
        return
    slab: Any = hierarchy.ports[0].tier
    at = slab.superblock.payload_offset(slab._blocks.index.find_one(name)) + 100
    descriptor = os.open(slab.path, os.O_RDWR)
    [byte] = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ 4]), at)
    os.close(descriptor)


@pytest.mark.parametrize("where", ["L2", "slab"])
def test_a_child_that_rots_is_a_miss_and_own_blocks_are_loaded(opened: Opened, cold: bytes, where: str) -> None:
    engine = opened()
    forget(engine, where)
    damage(engine, where, chain_of(engine, HELD).hashes[2])
    [answer] = engine.generate([REQUEST], KEEP)
    assert bits(answer) == cold
    assert (answer.num_l1_tokens, answer.num_external_tokens) == (0, OWN)
    tier = "l2" if where == "L2" else "file"
    assert hierarchy_of(engine).stats()[f'kvtier_corruption_total{{tier="{tier}"}}'] == 1
    # What was found bad is forgotten, and told no more.
    forget(engine, where)
    [answer] = engine.generate([HELD], KEEP)
    assert bits(engine.generate([REQUEST], KEEP)[0]) == cold


@pytest.mark.parametrize("tier", ["L1", "L2", "slab"])
def test_another_salts_child_is_never_shared(opened: Opened, cold: bytes, tier: str) -> None:
    engine = opened(salt="a")
    for salt, expected in (("b", 0), (None, 0), ("a", OWN + SHARED)):
        forget(engine, tier)
        [answer] = engine.generate([REQUEST], KEEP, cache_salt=salt)
        assert answer.num_l1_tokens + answer.num_external_tokens == expected
        assert bits(answer) == cold


def lies(engine: Engine) -> dict[str, Sequence[ChildBlock]]:
    """What might be told of a block: other tokens than its name is made of, or a name that nobody holds."""
    chain, request = chain_of(engine, HELD), chain_of(engine, REQUEST)
    more = request.block_tokens(2)  # the request's own next block
    other = pack_tokens([*REQUEST[OWN : OWN + SHARED + 1], 7, 7, 7])
    tail = chain.partial_block(len(HELD))
    assert tail is not None
    return {
        "more tokens": [ChildBlock(chain.hashes[2], more)],
        "fewer tokens": [ChildBlock(chain.hashes[2], more[: 4 * 8])],
        "another parent's": [ChildBlock(chain.hashes[0], more)],
        "not held": [ChildBlock(request._name(chain.hashes[1], other), other)],
        "no hash": [ChildBlock(b"?" * 32, more)],
    }


@pytest.mark.parametrize("lie", ["more tokens", "fewer tokens", "another parent's", "not held", "no hash"])
def test_no_lie_about_children_counts(opened: Opened, cold: bytes, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon of somebody else's making, or a damaged index, tells what is not so."""
    engine = opened()
    told = lies(engine)[lie]
    monkeypatch.setattr(Hierarchy, "_children", lambda *_: list(told))
    forget(engine, "slab")
    [answer] = engine.generate([REQUEST], KEEP)
    assert bits(answer) == cold
    assert answer.num_external_tokens == OWN


def test_a_record_whose_tokens_are_not_its_names_is_no_child(opened: Opened, cold: bytes) -> None:
    engine = opened()
    forget(engine, "L2")
    host, name = hierarchy_of(engine).host, chain_of(engine, HELD).hashes[2]
    [slot] = [at for at, record in enumerate(host.records) if record is not None and record.chain_hash == name]
    record = host.records[slot]
    assert record is not None
    slab: Any = hierarchy_of(engine).ports[0].tier
    slab.discard([name])  # which would tell its true tokens
    host.records[slot] = replace(record, tokens=chain_of(engine, REQUEST).block_tokens(2))
    [answer] = engine.generate([REQUEST], KEEP)
    assert bits(answer) == cold
    assert answer.num_external_tokens == OWN


@pytest.mark.parametrize("moment", ["before the view is asked for", "before it is loaded"])
def test_a_daemon_dead_before_loading_costs_hits(
    home: Path, cold: bytes, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = DaemonProcess(home / "s", host__size="16MiB")
    service = {"socket": home / "s", "deadline": "60s"}
    sections: dict[str, Any] = {"cache": CACHE, "service": service}
    connect = LocalConnector.connect(Config.model_validate(patient(sections)))
    engine = Engine.from_config(config_of("llama"), EngineConfig(num_blocks=64, **EXACT), connect)
    assert isinstance(engine.connector, LocalConnector)
    engine.generate([HELD], KEEP)
    assert engine.drain(60)
    assert engine.connector.tiers.drain(60)
    engine.pool.reset()
    child = chain_of(engine, HELD).hashes[2]
    asked, took = RemoteTiers.submit, RemoteTiers.lease
    killed: list[int] = []

    def ask(tiers: RemoteTiers, hashes: Sequence[ChainHash], *question: Any, **options: Any) -> Claim:
        if child in hashes and moment == "before the view is asked for":
            killed.append(daemon.end(signal.SIGKILL))
        return asked(tiers, hashes, *question, **options)

    def take(tiers: RemoteTiers, claim: Claim) -> Any:
        if child in claim.hashes and moment == "before it is loaded":
            killed.append(daemon.end(signal.SIGKILL))
        return took(tiers, claim)

    monkeypatch.setattr(RemoteTiers, "submit", ask)
    monkeypatch.setattr(RemoteTiers, "lease", take)
    [answer] = engine.generate([REQUEST], KEEP)
    assert killed == [-signal.SIGKILL]
    assert bits(answer) == cold
    if moment == "before the view is asked for":
        assert answer.num_external_tokens == 0
    assert bits(engine.generate([REQUEST], KEEP)[0]) == cold  # from L1
    assert engine.drain(60)
    engine.connector.tiers.check()
    engine.close()
    engine.pool.check()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
