"""A real vLLM publishes, our consumer reads: its index says what vLLM's lookups and kvtier's tiers find."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from event_rig import until
from node_rig import free_port
from vllm.config import KVEventsConfig
from vllm_rig import BLOCK, Engine, engine, prompt, tiers

from kvtier.service.events.consumer import EventConsumer
from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes

pytestmark = pytest.mark.timeout(300)

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 70)]
BLOCKS = [6, 3, 2]  # full ones


class Reader:
    """Our consumer, on vLLM's own publisher."""

    def __init__(self) -> None:
        self.ports = [free_port(), free_port()]
        self.index = PrefixIndex(BLOCK)
        addresses = [f"tcp://127.0.0.1:{port}" for port in self.ports]
        self.consumer = EventConsumer("vllm", self.index, *addresses)

    def found(self, tokens: Sequence[int], namespace: str | None = None) -> dict[str, int]:
        return self.index.matches(prompt_hashes(tokens, BLOCK, namespace=namespace)).get("vllm", {})

    @contextmanager
    def engine(self, model: Path, options: dict[str, Any] | None, **more: Any) -> Iterator[Engine]:
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{self.ports[0]}",
            replay_endpoint=f"tcp://*:{self.ports[1]}",
        )
        with engine(model, options, kv_events_config=config, **more) as vllm:
            yield vllm


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.consumer.close()
    made.index.check()
    assert not made.index.counts, "vLLM's events are never doubtful"


def test_what_vllm_holds_is_known(model: Path, reader: Reader) -> None:
    with reader.engine(model, None) as vllm:
        vllm.text(PROMPTS, 1)
        until(lambda: reader.index.holdings("vllm") == {"GPU": sum(BLOCKS)})
        for tokens, blocks in zip(PROMPTS, BLOCKS, strict=True):
            assert reader.found(tokens) == {"GPU": blocks}
        # a tenant's blocks are its own
        vllm.text([PROMPTS[0]], 1, salt="alice")
        until(lambda: reader.found(PROMPTS[0], "alice") == {"GPU": 6})
        assert reader.found(PROMPTS[0]) == {"GPU": 6}
        assert reader.index.num_blocks == sum(BLOCKS) + 6
        vllm.forget_l1()
        vllm.text([PROMPTS[1]], 1)
        until(lambda: reader.index.holdings("vllm") == {"GPU": 3})
        until(lambda: reader.consumer.state.state == "live")
    # and an engine with little room
    with reader.engine(model, None, num_gpu_blocks_override=16, max_model_len=256) as vllm:
        for seed in range(5):
            vllm.text([prompt(seed, 200)], 1)
        manager = vllm.scheduler.kv_cache_manager
        held = len(manager.block_pool.cached_block_hash_to_block._cache)
        until(lambda: reader.found(prompt(4, 200)) == {"GPU": 6})  # that was the last; as many blocks were held before
        until(lambda: reader.index.holdings("vllm") == {"GPU": held})
        assert reader.found(prompt(0, 200)) == {}


@pytest.mark.parametrize("keys", brief(["kvtier"], ["vllm", "kvtier"]))
def test_what_the_tiers_behind_vllm_hold_is_known(keys: str, model: Path, tmp_path: Path, reader: Reader) -> None:
    with reader.engine(model, tiers(tmp_path, keys=keys)) as vllm:
        vllm.text(PROMPTS, 1)
        vllm.text([PROMPTS[0]], 1, salt="alice")
        vllm.settle()
        told = sum(BLOCKS) + 6
        until(lambda: reader.index.holdings("vllm") == {"GPU": told, "CPU": told, "STORAGE": told})
        vllm.forget_l1()
        vllm.text([PROMPTS[1]], 1)
        vllm.settle()
        # vLLM has one prompt again, memory and slab have all of them
        until(lambda: reader.index.holdings("vllm") == {"GPU": 3, "CPU": told, "STORAGE": told})
        assert reader.found(PROMPTS[0]) == {"CPU": 6}
        assert reader.found(PROMPTS[1]) == {"GPU": 3}
        assert reader.found(PROMPTS[0], "alice") == {"CPU": 6}
    # an engine that finds the slab full knows whose blocks they are, or keeps quiet about them
    with reader.engine(model, tiers(tmp_path, keys=keys)) as vllm:
        vllm.settle()
        until(lambda: reader.found(PROMPTS[0]) == {"STORAGE": 6})
        assert reader.found(PROMPTS[0], "alice") == {}
        vllm.text([PROMPTS[0]], 1, salt="alice")
        vllm.settle()
        until(lambda: reader.found(PROMPTS[0], "alice") == {"GPU": 6})
        assert reader.found(PROMPTS[0]) == {"STORAGE": 6}
    if keys == "kvtier":  # there the tenant's chains begin at a root that nobody has named yet
        assert set(reader.index.counts) <= {"unknown_parent", "unknown_removal"}
        reader.index.counts.clear()
