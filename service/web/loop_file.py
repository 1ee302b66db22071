"""A file for an event loop: aiofiles, a deadline on every call, and one clear line for every failure."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import aiofiles
from aiofiles.threadpool.binary import AsyncBufferedIOBase, AsyncBufferedReader

from kvtier.tiers.errors import ConfigError, KVTierError

T = TypeVar("T")

_DEADLINE: Final = 60.0  # seconds one call may take


class LoopFile:
    """One file, read or written from an event loop. KVTierError for whatever the file system refuses.

    A call that does not end in time is given up; its thread ends when the disk answers.
    """

    def __init__(self, file: "AsyncBufferedIOBase | AsyncBufferedReader", path: Path) -> None:
        """Use `create` or `open`."""
        self.path = path
        self._file = file
        self._closed = False

    @classmethod
    async def create(cls, path: Path) -> "LoopFile":
        """A new file that its owner alone can read: it holds what users said. ConfigError where there is one."""
        try:
            return cls(await _in_time(aiofiles.open(path, "xb", opener=_private), path), path)
        except FileExistsError:
            raise ConfigError(f"{path}: exists already; remove it or choose another name") from None
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{str(path)!r}: {reason}; choose a file that can be written") from error

    @classmethod
    async def open(cls, path: Path) -> "LoopFile":
        """An existing regular file, to be read. ConfigError where it is not one."""
        try:
            if not await _in_time(asyncio.to_thread(path.is_file), path):
                raise ConfigError(f"{path}: not a file; name one that an export wrote")
            return cls(await _in_time(aiofiles.open(path, "rb"), path), path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; choose a file that can be read") from error

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append the pieces, whose bytes must not change before this returns. It outlives a kill then, no power cut."""
        await self._do(self._file.writelines(pieces))
        await self._do(self._file.flush())

    async def read_into(self, buffer: memoryview) -> int:
        """Fill the buffer; fewer bytes than it holds only at the file's end."""
        return await self._do(self._file.readinto(buffer)) or 0

    async def sync(self) -> None:
        """Wait until all of it is on the disk."""
        await self._do(asyncio.to_thread(os.fsync, self._file.fileno()))

    async def close(self) -> None:
        """Close it. Idempotent."""
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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
