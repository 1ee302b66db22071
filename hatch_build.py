"""Builds kvtier's extension modules: as hatchling's build hook, and in a checkout by `python hatch_build.py`.

Each is compiled by Cython and the C compiler of this machine. If there is none, kvtier is installed without them: the
same source, or a Python file beside it, does their work interpreted. Every module carries the digest of its source, so
`tiers/compiled/extensions.py` loads none that is stale.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # called as a program: Cython is enough
    BuildHookInterface = object

_COMMIT: Final = Path("kvtier/commit.txt")
_FROM: Final = "BUILD_COMMIT"  # the commit of what is packed, where that is a copy without git
_OFF: Final = "KVTIER_EXTENSIONS"  # "off": build none
_FLAGS: Final = ("-O2", "-g0", "-fPIC", "-shared", "-fwrapv", "-fno-strict-aliasing", "-w")
# Run interpreted, too: the module of each is NAME_compiled.
_BOTH: Final = (
    "kvtier/tiers/pool/core.py",
    "kvtier/tiers/reuse/recent.py",
    "kvtier/service/events/holders.py",
    "kvtier/service/router/scores.py",
)
_HEADER: Final = "kvtier/tiers/compiled/digests.h"  # all may include it
_SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX")
_SECONDS: Final = 900  # for Cython, or the compiler, with one module


class Extensions(BuildHookInterface):
    """Adds the extension modules to a wheel, and its commit to what is packed; `kvtier --version` shows it.

    Of an editable install the modules lie beside their sources.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs."""
        root = Path(self.root)
        if version == "editable":
            build(root)
            return
        place = Path(tempfile.mkdtemp(prefix="kvtier-extensions-"))
        if commit := commit_of(root):
            (place / _COMMIT.name).write_text(commit)
            build_data["force_include"][str(place / _COMMIT.name)] = str(_COMMIT)
        if self.target_name != "wheel":
            return
        if built := build(root, place):
            build_data["pure_python"], build_data["infer_tag"] = False, True
            build_data["force_include"].update({str(file): name for name, file in built.items()})


def commit_of(root: Path) -> str:
    """This checkout's commit, "-dirty" behind it if files differ. Empty: an sdist has its own, or there is no git."""
    if (root / _COMMIT).exists():
        return ""
    if given := os.environ.get(_FROM, "").strip():
        return given
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine
        return ""
    return told.stdout.strip()


def build(root: Path, place: Path | None = None) -> dict[str, Path]:
    """Build what is missing or stale, beside the sources or in `place`. Returns path in the wheel → file.

    Without a compiler, or where `KVTIER_EXTENSIONS` is "off", nothing is built, and a line says so.
    """
    compiler, wanting = _compiler()
    if wanting:
        print(f"kvtier: no extension modules, it will run interpreted: {wanting}", file=sys.stderr)
        return {}
    walked = os.walk(root / "kvtier", followlinks=True)  # links in a checkout, folders in an sdist
    sources = [Path(folder, file) for folder, _, files in walked for file in files if file.endswith("_compiled.pyx")]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(
            lambda each: _built(root, each, place, compiler, Path(work)),
            [*(root / each for each in _BOTH), *sorted(sources)],
        )
        return dict(made)


def _compiler() -> tuple[list[str], str]:
    """The C compiler's command, and what is wanting, or an empty line."""
    if os.environ.get(_OFF) == "off":
        return [], f"{_OFF} is off"
    configured = shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))
    found = next((name for name in (configured[0], "cc", "gcc", "clang") if shutil.which(name)), None)
    if found is None:
        return [], "no C compiler; on Debian, `apt-get install gcc libc6-dev`, then install kvtier anew"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        return [], f"no headers of Python; on Debian, `apt-get install {package}`, then install kvtier anew"
    return [found, *configured[1:]] if found == configured[0] else [found], ""


def _built(root: Path, source: Path, place: Path | None, compiler: list[str], work: Path) -> tuple[str, Path]:
    """The module of one source; built anew only if that is another than the one it was built of."""
    below = source.relative_to(root)
    stem = below.stem if below.suffix == ".pyx" else f"{below.stem}_compiled"
    module = ".".join((*below.parent.parts, stem))
    text, header = source.read_bytes(), root / _HEADER
    digest = hashlib.sha256(text + header.read_bytes()).hexdigest()
    target = (source.parent if place is None else place / module) / f"{stem}{_SUFFIX}"
    name = str(below.with_name(target.name))
    if target.exists() and target.read_bytes().endswith(digest.encode()):
        return name, target
    copy = work / module / f"{stem}.pyx"
    copy.parent.mkdir()
    copy.write_bytes(text + f'\nSOURCE_DIGEST = "{digest}"\n'.encode())
    written, linked = copy.with_suffix(".c"), copy.with_suffix(".so")
    _run(sys.executable, "-m", "cython", "-3", "--module-name", module, str(copy), "-o", str(written))
    folders = f"-I{sysconfig.get_path('include')}", f"-I{header.parent}"
    wanted = shlex.split(os.environ.get("CFLAGS", ""))
    _run(*compiler, *_FLAGS, *wanted, *folders, str(written), "-o", str(linked))
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"{target.name}.{os.getpid()}")
    new.write_bytes(linked.read_bytes() + digest.encode())  # a loader reads no further than the headers say
    new.chmod(0o755)
    new.replace(target)  # whoever has the old one mapped keeps it
    print(f"kvtier: built {module}", file=sys.stderr)
    return name, target


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-12:]
        raise SystemExit("\n".join((f"kvtier: {command[0]} ended with {done.returncode}", *last)))


if __name__ == "__main__":
    build(Path(__file__).resolve().parent)
