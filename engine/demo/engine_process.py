"""The engine's process of a demo: started, called by JSON lines, killed; with a progress bar per question."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvtier.tiers import ConfigError, KVTierError

_REPLY_DEADLINE: Final = 300.0  # seconds without a word; past it the child is killed and the demo fails


class EngineProcess:
    """The engine's process, which exchanges JSON lines with this one. Its stderr is ours."""

    def __init__(self, module: str, home: Path, model: Path | None, progress: Progress) -> None:
        self._progress = progress
        worker = [sys.executable, "-m", module, str(home), *([str(model)] if model else [])]
        # Threads that spin at barriers slow each other down tenfold if another process needs a core.
        arguments = ["env", "OMP_WAIT_POLICY=PASSIVE", *worker]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.opened = self.call("open", {}, "loading the model, opening the tiers")
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, arguments: dict[str, object], title: str, total: int | None = None) -> dict[str, Any]:
        """One request and its reply, with a progress bar of tokens. Raises KVTierError if the child failed."""
        task = self._progress.add_task(title, total=total)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        while line := self._line():
            reply: dict[str, Any] = json.loads(line)
            if "done" in reply:
                self._progress.update(task, completed=reply["done"])
            elif "error" in reply:
                kind = ConfigError if reply["is_usage"] else KVTierError
                raise kind(f"{title.strip()}: {reply['error']}")
            else:
                self._end(task, total)
                return reply
        status = self._process.wait(timeout=10)
        raise KVTierError(f"{title.strip()}: the engine's process ended with status {status}")

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        watchdog = Timer(_REPLY_DEADLINE, self._process.kill)
        watchdog.start()
        try:
            return self._process.stdout.readline()
        finally:
            watchdog.cancel()

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        task = self._progress.add_task("kill -9", total=None)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=10)
        self._end(task, None)

    def _end(self, task: TaskID, total: int | None) -> None:
        self._progress.update(task, total=total or 1, completed=total or 1)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()


def disk() -> str | None:
    """The directory for the slab: the current one if it can be written, since /tmp may be memory."""
    return os.getcwd() if os.access(os.getcwd(), os.W_OK) else None


def progress_of(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn())
    return Progress(*columns, console=console)
