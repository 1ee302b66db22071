"""Exports, imports and traces that operators start: each a task of its own, its progress told line by line."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from threading import Event
from typing import Any, Final

from kvtier.service.admin_bodies import ExportBody, ImportBody, TraceBody
from kvtier.service.archive import Progress, export_blocks, import_blocks
from kvtier.service.daemon import Daemon
from kvtier.service.lookup_trace import TraceRecorder
from kvtier.service.namespaces import Guest, Namespace
from kvtier.service.visits import leave, name_of, visit
from kvtier.tiers.errors import ConfigError, FingerprintMismatch, FormatError, KVTierError, TierUnavailable

Json = dict[str, Any]
Steps = AsyncGenerator[Json, None]

PERIOD: Final = 0.25  # seconds between lines
_PATIENCE: Final = 15.0  # seconds for the tiers that nodes share to say what they hold


class Transfers:
    """What is under way: one export or import at a time, and one trace of each model. On the HTTP loop alone."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._is_copying = False

    async def export(self, body: ExportBody) -> Steps:
        """See `archive.export_blocks`."""
        async with self._copying(), self._visiting(body.model) as namespace:
            names = None
            if (chosen := body.chosen) is not None:
                names, _ = await asyncio.to_thread(chosen.names, namespace, _PATIENCE)
            size = namespace.blocks.block_size
            steps = export_blocks(namespace.hierarchy, namespace.fingerprint, size, body.file, names, force=body.force)
            async with aclosing(steps):
                async for progress in steps:
                    yield _shown(namespace, progress)

    async def import_(self, body: ImportBody) -> Steps:
        """See `archive.import_blocks`."""
        async with self._copying(), self._visiting(body.model) as namespace:
            steps = import_blocks(namespace.hierarchy, namespace.fingerprint, namespace.blocks.block_size, body.file)
            try:
                async with aclosing(steps):
                    async for progress in steps:
                        yield _shown(namespace, progress)
            finally:
                await asyncio.to_thread(namespace.tiers.quotas.recount)

    async def trace(self, body: TraceBody) -> Steps:
        """See `lookup_trace.TraceRecorder`."""
        async with self._visiting(body.model) as namespace:
            tiers = namespace.tiers
            if tiers.recorder is not None:
                raise TierUnavailable("a trace of this model is being recorded already; wait for its end")
            recorder = tiers.recorder = await TraceRecorder.start(body.file)
            until = time.monotonic() + (body.duration or float("inf"))
            try:
                while time.monotonic() < until:
                    yield _counts(namespace, recorder)
                    await asyncio.sleep(min(PERIOD, max(0.0, until - time.monotonic())))
            finally:
                tiers.recorder = None
                await recorder.stop()
            yield _counts(namespace, recorder)

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
    async def _visiting(self, model: str | None) -> AsyncIterator[Namespace]:
        guest = Guest()
        namespace = await asyncio.to_thread(visit, self._daemon, model, guest)
        try:
            yield namespace
        finally:
            leave(self._daemon, namespace, guest)


class Told:
    """A transfer under way, as lines of JSON: progress, then `{"done": true, …}` or `{"error": "…"}`.

    It has a task of its own, so that it can put things in order whatever becomes of who reads the lines; it is called
    off when nobody does, and when `stopping` is set.
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
            is_mistake = isinstance(
                error, ConfigError | FormatError | FingerprintMismatch
            )  # 400, had it been told at once
            return {**self._latest, "error": str(error) or "the daemon is stopping", "mistake": is_mistake}
        return {**self._latest, "done": True}


def _shown(namespace: Namespace, progress: Progress) -> Json:
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
