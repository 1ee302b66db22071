"""Stories of the tier as vLLM's tiering manager calls it: jobs over a primary tier in memory, no engine."""

import hashlib
import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles import wait_until

from kvtier.tiers.breaker import BreakerState
from kvtier.tiers.checksum import checksum
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.identity import ModelIdentity

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

CHUNK_BYTES = 8192
NUM_CHUNKS = 16
Make = Callable[..., Any]
IDENTITY = ModelIdentity(
    model="tiny", revision="0" * 40, config_digest="0" * 64, dtype="float32", kv_dtype="float32",
    compute_dtype="float32", num_kv_heads=2, head_dim=32, block_size=32, layers=(0,),
)  # fmt: skip


def key(number: int, group: int = 0, hash_bytes: int = 32) -> bytes:
    return number.to_bytes(hash_bytes, "big") + group.to_bytes(4, "big")


@pytest.fixture
def primary() -> np.ndarray[Any, np.dtype[np.int8]]:
    """vLLM's CPU tier, `[num_chunks, chunk_bytes]`."""
    return np.zeros((NUM_CHUNKS, CHUNK_BYTES), np.int8)


def engine_of(images: Any, *, caches: bool = False) -> Any:
    """What of vLLM's configuration says how it names images; `images`: its `multimodal_config`."""
    model, cache = SimpleNamespace(multimodal_config=images), SimpleNamespace(enable_prefix_caching=caches)
    return SimpleNamespace(lora_config=None, model_config=model, cache_config=cache)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, disk_dir: Path, primary: Any) -> Iterator[Make]:
    """Makes tiers over one directory and the primary tier; laws are checked at the end."""
    from kvtier.connector.vllm import tier as vllm_tier

    monkeypatch.setattr(vllm_tier, "engine_config", lambda spec: getattr(spec, "engine", engine_of(None)))
    monkeypatch.setattr(vllm_tier, "why_none", lambda config: None)
    monkeypatch.setattr(vllm_tier, "native_identity", lambda config, spec, revision, epoch: IDENTITY)
    made: list[Any] = []

    def factory(**options: Any) -> Any:
        section = {"path": str(disk_dir), "size": "8MiB", "mode": "buffered", **options.pop("file", {})}
        view, spec = options.pop("view", None) or memoryview(primary), options.pop("spec", SimpleNamespace())
        tier = vllm_tier.KVTierSecondaryTier(spec, view, "kvtier", file=section, **options)
        made.append(tier)
        return tier

    yield factory
    for tier in made:
        tier.shutdown()
        tier.jobs.check()


def request(name: str) -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(name)


def job(job_id: int, keys: Collection[bytes], chunks: Sequence[int], context: Any, *, load: bool) -> Any:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(job_id, keys, np.array(chunks, np.int32), is_promotion=load, req_context=context)


def ended(tier: Any) -> Any:
    found: list[Any] = []

    def any_ended() -> bool:
        found.extend(tier.get_finished_jobs())
        return bool(found)

    wait_until(any_ended)
    [result] = found
    return result


def fill(primary: Any, *chunks: int) -> None:
    for chunk in chunks:
        primary[chunk] = chunk + 1


def _name(wanted: bytes) -> bytes:
    return hashlib.sha256(wanted).digest()


def answer(tier: Any, wanted: bytes, context: Any) -> str:
    return str(tier.lookup(wanted, context).name)


def test_chunks_go_down_and_come_up_into_other_slots(make: Make, primary: Any) -> None:
    tier, context = make(), request("r")
    tier.on_new_request(context)
    fill(primary, 0, 1, 2)
    assert answer(tier, key(1), context) == "MISS"
    # A set has no order: the keys' positions in the request give it.
    keys = {key(3), key(1), key(2)}
    for number in (1, 2, 3):
        context.set_offload_key_position(key(number), 32 * number)
    tier.submit_store(job(5, keys, [int.from_bytes(k[:32], "big") - 1 for k in keys], context, load=False))
    stored = ended(tier)
    assert (stored.job_id, stored.success, stored.transfer_bytes) == (5, True, 3 * CHUNK_BYTES)
    [port] = tier.jobs.ports
    slots = [port.tier._blocks.index.find_one(name) for name in map(_name, (key(1), key(2), key(3)))]
    assert slots == [slots[0], slots[0] + 1, slots[0] + 2]  # the chain lies together

    assert [answer(tier, key(n), context) for n in (1, 2, 3, 4)] == ["HIT", "HIT", "HIT", "MISS"]
    tier.submit_load(job(6, [key(1), key(2), key(3)], [7, 9, 8], context, load=True))
    assert ended(tier).success
    assert [int(primary[chunk, 0]) for chunk in (7, 9, 8)] == [1, 2, 3]
    assert (primary[[7, 9, 8]] == primary[[0, 1, 2]]).all()


def test_a_new_process_finds_them_and_keys_differ_by_group_and_length(make: Make, primary: Any) -> None:
    first, context = make(), request("r")
    fill(primary, 0, 1)
    first.submit_store(job(1, [key(1), key(2, hash_bytes=16)], [0, 1], context, load=False))  # xxhash: 16 bytes
    assert ended(first).success
    first.shutdown()
    again = make()
    assert answer(again, key(1), context) == answer(again, key(2, hash_bytes=16), context) == "HIT"
    assert answer(again, key(1, group=1), context) == answer(again, key(2), context) == "MISS"


def test_a_salt_of_the_configuration_is_a_namespace_of_its_own(make: Make, primary: Any) -> None:
    plain, salted = make(), make(cache={"cache_salt": "tenant"})
    plain.submit_store(job(1, [key(1)], [0], request("r"), load=False))
    assert ended(plain).success
    assert answer(plain, key(1), request("r")) == "HIT"
    assert answer(salted, key(1), request("r")) == "MISS"


def test_a_chunk_that_rotted_is_missed_alone_and_never_promised_again(make: Make, primary: Any) -> None:
    tier, context = make(), request("r")
    fill(primary, 0, 1, 2)
    tier.submit_store(job(1, [key(1), key(2), key(3)], [0, 1, 2], context, load=False))
    assert ended(tier).success
    [port] = tier.jobs.ports
    rotten = memoryview(bytearray(CHUNK_BYTES))
    port.tier._payload.write(
        port.tier.superblock.payload_offset(port.tier._blocks.index.find_one(_name(key(2)))), [rotten]
    )

    before = checksum(memoryview(primary[8]))
    tier.submit_load(job(2, [key(1), key(2), key(3)], [7, 8, 9], context, load=True))
    result = ended(tier)
    assert not result.success
    assert result.successful_keys == [key(1), key(3)]
    assert checksum(memoryview(primary[8])) == before  # nothing unverified was written
    assert [answer(tier, key(n), request("other")) for n in (1, 2, 3)] == ["HIT", "MISS", "HIT"]
    values = tier.get_stats().data["data"]
    assert values["vllm:kvtier_corruption"] == {("file",): 1}
    assert values["vllm:kvtier_miss"] == {("checksum",): 1}
    assert values["vllm:kvtier_store_blocks"] == {("file",): 3}
    assert tier.get_stats() is None  # no news


def test_whichever_thread_holds_vllms_lock_may_call(make: Make, primary: Any) -> None:
    """vLLM 0.33 also reaches tiers from its poll thread, through what other tiers ask. One call at a time, as ever."""

    def elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call, *arguments).result(60)

    tier, context = elsewhere(make), request("r")
    fill(primary, 0)
    elsewhere(tier.on_new_request, context)
    elsewhere(tier.submit_store, job(1, [key(1)], [0], context, load=False))
    assert elsewhere(ended, tier).success
    assert elsewhere(answer, tier, key(1), context) == "HIT"
    elsewhere(tier.submit_load, job(2, [key(1)], [7], context, load=True))
    elsewhere(tier.drain_jobs)
    assert elsewhere(ended, tier).success
    assert (primary[7] == primary[0]).all()
    assert not getattr(tier, "tolerates_off_thread_polling", False)  # its jobs are asked for in vLLM's steps alone


def test_one_request_is_promised_a_chunk_twice_at_most(make: Make, primary: Any) -> None:
    """Whatever takes it from the primary tier again in between: the request goes on, and others are not concerned."""
    tier, context = make(), request("r")
    tier.submit_store(job(1, [key(1)], [0], context, load=False))
    ended(tier)
    for job_id in (2, 3):
        assert answer(tier, key(1), context) == "HIT"
        tier.submit_load(job(job_id, [key(1)], [3], context, load=True))
        assert ended(tier).success
    assert answer(tier, key(1), context) == "MISS"
    assert answer(tier, key(1), request("other")) == "HIT"


@pytest.mark.parametrize("sizes", [[12], [3, 3, 3, 3], [1] * 12])
def test_a_prompt_that_fills_most_of_the_primary_tier_is_kept_whole(make: Make, primary: Any, sizes: list[int]) -> None:
    """vLLM hands over what it stored, a step's at a time; its own tiers take all of it."""
    tier, context, first = make(), request("r"), 0
    fill(primary, *range(12))
    [port] = tier.jobs.ports
    with port.tier._lock:  # the disk is busy
        for job_id, size in enumerate(sizes):
            keys = [key(first + i) for i in range(size)]
            tier.submit_store(job(job_id, keys, range(first, first + size), context, load=False))
            first += size
        assert not list(tier.get_finished_jobs())
    tier.drain_jobs()
    assert all(result.success for result in tier.get_finished_jobs())
    assert [answer(tier, key(n), context) for n in range(13)] == ["HIT"] * 12 + ["MISS"]


def test_with_a_bound_a_prompt_is_kept_up_to_where_it_was_reached(make: Make, primary: Any) -> None:
    tier, context = make(cache={"store_queue": 4 * CHUNK_BYTES}), request("r")
    [port] = tier.jobs.ports
    with port.tier._lock:
        tier.submit_store(job(1, [key(n) for n in range(6)], range(6), context, load=False))
        tier.submit_store(job(2, [key(99)], [9], context, load=False))
        [refused] = tier.get_finished_jobs()
        assert (refused.job_id, refused.success) == (2, False)
    assert ended(tier).success
    tier.submit_store(job(3, [key(100)], [10], context, load=False))  # behind the one that is missing
    assert not ended(tier).success
    assert [answer(tier, key(n), context) for n in (5, 99, 100)] == ["HIT", "MISS", "MISS"]


def spec_with_events(is_on: bool) -> Any:
    return SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=is_on))


def events(tier: Any) -> list[tuple[list[bytes], bool]]:
    """What the tier tells vLLM: keys, and whether they are gone."""
    told = list(tier.take_events())
    assert all(each.medium.value == "STORAGE" and each.locality.value == "LOCAL" for each in told)
    return [(list(each.keys), each.removed) for each in told]


def test_routers_are_told_what_came_and_what_has_left(make: Make, primary: Any) -> None:
    tier, context = make(spec=spec_with_events(True), enable_kv_events=True, locality="LOCAL"), request("r")
    [port] = tier.jobs.ports
    assert events(tier) == []
    other = request("another")
    tier.submit_store(job(1, [key(1), key(2)], [0, 1], context, load=False))
    assert ended(tier).success
    assert events(tier) == [([key(1), key(2)], False)]
    assert events(tier) == []
    tier.submit_store(job(2, [key(1), key(3)], [0, 2], context, load=False))  # one is there already
    assert ended(tier).success
    assert events(tier) == [([key(3)], False)]
    # The slab gives up a chunk; while the disk does not answer, nothing is said to be gone.
    port.tier.discard([_name(key(2))])
    port.breakers["read"].trip()
    assert events(tier) == []
    port.breakers["read"].state = BreakerState.HALF_OPEN
    port.breakers["read"].probed(True)
    assert events(tier) == [([key(2)], True)]
    tier.submit_store(job(3, [key(2)], [1], context, load=False))
    assert ended(tier).success
    assert events(tier) == [([key(2)], False)]
    # A load tells nothing, nor does a store that failed.
    tier.submit_load(job(4, [key(1)], [5], context, load=True))
    assert ended(tier).success
    port.breakers["write"].trip()
    tier.submit_store(job(5, [key(7)], [0], other, load=False))
    assert not ended(tier).success
    assert events(tier) == []


def test_whatever_left_is_found_by_and_by(make: Make, primary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.connector.vllm import tier as vllm_tier

    monkeypatch.setattr(vllm_tier, "_CHECKED", 2)
    tier, context = make(spec=spec_with_events(True), enable_kv_events=True, locality="LOCAL"), request("r")
    [port] = tier.jobs.ports
    keys = [key(n) for n in range(6)]
    tier.submit_store(job(1, keys, range(6), context, load=False))
    assert ended(tier).success
    events(tier)
    port.tier.discard([_name(each) for each in (keys[1], keys[4], keys[5])])
    found = [each for _ in range(6) for told in events(tier) for each in told[0]]
    assert sorted(found) == sorted([keys[1], keys[4], keys[5]])
    monkeypatch.setattr(vllm_tier, "_MOST", 2)
    assert [removed for _, removed in events(tier)] == [True]  # one more than are kept


def test_without_vllms_events_the_option_is_a_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tier = make(spec=spec_with_events(False), enable_kv_events=True)
    assert "vLLM publishes no KV events" in caplog.text
    tier.submit_store(job(1, [key(1)], [0], request("r"), load=False))
    assert ended(tier).success
    assert list(tier.take_events()) == []
    assert tier.locality is None


def test_an_unusable_directory_is_a_warning_and_misses(
    make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    tier = make(file={"path": str(tmp_path / "file" / "store")})
    assert "file tier is off for now, the engine runs on without it" in caplog.text
    assert answer(tier, key(1), request("r")) == "MISS"
    tier.submit_store(job(1, [key(1)], [0], request("r"), load=False))
    assert not ended(tier).success


def test_after_shutdown_nothing_holds_the_primary_tier(make: Make) -> None:
    """vLLM unmaps it then."""
    memory = mmap.mmap(-1, NUM_CHUNKS * CHUNK_BYTES)
    view = memoryview(memory).cast("b", (NUM_CHUNKS, CHUNK_BYTES))
    tier = make(view=view)
    tier.submit_store(job(1, [key(1)], [0], request("r"), load=False))
    tier.drain_jobs()
    assert ended(tier).success
    tier.submit_load(job(2, [key(1)], [1], request("r"), load=True))
    tier.shutdown()
    tier.shutdown()
    view.release()
    memory.close()  # BufferError where somebody could still look at it


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"fil": {}}, "secondary tier kvtier, fil {}: no such option here; known are config, revision, enable_"),
        ({"file": {"path": "x", "sise": 1}}, "[file] sise 1: unknown option; did you mean size?"),
        ({"host": {"size": "1GiB"}}, "secondary tier kvtier, host {'size': '1GiB'}: no such option here; known are "),
        ({"revision": 7}, "secondary tier kvtier, revision 7: not a string; write it in quotes"),
        ({"enable_kv_events": "yes"}, "secondary tier kvtier, enable_kv_events 'yes': neither true nor false; "),
        ({"locality": 3}, "secondary tier kvtier, locality 3: not a string; write it in quotes"),
        (
            {"locality": "here", "file": {"path": "x"}},
            'secondary tier kvtier, locality "here": no such place; write "LOCAL" or "REMOTE", or leave it out',
        ),
        ({}, "secondary tier kvtier, file.path: none given, so no blocks would be kept; name a directory: "),
    ],
)
def test_bad_options_are_refused_with_one_line(options: dict[str, Any], line: str) -> None:
    from kvtier.connector.vllm.tier import _configuration

    with pytest.raises(ConfigError) as refused:
        _configuration("kvtier", options)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("cache_gb", "caches", "is_kept"), [(0, False, False), (4, False, True), (0, True, True), (None, False, True)]
)
def test_nothing_is_kept_where_a_name_may_be_another_image(
    make: Make, cache_gb: int | None, caches: bool, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    images = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    tier = make(spec=SimpleNamespace(engine=engine_of(images, caches=caches)))
    assert bool(tier.jobs.ports) == is_kept
    assert ("vLLM names an image by its request, not by its content; leave out" in caplog.text) != is_kept
