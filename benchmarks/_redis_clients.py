"""Other clients of Redis, for a race: redis-py in each of its ways, and LMCache's C++ client in a folder of its own."""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import redis
from redis._parsers import _RESP2Parser

BlockKeys = Sequence[bytes]
SlotBuffers = Sequence[memoryview]

TTL_MS: Final = 86_400_000
LMCACHE: Final = "lmcache==0.5.6"
LMCACHE_CONNECTIONS: Final = (1, 2, 4)
_SECONDS: Final = 60.0  # for a batch of LMCache's


class Client(NamedTuple):
    """One way to move a batch: SET from buffers, GET into buffers, and away with the keys."""

    write: Callable[[BlockKeys, SlotBuffers], None]
    read: Callable[[BlockKeys, SlotBuffers], None]
    close: Callable[[], None]


def redis_py(port: int, *, clustered: bool) -> dict[str, Client]:
    """redis-py's ways, each GET followed by the copy into the buffers: with its C parser if hiredis is installed."""
    kind: Any = redis.RedisCluster if clustered else redis.Redis
    client = kind(host="127.0.0.1", port=port)
    ways = {"pipeline": _pipelined(client), "loop": _looped(client), "MGET, MSET": _together(client, clustered)}
    if not clustered:
        ways["raw connection"] = _bare(client)
        pool = redis.ConnectionPool(host="127.0.0.1", port=port, parser_class=_RESP2Parser, protocol=2)
        ways["pipeline, no hiredis"] = _pipelined(redis.Redis(connection_pool=pool))
    return ways


def _copied(values: Sequence[Any], into: SlotBuffers) -> None:
    for value, target in zip(values, into, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(value, np.uint8))


def _pipelined(client: Any) -> Client:
    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        pipeline = client.pipeline(transaction=False)
        for key, buffer in zip(keys, buffers, strict=True):
            pipeline.set(key, buffer, px=TTL_MS)
        assert all(pipeline.execute())

    def read(keys: BlockKeys, into: SlotBuffers) -> None:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        _copied(pipeline.execute(), into)

    return Client(write, read, client.close)


def _looped(client: Any) -> Client:
    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        for key, buffer in zip(keys, buffers, strict=True):
            assert client.set(key, buffer, px=TTL_MS)

    def read(keys: BlockKeys, into: SlotBuffers) -> None:
        for key, target in zip(keys, into, strict=True):
            _copied([client.get(key)], [target])

    return Client(write, read, client.close)


def _together(client: Any, clustered: bool) -> Client:
    """MSET knows no expiry."""
    mget, mset = (client.mget_nonatomic, client.mset_nonatomic) if clustered else (client.mget, client.mset)

    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        assert mset(dict(zip(keys, buffers, strict=True)))

    return Client(write, lambda keys, into: _copied(mget(keys), into), client.close)


def _bare(client: Any) -> Client:
    """Packed commands and replies of one connection, below the client's own layers."""
    connection = client.connection_pool.get_connection()

    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        sets = [("SET", key, buffer, "PX", TTL_MS) for key, buffer in zip(keys, buffers, strict=True)]
        connection.send_packed_command(connection.pack_commands(sets))
        assert all(connection.read_response() for _ in sets)

    def read(keys: BlockKeys, into: SlotBuffers) -> None:
        connection.send_packed_command(connection.pack_commands([("GET", key) for key in keys]))
        for target in into:
            _copied([connection.read_response()], [target])

    return Client(write, read, connection.disconnect)


def lmcache(folder: Path, port: int, *, install: bool) -> dict[str, Client] | str:
    """LMCache's C++ client with each number of connections, a thread each; or why it is not to be had here.

    Nothing of LMCache's Python, and none of what it depends on, is needed: its extension wants torch's libraries,
    which importing torch brings. It sets no expiry, and verifies nothing.
    """
    try:
        kind = _extension(folder, install=install).LMCacheRedisClient
        return {f"{count} connections": _native(kind("127.0.0.1", port, count)) for count in LMCACHE_CONNECTIONS}
    except (OSError, ImportError, AttributeError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not to be had here: {str(error).strip().splitlines()[-1][:120]}"


def _extension(folder: Path, *, install: bool) -> Any:
    pattern = "lmcache/lmcache_redis.cpython-*.so"
    if install and not any(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), LMCACHE], check=True, timeout=600)
    found = next(folder.glob(pattern), None)
    if found is None:
        raise ImportError(f"no {pattern} in {folder.name}")
    import torch  # noqa: F401  # its libraries, before what is linked to them

    spec = spec_from_file_location("lmcache_redis", found, loader=ExtensionFileLoader("lmcache_redis", str(found)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _native(client: Any) -> Client:
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)

    def move(submit: Callable[[list[str], list[memoryview]], object], keys: BlockKeys, buffers: SlotBuffers) -> None:
        submit([key.decode() for key in keys], list(buffers))
        while not (done := client.drain_completions()):
            if not poll.poll(_SECONDS * 1000):
                raise RuntimeError("LMCache's client kept silent")
            with suppress(BlockingIOError):
                os.read(client.event_fd(), 8)
        assert all(completion[1] for completion in done), done

    return Client(partial(move, client.submit_batch_set), partial(move, client.submit_batch_get), client.close)
