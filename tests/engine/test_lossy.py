"""`[cache] lossy` through whole engines: answers of a trained model survive it, and exact engines share nothing."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _architectures import ARCHITECTURES
from doubles import SLOT_BYTES
from extent import brief
from recall import MODEL, Asked, asked
from redis_rig import NO_REDIS, RedisServer, standalone
from service_rig import PATIENT, DaemonThread, attach
from small_engines import end, settled
from state_models import config_of as states_of
from state_models import model_of
from tiny_models import config_of
from transformers import AutoModelForCausalLM

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import Hello
from kvtier.connector.local import LocalConnector
from kvtier.connector.transformers.adapter import KVTier
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine, engine_config
from kvtier.engine.model import Model
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.fp8 import fp8_form

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
BLOCK = 8

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with standalone() as running:
        yield running


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    return asked(20)


def config_for(server: RedisServer, lossy: str, **sections: Any) -> Config:
    redis = {"url": server.url, **PATIENT["redis"]}
    cache = {"block_size": BLOCK, "load_or_recompute": "load", "prefetch_deadline": "60s", "lossy": lossy}
    return Config.load(None, **{"host": {"size": "32MiB"}, "redis": redis, "cache": cache, **sections})


def opened(config: Config) -> Engine:
    model = Model.from_pretrained(MODEL, dtype="bfloat16", device="cpu")
    return Engine(model, engine_config(config, num_blocks=1000), LocalConnector.connect(config))


def right(engine: Engine, questions: Sequence[Asked]) -> float:
    """The share of right answers."""
    found = engine.generate([each.prompt for each in questions], ONE)
    return sum(one.token_ids == [each.answer] for one, each in zip(found, questions, strict=True)) / len(questions)


def test_a_trained_model_answers_from_it_and_an_exact_engine_from_its_own(
    questions: list[Asked], server: RedisServer
) -> None:
    server.cli("FLUSHALL")
    lossy = config_for(server, "fp8")
    first = opened(lossy)
    full = right(first, questions)
    assert full >= 0.95
    settled(first)
    end(first)
    # Another node's engine loads what the first one computed.
    second = opened(lossy)
    assert right(second, questions) >= full - 0.05
    assert second.stats["external_tokens"] > second.stats["computed_tokens"]
    end(second)
    # An exact engine computes all of it, over the same server, and leaves its own there.
    exact = opened(config_for(server, "none"))
    assert exact.identity.fingerprint() != second.identity.fingerprint()
    assert right(exact, questions) == full
    assert exact.stats["external_tokens"] == 0
    settled(exact)
    end(exact)
    third = opened(lossy)
    right(third, questions)
    assert third.stats["external_tokens"] == second.stats["external_tokens"]
    end(third)


def why_refused(socket: Path, hello: Hello) -> str:
    """Why the daemon does not let a client in."""
    tiers = RemoteTiers(socket, hello, patience=60.0, deadline=60.0)
    try:
        assert tiers.member is None
        return tiers.wanting["daemon"]
    finally:
        tiers.close()


def test_in_one_daemon_neither_finds_the_others_blocks(
    questions: list[Asked], server: RedisServer, tmp_path: Path
) -> None:
    server.cli("FLUSHALL")
    redis = {"url": server.url, **PATIENT["redis"]}
    serving = DaemonThread(tmp_path / "s", host={"size": "64MiB", "pin": False}, redis=redis)
    service = {"socket": str(tmp_path / "s"), "deadline": "60s"}
    try:
        loaded, kept = list[float](), list[int]()
        for lossy in ("fp8", "none", "fp8", "none"):
            engine = opened(config_for(server, lossy, service=service))
            right(engine, questions[:8])
            assert engine.drain(60)
            assert isinstance(engine.connector, LocalConnector)
            assert engine.connector.tiers.drain(60)
            loaded.append(engine.stats["external_tokens"])
            engine.close()
            kept.append(int(server.cli("DBSIZE")))
        # The first of each kind finds nothing, in L2 or in Redis, and the second one what the first has left.
        assert loaded[:2] == [0, 0]
        assert loaded[2] == loaded[3] > 0
        assert 0 < kept[0] < kept[1] == kept[3]
        namespaces = serving.daemon.call(serving.daemon.namespaces)
        assert sorted(each.lossy or "exact" for each in namespaces) == ["exact", fp8_form("bfloat16", 32)]
        # A client that speaks of the same model otherwise is not let in.
        for each in namespaces:
            other = None if each.lossy else fp8_form("bfloat16", 32)
            hello = Hello(each.fingerprint, *each.blocks, 1 << 20, reset=False, lossy=other)
            why = why_refused(tmp_path / "s", hello)
            assert re.search(r"\[cache\] lossy: blocks as .* run one kvtier everywhere", why)
        unknown = Hello(b"?" * 32, 4, SLOT_BYTES, 1 << 20, reset=False, lossy="int4")
        assert "lossy form 'int4': not known here" in why_refused(tmp_path / "s", unknown)
        attach(tmp_path / "s").close()
        serving.check()
    finally:
        serving.close()


def test_transformers_loads_the_engines_blocks_and_no_exact_ones(questions: list[Asked], server: RedisServer) -> None:
    server.cli("FLUSHALL")
    engine = opened(config_for(server, "fp8"))
    right(engine, questions[:8])
    settled(engine)
    end(engine)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    prompts = torch.tensor([each.prompt for each in questions[:8]])
    for lossy, is_found in (("fp8", True), ("none", False)):
        with KVTier(model, config_for(server, lossy)) as kv:
            answers = kv.generate(prompts, max_new_tokens=1, do_sample=False)[:, -1].tolist()
            assert (kv.num_cached_tokens > 0) is is_found
        assert sum(one == each.answer for one, each in zip(answers, questions, strict=False)) >= 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek-v3", "kind 'mla': latents"),
        ("gemma4", "its layers keep something else than K and V of one shape"),
        ("mamba2", "kind 'state': latents and recurrent states"),
        *brief([], [("bamba", "kind 'state': latents and recurrent states")]),
    ],
)
def test_models_that_cannot_be_kept_so_are_refused(name: str, said: str) -> None:
    row = next((one for one in ARCHITECTURES if one.name == name), None)
    refused = rf'^\[cache\] lossy "fp8": .*{said}.*; leave it out$'
    with pytest.raises(ConfigError, match=refused):
        Model.from_config(states_of(name) if row is None else row.make_config()).identity(EngineConfig(lossy="fp8"))
    with pytest.raises(ConfigError, match=refused):
        KVTier(
            model_of(name) if row is None else row.make_model(),
            {"host": {"size": "4MiB"}, "cache": {"lossy": "fp8", "block_size": 16}},
        )


def test_an_exact_engine_is_not_lossy() -> None:
    settings = EngineConfig(block_size=16, num_blocks=64, lossy="fp8", exact=True)
    with pytest.raises(ConfigError, match="exact mode promises the same bits; leave it out"):
        Engine.from_config(config_of("llama"), settings)


def test_an_engine_and_its_tiers_have_to_agree() -> None:
    config = Config.load(None, host={"size": "4MiB"}, cache={"lossy": "fp8", "block_size": 16})
    with pytest.raises(ConfigError, match=r'lossy "fp8": this engine names its KV as exact; give both the same'):
        Engine.from_config(
            config_of("llama"), EngineConfig(block_size=16, num_blocks=64), LocalConnector.connect(config)
        )
    with pytest.raises(ConfigError, match="lossy 'fp4': use one of none, fp8"):
        EngineConfig(lossy="fp4")  # type: ignore[arg-type]
