"""A prefill vLLM stores, a decode vLLM on another node loads, by Redis or from peers: roles, hand-over, and what fails.

One engine after the other in the test's process. What is late is hidden in Redis, and comes back while the decode node
waits. test_vllm_two_servers.py has two servers at once.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from node_rig import free_port, node
from peers_rig import key_file
from redis_rig import NO_REDIS, RedisServer, standalone
from test_vllm_states import OPTIONS as STATE_OPTIONS
from vllm import SamplingParams
from vllm_rig import BLOCK, Engine, engine, make_checkpoint, prompt

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))]

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 170)]
BLOCKS: Final = [6, 3, 5]
CACHED: Final = [192, 64, 160]  # tokens: a part of the last block is found only in L2 and in a slab, not in Redis
PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
HIDDEN: Final = "hidden:"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with standalone() as server:
        yield server


def told(redis: RedisServer, patience: str = "60s") -> dict[str, Any]:
    """A node's configuration: memory of its own, and the Redis that both share."""
    shared = {"url": redis.url, "deadline": "20s", "connect_timeout": "20s"}
    return {"host": {"size": "32MiB"}, "redis": shared, "cache": {"prefetch_deadline": patience}}


def of_role(role: str, kvtier: dict[str, Any], **options: Any) -> Any:
    """An engine with that `kv_role`."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": kvtier,
        **options,
    }


def ask(
    vllm: Engine, prompts: Sequence[list[int]], params: Sequence[dict[str, Any] | None], num_tokens: int = 16
) -> list[Any]:
    """vLLM's outputs; each prompt with its `kv_transfer_params`, as its API server passes them."""
    settings = [
        SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            detokenize=False,
            ignore_eos=True,
            extra_args=None if one is None else {"kv_transfer_params": one},
        )
        for one in params
    ]
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs: list[Any] = vllm.llm.generate(asked, settings, use_tqdm=False)
    return outputs


def prefill(model: Path, kvtier: dict[str, Any], prompts: Sequence[list[int]], **options: Any) -> list[Any]:
    """Have a prefill node compute the prompts, as a proxy does. Returns its answers' `kv_transfer_params`."""
    with engine(model, transfer=of_role("kv_producer", kvtier), **options) as node:
        return [output.kv_transfer_params for output in ask(node, prompts, [PREFILL] * len(prompts), 1)]


def texts(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached(outputs: Sequence[Any]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def rename(redis: RedisServer, *, hide: bool) -> int:
    """Hide every block from those who look for it, or bring all back. Returns how many."""
    keys = [key for key in redis.all_keys() if key.startswith(HIDDEN) != hide]
    blocks = [key for key in keys if len(redis.value_of(key)) > 1000]
    for key in blocks:
        redis.cli("RENAME", key, HIDDEN + key if hide else key.removeprefix(HIDDEN))
    return len(blocks)


@contextmanager
def late(redis: RedisServer, vllm: Engine, looks: int = 5) -> Iterator[None]:
    """The blocks are in Redis only after the decode node has looked for them that many times."""
    rename(redis, hide=True)
    seen, is_coming = [0], vllm.half._handovers.is_coming

    def counted(row: Any, now: float) -> bool:
        waits: bool = is_coming(row, now)
        seen[0] += waits
        return waits

    vllm.half._handovers.is_coming = counted
    ended = threading.Event()

    def bring() -> None:
        while seen[0] < looks and not ended.wait(0.005):
            pass
        rename(redis, hide=False)

    thread = threading.Thread(target=bring)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert seen[0] >= looks


def test_the_decode_node_loads_all_prefilled_blocks(model: Path, expected: list[list[int]], redis: RedisServer) -> None:
    handed = prefill(model, told(redis), PROMPTS)
    assert [each["kvtier"]["blocks"] for each in handed] == BLOCKS
    assert all(each.keys() == {"kvtier"} for each in handed)
    held = redis.all_keys()
    with engine(model, transfer=of_role("kv_consumer", told(redis))) as decode:
        outputs = ask(decode, PROMPTS, handed)
        assert (texts(outputs), cached(outputs)) == (expected, CACHED)
        assert not any(output.kv_transfer_params for output in outputs)
        assert decode.found_in("redis") == sum(CACHED) // BLOCK
        long = ask(decode, PROMPTS, handed, 80)  # several blocks of answers
        assert [text[:16] for text in texts(long)] == expected
    assert redis.all_keys() == held  # a consumer stores nothing, not even those


def test_the_decode_node_loads_them_from_the_prefill_node_s_daemon(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    peers = {"PEERS__NODES": " ".join(addresses), "PEERS__KEY_FILE": str(key_file(tmp_path)), "PEERS__DEADLINE": "20s"}
    first, second = ({"PEERS__LISTEN": address, **peers} for address in addresses)
    with node(**first) as one, node(**second) as two:
        handed = prefill(model, {"service": one.section}, PROMPTS)
        with engine(model, transfer=of_role("kv_consumer", {"service": two.section})) as decode:
            outputs = ask(decode, PROMPTS, handed)
            assert (texts(outputs), cached(outputs)) == (expected, CACHED), two.told()
            assert decode.found_in("peers") == sum(CACHED) // BLOCK, two.told()
            one.kill()
            decode.forget_l1()
            again = ask(decode, PROMPTS, [None] * 3)  # the second node has its own copies
            assert (texts(again), cached(again)) == (expected, CACHED), two.told()
            assert decode.found_in("peers") == sum(CACHED) // BLOCK


def test_a_refused_store_is_offered_again_when_its_request_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model, transfer=of_role("kv_producer", {"host": {"size": "32MiB"}})) as node:
        tiers, reserve = node.half.side.tiers, node.half.side.tiers.reserve
        refused: list[int] = []

        def full_at_first(wanted: Sequence[Any], *, may_retry: bool) -> list[Any]:
            if not refused:
                refused.append(len(wanted))
                return [None] * len(wanted)
            return list(reserve(wanted))

        monkeypatch.setattr(tiers, "reserve", full_at_first)
        ask(node, PROMPTS[:1], [PREFILL], 1)
        node.settle()
        assert refused == [1]
        node.llm.reset_prefix_cache()
        assert cached(ask(node, PROMPTS[:1], [None], 1)) == [BLOCKS[0] * BLOCK]


@pytest.mark.parametrize("is_reused", [False, True], ids=["free blocks", "blocks that vLLM hands out meanwhile"])
def test_what_a_late_daemon_gave_no_slot_for_is_stored_behind_its_request(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, is_reused: bool
) -> None:
    config = of_role("kv_producer", {"host": {"size": "32MiB"}})
    with engine(model, transfer=config, num_gpu_blocks_override=16 if is_reused else 64, max_model_len=480) as node:
        tiers, reserve = node.half.side.tiers, node.half.side.tiers.reserve
        num_late = 40 if is_reused else 5

        def late_at_first(wanted: Sequence[Any], *, may_retry: bool) -> list[Any]:
            nonlocal num_late
            assert may_retry
            tiers.is_late = num_late > 0
            num_late -= 1
            return [None] * len(wanted) if tiers.is_late else list(reserve(wanted))

        monkeypatch.setattr(tiers, "reserve", late_at_first)
        ask(node, PROMPTS[:1], [PREFILL], 1)
        if is_reused:
            assert texts(ask(node, PROMPTS[1:], [None, None])) == expected[1:]
            num_late = 0
        node.settle()
        node.llm.reset_prefix_cache()
        [again] = ask(node, PROMPTS[:1], [None])
        assert texts([again]) == expected[:1]
        assert cached([again]) == [0 if is_reused else BLOCKS[0] * BLOCK]


def test_kv_both_keeps_answers_for_the_next_turn(model: Path, expected: list[list[int]], redis: RedisServer) -> None:
    handed = prefill(model, told(redis), PROMPTS[:1])
    with engine(model, transfer=of_role("kv_both", told(redis))) as decode:
        [output] = ask(decode, PROMPTS[:1], handed, 80)
    answer = texts([output])[0]
    assert answer[:16] == expected[0]
    turn = [*PROMPTS[0], *answer, *prompt(9, 20)]
    with engine(model) as alone:
        right = alone.text([turn])
    with engine(model, transfer=of_role("kv_producer", told(redis))) as node:
        [output] = ask(node, [turn], [None])
        assert (texts([output]), cached([output])) == (right, [(200 + 79) // BLOCK * BLOCK])  # it loads, too
        assert output.kv_transfer_params is None  # nobody asked


@pytest.mark.parametrize("family", brief(["qwen3-next"], ["llama", "gemma3", "qwen3-next"]))
def test_what_comes_late_is_waited_for(family: str, redis: RedisServer, tmp_path: Path) -> None:
    """The prefill node has answered, and its blocks are still on their way."""
    has_states = family == "qwen3-next"
    dtype = torch.bfloat16 if has_states else torch.float32
    path = make_checkpoint(family, tmp_path / "model", dtype=dtype)
    options = STATE_OPTIONS if has_states else {}
    tokens = prompt(1, 700 if has_states else 200)
    with engine(path, **options) as alone:
        right = alone.text([tokens])
    handed = prefill(path, told(redis), [tokens], **options)
    in_all = handed[0]["kvtier"]["blocks"] * (160 if has_states else BLOCK)
    assert len(tokens) - in_all < (160 if has_states else BLOCK)
    with engine(path, transfer=of_role("kv_consumer", told(redis)), **options) as decode, late(redis, decode):
        outputs = ask(decode, [tokens], handed)
        assert (texts(outputs), cached(outputs)) == (right, [in_all])


def test_without_a_hand_over_nobody_waits(model: Path, expected: list[list[int]], redis: RedisServer) -> None:
    """The negative control of the test above: the same blocks are as late, and are computed."""
    prefill(model, told(redis), PROMPTS)
    with engine(model, transfer=of_role("kv_consumer", told(redis))) as decode:
        assert rename(redis, hide=True) == sum(BLOCKS)
        outputs = ask(decode, PROMPTS, [None] * 3)
        assert (texts(outputs), cached(outputs)) == (expected, [0, 0, 0])


def test_a_part_that_came_in_time_is_loaded(model: Path, expected: list[list[int]], redis: RedisServer) -> None:
    """The prefill node died while it stored: of the first prompt's six blocks the first two are there."""
    with engine(model, transfer=of_role("kv_producer", told(redis))) as node:
        ask(node, [PROMPTS[0][: 2 * BLOCK]], [None], 1)
    first = set(redis.all_keys())
    handed = prefill(model, told(redis), PROMPTS[:1])
    for key in set(redis.all_keys()) - first:
        redis.cli("DEL", key)
    with engine(model, transfer=of_role("kv_consumer", told(redis, "300ms"))) as decode:
        outputs = ask(decode, PROMPTS[:1], handed)
        assert (texts(outputs), cached(outputs)) == (expected[:1], [2 * BLOCK])


def test_redis_that_died_between_is_not_awaited(model: Path, expected: list[list[int]], redis: RedisServer) -> None:
    handed = prefill(model, told(redis), PROMPTS)
    patient = told(redis, "600s") | {"breaker": {"failures": 1}}
    patient["redis"] |= {"deadline": "500ms"}
    with engine(model, transfer=of_role("kv_consumer", patient)) as decode:
        redis.kill()
        outputs = ask(decode, PROMPTS, handed)  # the breaker opens, long before the deadline of the hand-over
        assert (texts(outputs), cached(outputs)) == (expected, [0, 0, 0])
