"""Stories of our file tier below vLLM's own offloading: real engines, a process each, over one directory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvtier.tiers.checksum import checksum
from kvtier.tiers.file.slab import decode
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from extent import brief
from vllm_rig import make_checkpoint

HERE: Final = Path(__file__).resolve().parent
SLAB_BYTES: Final = 16 << 20
BLOCK: Final = 32  # tokens
PROMPTS: Final = [[(7 * i * i + seed) % 509 for i in range(length)] for seed, length in ((1, 330), (2, 200), (1, 400))]
CACHED: Final = [10 * BLOCK, 6 * BLOCK, 12 * BLOCK]  # every whole block
NUM_CHUNKS: Final = 10 + 6 + 2  # the third prompt begins like the first
DEADLINE: Final = 500  # seconds for a child: 20 on an idle machine, 270 with six busy programs for each core
pytestmark = [pytest.mark.timeout(2000), pytest.mark.slow]  # the first test waits for two more children

Job = dict[str, Any]


def generate(**options: Any) -> Job:
    return {"do": "generate", "prompts": PROMPTS, **options}


FORGET: Final[Job] = {"do": "forget"}
METRICS: Final[Job] = {"do": "metrics"}


def tier(store: Path, **options: Any) -> Job:
    """The extra config of native offloading with our file tier below it."""
    entry = {"type": "KVTierSecondaryTier", "module_path": "kvtier.connector.vllm_tier"}
    return native(secondary_tiers=[{**entry, "file": {"path": str(store), "size": SLAB_BYTES, **options}}])


def native(**options: Any) -> Job:
    """vLLM's native offloading: CPU memory for 256 chunks of one block each."""
    spec = {"spec_name": "HostOffloadingSpec", "spec_module_path": "host_offloading"}
    return {**spec, "cpu_bytes_to_use": 16 << 20, **options}


def run(model: Path, extra: Job, *steps: Job, env: dict[str, str] | None = None, **options: Any) -> Any:
    """What an engine process answers to each step; AssertionError with its last words where it fails."""
    done = start(model, extra, *steps, env=env, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def start(
    model: Path, extra: Job, *steps: Job, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    settings = {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    engine_id = f"kvtier-test-{uuid.uuid4()}"
    job = {
        "model": str(model), "extra": extra, "steps": steps, "options": options, "engine_id": engine_id,
        "deadline": DEADLINE,
    }  # fmt: skip
    try:
        return subprocess.run(
            [sys.executable, str(HERE / "_vllm_tier_child.py")],
            input=json.dumps(job),
            env={**os.environ, **settings, **(env or {})},
            capture_output=True,
            text=True,
            timeout=DEADLINE + 30,
        )
    finally:
        for left in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*"):  # by an engine that was refused its start
            left.unlink()


class House:
    """A model, what it answers without any cache, and a store that one engine process filled and left."""

    def __init__(self, directory: Path) -> None:
        self.model = make_checkpoint("llama", directory / "model")
        self.other = make_checkpoint("llama", directory / "other", seed=1)
        self.store = directory / "filled"
        [plain] = run(self.model, {}, generate(), enable_prefix_caching=False)
        self.tokens = plain["tokens"]
        [self.cold, self.metrics] = run(self.model, tier(self.store), generate(), METRICS)

    def empty(self, name: str) -> Path:
        """A fresh directory for a store. A test that runs once more gets another one."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.store.parent))

    def copy(self, name: str) -> Path:
        """The filled store, copied to a fresh directory."""
        return Path(shutil.copytree(self.store, self.empty(name), dirs_exist_ok=True))


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    # On a real disk: /tmp may refuse O_DIRECT.
    directory = Path(tempfile.mkdtemp(prefix=".test-disk-vllm-", dir=HERE.parent.parent))
    try:
        yield House(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def slab_of(store: Path) -> Path:
    [path] = store.glob("*.slab")
    return path


def open_slab(store: Path) -> FileStore:
    path = slab_of(store)
    superblock = decode(path.read_bytes()[:8192], str(path))
    return FileStore.open(
        store, superblock.fingerprint, slot_bytes=superblock.slot_bytes, block_size=superblock.block_size,
        size=SLAB_BYTES, mode="buffered",
    )  # fmt: skip


def rewrite(store: Path, *, sealed: bool) -> int:
    """Flip a bit in every stored chunk; `sealed`: under a fresh checksum, so that nobody can tell. How many."""
    slab = open_slab(store)
    names = [name for name, _ in slab.lineage().pairs()]
    buffers = [memoryview(bytearray(slab.superblock.slot_bytes)) for _ in names]
    records = [record for record in slab.read(names, buffers) if isinstance(record, BlockRecord)]
    assert len(records) == len(names)
    for buffer in buffers:
        for exponent in range(3, len(buffer), 4 * 97):  # the sign and the exponent of many floats
            buffer[exponent] ^= 0b1100_0000
    if sealed:
        slab.reset()
        fresh = [
            BlockRecord(r.chain_hash, r.parent, r.tokens, checksum(b)) for r, b in zip(records, buffers, strict=True)
        ]
        assert set(slab.write(fresh, buffers)) == {Outcome.OK}
    else:
        for name, buffer in zip(names, buffers, strict=True):
            slab._payload.write(slab.superblock.payload_offset(slab._blocks.index.find_one(name)), [buffer])
    slab.close()
    return len(names)


def test_a_cold_engine_stores_every_whole_chunk_and_says_the_same(house: House) -> None:
    assert house.cold["tokens"] == house.tokens
    assert house.cold["cached"][:2] == [0, 0]
    assert house.metrics["vllm:kvtier_store_blocks_total file"] == NUM_CHUNKS


def test_a_new_engine_process_loads_what_another_stored(house: House) -> None:
    [warm, metrics, salted] = run(house.model, tier(house.copy("warm")), generate(), METRICS, generate(salt="tenant"))
    assert warm["tokens"] == house.tokens
    assert warm["cached"] == CACHED
    assert metrics["vllm:kv_offload_tiering_chunk_hits_total 1:KVTierSecondaryTier"] >= NUM_CHUNKS
    # Another tenant's salt is part of vLLM's keys.
    assert salted["cached"][:2] == [0, 0]
    assert salted["tokens"] == house.tokens


def test_corrupted_chunks_are_counted_misses_and_the_answer_is_right(house: House) -> None:
    store = house.copy("rot")
    assert rewrite(store, sealed=False) == NUM_CHUNKS
    [found, metrics, again] = run(house.model, tier(store), generate(), METRICS, generate())
    assert found["tokens"] == house.tokens
    assert found["cached"][:2] == [0, 0]
    assert metrics["vllm:kvtier_corruption_total file"] == NUM_CHUNKS
    assert metrics["vllm:kvtier_miss_total checksum"] == NUM_CHUNKS
    assert again["tokens"] == house.tokens


def test_the_tests_can_fail_rot_that_nobody_can_tell_changes_the_answer(house: House) -> None:
    """The negative control: bytes that pass for good ones are served, so they did come from the store."""
    store = house.copy("forged")
    assert rewrite(store, sealed=True) == NUM_CHUNKS
    [forged] = run(house.model, tier(store), generate())
    assert forged["cached"] == CACHED
    assert all(wrong != right for wrong, right in zip(forged["tokens"], house.tokens, strict=True))


@pytest.mark.parametrize(("state", "reason"), [*brief([], [("failing", "io_error")]), ("silent", "timeout")])
def test_a_bad_disk_never_reaches_the_engine_and_is_used_once_well(house: House, state: str, reason: str) -> None:
    extra = tier(house.copy(state))
    extra["secondary_tiers"][0]["breaker"] = {"failures": 2, "retry_after": "10ms"}
    bad, well = {"do": "disk", "state": state}, {"do": "disk", "state": "well"}
    recover = {"do": "recover", "prompts": PROMPTS, "cached": CACHED}
    [_, ill, metrics, _, answers, after] = run(house.model, extra, bad, generate(), METRICS, well, recover, METRICS)
    assert all(answer["tokens"] == house.tokens for answer in (ill, *answers))
    assert ill["cached"][:2] == [0, 0]  # not one chunk came from the bad disk
    assert metrics[f"vllm:kvtier_miss_total {reason}"] > 0
    assert metrics["vllm:kvtier_breaker_open file read"] == 1
    assert answers[-1]["cached"] == CACHED  # without a restart
    assert after["vllm:kvtier_breaker_open file read"] == 0


def test_vllms_own_processes_share_the_store_too(house: House) -> None:
    """Scheduler and workers in processes of their own, as vLLM does by default."""
    [warm] = run(house.model, tier(house.copy("split")), generate(), env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert warm["tokens"] == house.tokens
    assert warm["cached"] == CACHED


def test_routers_are_told_which_blocks_the_store_has(house: House) -> None:
    """In vLLM's own stream, with tokens and hashes: what a router needs to send a prompt where its KV is."""
    extra = tier(house.empty("told")) | {"self_describing_kv_events": True}
    extra["secondary_tiers"][0] |= {"enable_kv_events": True, "locality": "LOCAL"}
    told = {"do": "events"}
    [cold, again, events] = run(house.model, extra, generate(), generate(), told, events=True)
    assert cold["tokens"] == again["tokens"] == house.tokens
    assert {(each["is"], each["locality"]) for each in events} == {("BlockStored", "LOCAL")}
    assert len({each["hashes"][0] for each in events}) == len(events) == NUM_CHUNKS
    blocks = {tuple(prompt[i : i + BLOCK]) for prompt in PROMPTS for i in range(0, len(prompt) - BLOCK + 1, BLOCK)}
    assert {tuple(each["tokens"]) for each in events} == blocks


def test_layers_that_slide_get_right_hits(tmp_path: Path, house: House) -> None:
    """Gemma 3: every other layer sees 64 tokens; vLLM keeps those in a group of their own, with keys of their own."""
    model, extra = make_checkpoint("gemma3", tmp_path), tier(house.empty("sliding"), size=2 * SLAB_BYTES)
    [cold] = run(model, extra, generate())
    [warm] = run(model, extra, generate())
    assert warm["tokens"] == cold["tokens"]
    assert warm["cached"] == CACHED


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM's MLA has no float32 on a CPU with AMX")
def test_where_vllm_cannot_go_on_behind_a_prefix_nothing_is_kept(tmp_path: Path, house: House) -> None:
    """MLA on a CPU: its kernel computes whole prompts only, so a loaded prefix would give wrong text."""
    model, store = make_checkpoint("deepseek", tmp_path), house.empty("latent")
    [plain] = run(model, {}, generate())
    [answer, _, again] = run(model, tier(store), generate(), FORGET, generate())
    assert answer == again == {"tokens": plain["tokens"], "cached": [0, 0, 0]}
    assert not list(store.glob("*.slab"))


def test_names_no_other_process_could_find_again_are_refused_with_one_line(house: House) -> None:
    done = start(house.model, tier(house.empty("never")), generate(), prefix_caching_hash_algo="xxhash")
    assert done.returncode != 0
    assert "ConfigError: prefix_caching_hash_algo 'xxhash': its chains begin at a random value; set PYTHONHASHSEED" in (
        done.stderr
    )
