"""Stories of benchmarks/_engine_starter.py, over a program that serves no engine: forks, ends, hangs."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import _engine_starter
import pytest
from _engine_starter import EngineEnded, EngineStarter
from doubles import wait_until

ECHO: Final = """
import os, subprocess, sys, time
from _engine_starter import serve

class Echo:
    def __init__(self, setup):
        self.setup = setup

    def converse(self):
        return {"pid": os.getpid(), **self.setup}

    def fail(self):
        raise ValueError("no such thing")

    def hang(self):
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid, file=sys.stderr, flush=True)
        time.sleep(60)

    def end(self):
        print("it has ended", file=sys.stderr, flush=True)

serve(sys.argv[1:], Echo)
"""


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[EngineStarter]:
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    with (tmp_path / "starter.log").open("wb") as log:
        made = EngineStarter(Path(sys.executable), str(program), log)
    yield made
    made.close()
    assert made.process.returncode == 0


def test_an_engine_that_ends_leaves_its_last_words_and_the_next_one_starts(
    starter: EngineStarter, tmp_path: Path
) -> None:
    with (tmp_path / "engine.log").open("wb") as log:
        engine = starter.start({}, log)
    with pytest.raises(EngineEnded, match="it ended"):
        engine.ask("fail")
    with pytest.raises(EngineEnded):
        engine.ask("converse")
    engine.close()
    assert "ValueError: no such thing" in (tmp_path / "engine.log").read_text()
    assert "it has ended" in (tmp_path / "engine.log").read_text()
    with (tmp_path / "engine.log").open("wb") as log:
        first, second = (starter.start({"number": number}, log) for number in range(2))
    told = [engine.ask("converse") for engine in (first, second)]
    assert [each["number"] for each in told] == [0, 1]
    assert told[0]["pid"] != told[1]["pid"]
    for engine in (first, second):
        engine.close()


def test_an_engine_that_hangs_is_killed_with_what_it_started(
    starter: EngineStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "engine.log").open("wb") as log:
        engine = starter.start({}, log)
    monkeypatch.setattr(_engine_starter, "_ANSWER", 3.0)
    with pytest.raises(EngineEnded, match="did not answer within 3 s"):
        engine.ask("hang")
    engine.close()
    child = int((tmp_path / "engine.log").read_text())
    state = Path(f"/proc/{child}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX")
    with (tmp_path / "engine.log").open("wb") as log:
        engine = starter.start({}, log)
    engine.close()
