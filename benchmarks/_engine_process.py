"""The benchmark's end of an engine in a process of its own: JSON commands go in, a line of JSON comes back for each."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent


class EngineEnded(RuntimeError):
    """The engine's process ended without an answer."""


class EngineArmProcess:
    """A program of this folder that serves an engine, run by the engine's Python; ready once this is made.

    Raises EngineEnded.
    """

    def __init__(self, python: Path, program: str, arguments: Sequence[str]) -> None:
        paths = [ROOT, ROOT / "tests" / "interop", ROOT / "benchmarks"]
        self.process = subprocess.Popen(
            [str(python), str(ROOT / "benchmarks" / program), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._reply() != {"ready": True}:
            raise EngineEnded("an engine did not say that it is ready")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have it `do` something, and wait for the answer. Raises EngineEnded."""
        assert self.process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineEnded("an engine ended before it was asked") from None
        return self._reply()

    def close(self) -> None:
        """Let it end, and kill it if it takes longer than a minute. Idempotent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineEnded("an engine ended; run `make test-vllm` first: it shows what is wrong")
        reply: dict[str, Any] = json.loads(line)
        return reply
