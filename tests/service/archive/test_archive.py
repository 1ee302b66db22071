"""Stories of archives: blocks exported while a hierarchy serves, and imported into another, whatever happens."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import xxhash
from doubles import (
    BLOCK_SIZE,
    SLOT_BYTES,
    MemoryTier,
    bytes_in_l2,
    chain_of,
    hierarchy_of,
    payload_of,
    store,
    wait_until,
)
from extent import brief
from fault_rig import FINGERPRINT, fetch, forget_l2, over_slab, settle
from fork_rig import SERVICES, Forked
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

from kvtier.service import command_line
from kvtier.service.archive import archive
from kvtier.service.archive import archive as archive_copy
from kvtier.service.archive.archive import (
    HEADER_BYTES,
    TRAILER_BYTES,
    ArchiveProgress,
    encode_trailer,
    export_blocks,
    import_blocks,
)
from kvtier.service.web import loop_file
from kvtier.tiers.checksum import checksum
from kvtier.tiers.cipher import key_id
from kvtier.tiers.errors import ConfigError, FingerprintMismatch, FormatError, KVTierError
from kvtier.tiers.hierarchy import demote
from kvtier.tiers.hierarchy.cache_tiers import Pending
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.hierarchy.opening import require_alike
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.naming.kv_probe import KVProbe
from kvtier.tiers.tier import ChainHash, Outcome

T = TypeVar("T")
RECORD_BYTES = 104 + 4 * BLOCK_SIZE + SLOT_BYTES
key: bytes | None = None  # of the archives of the story that is being told


KEYS = {"plain": None, "encrypted": bytes(range(32))}
both = pytest.mark.parametrize("_key", KEYS, indirect=True)  # what an archive's own bytes decide


@pytest.fixture(params=brief(["plain"], [*KEYS]), autouse=True)
def _key(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stories of archives in the clear, and of encrypted ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "key", KEYS[request.param])
        patch.setattr(sys.modules[__name__], "RECORD_BYTES", RECORD_BYTES + (60 if key else 0))
        yield


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(story)


async def last(copy: AsyncIterator[ArchiveProgress]) -> ArchiveProgress:
    seen = [progress async for progress in copy]
    assert [p.num_bytes for p in seen] == sorted(p.num_bytes for p in seen)
    return seen[-1]


def exported(
    hierarchy: Hierarchy, path: Path, hashes: Sequence[ChainHash] | None = None, force: bool = False
) -> ArchiveProgress:
    return run(last(export_blocks(hierarchy, FINGERPRINT, BLOCK_SIZE, path, hashes, force=force, key=key)))


def imported(hierarchy: Hierarchy, path: Path) -> ArchiveProgress:
    return run(last(import_blocks(hierarchy, FINGERPRINT, BLOCK_SIZE, path, key)))


def num_held(hierarchy: Hierarchy, chain: TokenChain) -> int:
    where = hierarchy.lookup(chain.hashes)
    return where.blocks - where.miss


def slab_of(directory: Path, chains: Sequence[TokenChain], slots: int = 32) -> Hierarchy:
    """A hierarchy whose slab holds whole chains, its L2 nothing."""
    hierarchy = over_slab(directory, slots=slots)
    for chain in chains:
        for first in range(0, len(chain.hashes), slots // 4):  # as many as may wait to be written
            store(hierarchy, chain, first, first + slots // 4)
            assert hierarchy.drain(60)
            forget_l2(hierarchy)
    assert all(num_held(hierarchy, chain) == len(chain.hashes) for chain in chains)
    return hierarchy


@pytest.fixture
def archive_of_12(tmp_path: Path) -> Path:
    """An archive of one chain of twelve blocks."""
    hierarchy = hierarchy_of(slots=16)
    store(hierarchy, chain_of(12))
    exported(hierarchy, tmp_path / "twelve")
    hierarchy.close()
    return tmp_path / "twelve"


@both
def test_a_namespace_goes_to_a_file_and_comes_back_elsewhere(tmp_path: Path) -> None:
    # A chain longer than L2 and a branch of it lie in the slab, another chain in L2 alone.
    long, other = chain_of(60), chain_of(6, first_token=5000)
    branch = chain_of(20)
    branch.extend(range(7000, 7000 + 4 * BLOCK_SIZE))
    source = slab_of(tmp_path / "one", [long, branch])
    store(source, other)
    progress = exported(source, tmp_path / "all")
    assert (progress.num_blocks, progress.num_planned, progress.lost) == (60 + 4 + 6, 60 + 4 + 6, {})
    assert progress.num_bytes == (tmp_path / "all").stat().st_size
    assert stat.S_IMODE((tmp_path / "all").stat().st_mode) == 0o600
    assert set(os.listdir(tmp_path)) == {"one", "all"}
    settle(source)

    # Elsewhere, with an eighth of the memory, every chain is found whole, byte by byte, with its tokens.
    target = over_slab(tmp_path / "two", slots=8)
    progress = imported(target, tmp_path / "all")
    assert (progress.num_blocks, progress.lost) == (70, {})
    forget_l2(target)
    for chain in (long, branch, other):
        read_piecewise(target, chain, len(chain.hashes))
    settle(target)


def read_piecewise(target: Hierarchy, chain: TokenChain, num_blocks: int, linked: bool = False) -> None:
    """A chain's first blocks are as they were stored. Not linked to each other, they may be more than L2 holds."""
    for first in range(0, num_blocks, 4):
        claim = target.submit(
            chain.hashes[first : min(first + 4, num_blocks)], chain.parent(first) if linked else chain.root
        )
        while isinstance(target.poll(claim), Pending):
            target.wait_progress(0.01)
        with target.lease(claim) as lease:
            assert len(lease) == min(4, num_blocks - first)
            for i, slot in enumerate(lease.slots, first):
                record = target.host.records[slot]
                assert record is not None
                assert (record.parent, record.tokens) == (chain.parent(i), chain.block_tokens(i))
                assert bytes(target.host.region.slot(slot)) == payload_of(chain.hashes[i])


def test_one_prompt_is_exported_as_far_as_it_is_held(tmp_path: Path) -> None:
    chain, other = chain_of(10), chain_of(5, first_token=900)
    source = slab_of(tmp_path / "slab", [chain, other])
    source.ports[0].tier.discard(chain.hashes[7:8])  # type: ignore[union-attr]  # a hole: nobody reaches what is behind it
    progress = exported(source, tmp_path / "prompt", chain.hashes)
    assert (progress.num_blocks, progress.num_planned) == (7, 10)
    assert progress.lost == {Outcome.ABSENT: 1, Outcome.PARENT_FAILED: 2}
    settle(source)
    target = hierarchy_of(slots=16)
    assert imported(target, tmp_path / "prompt").num_blocks == 7
    assert num_held(target, chain) == 7
    assert num_held(target, other) == 0
    target.check()
    target.close()


def test_an_export_takes_no_more_of_l2_than_its_share(tmp_path: Path) -> None:
    # 16 hot blocks lie in a full L2; 80 cold ones in the slab.
    hot, cold = chain_of(16, first_token=9000), chain_of(80)
    source = slab_of(tmp_path / "slab", [cold], slots=16)
    store(source, hot, 0, 8)
    store(source, hot, 8, 16)
    assert source.drain(60)
    exported(source, tmp_path / "all")
    still = source.host.pool.lookup(hot.hashes)
    assert still >= 16 - 16 // 8
    assert not any(source.host.pool.holds(cold.hashes))
    settle(source)


def test_a_chain_whose_head_fills_l2_is_exported_whole(tmp_path: Path) -> None:
    # No policy evicts a block that has a child: the tail finds room all the same.
    source = slab_of(tmp_path / "slab", [chain := chain_of(40)], slots=16)
    read_piecewise(source, chain, 16, linked=True)
    assert source.host.pool.lookup(chain.hashes) == 16
    progress = exported(source, tmp_path / "all")
    assert (progress.num_blocks, progress.lost) == (40, {})
    settle(source)


@pytest.mark.parametrize("late", [*brief([], [None]), (demote.Demoter, "offer"), (demote._WriteJob, "end")])
def test_an_import_takes_free_slots_and_then_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[type, str] | None
) -> None:
    # Also where a thread is held up between a block's steps: sealed but not offered, written but still leased.
    if late is not None:
        step = getattr(*late)

        def held_up(*given: Any, **named: Any) -> Any:
            time.sleep(0.005)
            return step(*given, **named)

        monkeypatch.setattr(*late, held_up)
    hot, cold = chain_of(20, first_token=9000), chain_of(80)
    source = slab_of(tmp_path / "one", [cold])
    exported(source, tmp_path / "all")
    settle(source)
    target = over_slab(tmp_path / "two", slots=32)
    store(target, hot, 0, 8)
    store(target, hot, 8, 20)
    assert imported(target, tmp_path / "all").num_blocks == 80
    assert target.host.pool.lookup(hot.hashes) >= 20 - 32 // 8
    assert sum(target.host.pool.holds(cold.hashes)) >= 4  # what was free serves the next request
    assert fetch(target, cold, 16) == 16
    settle(target)


def test_stores_and_requests_go_on_during_an_export(tmp_path: Path) -> None:
    chains = [chain_of(16, first_token=1000 * n) for n in range(4)]
    source = slab_of(tmp_path / "slab", chains)

    async def story() -> tuple[ArchiveProgress, int]:
        seen, num_stored = [], 0
        async for progress in export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "all", key=key):
            seen.append(progress)
            # Between any two pieces a new chain is stored and an old one is read.
            num_stored += store(source, chain_of(3, first_token=100_000 + 1000 * num_stored))
            assert fetch(source, chains[num_stored % 4], 8) == 8
        return seen[-1], num_stored

    progress, num_stored = run(story())
    assert num_stored >= 30
    assert progress.num_blocks + sum(progress.lost.values()) == 64
    settle(source)
    target = over_slab(tmp_path / "other")
    assert imported(target, tmp_path / "all").num_blocks == progress.num_blocks
    settle(target)


def test_the_loop_is_free_while_the_disk_is_slow(tmp_path: Path) -> None:
    tier = MemoryTier()
    tier.fill(chain := chain_of(8))
    source = hierarchy_of(slots=16, tier=tier)

    async def story() -> int:
        tier.gate.clear()
        task = asyncio.create_task(last(export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "all", key=key)))
        ticks = 0
        while ticks < 50:  # the tier answers nothing, and others have their turns
            await asyncio.sleep(0.002)
            ticks += 1
        assert not task.done()
        tier.gate.set()
        return (await task).num_blocks

    assert run(story()) == len(chain.hashes)
    settle(source)


def test_a_cancelled_export_leaves_neither_file_nor_lease(tmp_path: Path) -> None:
    source = slab_of(tmp_path / "slab", [chain_of(40)])

    async def leave_early() -> None:
        async with contextlib.aclosing(
            export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "all", key=key)
        ) as copy:
            async for progress in copy:
                if progress.num_blocks > 4:
                    break

    async def be_cancelled() -> None:
        begun = asyncio.Event()

        async def export() -> None:
            async for _ in export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "all", key=key):
                begun.set()  # and on it goes: what waits for this comes before the next block is read

        task = asyncio.create_task(export())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for story in (leave_early, be_cancelled):
        run(story())
        assert os.listdir(tmp_path) == ["slab"]
    settle(source)


def test_an_export_cancelled_at_file_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = slab_of(tmp_path / "slab", [chain_of(4)])
    asked, may_open = Event(), Event()

    def slow_open(path: str, flags: int, mode: int) -> int:
        asked.set()
        assert may_open.wait(30)
        return os.open(path, flags, mode)

    # The disk is slow to create the file, and the client leaves before it is there.
    monkeypatch.setattr(command_line, "os", SimpleNamespace(**{**vars(os), "open": slow_open}))

    async def be_cancelled() -> None:
        task = asyncio.create_task(last(export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "all", key=key)))
        assert await asyncio.to_thread(asked.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_open.set()

    run(be_cancelled())
    wait_until(lambda: os.listdir(tmp_path) == ["slab"])  # once the thread has ended
    settle(source)


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    source = hierarchy_of(slots=16)
    store(source, chain_of(4))
    path = tmp_path / "taken"
    path.write_text("a letter")
    with pytest.raises(ConfigError, match=r"taken: exists already.*--force"):
        exported(source, path)
    assert path.read_text() == "a letter"
    assert exported(source, path, force=True).num_blocks == 4
    assert path.stat().st_size > 4 * SLOT_BYTES
    # A part file is another export's, or was left by a killed one: force does not touch it.
    (tmp_path / "new.part").write_text("somebody's")
    with pytest.raises(ConfigError, match=r"new\.part: exists already; remove it"):
        exported(source, tmp_path / "new", force=True)
    assert (tmp_path / "new.part").read_text() == "somebody's"
    for name, complaint in (("nowhere/file", "No such file"), ("a\0b", "null byte"), ("x" * 300, "name too long")):
        with pytest.raises(ConfigError, match=rf"{complaint}.*; choose a file that can be written"):
            exported(source, tmp_path / name)

    # The name is taken while the export runs: it is not overwritten either.
    async def taken_meanwhile() -> None:
        async for _ in export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "late", key=key):
            (tmp_path / "late").write_text("somebody's")

    with pytest.raises(ConfigError, match="late: exists already"):
        run(taken_meanwhile())
    assert (tmp_path / "late").read_text() == "somebody's"
    assert not (tmp_path / "late.part").exists()
    source.check()
    source.close()


@pytest.mark.parametrize("blocks_that_fit", [0, 3])
def test_a_full_disk_is_one_line_and_no_file(tmp_path: Path, blocks_that_fit: int) -> None:
    source = hierarchy_of(slots=16)
    store(source, chain_of(8))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 100 + blocks_that_fit * RECORD_BYTES, limit[1]))
        with pytest.raises(KVTierError, match=rf"all\.part: {os.strerror(errno.EFBIG)}"):
            exported(source, tmp_path / "all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []
    settle(source)


def test_a_file_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hierarchy_of(slots=16)
    store(source, chain_of(8))
    monkeypatch.setattr(loop_file, "_DEADLINE", 0.3)
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(1.0))
    with pytest.raises(KVTierError, match=r"all\.part: the disk has not answered"):
        exported(source, tmp_path / "all")
    assert os.listdir(tmp_path) == []
    settle(source)


def test_a_block_that_rotted_in_l2_is_taken_from_below(tmp_path: Path) -> None:
    chain = chain_of(6)
    source = over_slab(tmp_path / "slab", slots=16)
    store(source, chain)
    assert source.drain(60)
    with source.host.pool.lease(chain.hashes) as lease:
        source.host.region.slot(lease.slots[2])[7] ^= 1
    progress = exported(source, tmp_path / "all")
    assert (progress.num_blocks, progress.lost) == (6, {})
    settle(source)
    # Without a tier below it is lost, with those behind it, and never written.
    source = hierarchy_of(slots=16)
    store(source, chain)
    with source.host.pool.lease(chain.hashes) as lease:
        source.host.region.slot(lease.slots[2])[7] ^= 1
    progress = exported(source, tmp_path / "rest")
    assert (progress.num_blocks, progress.lost) == (2, {Outcome.ABSENT: 1, Outcome.PARENT_FAILED: 3})
    settle(source)


def test_another_models_archive_is_refused_naming_both(archive_of_12: Path) -> None:
    target = hierarchy_of(slots=16)
    other = b"another model".ljust(32, b".")
    with pytest.raises(FingerprintMismatch, match=rf"twelve: .*{FINGERPRINT.hex()}.*{other.hex()}"):
        run(last(import_blocks(target, other, BLOCK_SIZE, archive_of_12, key)))
    with pytest.raises(FingerprintMismatch, match=r"have 4 tokens and 4096 bytes, but here they have 8 and 4096"):
        run(last(import_blocks(target, FINGERPRINT, 8, archive_of_12, key)))
    assert target.host.pool.counts().ready == 0
    target.close()


def test_kv_of_another_computation_is_not_imported(tmp_path: Path) -> None:
    """It has the probe of its model: a daemon whose model computes other KV refuses it, one without takes it."""
    planes = np.random.default_rng(1).normal(size=(4, 7, 8))
    made, other = KVProbe.of(list(planes), "float32"), KVProbe.of(list(planes + 0.1), "float32")
    source = hierarchy_of(slots=16)
    store(source, chain_of(12))
    run(last(export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "probed", key=key, probe=made)))
    source.close()
    for own, num_imported in ((other, 0), (made, 12), (None, 12)):
        target, seen = hierarchy_of(slots=16), list[bytes]()

        def require(packed: bytes, own: KVProbe | None = own, seen: list[bytes] = seen) -> None:
            seen.append(packed)
            if own is not None:
                require_alike(own, KVProbe.unpack(packed), "host memory")

        steps = import_blocks(target, FINGERPRINT, BLOCK_SIZE, tmp_path / "probed", key, require_alike=require)
        if num_imported:
            run(last(steps))
        else:
            with pytest.raises(FingerprintMismatch, match="probed: host memory: the KV kept under this model's name"):
                run(last(steps))
        assert seen == [made.packed()]
        assert num_held(target, chain_of(12)) == num_imported
        target.close()
    damaged = bytearray((tmp_path / "probed").read_bytes())
    damaged[HEADER_BYTES + 40] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    target = hierarchy_of(slots=16)
    with pytest.raises(FormatError, match="a KV probe that is not whole; 0 blocks were imported"):
        imported(target, tmp_path / "damaged")
    target.close()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a kvtier archive"),
        (b"KVTIER01" + bytes(4096), "not a kvtier archive"),
        (b"KVTARCHV", "breaks off in its header"),
        (b"KVTARCHV" + (9).to_bytes(4, "little") + bytes(200), "version 9, but this kvtier reads 1 to 4"),
        (b"KVTARCHV" + (1).to_bytes(4, "little") + b"\xff" * 200, "header is damaged"),
    ],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "file").write_bytes(content)
    target = hierarchy_of()
    with pytest.raises(FormatError, match=rf"file: .*{complaint}.*; 0 blocks were imported"):
        imported(target, tmp_path / "file")
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="not a file"):
            imported(target, missing)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(ConfigError, match="not a file"):
        imported(target, tmp_path / "pipe")
    target.close()


@hypothesis_settings(max_examples=brief(15, 60))
@given(data=strategies.data())
def test_an_archive_cut_anywhere_leaves_its_whole_blocks(archive_of_12: Path, data: strategies.DataObject) -> None:
    whole = archive_of_12.read_bytes()
    assert len(whole) == HEADER_BYTES + 12 * RECORD_BYTES + TRAILER_BYTES
    length = data.draw(strategies.integers(0, len(whole) - 1))
    cut = archive_of_12.with_name("cut")
    cut.write_bytes(whole[:length])
    target = hierarchy_of(slots=32)
    num_whole = min(12, max(0, length - HEADER_BYTES) // RECORD_BYTES)
    with pytest.raises(FormatError, match=rf"; {num_whole} blocks were imported and stay"):
        imported(target, cut)
    expect_exactly(target, num_whole)


@both
@hypothesis_settings(max_examples=brief(20, 100))
@given(data=strategies.data())
def test_a_flipped_bit_is_found_wherever_it_is(archive_of_12: Path, data: strategies.DataObject) -> None:
    content = bytearray(archive_of_12.read_bytes())
    at = data.draw(strategies.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(strategies.integers(0, 7))
    flipped = archive_of_12.with_name("flipped")
    flipped.write_bytes(content)
    target = hierarchy_of(slots=32)
    num_whole = min(12, max(0, at - HEADER_BYTES) // RECORD_BYTES)
    with pytest.raises((FormatError, FingerprintMismatch)):
        imported(target, flipped)
    expect_exactly(target, num_whole)


def expect_exactly(target: Hierarchy, num_whole: int) -> None:
    """The chain's first blocks are there, with their bytes, and nothing else."""
    chain = chain_of(12)
    assert num_held(target, chain) == target.host.pool.counts().ready == num_whole
    for name in chain.hashes[:num_whole]:
        assert bytes_in_l2(target, name) == payload_of(name)
    settle(target)


@both
def test_records_moved_doubled_or_left_out_are_found(archive_of_12: Path) -> None:
    whole = archive_of_12.read_bytes()
    header, end = whole[:HEADER_BYTES], whole[-TRAILER_BYTES:]
    records = [whole[HEADER_BYTES + i * RECORD_BYTES :][:RECORD_BYTES] for i in range(12)]
    for wrong, num_whole in (
        ([*records[:5], records[6], records[5], *records[7:]], 5),
        ([*records[:5], records[4], *records[5:]], 5),
        ([*records[:5], *records[6:]], 5),
        (records[:11], 11),
    ):
        archive_of_12.write_bytes(header + b"".join(wrong) + end)
        target = hierarchy_of(slots=32)
        with pytest.raises(FormatError, match=rf"; {num_whole} blocks were imported"):
            imported(target, archive_of_12)
        expect_exactly(target, num_whole)
    archive_of_12.write_bytes(whole + b"more")
    target = hierarchy_of(slots=32)
    with pytest.raises(FormatError, match="bytes follow behind its end; 12 blocks"):
        imported(target, archive_of_12)
    expect_exactly(target, 12)


def test_an_archive_larger_than_memory_keeps_its_heads(tmp_path: Path) -> None:
    source = slab_of(tmp_path / "slab", [chain := chain_of(60)])
    exported(source, tmp_path / "all")
    settle(source)
    # No tier below: what fits is the chain's head, and the rest is counted.
    target = hierarchy_of(slots=16)
    progress = imported(target, tmp_path / "all")
    assert progress.num_blocks == num_held(target, chain) == 16
    assert sum(progress.lost.values()) == 60 - 16
    settle(target)


def test_an_import_under_write_back_is_written_before_it_makes_room(tmp_path: Path) -> None:
    source = slab_of(tmp_path / "one", [chain := chain_of(60)])
    exported(source, tmp_path / "all")
    settle(source)
    target = over_slab(tmp_path / "two", slots=16, settings=HierarchySettings(write_policy="write_back"))
    progress = imported(target, tmp_path / "all")
    assert (progress.num_blocks, progress.lost) == (60, {})
    assert num_held(target, chain) == 60
    settle(target)


def test_an_import_needs_no_admission_and_may_be_repeated(archive_of_12: Path) -> None:
    target = hierarchy_of(slots=32, settings=HierarchySettings(admit_after=3))
    for _ in range(2):
        progress = imported(target, archive_of_12)
        assert (progress.num_blocks, progress.num_planned, progress.lost) == (12, 12, {})
    settle(target)


def test_a_reset_ends_an_import(archive_of_12: Path) -> None:
    target = hierarchy_of(slots=32)

    async def story() -> None:
        async for progress in import_blocks(target, FINGERPRINT, BLOCK_SIZE, archive_of_12, key):
            if progress.num_blocks:
                await asyncio.to_thread(target.reset)

    with pytest.raises(KVTierError, match="the tiers were reset meanwhile"):
        run(story())
    assert target.host.pool.counts().ready == 0
    settle(target)


IMPORTER = """
import asyncio, sys
from pathlib import Path
from fault_rig import FINGERPRINT, over_slab
from doubles import BLOCK_SIZE, wait_until
from kvtier.service.archive.archive import import_blocks

async def main():
    hierarchy = over_slab(Path(sys.argv[1]), slots=16)
    async for progress in import_blocks(hierarchy, FINGERPRINT, BLOCK_SIZE, Path(sys.argv[2]), KEY):
        print(progress.num_blocks, flush=True)
        await asyncio.sleep(0.002)

asyncio.run(main())
"""


@pytest.mark.parametrize("after", brief([20], [2, 20, 41]))
def test_an_importer_killed_leaves_only_whole_reachable_blocks(tmp_path: Path, after: int) -> None:
    source = slab_of(tmp_path / "one", [chain := chain_of(60)])
    exported(source, tmp_path / "all")
    settle(source)
    command = ["-c", IMPORTER.replace("KEY", repr(key)), str(tmp_path / "two"), str(tmp_path / "all")]
    with Forked(command, SERVICES, env=os.environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= after:
                child.kill()
                break
    # The next process finds the head of the chain, every byte right, and imports the rest.
    target = over_slab(tmp_path / "two", slots=32)
    held = num_held(target, chain)
    assert after <= held
    assert sum(target.ports[0].holds(chain.hashes)) == held
    read_piecewise(target, chain, held)
    assert imported(target, tmp_path / "all").num_blocks == 60
    settle(target)


def test_an_export_waits_while_requests_hold_all_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hierarchy_of(slots=16)
    store(source, chain := chain_of(16))
    greedy = source.submit(chain.hashes[:8], chain.root)  # half of L2 is promised to a request
    monkeypatch.setattr(archive_copy, "_PATIENCE", 0.05)
    progress = exported(source, tmp_path / "some")
    assert progress.num_blocks == 8  # what the request holds takes no room of its own; the rest was refused
    assert progress.lost == {Outcome.NO_SLOT: 1, Outcome.PARENT_FAILED: 7}
    monkeypatch.undo()

    async def story() -> ArchiveProgress:
        task = asyncio.create_task(last(export_blocks(source, FINGERPRINT, BLOCK_SIZE, tmp_path / "all", key=key)))
        await asyncio.sleep(0.05)
        source.cancel(greedy)
        return await task

    assert run(story()).num_blocks == 16
    settle(source)


def test_names_are_checked_before_anything_is_touched(tmp_path: Path) -> None:
    source = hierarchy_of()
    for fingerprint, hashes in ((b"short", None), (FINGERPRINT, [b"x" * 31]), (FINGERPRINT, [b"x" * 32] * 2)):
        with pytest.raises(ValueError, match=r"32 bytes|must be 32|given twice"):
            run(last(export_blocks(source, fingerprint, BLOCK_SIZE, tmp_path / "file", hashes)))
    assert os.listdir(tmp_path) == []
    assert archive.ArchiveProgress is ArchiveProgress
    source.close()


def tokens_in(path: Path, chain: TokenChain) -> bool:
    """Whether a file holds a block's tokens, its payload's head or half of its name as they are."""
    content = path.read_bytes()
    secrets = (chain.block_tokens(0), payload_of(chain.hashes[0])[:16], chain.hashes[0][:16])
    return any(bytes(secret) in content for secret in secrets)


@both
def test_archives_and_slabs_in_the_clear_and_encrypted_ones_go_into_each_other(tmp_path: Path) -> None:
    chain = chain_of(12)
    source = hierarchy_of(slots=16)
    store(source, chain)
    exported(source, tmp_path / "all")
    settle(source)
    assert tokens_in(tmp_path / "all", chain) == (key is None)
    for name, slab_key in (("plain", None), ("sealed", bytes(range(32)))):
        target = over_slab(tmp_path / name, slots=32, key=slab_key)
        assert imported(target, tmp_path / "all").num_blocks == 12
        assert target.drain(60)
        assert fetch(target, chain) == 12
        settle(target)
        (slab,) = (tmp_path / name).glob("*.slab")
        assert tokens_in(slab, chain) == (slab_key is None)


@both
def test_an_encrypted_archive_needs_its_key(tmp_path: Path, archive_of_12: Path) -> None:
    target = hierarchy_of(slots=16)
    if key is None:  # in the clear: whoever has a key must want it so
        what = target, FINGERPRINT, BLOCK_SIZE, archive_of_12, bytes(32)
        with pytest.raises(ConfigError, match=r"twelve: not encrypted, and .* its origin is unknown"):
            run(last(import_blocks(*what)))
        assert target.host.pool.counts().ready == 0
        assert run(last(import_blocks(*what, unsealed=True))).num_blocks == 12
        settle(target)
        return
    for other, complaint in (
        (None, rf"encrypted with key {key_id(key).hex()}, and no \[file\] key_file is set"),
        (bytes(32), rf"encrypted with key {key_id(key).hex()}, \[file\] key_file holds {key_id(bytes(32)).hex()}"),
    ):
        with pytest.raises(ConfigError, match=rf"twelve: {complaint}; set the key it was exported with"):
            run(last(import_blocks(target, FINGERPRINT, BLOCK_SIZE, archive_of_12, other)))
    assert target.host.pool.counts().ready == 0
    # The same key's id over another salt: nothing in it is authentic.
    content = bytearray(archive_of_12.read_bytes())
    content[88:104] = bytes(16)
    content[120:128] = checksum(memoryview(content[:120])).to_bytes(8, "little")
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(FormatError, match="block 0 is damaged; 0 blocks were imported"):
        imported(target, tmp_path / "other")
    settle(target)


@both
def test_records_exchanged_within_an_encrypted_archive_are_damage(tmp_path: Path, archive_of_12: Path) -> None:
    # Somebody writes who lacks the key: the trailer's digest can be made right, what is sealed cannot.
    content = archive_of_12.read_bytes()
    records = [content[HEADER_BYTES + i * RECORD_BYTES :][:RECORD_BYTES] for i in range(12)]
    head = RECORD_BYTES - SLOT_BYTES
    forgeries = {
        "records": [*records[:4], records[5], records[4], *records[6:]],
        "payloads": [*records[:4], records[4][:head] + records[5][head:], *records[5:]],
        "stamps": [*records[:4], records[4][: head - 28] + records[5][head - 28 :], *records[5:]],
    }
    for name, forged in forgeries.items():
        body = content[:HEADER_BYTES] + b"".join(forged)
        trailer = encode_trailer(12, xxhash.xxh3_128_digest(body))
        (tmp_path / name).write_bytes(body + trailer)
        target = hierarchy_of(slots=16)
        with pytest.raises(FormatError, match="block 4 is damaged; 4 blocks were imported"):
            imported(target, tmp_path / name)
        settle(target)
