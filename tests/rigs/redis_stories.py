"""What the stories of the Redis tier share: stores, ports and hierarchies over a real server, and what they hold."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, record_of, wait_until

from kvtier.tiers.config.config import Config
from kvtier.tiers.config.sections import RedisConfig
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.redis.wire import Head, Wire
from kvtier.tiers.shared.stream import Transfer
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome, Tier

FINGERPRINT = b"a model of the Redis stories".ljust(32, b".")
PATIENT = PortSettings(deadline=60.0, failures=2, retry_after=0.02)
SECRET = "a secret of the Redis stories"
CHAIN, OTHER = chain_of(8), chain_of(6, first_token=1000)


def together(wire: Wire, head_bytes: int, into: Sequence[memoryview]) -> Iterator[Head]:
    """The values of GETs that were sent: by one transfer while they are as expected, then one by one."""
    line, places = wire.value_places(head_bytes, into)
    heads: list[bytes] = []

    def came(run: Transfer, replies: range) -> None:
        heads.extend(bytes(places[i][0][len(line) :]) for i in replies)

    done, _ = wire.in_turn([(b"GET",)] * len(into), places, line, len(into), came)
    yield from heads
    yield from wire.one_by_one(head_bytes, into[done:])


def options(url: str, **more: object) -> RedisConfig:
    """A configuration of the tier whose patience no busy machine outlasts; see `within`."""
    patience = {"connect_timeout": "20s", "deadline": "20s", "bandwidth": "1GB"}
    return Config.load(redis={"url": url, **patience, **more}).redis


def open_store(url: str, fingerprint: bytes = FINGERPRINT, **more: Any) -> RedisStore:
    """The tier itself."""
    return RedisStore.open(options(url, **more), fingerprint, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE)


@contextmanager
def opened(url: str, fingerprint: bytes = FINGERPRINT, **more: Any) -> Iterator[RedisStore]:
    """The tier, its laws checked at the end."""
    store = open_store(url, fingerprint, **more)
    try:
        yield store
        store.check()
    finally:
        store.close()


def protection(form: str, directory: Path, mark: str = "") -> dict[str, Any]:
    """Options of [redis] for records "clear", "sealed" by a secret, or "encrypted"; of another mark, by other ones.

    Clear and sealed ones may be "compressed", too.
    """
    if form.startswith("compressed"):
        return {
            **protection(form.removeprefix("compressed").strip() or "clear", directory, mark),
            "compression": "zstd",
        }
    if form == "clear":
        return {}
    if form == "sealed":
        return {"secret": f"{SECRET}{mark}"}
    key_file = directory / f"key{mark}"
    key_file.touch(0o600)
    key_file.write_text(hashlib.sha256(f"{SECRET}{mark}".encode()).hexdigest() + "\n")
    return {"key_file": str(key_file)}


def kv_of(chain_hash: ChainHash, num_bytes: int = SLOT_BYTES) -> bytes:
    """The bytes of a block as KV in bf16 has them: `payload_of` for stories of blocks that can be compressed."""
    numbers = np.random.default_rng(int.from_bytes(chain_hash[:8], "little")).normal(0, 1, num_bytes // 2)
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def key_of(store: RedisStore, chain_hash: ChainHash) -> str:
    """Under which key a server holds a block."""
    epoch = store._epoch.value
    assert epoch is not None
    return store.space.keys([chain_hash], epoch)[0].decode()


@contextmanager
def within(tier: Tier | None, seconds: float) -> Iterator[None]:
    """A batch of the store has so long: for as long as a server keeps silent, and a story waits for that to be told."""
    assert isinstance(tier, RedisStore)
    config = tier._config
    tier._config = config.model_copy(update={"deadline": seconds})
    try:
        yield
    finally:
        tier._config = config


def over_shared(name: str, open: Callable[[], Tier], patience: PortSettings, slots: int) -> Hierarchy:
    """A hierarchy over a shared tier."""
    metrics, rates = Metrics(), Rates("load")
    host = HostTier(HostRegion.allocate(slots, SLOT_BYTES, huge_pages=False, prefault=False))
    port = TierPort(name, open, patience, metrics, rates)
    return Hierarchy(host, [port], HierarchySettings(prefetch_deadline=20.0), metrics, rates)


def over_redis(url: str, patience: PortSettings = PATIENT, slots: int = 128, **more: Any) -> Hierarchy:
    """A hierarchy over the tier."""
    return over_shared("redis", lambda: open_store(url, **more), patience, slots)


def write(store: RedisStore, chain: TokenChain) -> list[Outcome]:
    """Store a whole chain."""
    payloads = [memoryview(bytearray(payload_of(chain_hash))) for chain_hash in chain.hashes]
    return list(store.write([record_of(chain, i) for i in range(len(chain.hashes))], payloads))


def written(store: RedisStore, chain: TokenChain) -> None:
    """Store a whole chain, every block of it."""
    assert write(store, chain) == [Outcome.OK] * len(chain.hashes)


def read(store: RedisStore, chain: TokenChain) -> list[Outcome]:
    """Read a whole chain. What comes as read must be the record and the bytes of its key (I1)."""
    buffers = np.zeros((len(chain.hashes), SLOT_BYTES), np.uint8)
    results = store.read(chain.hashes, [memoryview(buffer) for buffer in buffers])
    assert len(results) == len(chain.hashes)
    return [judged(chain, i, result, buffers[i].tobytes()) for i, result in enumerate(results)]


def judged(chain: TokenChain, i: int, result: BlockRecord | Outcome, data: bytes) -> Outcome:
    """OK for a block that is what it should be; fails the test for one that only says so."""
    if isinstance(result, Outcome):
        assert result is not Outcome.OK
        return result
    assert result == record_of(chain, i), "another block's record"
    assert data == payload_of(chain.hashes[i]), "another block's bytes"
    return Outcome.OK


def whole(outcomes: Sequence[Outcome]) -> bool:
    """Whether every block came."""
    return set(outcomes) == {Outcome.OK}


def reads_again(store: RedisStore, chain: TokenChain) -> None:
    """Sooner or later, without a restart."""
    wait_until(lambda: whole(read(store, chain)))


def located(hierarchy: Hierarchy, chain: TokenChain) -> int:
    """How many of a chain's blocks Redis holds, asked as for a request: its server too, where the index knows none."""
    return hierarchy.locate(chain.hashes, 5.0)["redis"]


def is_open(hierarchy: Hierarchy, direction: str) -> bool:
    """Whether the breaker of the Redis tier is open."""
    return hierarchy.stats()[f'kvtier_breaker_open{{tier="redis",direction="{direction}"}}'] == 1


def until(hierarchy: Hierarchy, condition: Callable[[], object]) -> None:
    """Wait, as an engine does that goes on asking: that is what sends probes."""

    def asked() -> object:
        hierarchy.tick()
        return condition()

    wait_until(asked)
