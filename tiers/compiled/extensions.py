"""Extension modules: innermost loops, compiled where there was a C compiler (`hatch_build.py`). Else Python does it."""

import hashlib
import importlib
import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

from kvtier.tiers.config import COMPILED, compiled_setting

logger = logging.getLogger(__name__)

EXTENSIONS: Final = (
    "kvtier.tiers.file.read_queue_compiled",
    "kvtier.tiers.fp8_compiled",
    "kvtier.tiers.host.memory_compiled",
    "kvtier.tiers.host.records_compiled",
    "kvtier.tiers.naming.chain_compiled",
    "kvtier.tiers.pool.core_compiled",
    "kvtier.tiers.reuse.recent_compiled",
    "kvtier.tiers.shared.transfer_compiled",
    "kvtier.service.events.holders_compiled",
    "kvtier.service.router.scores_compiled",
)
"""Every one there is; `kvtier doctor` says which are in use."""


@dataclass(frozen=True, slots=True)
class ExtensionStatus:
    """How one extension module stands in this process, and why it is not in use if it is not."""

    name: str
    state: Literal["loaded", "off", "not built", "broken"]
    reason: str = ""


def extension(name: str) -> ModuleType | None:
    """The extension module of this name; None: Python does its work. It raises nothing."""
    if compiled_setting() == "off":
        return None
    found = _loaded(name)
    return found if isinstance(found, ModuleType) else None


def status() -> list[ExtensionStatus]:
    """How every extension module stands in this process."""
    if compiled_setting() == "off":
        return [ExtensionStatus(name, "off", f"{COMPILED} is off") for name in EXTENSIONS]
    found = {name: _loaded(name) for name in EXTENSIONS}
    return [
        each if isinstance(each, ExtensionStatus) else ExtensionStatus(name, "loaded") for name, each in found.items()
    ]


@cache
def _loaded(name: str) -> ModuleType | ExtensionStatus:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return ExtensionStatus(name, "not built", "installed where there was no C compiler")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        logger.warning("%s is not used, Python does its work: %s: %s", name, type(error).__name__, error)
        return ExtensionStatus(name, "broken", f"{spec.origin}: {error}")
    source = _source_of(Path(spec.origin), name)
    if source is not None and _digest(source) != module.SOURCE_DIGEST:
        logger.warning("%s is not used, Python does its work: it was built of another %s", name, source.name)
        return ExtensionStatus(name, "broken", f"{spec.origin}: built of another {source.name}; build it anew")
    return module


def _digest(source: Path) -> str:
    """As `hatch_build.py` has it: of the source, and of the header that all share."""
    return hashlib.sha256(source.read_bytes() + Path(__file__).with_name("digests.h").read_bytes()).hexdigest()


def _source_of(built: Path, name: str) -> Path | None:
    stem = name.rpartition(".")[2]
    sources = (built.with_name(f"{stem}.pyx"), built.with_name(f"{stem.removesuffix('_compiled')}.py"))
    return next((each for each in sources if each.exists()), None)
