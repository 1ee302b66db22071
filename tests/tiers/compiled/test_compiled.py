"""Compiled twins: built once and whole, never stale, never somebody else's; else the Python way, and a reason."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_rig import kvtier

from kvtier.service.doctor.doctor import check_twins
from kvtier.tiers.compiled import building, twins
from kvtier.tiers.compiled.building import build
from kvtier.tiers.compiled.twins import SEAL_BYTES, TwinStatus, file_of, source_of, status, twin
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, KVTierError
from kvtier.tiers.finding import Status

NAME = "kvtier.tiers.pool.number_compiled"
CAN_BUILD = shutil.which("cc") and find_spec("Cython") and Path(sysconfig.get_path("include"), "Python.h").exists()
builds = pytest.mark.skipif(not CAN_BUILD, reason="no Cython, C compiler or headers of Python here")


class Tree:
    """Sources of our own, and where they are built."""

    def __init__(self, place: Path) -> None:
        self.cache = place / "cache"
        self.root = place / "kvtier"

    def write(self, number: int, name: str = NAME) -> None:
        source = source_of(name)
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"def number():\n    return {number}\n")

    def put(self, content: bytes) -> None:
        """As it is built, without the time."""
        for folder in (self.cache, self.file.parent):
            folder.mkdir(mode=0o755, exist_ok=True)
            folder.chmod(0o755)
        self.file.unlink(missing_ok=True)
        self.file.write_bytes(content)
        self.file.chmod(0o755)

    @property
    def file(self) -> Path:
        return file_of(NAME, self.cache)


def planted(made: Tree, patches: pytest.MonkeyPatch) -> Tree:
    patches.setattr(twins, "_ROOT", made.root)
    patches.setattr(twins, "_BOTH", ())
    patches.setattr(twins, "_loaded", {})
    patches.setattr("kvtier.tiers.compiled.building.C_FLAGS", ("-O0", *twins.C_FLAGS[1:]))  # a third of the time
    patches.setenv("KVTIER_COMPILED", str(made.cache))
    return made


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return planted(Tree(tmp_path), monkeypatch)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file as it is built, of the source for 1: once for all processes of the suite."""
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    with pytest.MonkeyPatch.context() as patches:
        made = planted(Tree(tmp_path_factory.mktemp("one")), patches)
        made.cache = place / "one-twin"
        patches.setenv("KVTIER_COMPILED", str(made.cache))
        made.write(1)
        build()
        return made.file.read_bytes()


def number() -> int | None:
    module = twin(NAME)
    return None if module is None else module.number()


def state() -> TwinStatus:
    (found,) = status()
    return found


def refused(tree: Tree, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """No twin, with one logged reason that says so."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert [number(), number()] == [None, None]
    (line,) = caplog.messages
    for word in words:
        assert word in line
    assert state().state == "broken"


@builds
def test_a_twin_is_found_once_it_was_built_and_never_stale(tree: Tree, one: bytes) -> None:
    tree.write(1)
    assert number() is None
    assert state() == TwinStatus(NAME, "not built", "`kvtier compile` builds it")
    before = tree.file
    tree.put(one)
    assert number() == 1  # in the process that had asked before
    tree.write(2)
    assert tree.file != before
    assert number() is None  # the old one is not taken for it
    tree.write(1)
    assert number() == 1  # what was built of it is still there


@builds
@pytest.mark.exhaustive  # each build takes seconds: `make compiled` and `one` show one
def test_what_is_torn_is_built_anew_and_another_source_beside_it(tree: Tree) -> None:
    tree.write(1)
    before = tree.file
    tree.put(b"torn")
    build()
    assert number() == 1
    tree.write(2)
    lines: list[str] = []
    assert build(lines.append) == [tree.file]
    assert number() == 2
    build(lines.append)
    assert [line.partition(" in ")[0] for line in lines] == [f"{NAME}: built", f"{NAME}: built already"]
    folders = {"lock", before.parent.name, tree.file.parent.name}
    assert {path.name for path in tree.cache.iterdir()} == folders


@builds
def test_what_cannot_be_trusted_is_not_loaded(tree: Tree, one: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def torn(file: Path) -> None:
        file.write_bytes(one[:-100])

    def flipped(file: Path) -> None:
        file.write_bytes(one[:5000] + bytes([one[5000] ^ 1]) + one[5001:])

    def empty(file: Path) -> None:
        file.write_bytes(b"")

    spoilt: list[tuple[Callable[[Path], None], str]] = [
        (lambda file: file.chmod(0o777), "other users may write it"),
        (lambda file: file.parent.chmod(0o777), "other users may write it"),
        (empty, "checksum"), (flipped, "checksum"), (torn, "checksum"),
    ]  # fmt: skip
    tree.write(1)
    for spoil, word in spoilt:
        tree.put(one)
        spoil(tree.file)
        refused(tree, caplog, NAME, word)
        twins._loaded.clear()  # a process that starts now


@builds
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_or_folder_is_not_trusted(tree: Tree, one: bytes, caplog: pytest.LogCaptureFixture) -> None:
    tree.write(3)
    tree.put(one)
    for path in (tree.file, tree.file.parent, tree.cache):
        os.chown(path, 12345, -1)
        refused(tree, caplog, "belongs to user 12345")
        os.chown(path, 0, -1)
        twins._loaded.clear()
    assert number() == 1


@builds
@pytest.mark.exhaustive
def test_an_extension_that_does_not_start_is_one_reason(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    source_of(NAME).parent.mkdir(parents=True)
    source_of(NAME).write_text("raise RuntimeError('not on this machine')\n")
    build()
    refused(tree, caplog, "RuntimeError: not on this machine")
    found = check_twins()
    assert (found.status, found.fix) == (Status.WARNING, "`kvtier compile`")
    assert "not on this machine" in found.found


def test_what_is_no_extension_is_one_reason(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    tree.write(4)
    content = b"no machine code"
    tree.put(content + hashlib.sha256(content).digest())
    assert len(tree.file.read_bytes()) == len(content) + SEAL_BYTES
    refused(tree, caplog, "ImportError")


def test_off_is_the_python_way(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.write(5)
    monkeypatch.setenv("KVTIER_COMPILED", "off")
    assert number() is None
    assert state() == TwinStatus(NAME, "off", "KVTIER_COMPILED is off")
    assert check_twins().found == "0 of 1 twins in use; KVTIER_COMPILED is off"
    with pytest.raises(ConfigError, match="turned off; unset it"):
        build()
    Config.load()  # the variable is known, though no option


def test_a_folder_that_is_no_path_is_told_with_the_fix(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree.write(6)
    monkeypatch.setenv("KVTIER_COMPILED", "here")
    refused(tree, caplog, 'KVTIER_COMPILED "here": not an absolute path; write one, or "off"')
    with pytest.raises(ConfigError, match="not an absolute path"):
        build()


def test_a_folder_that_cannot_be_looked_into_is_one_reason(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where HOME is another user's: an image's root, in a container that runs as somebody else."""
    tree.write(1)
    look = Path.stat

    def closed(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == tree.file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patches:
        patches.setattr(Path, "stat", closed)
        refused(tree, caplog, str(tree.file), "Permission denied")
    monkeypatch.setenv("KVTIER_COMPILED", "/" + 300 * "a")
    refused(tree, caplog, "File name too long")


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have(tree: Tree) -> None:
    tree.write(1)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with twins._lock[0]:
            held.set()
            done.wait(100)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(100)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(twin(NAME) is not None)
    done.set()
    thread.join(100)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_source_nothing_is_loaded(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    assert twin(NAME) is None
    assert "No such file" in caplog.text
    assert status() == []


def test_the_cache_directory_is_the_users(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_COMPILED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert twins.folder() == tmp_path / "kvtier" / "compiled"


def test_what_is_missing_is_named_with_the_fix(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree.write(7)
    with monkeypatch.context() as without:
        without.setattr(building, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"no Cython here; `pip install "):
            build()
    monkeypatch.setattr(building, "find_spec", lambda name: True)
    with monkeypatch.context() as without:
        without.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        without.setattr("sysconfig.get_path", lambda name: str(tree.root))
        with pytest.raises(ConfigError, match=r"Python.h is not there; .*-dev"):
            build()
    monkeypatch.setenv("PATH", str(tree.root))
    with pytest.raises(ConfigError, match="no C compiler here; install one"):
        build()
    tree.cache.joinpath("lock").unlink()
    tree.cache.rmdir()
    tree.cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"File exists; name a folder that can be written by KVTIER_COMPILED"):
        build()


def test_the_verb_ends_with_2_where_there_is_no_compiler(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.write(1)
    monkeypatch.setenv("PATH", str(tree.root))
    done = kvtier("compile")
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: compile: no C")


@builds
@pytest.mark.exhaustive
def test_a_source_that_does_not_compile_says_where(tree: Tree) -> None:
    source_of(NAME).parent.mkdir(parents=True)
    source_of(NAME).write_text("def number(:\n")
    with pytest.raises(KVTierError, match=r"(?s)ended with 1.*number_compiled.pyx:1:"):
        build()
    assert not list(tree.cache.rglob("*.so"))


@builds
@pytest.mark.exhaustive
def test_two_that_build_at_once_build_it_once(tree: Tree) -> None:
    tree.write(8)
    lines: list[str] = []
    threads = [threading.Thread(target=build, args=(lines.append,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(line.partition(" in ")[0] for line in lines if "waiting" not in line) == [
        f"{NAME}: built", f"{NAME}: built already"
    ]  # fmt: skip
    assert number() == 8


def test_the_verb_fails_where_what_is_built_does_not_load(tree: Tree) -> None:
    """As in a home that nothing may be run from: to build it once more would change nothing."""
    tree.write(4)
    content = b"no machine code"
    tree.put(content + hashlib.sha256(content).digest())
    done = kvtier("compile", "--json")
    assert done.returncode == 1
    assert [each["state"] for each in json.loads(done.stdout)] == ["broken"]
    assert "1 of 1 twins were built and do not load" in done.stderr
    assert "name another one by KVTIER_COMPILED" in done.stderr


@builds
def test_the_verb_shows_what_is_in_use(tree: Tree, one: bytes) -> None:
    tree.write(1)
    tree.put(one)
    done = kvtier("compile", "--json")
    assert json.loads(done.stdout) == [{"name": NAME, "state": "loaded", "reason": ""}]
    assert done.stderr == f"{NAME}: built already\n"
    assert check_twins().found == "1 of 1 twins in use"


def test_a_lock_that_stays_has_a_deadline(tree: Tree) -> None:
    tree.write(9)
    tree.cache.mkdir()
    lines: list[str] = []
    with (tree.cache / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(KVTierError, match=r"another process has built in .* for 0.2 s"):
            build(lines.append, wait=0.2)
    assert lines == ["another process builds; waiting for it"]


def test_loading_imports_neither_cython_nor_pydantic() -> None:
    program = "import sys; from kvtier.tiers.compiled import twin; twin('kvtier.tiers.pool.none_compiled')\n"
    told = "print([name for name in ('Cython', 'pydantic', 'numpy', 'sysconfig', 'subprocess') if name in sys.modules])"
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", program + told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, env=unmeasured)
    assert done.stdout.strip() == "[]"
