"""Finds and loads compiled twins: what `kvtier compile` built of exactly the source that stands here, or nothing.

A twin does what the Python file beside it does, faster. Its file lies in a folder named by a digest of its source and
of all else that it depends on, so that nothing stale is ever loaded. It ends in its own checksum.
"""

import hashlib
import logging
import os
import stat
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Final, Literal

from kvtier.tiers import ConfigError
from kvtier.tiers.config import COMPILED, cache_directory, compiled_setting

logger = logging.getLogger(__name__)

TwinState = Literal["loaded", "off", "not built", "broken"]

CYTHON_FLAGS: Final = ("-3",)
C_FLAGS: Final = ("-O2", "-g0", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing", "-w")
SEAL_BYTES: Final = hashlib.sha256().digest_size  # after the extension's own bytes: the SHA-256 of these
_ROOT: Final = Path(__file__).absolute().parents[2]  # of the package kvtier
_PACKAGES: Final = ("tiers", "connector", "engine", "service")
_SUFFIX: Final = "_compiled.pyx"
_BOTH: Final = ("kvtier.tiers.pool.core_compiled",)  # built of the Python file itself, in Cython's pure Python mode
_FOR_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class TwinStatus:
    """How one twin stands in this process, and why it is not in use if it is not."""

    name: str  # of its module, as in kvtier.tiers.pool.few_compiled
    state: TwinState
    reason: str = ""


_lock: Final = [RLock()]  # a child gets a new one: whoever held it when the process forked is not in the child
_loaded: Final[dict[Path, ModuleType | TwinStatus]] = {}  # by the file; what failed is not tried again
os.register_at_fork(after_in_child=lambda: _lock.__setitem__(0, RLock()))


def twin(name: str) -> ModuleType | None:
    """The twin of this name, as in "kvtier.tiers.pool.few_compiled"; None: take the Python way.

    It raises nothing: what is wrong with a twin that was built is logged, once, and `status` tells it.
    """
    found = _load(name)
    return found if isinstance(found, ModuleType) else None


def status() -> list[TwinStatus]:
    """How every twin stands in this process."""
    found = {name: _load(name) for name in names()}
    return [each if isinstance(each, TwinStatus) else TwinStatus(name, "loaded") for name, each in found.items()]


def names() -> list[str]:
    """Every twin's name: of the sources that lie beside their Python files."""
    sources = (
        Path(folder, file)
        for package in _PACKAGES
        for folder, _, files in os.walk(_ROOT / package)  # `Path.rglob` follows no link
        for file in files
        if file.endswith(_SUFFIX)
    )
    twins = (".".join(("kvtier", *source.relative_to(_ROOT).with_suffix("").parts)) for source in sources)
    return sorted((*twins, *_BOTH))


def source_of(name: str) -> Path:
    """The file that a twin is built of."""
    if name in _BOTH:
        name, suffix = name.removesuffix("_compiled"), ".py"
    else:
        suffix = ".pyx"
    return _ROOT.joinpath(*name.split(".")[1:]).with_suffix(suffix)


def folder() -> Path | None:
    """Where twins are built and looked for; None: they are turned off.

    ConfigError where `KVTIER_COMPILED` is neither "off" nor an absolute path.
    """
    setting = compiled_setting()
    if setting == "off":
        return None
    if setting and not os.path.isabs(setting):
        raise ConfigError(f'{COMPILED} "{setting}": not an absolute path; write one, or "off"')
    return Path(setting) if setting else cache_directory() / "compiled"


def file_of(name: str, home: Path) -> Path:
    """Where a twin of exactly this source, for this Python and this machine, lies."""
    suffix = EXTENSION_SUFFIXES[0]  # it names the interpreter's binary interface
    parts = (name, *CYTHON_FLAGS, *C_FLAGS, suffix, sys.platform, os.uname().machine)
    digest = hashlib.sha256("\0".join(parts).encode() + b"\0" + source_of(name).read_bytes()).hexdigest()
    return home / digest[:32] / f"{name.rpartition('.')[2]}{suffix}"


def why_not(file: Path) -> str:
    """Why a built file may not be loaded: it, or a folder of it, is somebody else's, or it is not whole. Or empty."""
    for path in (file.parents[1], file.parent, file):
        try:
            found = path.stat() if path == file.parents[1] else path.lstat()  # a cache may be a link to another disk
        except OSError as error:
            return f"{path}: {error.strerror}"
        if found.st_uid not in (0, os.geteuid()):
            return f"{path}: belongs to user {found.st_uid}, not to {os.geteuid()}"
        if found.st_mode & _FOR_OTHERS:
            return f"{path}: other users may write it; `chmod go-w` it"
    try:
        content = file.read_bytes()
    except OSError as error:
        return f"{file}: {error.strerror}"
    if hashlib.sha256(content[:-SEAL_BYTES]).digest() != content[-SEAL_BYTES:]:
        return f"{file}: damaged, its checksum is another"
    return ""


def _load(name: str) -> ModuleType | TwinStatus:
    try:
        home = folder()
        if home is None:
            return TwinStatus(name, "off", f"{COMPILED} is off")
        file, wrong = file_of(name, home), ""
    except (ConfigError, OSError) as error:  # OSError: the source is not there, so none of its files is known
        file, wrong = Path(name), str(error)
    with _lock[0]:
        found = _loaded.get(file)
        if found is None or not (isinstance(found, ModuleType) or found.state == "broken"):  # it may be built by now
            broken = [path for path, each in _loaded.items() if isinstance(each, TwinStatus) and each.state == "broken"]
            found = _loaded[file] = TwinStatus(name, "broken", wrong) if wrong else _tried(name, file)
            if isinstance(found, TwinStatus) and found.state == "broken":
                is_told = any(path.parents[1:2] == file.parents[1:2] for path in broken)  # what its folder is, all are
                level = logging.DEBUG if is_told else logging.WARNING
                logger.log(level, "%s is not used, the Python way is: %s", name, found.reason)
        return found


def _tried(name: str, file: Path) -> ModuleType | TwinStatus:
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return TwinStatus(name, "not built", "`kvtier compile` builds it")
    except OSError as error:  # another user's home, or a path too long
        return TwinStatus(name, "broken", f"{file}: {error.strerror}")
    if reason := why_not(file):
        return TwinStatus(name, "broken", reason)
    try:
        loader = ExtensionFileLoader(name, str(file))
        spec = spec_from_file_location(name, file, loader=loader)
        assert spec is not None  # it has a loader
        module = module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:
        return TwinStatus(name, "broken", f"{file}: {type(error).__name__}: {error}")
    return module
