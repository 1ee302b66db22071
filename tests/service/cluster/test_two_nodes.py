"""Two nodes, each with its daemon, and a Redis Cluster of three between them: what one computes, the other loads."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Timer

import pytest
from extent import brief
from node_rig import Node, node
from redis_rig import Cluster, cluster
from small_engines import GREEDY
from tiny_models import config_of, prompt

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.tiers.config.config import Config

pytestmark = pytest.mark.timeout(400)

PROMPTS = [prompt(seed, 200) for seed in range(6)]
BLOCK = 16
NUM_BLOCKS = 6 * (200 // BLOCK)  # that can be loaded


@dataclass
class Rack:
    """Both nodes and what is between them."""

    redis: Cluster
    one: Node
    other: Node


@pytest.fixture
def rack() -> Iterator[Rack]:
    with ExitStack() as stack:
        redis = stack.enter_context(cluster())
        shared = {"REDIS__URL": redis.url, "REDIS__MODE": "cluster", "BREAKER__RETRY_AFTER": "200ms"}
        yield Rack(redis, *(stack.enter_context(node(**shared)) for _ in range(2)))


@contextmanager
def engine_on(where: Node | None, salt: str | None = None) -> Iterator[Engine]:
    """An engine over a node's daemon, or with nothing below L1; the laws hold at its end, and all is written."""
    options = EngineConfig(block_size=BLOCK, num_blocks=128, exact=True, exact_rows=64, max_num_seqs=8, cache_salt=salt)
    cache = {"load_or_recompute": "load", "prefetch_deadline": "60s"}
    connect = None
    if where is not None:
        config = Config.load(service=dict(where.section), host={"size": "16MiB"}, cache=cache)
        connect = LocalConnector.connect(config)
    engine = Engine.from_config(config_of("llama"), options, connect)
    try:
        yield engine
        assert engine.drain(60)
        if isinstance(engine.connector, LocalConnector):
            tiers = engine.connector.tiers  # what a dead shard lacks is not waited for longer
            assert tiers.drain(20) or tiers.drain(60, below=False)
            engine.connector.tiers.check()
    finally:
        engine.close()


def text(engine: Engine) -> list[list[int]]:
    """What it answers to every prompt."""
    return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]


def found(engine: Engine, tier: str) -> int:
    """Blocks found in a tier, where they were when first asked."""
    assert isinstance(engine.connector, LocalConnector)
    return int(engine.connector.tiers.stats()[f'kvtier_lookup_blocks_total{{tier="{tier}"}}'])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine_on(None) as plain:
        return text(plain)


def test_another_tenant_finds_nothing_on_either_node(rack: Rack, expected: list[list[int]]) -> None:
    with engine_on(rack.one, salt="one") as first:
        assert text(first) == expected
    for where, salt in ((rack.one, "two"), (rack.other, "three"), (rack.other, None)):
        with engine_on(where, salt=salt) as other:
            assert text(other) == expected
            assert found(other, "miss") == NUM_BLOCKS


@pytest.mark.parametrize("delay", brief([0.05], [0.0, 0.05, 0.2]))
def test_a_master_killed_amid_loads_costs_only_hits(rack: Rack, expected: list[list[int]], delay: float) -> None:
    with engine_on(rack.one) as first:
        assert text(first) == expected
    with engine_on(rack.other) as second:
        timer = Timer(delay, rack.redis.masters[1].kill)
        timer.start()
        assert text(second) == expected
        timer.join()
    with engine_on(rack.other) as third:  # the other two shards answer, and what is gone was computed and kept again
        assert text(third) == expected
        assert found(third, "l2") == NUM_BLOCKS
