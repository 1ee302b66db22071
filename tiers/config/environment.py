"""Reads what the environment says beside the configuration: this user's cache, and the use of extension modules."""

import os
from pathlib import Path
from typing import Final

COMPILED: Final = "KVTIER_COMPILED"  # "off": no extension module is used


def cache_directory() -> Path:
    """Where what was measured or built is kept for this user, by the XDG specification: a relative path is none."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(home if os.path.isabs(home) else "/") / ".cache"
    return base / "kvtier"


def compiled_setting() -> str:
    """`KVTIER_COMPILED` as it stands; empty: not given."""
    return os.environ.get(COMPILED, "")
