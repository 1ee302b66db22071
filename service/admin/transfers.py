"""Exports, imports and traces that operators start: each a task of its own, its progress told line by line."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from threading import Event
from typing import Final

from kvtier.service import Json
from kvtier.service.admin.bodies import ExportBody, ImportBody, TraceBody
from kvtier.service.archive import ArchiveProgress, export_blocks, import_blocks
from kvtier.service.node import Daemon, Namespace, OperatorHold, TraceRecorder, hold_open, name_of, release_hold
from kvtier.tiers import ConfigError, FingerprintMismatch, FormatError, KVTierError, TierUnavailable, load_key

Steps = AsyncGenerator[Json, None]

PERIOD: Final = 0.25  # seconds between lines
_PATIENCE: Final = 15.0  # seconds for the tiers that nodes share to say what they hold


class Transfers:
    """What is under way: one export or import at a time, and one trace of each model. On the HTTP loop alone."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._is_copying = False

    async def export(self, body: ExportBody) -> Steps:
        async with self._copying(), self._held_open(body.model) as namespace:
            names = None
            if (selection := body.selection) is not None:
                names, _ = await asyncio.to_thread(selection.names, namespace, _PATIENCE)
            what = namespace.hierarchy, namespace.fingerprint, namespace.blocks.block_size
            file = await self._archive(body.file)
            steps = export_blocks(*what, file, names, force=body.force, key=await self._key())
            async with aclosing(steps):
                async for progress in steps:
                    yield _shown(namespace, progress)

    async def import_(self, body: ImportBody) -> Steps:
        async with self._copying(), self._held_open(body.model) as namespace:
            what = namespace.hierarchy, namespace.fingerprint, namespace.blocks.block_size
            file = await self._archive(body.file)
            steps = import_blocks(*what, file, await self._key(), unsealed=body.unsealed)
            try:
                async with aclosing(steps):
                    async for progress in steps:
                        yield _shown(namespace, progress)
            finally:
                await asyncio.to_thread(namespace.tiers.quotas.recount)

    async def trace(self, body: TraceBody) -> Steps:
        async with self._held_open(body.model) as namespace:
            tiers = namespace.tiers
            if tiers.recorder is not None:
                raise TierUnavailable("a trace of this model is being recorded already; wait for its end")
            recorder = tiers.recorder = await TraceRecorder.start(await self._archive(body.file))
            until = time.monotonic() + (body.duration or float("inf"))
            try:
                while time.monotonic() < until:
                    yield _counts(namespace, recorder)
                    await asyncio.sleep(min(PERIOD, max(0.0, until - time.monotonic())))
            finally:
                tiers.recorder = None
                await recorder.stop()
            yield _counts(namespace, recorder)

    async def _archive(self, file: Path) -> Path:
        """Where a file of this name lies: below one directory, so that nobody has the daemon write anywhere else."""
        service, slabs = self._daemon.config.service, self._daemon.config.file.path
        root = service.archives or (slabs and slabs / "archives")
        if root is None:
            raise ConfigError(
                "[service] archives none: there is no [file] path either; name a directory for such files"
            )
        return await asyncio.to_thread(_below, root, file)

    async def _key(self) -> bytes | None:
        path = self._daemon.config.file.key_file
        return await asyncio.to_thread(load_key, path, "[file] key_file") if path is not None else None

    @asynccontextmanager
    async def _copying(self) -> AsyncIterator[None]:
        if self._is_copying:
            raise TierUnavailable("an export or import is under way already; wait for its end")
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    @asynccontextmanager
    async def _held_open(self, model: str | None) -> AsyncIterator[Namespace]:
        hold = OperatorHold()
        namespace = await asyncio.to_thread(hold_open, self._daemon, model, hold)
        try:
            yield namespace
        finally:
            release_hold(self._daemon, namespace, hold)


class RunningTransfer:
    """A transfer under way, as lines of JSON: progress, then `{"done": true, …}` or `{"error": "…"}`.

    It has a task of its own, so that it can put things in order whatever becomes of its reader; it is cancelled
    when nobody reads, and when `stopping` is set.
    """

    def __init__(self, steps: Steps, stopping: Event) -> None:
        self._latest: Json = {}
        self._stopping = stopping
        self._task = asyncio.create_task(self._run(steps))

    async def begun(self) -> None:
        """Wait a moment for what is refused at once: raises that."""
        await asyncio.wait({self._task}, timeout=PERIOD)
        if self._task.done():
            self._task.result()

    async def lines(self) -> AsyncIterator[bytes]:
        """One every quarter of a second, and the last one."""
        try:
            while not self._task.done():
                yield _line(self._latest)
                await asyncio.wait({self._task}, timeout=PERIOD)
                if self._stopping.is_set():
                    self._task.cancel()
            yield _line(self._ending())
        finally:
            self._task.cancel()

    async def _run(self, steps: Steps) -> None:
        async with aclosing(steps):
            async for self._latest in steps:
                pass

    def _ending(self) -> Json:
        try:
            self._task.result()
        except (KVTierError, asyncio.CancelledError) as error:
            # status 400, had it been told at once
            is_mistake = isinstance(error, ConfigError | FormatError | FingerprintMismatch)
            return {**self._latest, "error": str(error) or "the daemon is stopping", "mistake": is_mistake}
        return {**self._latest, "done": True}


def _below(root: Path, file: Path) -> Path:
    """The file below this directory, which is made. ConfigError if it would lie elsewhere, by links as well."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = (root / file).parent.resolve()
        if folder.is_relative_to(root.resolve()) and file.name not in ("", ".."):
            return folder / file.name
    except (OSError, RuntimeError) as error:
        raise ConfigError(f'[service] archives "{root}": {error}; name a directory that the daemon can use') from None
    raise ConfigError(f'file "{file}": not below [service] archives "{root}"; choose a name there, or set that')


def _shown(namespace: Namespace, progress: ArchiveProgress) -> Json:
    return {
        "model": name_of(namespace.fingerprint),
        "blocks": progress.num_blocks,
        "planned": progress.num_planned,
        "bytes": progress.num_bytes,
        "lost": dict(progress.lost),
    }


def _counts(namespace: Namespace, recorder: TraceRecorder) -> Json:
    counts = recorder.counts()
    return {
        "model": name_of(namespace.fingerprint),
        "recorded": counts.num_recorded,
        "dropped": counts.num_dropped,
        "bytes": counts.num_bytes,
    }


def _line(value: Json) -> bytes:
    return json.dumps(value).encode() + b"\n"
