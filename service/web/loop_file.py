"""A file used from an event loop: aiofiles, with a deadline on every call and one clear line for every error."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import aiofiles
from aiofiles.threadpool import wrap
from aiofiles.threadpool.binary import AsyncBufferedIOBase, AsyncBufferedReader

from kvtier.service import private_file
from kvtier.tiers import ConfigError, KVTierError

T = TypeVar("T")

_DEADLINE: Final = 60.0  # seconds that one call may take


class LoopFile:
    """One file used from an event loop. KVTierError for every error; a call past its deadline is abandoned."""

    def __init__(self, file: "AsyncBufferedIOBase | AsyncBufferedReader", path: Path) -> None:
        self.path, self._file = path, file
        self._closed = False

    @classmethod
    async def create(cls, path: Path) -> "LoopFile":
        """Create a file that only its owner can read: it holds users' texts. Raises ConfigError if it exists."""
        pool = ThreadPoolExecutor(1, "kvtier-create")
        made = pool.submit(private_file, path)
        pool.shutdown(wait=False)
        try:
            return cls(wrap(await _in_time(asyncio.wrap_future(made), path)), path)
        except (asyncio.CancelledError, KVTierError):  # its thread may be about to create the file
            made.add_done_callback(partial(_unmake, path))
            raise

    @classmethod
    async def open(cls, path: Path) -> "LoopFile":
        try:
            if not await _in_time(asyncio.to_thread(path.is_file), path):
                raise ConfigError(f"{path}: not a file; name a file that an export wrote")
            return cls(await _in_time(aiofiles.open(path, "rb"), path), path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; choose a file that can be read") from error

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append the pieces; they must not change until this returns. They then survive a kill, but no power cut."""
        await self._do(self._file.writelines(pieces))
        await self._do(self._file.flush())

    async def read_into(self, buffer: memoryview) -> int:
        """Fill the buffer, and return the number of bytes: fewer than it holds only at the file's end."""
        return await self._do(self._file.readinto(buffer)) or 0

    async def sync(self) -> None:
        await self._do(asyncio.to_thread(os.fsync, self._file.fileno()))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._do(self._file.close())

    async def _do(self, call: Awaitable[T]) -> T:
        try:
            return await _in_time(call, self.path)
        except OSError as error:
            raise KVTierError(f"{self.path}: {error.strerror or error}") from error


async def _in_time(call: Awaitable[T], path: Path) -> T:
    try:
        async with asyncio.timeout(_DEADLINE):
            return await call
    except TimeoutError:
        raise KVTierError(f"{path}: the disk has not answered for {_DEADLINE:.0f} s") from None


def _unmake(path: Path, made: "Future[BinaryIO]") -> None:
    """Remove the file, now or once its thread has made it: its caller waits no more."""
    if not made.cancelled() and made.exception() is None:
        made.result().close()
        path.unlink(missing_ok=True)
