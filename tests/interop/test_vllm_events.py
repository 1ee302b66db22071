"""A real vLLM with KV events on: a reader of its stream knows what kvtier's tiers hold, block by block."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import msgspec
import zmq
from redis_rig import NO_REDIS, standalone
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_rig import BLOCK, Engine, engine, prompt, tiers

pytestmark = pytest.mark.timeout(300)

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 70), prompt(4, 31)]
BLOCKS = [6, 3, 2, 0]  # full ones


class Reader:
    """Believes what it is told, and minds contradictions."""

    def __init__(self, *media: str) -> None:
        self.held: dict[str, dict[Any, BlockStored]] = {medium: {} for medium in media}
        self.removed: dict[str, list[Any]] = {medium: [] for medium in media}

    def names(self, *media: str) -> tuple[set[Any], ...]:
        return tuple(set(self.held[medium]) for medium in media)

    def read(self, batches: Sequence[Any]) -> "Reader":
        for event in [event for batch in batches for event in batch.events]:
            if isinstance(event, AllBlocksCleared):
                continue  # vLLM's own, of its GPU blocks: it names no medium
            if event.medium not in self.held:
                continue
            held = self.held[event.medium]
            if isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= held.keys(), "removed, and never told of"
                for name in event.block_hashes:
                    del held[name]
                self.removed[event.medium] += event.block_hashes
                continue
            size = event.block_size
            parents = [event.parent_block_hash, *event.block_hashes]
            assert len(event.token_ids) == size * len(event.block_hashes)
            for i, name in enumerate(event.block_hashes):
                assert name not in held, "stored twice"
                held[name] = event_of(event, i, parents[i])
        return self


def event_of(event: BlockStored, i: int, parent: Any) -> BlockStored:
    """What an event says of its block `i` alone."""
    tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
    one: BlockStored = msgspec.structs.replace(
        event, block_hashes=[event.block_hashes[i]], parent_block_hash=parent, token_ids=tokens
    )
    return one


@contextmanager
def telling(model: Path, options: dict[str, Any], **more: Any) -> Iterator[tuple[Engine, list[Any]]]:
    """An engine and the batches it publishes."""
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(model, options, kv_events_config=config, **more) as vllm:
        batches: list[Any] = []
        vllm.scheduler.kv_event_publisher.publish = batches.append
        yield vllm, batches


def in_tiers(vllm: Engine) -> tuple[set[Any], ...]:
    """What host memory and the slab hold, by the names vLLM publishes."""
    host, slab = vllm.hierarchy.host, vllm.hierarchy.ports[0].tier
    names = {record.chain_hash for record in host.records if record is not None}
    in_host = {name for name, held in zip(names, host.pool.holds(list(names)), strict=True) if held}
    external = maybe_convert_block_hash
    return {external(name) for name in in_host}, {external(name) for name, _ in slab.lineage().pairs()}


@pytest.mark.parametrize("keys", brief(["vllm"], ["vllm", "kvtier"]))
def test_every_stored_block_is_told_with_tokens_parent_and_medium(keys: str, model: Path, tmp_path: Path) -> None:
    with telling(model, tiers(tmp_path, keys=keys)) as (vllm, batches):
        vllm.text(PROMPTS, 1)
        vllm.settle()
        reader = Reader("GPU", "CPU", "STORAGE").read(batches)
        assert reader.names("CPU", "STORAGE") == in_tiers(vllm)
        assert len(reader.held["CPU"]) == len(reader.held["STORAGE"]) == sum(BLOCKS)
        for medium in ("CPU", "STORAGE"):
            for tokens, num_blocks in zip(PROMPTS, BLOCKS, strict=True):
                parent = None
                for block in range(num_blocks):
                    said = [event for event in reader.held[medium].values() if event.parent_block_hash == parent]
                    words = tokens[block * BLOCK : (block + 1) * BLOCK]
                    [event] = [event for event in said if event.token_ids == words]
                    assert (event.block_size, event.lora_name, event.group_idx) == (BLOCK, None, 0)
                    assert event.kv_cache_spec_kind == "full_attention"
                    parent = event.block_hashes[0]
        if keys == "vllm":  # one block has one name, wherever it is
            for name, event in reader.held["CPU"].items():
                on_gpu = reader.held["GPU"][name]
                assert (event.token_ids, event.parent_block_hash) == (on_gpu.token_ids, on_gpu.parent_block_hash)
                assert (event.group_idx, event.kv_cache_spec_kind) == (on_gpu.group_idx, on_gpu.kv_cache_spec_kind)


def test_what_is_evicted_is_told_as_removed(model: Path, tmp_path: Path) -> None:
    with telling(model, tiers(tmp_path)) as (vllm, _):
        block_bytes = vllm.half._plan.block_bytes
    small = tiers(tmp_path / "kv", host={"size": f"{8 * block_bytes}"})
    with telling(model, small) as (vllm, batches):
        vllm.text([PROMPTS[0]], 1)
        vllm.settle()
        first = set(Reader("CPU").read(batches).held["CPU"])
        assert len(first) == 6
        vllm.text([prompt(21, 200)], 1)  # six more, into eight places
        vllm.settle()
        reader = Reader("CPU", "STORAGE").read(batches)
        assert len(first & set(reader.removed["CPU"])) == 4
        assert reader.names("CPU", "STORAGE") == in_tiers(vllm)


def test_a_reset_is_told_and_harms_nothing_on_the_gpu(model: Path, tmp_path: Path) -> None:
    with telling(model, tiers(tmp_path)) as (vllm, batches):
        vllm.text(PROMPTS, 1)
        vllm.settle()
        assert vllm.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        before = len(batches)
        vllm.text([PROMPTS[1]], 1)
        vllm.settle()
        reader = Reader("CPU", "STORAGE").read(batches)
        assert len(reader.removed["CPU"]) == len(reader.removed["STORAGE"]) == sum(BLOCKS)
        assert reader.names("CPU", "STORAGE") == in_tiers(vllm)
        assert len(reader.held["CPU"]) == BLOCKS[1]
        # vLLM clears its GPU blocks and stores new ones in one batch; a second clearing behind would wipe those out.
        events = [event for batch in batches[before:] for event in batch.events]
        assert sum(isinstance(event, AllBlocksCleared) for event in events) == 1
        assert isinstance(events[0], AllBlocksCleared)
        assert any(isinstance(event, BlockStored) and event.medium == "GPU" for event in batches[before].events)


def test_what_a_slab_held_is_told_by_the_next_engine(model: Path, tmp_path: Path) -> None:
    with telling(model, tiers(tmp_path)) as (vllm, batches):
        vllm.text(PROMPTS, 1)
        vllm.settle()
        told = Reader("STORAGE").read(batches).held["STORAGE"]
    with telling(model, tiers(tmp_path)) as (vllm, batches):
        vllm.settle()  # nobody asks anything
        assert Reader("STORAGE").read(batches).held["STORAGE"] == told
        vllm.text(PROMPTS, 1)
        vllm.settle()
        assert Reader("CPU").read(batches).held["CPU"].keys() == in_tiers(vllm)[0] != set()


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
@pytest.mark.parametrize("shared", [True, False])
def test_what_every_replica_can_reach_need_not_be_told(shared: bool, model: Path, tmp_path: Path) -> None:
    with standalone() as redis:
        options = tiers(tmp_path, redis={"url": redis.url}, events={"shared": shared})
        with telling(model, options) as (vllm, batches):
            vllm.text(PROMPTS, 1)
            vllm.settle()
            reader = Reader("CPU", "STORAGE", "EXTERNAL").read(batches)
            assert len(reader.held["CPU"]) == len(reader.held["STORAGE"]) == sum(BLOCKS)
            assert len(reader.held["EXTERNAL"]) == (sum(BLOCKS) if shared else 0)


def test_nothing_is_noted_where_vllm_publishes_nothing(model: Path, tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path)) as vllm:
        vllm.text(PROMPTS, 1)
        vllm.settle()
        assert vllm.hierarchy.host.pool._core.changes is None
        assert list(vllm.scheduler.connector.take_events()) == []


def test_over_the_wire(model: Path, tmp_path: Path) -> None:
    """vLLM's own publisher, its replay socket, and a reader that knows nothing but the bytes."""
    replay = f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{tmp_path}/events", replay_endpoint=replay
    )
    with engine(model, tiers(tmp_path / "kv"), kv_events_config=config) as vllm:
        vllm.text(PROMPTS, 1)
        vllm.settle()
        deadline = time.monotonic() + 60
        while True:
            reader = Reader("CPU", "STORAGE").read(replayed(replay))
            if reader.names("CPU", "STORAGE") == in_tiers(vllm):
                break
            assert time.monotonic() < deadline, "the stream never said what the tiers hold"
        assert len(reader.held["CPU"]) == sum(BLOCKS)


def replayed(endpoint: str) -> list[Any]:
    """Every batch published so far, in order."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = list[Any]()
        while True:
            *_, payload = socket.recv_multipart()
            if not payload:
                return batches
            batches.append(decoder.decode(payload))
    finally:
        socket.close()
