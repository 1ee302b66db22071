"""vLLM over tiers that fail: what goes wrong is computed again, never served; and each of these tests could fail."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm_rig import BLOCK, Engine, FailingLoads, before_copies, engine, greedy, make_checkpoint, prompt, said, tiers

from kvtier.connector.plan import StepPlan, WorkerReport
from kvtier.connector.vllm.worker import RegionHandle
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.errors import TierUnavailable

pytestmark = pytest.mark.timeout(300)

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 170)]
BLOCKS = 6 + 2 + 5  # that can be loaded
CACHED = [192, 95, 160]  # tokens: the second prompt's third block is of use but for its last token


def fill(vllm: Engine) -> None:
    """The prompts are in the tiers, and in vLLM no more."""
    vllm.text(PROMPTS)
    vllm.forget_l1()


def test_a_wrong_byte_in_the_tiers_would_be_seen(model: Path, expected: list[list[int]]) -> None:
    """The negative control of every other test here: text depends on the bytes that are loaded."""
    with engine(model, tiers()) as vllm:
        fill(vllm)
        vllm.hierarchy.host.region.array[:] = 0
        assert vllm.text(PROMPTS) != expected
        vllm.half.reset()


def test_a_block_damaged_on_disk_is_not_served(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path)) as vllm:
        fill(vllm)
    [slab] = tmp_path.glob("*.slab")
    content = bytearray(slab.read_bytes())
    middle = len(content) // 2
    for start in range(8192, middle, 4096):  # the payload: a byte in every page that holds any
        if any(content[start : start + 4096]) and start > 1 << 20:
            content[start + 100] ^= 1
    slab.write_bytes(content)
    with engine(model, tiers(tmp_path)) as vllm:
        assert vllm.text(PROMPTS) == expected
        assert vllm.found_in("file") == BLOCKS
        assert vllm.stats()['kvtier_corruption_total{tier="file"}'] > 0


def test_a_failed_load_is_computed_again(failing_loads: FailingLoads, tmp_path: Path) -> None:
    """Of several KV groups. test_vllm_peer.py and test_vllm_partial.py have models with one."""
    path = make_checkpoint("gemma3", tmp_path / "model")
    with engine(path) as plain:
        right = plain.text(PROMPTS)
    with engine(path, tiers()) as vllm:
        fill(vllm)
        failing_loads.on = True
        assert vllm.text(PROMPTS) == right
        assert vllm.stats()['kvtier_miss_total{reason="copy_failed"}'] == BLOCKS
        failing_loads.on = False
        vllm.forget_l1()
        text, cached = said(vllm.run(PROMPTS))  # and what was computed on top of a failed load was not kept
        assert (text, sum(cached)) == (right, BLOCKS * BLOCK)


def test_groups_that_share_memory_wait_for_each_others_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3: a block one group's store still has to read goes to the other group. L1 is small, stores are slow."""
    path = make_checkpoint("gemma3", tmp_path / "model")
    prompts = [prompt(i, 34) for i in range(16)]
    small: dict[str, Any] = {"num_gpu_blocks_override": 10, "max_model_len": 64, "max_num_seqs": 1}
    with engine(path, max_model_len=64) as plain:
        right = [plain.text([tokens], 2)[0] for tokens in prompts]
    with engine(path, tiers(), **small) as vllm:
        with monkeypatch.context() as slow:
            before_copies(slow, lambda direction: time.sleep(0.2 * (direction == "store")))
            for tokens in prompts:
                vllm.text([tokens], 2)
            vllm.forget_l1()
        text, cached = said([vllm.run([tokens], 2)[0] for tokens in prompts])
        assert (text, sum(cached)) == (right, 16 * BLOCK)


def test_what_was_promised_before_a_reset_is_not_loaded_after_it(model: Path) -> None:
    """The weights may be others by now."""
    with engine(model, tiers()) as vllm:
        fill(vllm)
        llm = vllm.llm.llm_engine
        llm.add_request("waiting", {"prompt_token_ids": PROMPTS[0]}, greedy(4))
        [request] = vllm.scheduler.requests.values()
        assert vllm.half.matched(request, 0)[0] == 6 * BLOCK
        assert llm.reset_prefix_cache(reset_connector=True)
        assert vllm.half.matched(request, 0)[0] == 0
        [output] = [output for _ in range(20) for output in llm.step() if output.finished]
        assert output.num_cached_tokens == 0


def test_resetting_the_connector_forgets_every_tier(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path)) as vllm:
        fill(vllm)
        assert vllm.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)


def test_a_shutdown_with_copies_in_flight_ends_them_and_keeps_what_they_stored(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()
    before_copies(monkeypatch, lambda _: ends.wait(20))  # each outlives the requests, however slow their steps are
    vllm = Engine(model, tiers(tmp_path))
    assert vllm.text(PROMPTS) == expected
    assert vllm.half.pending
    hierarchy = vllm.hierarchy
    begun = time.monotonic()
    threading.Timer(0.3, ends.set).start()
    vllm.core.shutdown()
    assert time.monotonic() - begun < 20
    hierarchy.check()
    with engine(model, tiers(tmp_path)) as again:
        assert said(again.run(PROMPTS)) == (expected, CACHED)


def test_a_worker_that_cannot_map_the_schedulers_memory_goes_on_without(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: RegionHandle) -> Any:
        raise PermissionError("not this user's process")

    monkeypatch.setattr(RegionHandle, "attach", refused)
    with engine(model, tiers()) as vllm:
        for _ in range(2):
            assert vllm.text(PROMPTS) == expected
            vllm.forget_l1()
        assert vllm.found_in("l2") == 0
        assert vllm.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] > 0
    assert caplog.text.count("the scheduler's memory cannot be mapped here") == 1


def test_a_worker_tries_to_map_again(model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon too busy to let a rank join in time must not cost the engine its cache for ever."""
    monkeypatch.setattr("kvtier.connector.vllm.worker._TRY_AGAIN", 0.0)
    attach, tries = RegionHandle.attach, []

    def busy(self: RegionHandle) -> Any:
        tries.append(self)
        if len(tries) == 1:
            raise TierUnavailable("no answer")
        return attach(self)

    monkeypatch.setattr(RegionHandle, "attach", busy)
    with engine(model, tiers()) as vllm:
        vllm.text(PROMPTS[:1])  # its step stores nothing
        vllm.forget_l1()
        fill(vllm)
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)
        assert len(tries) == 2


def test_a_load_too_late_is_recomputed(model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped for a while: the deadline passes, the step computes, and then the load ends well."""
    computed, start_load, poll = threading.Event(), WorkerSide.start_load, WorkerSide.poll

    def late(self: WorkerSide, plan: StepPlan) -> None:
        start_load(self, plan)
        if not computed.is_set():
            self._late_at = 0.0

    def looked(self: WorkerSide) -> WorkerReport:
        computed.set()
        assert all(event.wait(60) for groups in self._loads.values() for _, event in groups)
        return poll(self)

    with engine(model, tiers()) as vllm:
        fill(vllm)
        before_copies(monkeypatch, lambda direction: direction == "store" or computed.wait(60))
        monkeypatch.setattr(WorkerSide, "start_load", late)
        monkeypatch.setattr(WorkerSide, "poll", looked)
        assert vllm.text(PROMPTS) == expected
        assert computed.is_set()
        assert vllm.stats()['kvtier_miss_total{reason="copy_failed"}'] > 0
