"""Builds compiled twins by Cython and this machine's C compiler; several processes may do so at once."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvtier.tiers import ConfigError, KVTierError, install_command
from kvtier.tiers.compiled.twins import C_FLAGS, CYTHON_FLAGS, file_of, folder, names, source_of, why_not
from kvtier.tiers.config import COMPILED

_STEP_SECONDS: Final = 900.0  # for Cython, or the compiler, with one twin
_LOCK_SECONDS: Final = 1800.0  # for another process that builds
_LOOK_AGAIN: Final = 0.1  # seconds between looks at its lock
_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


def build(progress: Callable[[str], object] = lambda line: None, wait: float = _LOCK_SECONDS) -> list[Path]:
    """Build every twin that is not there, and return the files of all. `progress` gets a line for each.

    `wait`: seconds for another process that builds. ConfigError where Cython, a C compiler or a folder is missing, or
    twins are turned off; KVTierError where a source does not compile.
    """
    home = folder()
    if home is None:
        raise ConfigError(f'{COMPILED} "off": twins are turned off; unset it to build them')
    files = {name: file_of(name, home) for name in names()}
    with _alone(home, progress, wait):
        missing = [name for name, file in files.items() if why_not(file)]
        compiler = _tools() if missing else ""
        for name in missing:
            start = time.monotonic()
            _build_one(name, files[name], compiler)
            progress(f"{name}: built in {time.monotonic() - start:.1f} s")
    for name in files.keys() - set(missing):
        progress(f"{name}: built already")
    return list(files.values())


def _tools() -> str:
    """The C compiler's path, if all that building needs is there."""
    if find_spec("Cython") is None:
        raise ConfigError(f"compile: no Cython here; `{install_command('compiled')}`")
    configured = str(sysconfig.get_config_var("CC") or "cc").split()[0]
    found = next(filter(None, map(shutil.which, (configured, "cc", "gcc", "clang"))), None)
    if found is None:
        raise ConfigError("compile: no C compiler here; install one, on Debian by `apt-get install gcc libc6-dev`")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        fix = f"install Python's headers, on Debian by `apt-get install python{_PYTHON}-dev`"
        raise ConfigError(f"compile: {header} is not there; {fix}")
    return found


def _build_one(name: str, file: Path, compiler: str) -> None:
    """Under another name first: nobody finds half a file."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=file.parents[1]) as place:
        source = Path(place, f"{name.rpartition('.')[2]}.pyx")
        shutil.copyfile(source_of(name), source)
        written, linked = source.with_suffix(".c"), source.with_suffix(".so")
        cython = (sys.executable, "-m", "cython", *CYTHON_FLAGS, "--module-name", name)
        _run(name, (*cython, source.name, "-o", written.name), place)
        include = f"-I{sysconfig.get_path('include')}"
        _run(name, (compiler, *C_FLAGS, include, written.name, "-o", linked.name), place)
        content = linked.read_bytes()
        sealed = source.with_suffix(".sealed")
        with sealed.open("wb") as out:
            out.write(content + hashlib.sha256(content).digest())
            out.flush()
            os.fsync(out.fileno())
        sealed.chmod(0o755)
        try:
            if os.path.lexists(file.parent) and why_not(file):
                _clear(file.parent)
            file.parent.mkdir(mode=0o755, exist_ok=True)
            sealed.replace(file)
        except OSError as error:
            raise KVTierError(f"compile {name}: {error.filename}: {error.strerror}; remove it") from None
    if reason := why_not(file):
        raise KVTierError(f"compile {name}: {reason}")


def _clear(place: Path) -> None:
    """A folder that cannot be trusted goes before what is built anew is put there."""
    if place.is_symlink():
        place.unlink()
    else:
        shutil.rmtree(place)


def _run(name: str, command: Sequence[str], place: str) -> None:
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=_STEP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise KVTierError(f"compile {name}: {command[0]} took longer than {_STEP_SECONDS:.0f} s") from None
    except OSError as error:
        raise KVTierError(f"compile {name}: {command[0]}: {error.strerror}") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise KVTierError("\n".join((f"compile {name}: {Path(command[0]).name} ended with {done.returncode}", *last)))


@contextmanager
def _alone(home: Path, progress: Callable[[str], object], wait: float) -> Iterator[None]:
    """No other process builds here meanwhile."""
    try:
        home.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        fix = f"name a folder that can be written by {COMPILED}"
        raise ConfigError(f"compile: {home}: {error.strerror}; {fix}") from None
    try:
        deadline, told = time.monotonic() + wait, False
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise KVTierError(f"compile: another process has built in {home} for {wait:g} s; see what it waits for")
            if not told:
                progress("another process builds; waiting for it")
            told = True
            time.sleep(_LOOK_AGAIN)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
