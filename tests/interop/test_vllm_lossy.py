"""`[cache] lossy` under vLLM: what one engine stored in Redis another loads; an exact one does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from redis_rig import NO_REDIS, RedisServer, standalone
from vllm_rig import BLOCK, engine, make_checkpoint, prompt

pytestmark = [pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS)), pytest.mark.timeout(300)]

PROMPT = prompt(1, 200)
BLOCKS = 6


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with standalone() as server:
        yield server


def options(redis: RedisServer, lossy: str = "fp8", **more: Any) -> dict[str, Any]:
    shared = {"url": redis.url, "deadline": "20s", "connect_timeout": "20s"}
    cache = {"prefetch_deadline": "60s", "load_or_recompute": "load", "partial_blocks": False, "lossy": lossy}
    return {"host": {"size": "32MiB"}, "redis": shared, "cache": cache, **more}


@pytest.mark.parametrize("keys", brief(["vllm"], ["vllm", "kvtier"]))
def test_a_second_engine_loads_lossy_blocks_and_an_exact_one_none(
    keys: str, redis: RedisServer, tmp_path: Path
) -> None:
    redis.cli("FLUSHALL")
    model = make_checkpoint("llama", tmp_path / "m")
    with engine(model, options(redis, keys=keys)) as first:
        right = first.text([PROMPT])
        whole = first.half.side.tiers.num_slots
    blocks = [redis.value_of(key) for key in redis.all_keys() if len(redis.value_of(key)) > 1000]
    assert len(blocks) >= BLOCKS
    assert whole > 0
    with engine(model, options(redis, keys=keys)) as second:
        output = second.run([PROMPT])[0]
        assert output.num_cached_tokens == BLOCKS * BLOCK
        assert second.found_in("redis") == BLOCKS
        slot = second.half.side.tiers.region.slot_bytes
        assert max(map(len, blocks)) < slot / 3.5  # of float32
        assert len(output.outputs[0].token_ids) == len(right[0])
    with engine(model, options(redis, "none", keys=keys)) as exact:
        output = exact.run([PROMPT])[0]
        assert output.num_cached_tokens == 0
        assert list(output.outputs[0].token_ids) == right[0]  # both computed it
