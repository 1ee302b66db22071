"""A real S3 server on a loopback port (moto's), to be stopped and killed; stores and hierarchies over its buckets."""

import hashlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from doubles import BLOCK_SIZE, SLOT_BYTES, payload_of, record_of
from node_rig import free_port
from redis_rig import DIE_WITH_US, ServerProcess
from redis_stories import judged, over_shared, protection

from kvtier.tiers.config.config import Config
from kvtier.tiers.config.sections import ObjectsConfig
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import PortSettings
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.tier import ChainHash, Outcome

_MISSING: Final = [name for name in ("obstore", "moto", "flask", "flask_cors") if find_spec(name) is None]
NO_OBJECTS: Final = f"{_MISSING[0]} is not installed (the extra `dev` brings it)" if _MISSING else None

FINGERPRINT = b"a model of the object stories".ljust(32, b".")
PATIENT = PortSettings(deadline=60.0, failures=2, retry_after=0.02)
BUCKET = "blocks-of-nodes"
_PATIENCE: Final = 60.0  # seconds for the server to start

__all__ = ["protection"]  # of records: the same options as [redis] has


class ObjectServer(ServerProcess):
    """moto's S3."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, wait until it answers, and make the bucket."""
        serve = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*DIE_WITH_US, sys.executable, "-c", serve],
                stdout=log,
                stderr=log,
                env=os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 30)},
            )
        deadline = time.monotonic() + _PATIENCE
        while True:
            with suppress(OSError):
                self.ask("PUT", f"/{BUCKET}")
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"moto did not start: {(self.directory / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """What it answers; OSError if nobody does."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 400, (method, path, answer.status, content)
        return content

    def keys(self, prefix: str = "", bucket: str = BUCKET) -> list[str]:
        """Every object's key."""
        return sorted(each["path"] for page in self._client(bucket).list(prefix) for each in page)

    def content(self, key: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._client(), key).bytes())

    def put(self, key: str, content: bytes) -> None:
        import obstore

        obstore.put(self._client(), key, content)

    def delete(self, *keys: str) -> None:
        import obstore

        obstore.delete(self._client(), list(keys))

    def empty(self) -> None:
        """As a lifecycle rule does in the end."""
        if keys := self.keys():
            self.delete(*keys)

    def _client(self, bucket: str = BUCKET) -> Any:
        from obstore.store import S3Store

        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id="rig",
            secret_access_key="rig",
            region="us-east-1",
            client_options={"allow_http": True},
        )


@contextmanager
def object_server(directory: Path, *, starts: bool = True) -> Iterator[ObjectServer]:
    server = ObjectServer(directory)
    try:
        if starts:
            server.start()
        yield server
    finally:
        server.kill()


def options(endpoint: str, **more: object) -> ObjectsConfig:
    """A configuration of the tier whose patience no busy machine outlasts."""
    login = {"access_key_id": "a node", "secret_access_key": "a secret of the node"}
    patience = {"connect_timeout": "20s", "deadline": "20s"}
    return Config.load(objects={"bucket": BUCKET, "endpoint": endpoint, **login, **patience, **more}).objects


def open_store(endpoint: str, fingerprint: bytes = FINGERPRINT, **more: Any) -> ObjectStore:
    return ObjectStore.open(options(endpoint, **more), fingerprint, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE)


@contextmanager
def opened(endpoint: str, fingerprint: bytes = FINGERPRINT, **more: Any) -> Iterator[ObjectStore]:
    """The tier, its laws checked at the end."""
    store = open_store(endpoint, fingerprint, **more)
    try:
        yield store
        store.check()
    finally:
        store.close()


def over_objects(endpoint: str, patience: PortSettings = PATIENT, slots: int = 64, **more: Any) -> Hierarchy:
    """A hierarchy over the tier."""
    return over_shared("objects", lambda: open_store(endpoint, **more), patience, slots)


def write(store: ObjectStore, chain: TokenChain, first: int = 0, last: int | None = None) -> list[Outcome]:
    """Store consecutive blocks of a chain, in one batch."""
    places = range(len(chain.hashes))[first:last]
    payloads = [memoryview(bytearray(payload_of(chain.hashes[i]))) for i in places]
    return list(store.write([record_of(chain, i) for i in places], payloads))


def written(store: ObjectStore, chain: TokenChain, first: int = 0, last: int | None = None) -> None:
    assert set(write(store, chain, first, last)) == {Outcome.OK}


def read(store: ObjectStore, chain: TokenChain, hashes: Sequence[ChainHash] | None = None) -> list[Outcome]:
    """Read a chain. What comes as read must be the record and the bytes of its key (I1)."""
    hashes = chain.hashes if hashes is None else hashes
    buffers = np.zeros((len(hashes), SLOT_BYTES), np.uint8)
    results = store.read(hashes, [memoryview(buffer) for buffer in buffers])
    return [
        judged(chain, chain.hashes.index(name), result, buffers[i].tobytes())
        for i, (name, result) in enumerate(zip(hashes, results, strict=True))
    ]


def object_of(store: ObjectStore, chain_hash: ChainHash) -> str:
    """The key of the object that begins with a block."""
    epoch = store._epoch.value
    assert epoch is not None
    return store.space.key(store.space.names([chain_hash])[0], epoch)


def requests(store: ObjectStore, work: Callable[[], object]) -> dict[str, int]:
    """What `work` asked of the bucket: requests by kind."""
    before = store.stats()
    work()
    after = store.stats()
    kinds = {name for name in after if name.startswith("requests_")}
    counted = {kind.removeprefix("requests_"): after[kind] - before.get(kind, 0) for kind in sorted(kinds)}
    return {kind: count for kind, count in counted.items() if count}


def flipped(content: bytes, position: int) -> bytes:
    """With one bit another."""
    changed = bytearray(content)
    changed[position] ^= 1 << hashlib.sha256(str(position).encode()).digest()[0] % 8
    return bytes(changed)
