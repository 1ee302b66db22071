"""Stories of an engine that computes a front while a slow slab brings the back: the same bits, whatever goes."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from mischief import EvenRates
from small_engines import end, settled
from tiny_models import config_of, prompt

from kvtier.connector.local import LocalConnector
from kvtier.connector.overlapped import OverlappedLoad
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import Output, SamplingParams
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.transfer import BlockCopies
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.promotion import HostCheck
from kvtier.tiers.kinds import TIERS

HELD = 960  # tokens: 60 blocks of 16
LENGTH = HELD + 10
KEEP = SamplingParams(max_tokens=3, ignore_eos=True, keep_logits=True)
EXACT: dict[str, Any] = {"exact": True, "exact_rows": 128, "max_num_batched_tokens": 128, "max_num_seqs": 4}


class SlowSlab:
    """An engine over a slab that holds a prompt, and answers no read before the story says so."""

    def __init__(self, home: Path, block_size: int = 16, verify: str = "never", **options: Any) -> None:
        sections: dict[str, Any] = {
            "host": {"size": "8MiB", "verify": verify},
            "file": {"path": str(home), "size": "64MiB", "deadline": "60s"},
            "cache": {"block_size": block_size, "prefetch_deadline": "60s"},
        }
        config = Config(**sections)
        settings = EngineConfig(**EXACT | {"block_size": block_size, "num_blocks": 2560 // block_size} | options)
        self.engine = Engine.from_config(config_of("llama"), settings, LocalConnector.connect(config))
        self.block_size = block_size
        self.prompt = prompt(1, LENGTH)
        self.gate = Event()
        self.gate.set()
        tier: Any = self.hierarchy.ports[0].tier
        read = tier.read

        def gated(*arguments: Any) -> Any:
            assert self.gate.wait(60)
            return read(*arguments)

        tier.read = gated
        [stored] = self.engine.generate([self.prompt], KEEP)
        self.bits = np.stack(stored.logits).tobytes()  # computed without a hit
        self.hierarchy.rates = EvenRates(self.engine.shape.block_bytes // block_size)
        self.forget()
        self.gate.clear()
        self.before = dict(self.engine.stats)

    @property
    def hierarchy(self) -> Hierarchy:
        assert isinstance(self.engine.connector, LocalConnector)
        return self.engine.connector.hierarchy

    @property
    def back(self) -> OverlappedLoad | None:
        return self.engine.connector.scheduler.overlapped.get("a")

    def forget(self, *, l2: bool = True) -> None:
        """What L1 and L2 hold."""
        settled(self.engine)
        self.engine.pool.reset()
        if l2:
            self.hierarchy.host.pool.reset()

    def until_the_front_is_at_the_back(self) -> None:
        self.engine.add_request(self.prompt, KEEP, request_id="a")
        request = self.engine.request("a")
        for _ in range(1000):
            self.engine.step()
            if self.back is not None and request.num_computed == self.back.limit(request.num_computed, alone=True):
                return
        raise AssertionError("the front never gets there")

    def finish(self) -> bytes:
        """The logits of the request."""
        outputs: list[Output] = []
        while self.engine.has_unfinished:
            outputs += self.engine.step()
        return np.stack([each.logits for each in outputs if each.logits is not None]).tobytes()

    def more(self, what: str) -> int:
        """How much a count of the engine has grown."""
        return self.engine.stats[what] - self.before[what]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front waits for the back however long it takes."""
    monkeypatch.setattr(OverlappedLoad, "_is_late", lambda back, group: False)


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Any]:
    opened: list[SlowSlab] = []

    def build(**options: Any) -> SlowSlab:
        opened.append(SlowSlab(tmp_path / str(len(opened)), **options))
        return opened[-1]

    yield build
    for slab in opened:
        slab.gate.set()
        end(slab.engine)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("block_size", "loading"), [(16, "async"), (64, "layerwise")])
def test_both_meet_and_every_bit_is_as_without_a_cache(slabs: Any, block_size: int, loading: str) -> None:
    slab = slabs(block_size=block_size, loading=loading)
    slab.until_the_front_is_at_the_back()
    front = slab.engine.request("a").num_computed
    slab.gate.set()
    request = slab.engine.request("a")
    assert slab.finish() == slab.bits
    assert 256 <= front <= 768
    assert slab.more("skipped_tokens") == front
    assert slab.more("external_tokens") == request.num_external_tokens == HELD - front
    assert slab.more("computed_tokens") == LENGTH - (HELD - front) + 2
    assert request.cached_tokens[TIERS["file"].label] == HELD - front
    counts = slab.hierarchy.stats()
    assert counts['kvtier_miss_total{reason="skipped"}'] == front // block_size
    assert counts['kvtier_lookup_blocks_total{tier="file"}'] == HELD // block_size  # asked for once


@pytest.mark.usefixtures("patient")
def test_what_l2_has_of_the_beginning_is_neither_computed_nor_read(slabs: Any) -> None:
    slab = slabs()
    slab.gate.set()
    slab.engine.generate([slab.prompt[:161]], KEEP)  # brings ten blocks to L2
    slab.forget(l2=False)
    slab.gate.clear()
    slab.before = dict(slab.engine.stats)
    slab.until_the_front_is_at_the_back()
    slab.gate.set()
    request = slab.engine.request("a")
    assert slab.finish() == slab.bits
    skipped = slab.more("skipped_tokens")
    assert 0 < skipped < 768
    assert request.num_external_tokens == HELD - skipped
    assert request.cached_tokens[TIERS["l2"].label] == 160


@pytest.mark.usefixtures("patient")
def test_a_hole_is_computed_and_what_lies_behind_it_still_counts(slabs: Any) -> None:
    slab = slabs()
    slab.until_the_front_is_at_the_back()
    request = slab.engine.request("a")
    front = request.num_computed
    slab.hierarchy.ports[0].tier.discard([request.hashes[56]])  # of the last group: 4 blocks of it go
    slab.gate.set()
    assert slab.finish() == slab.bits
    assert request.num_external_tokens == HELD - front - 4 * 16
    assert slab.more("skipped_tokens") == front  # a hole is none
    stored = HELD // 16  # misses of the request that stored the prompt
    assert slab.hierarchy.stats()['kvtier_miss_total{reason="absent"}'] == stored + 4


def test_a_back_that_never_comes_is_computed(slabs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverlappedLoad, "_is_late", lambda back, group: True)
    slab = slabs()
    slab.engine.add_request(slab.prompt, KEEP, request_id="a")
    assert slab.finish() == slab.bits
    assert (slab.more("external_tokens"), slab.more("skipped_tokens")) == (0, HELD)


@pytest.mark.usefixtures("patient")
def test_an_abort_lets_go_of_front_and_back(slabs: Any) -> None:
    slab = slabs()
    slab.until_the_front_is_at_the_back()
    assert slab.engine.abort("a")
    slab.engine.step()
    assert not slab.engine.has_unfinished
    slab.gate.set()  # the reads end, for nobody
    slab.forget()
    slab.engine.add_request(slab.prompt, KEEP, request_id="a")
    assert slab.finish() == slab.bits


@pytest.mark.usefixtures("patient")
def test_a_reset_below_leaves_the_rest_to_the_front(slabs: Any) -> None:
    slab = slabs()
    slab.until_the_front_is_at_the_back()
    slab.hierarchy.reset()
    slab.gate.set()
    assert slab.finish() == slab.bits


class FailingCopies:
    """A copier of which the next load fails, having written rubbish."""

    def __init__(self, slab: SlowSlab) -> None:
        worker: Any = slab.engine.worker
        self._real, self._tensor = worker._stream._copier, slab.engine.pool.tensor
        self.num_left = 0
        self.written: list[list[int]] = []  # blocks of L1, by copy
        worker._stream._copier = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def copy(self, direction: str, copies: BlockCopies, cancelled: Any) -> str | None:
        if direction == "load":
            self.written.append(copies.device_blocks.tolist())
            if self.num_left:
                self.num_left -= 1
                self._tensor[torch.from_numpy(copies.device_blocks)] = 1e3
                return "the driver reports a failed copy"
        error: str | None = self._real.copy(direction, copies, cancelled)
        return error


def with_a_beginning_in_l2(slab: SlowSlab, num_blocks: int) -> None:
    """L2 has the first blocks of the prompt, the slab all."""
    slab.gate.set()
    slab.engine.generate([slab.prompt[: num_blocks * 16 + 1]], KEEP)
    slab.forget(l2=False)
    slab.gate.clear()
    slab.before = dict(slab.engine.stats)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("copies", ["whole", "failed"])
def test_a_beginning_loaded_layer_by_layer_in_a_step_that_computes_nothing_of_its_request(
    slabs: Any, monkeypatch: pytest.MonkeyPatch, copies: str
) -> None:
    """Nobody's compute waits for that load: it has ended well, or its tokens are computed."""
    slab = slabs(loading="layerwise", verify="always")
    with_a_beginning_in_l2(slab, 10)
    looked = Event()
    run = HostCheck.run
    monkeypatch.setattr(HostCheck, "run", lambda check: (looked.wait(60), run(check))[1])
    slab.engine.add_request(slab.prompt, KEEP, request_id="a")
    slab.engine.step()  # alone, it is to come from both ends; L2's bytes are looked at first
    assert slab.back is not None
    # Meanwhile somebody else comes. All that is held is now loaded, so that nothing is left to compute.
    slab.engine.add_request(prompt(2, 40), SamplingParams(max_tokens=40, ignore_eos=True), request_id="b")
    looked.set()
    failing = FailingCopies(slab)
    failing.num_left = copies == "failed"
    while not failing.written:
        slab.engine.step()
    assert slab.engine.request("a").num_computed <= 160
    slab.gate.set()
    told: list[Output] = []
    while slab.engine.has_unfinished:
        told += slab.engine.step()
    rows = [each.logits for each in told if each.request_id == "a"]
    assert np.stack(rows).tobytes() == slab.bits  # type: ignore[arg-type]
    assert slab.engine.stats["failed_loads"] == (copies == "failed")


@pytest.mark.usefixtures("patient")
def test_nothing_is_loaded_twice_beside_a_beginning_that_is_on_its_way(slabs: Any) -> None:
    slab = slabs()
    with_a_beginning_in_l2(slab, 40)
    copies = FailingCopies(slab)
    slab.until_the_front_is_at_the_back()
    slab.gate.set()
    assert slab.finish() == slab.bits
    written = [block for blocks in copies.written for block in blocks]
    assert len(written) == len(set(written))


@pytest.mark.usefixtures("patient")
def test_copies_of_the_back_that_fail_are_computed(slabs: Any) -> None:
    slab = slabs()
    copies = FailingCopies(slab)
    copies.num_left = 1
    slab.until_the_front_is_at_the_back()
    request = slab.engine.request("a")
    front = request.num_computed
    slab.gate.set()
    assert slab.finish() == slab.bits
    assert copies.num_left == 0
    lost = 16 * len(copies.written[0])
    assert request.num_external_tokens == HELD - front - lost
    assert slab.hierarchy.stats()['kvtier_miss_total{reason="copy_failed"}'] == len(copies.written[0])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_who_is_preempted_between_its_ends_begins_anew(slabs: Any, preemption: str) -> None:
    slab = slabs(preemption=preemption)
    slab.until_the_front_is_at_the_back()
    slab.engine.scheduler._preempt(slab.engine.request("a"))
    assert slab.back is None
    slab.gate.set()  # what was asked for comes, for nobody
    assert slab.finish() == slab.bits
    assert slab.more("preempted") == 1
