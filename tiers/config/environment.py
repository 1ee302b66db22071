"""Environment variables besides the configuration: this user's cache, extension modules, and what libraries read."""

import os
from pathlib import Path
from typing import Final

COMPILED: Final = "KVTIER_COMPILED"  # "off": no extension module is used


def cache_directory() -> Path:
    """This user's directory for measurements and builds, by the XDG specification; a relative path is ignored."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(home if os.path.isabs(home) else "/") / ".cache"
    return base / "kvtier"


def compiled_setting() -> str:
    """The value of `KVTIER_COMPILED`; empty: not given."""
    return os.environ.get(COMPILED, "")


def preset(name: str, value: str) -> None:
    """Set a variable for libraries of this process that read it, unless the user has."""
    os.environ.setdefault(name, value)
