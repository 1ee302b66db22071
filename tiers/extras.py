"""The extras of `pyproject.toml`: what each brings, and the error that names what of it is missing."""

from importlib.util import find_spec
from typing import Final

from kvtier.tiers.errors import MissingPackages

# Extra → what is imported of it.
EXTRAS: Final = {
    "charts": ("matplotlib",),
    "engine": ("llguidance", "safetensors", "torch", "transformers"),
    "ray": ("ray",),
    "transformers": ("safetensors", "torch", "transformers"),
}


def require_extra(what: str, extra: str) -> None:
    """MissingPackages, if anything is that an extra brings: `what` needs it, and how to install it. Imports nothing."""
    missing = [package for package in EXTRAS[extra] if find_spec(package) is None]
    if missing:
        raise MissingPackages(f"{what} needs {', '.join(missing)}: pip install 'kvtier[{extra}]'") from None
