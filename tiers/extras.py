"""The extras of `pyproject.toml`: what each brings, what installs it, and the error that names what is missing."""

import shlex
from importlib.util import find_spec
from typing import Final

from kvtier.tiers.errors import MissingPackages

# Extra → package as it is imported → the requirement that brings it.
EXTRAS: Final = {
    "charts": {"matplotlib": "matplotlib>=3.10"},
    "compression": {"zstandard": "zstandard>=0.23"},
    "cuda12": {"cupy": "cupy-cuda12x>=14", "torch": "torch>=2.6"},
    "cuda13": {"cupy": "cupy-cuda13x>=14", "torch": "torch>=2.6"},
    "encryption": {"cryptography": "cryptography>=43"},
    "engine": {
        "llguidance": "llguidance>=1.7",
        "safetensors": "safetensors>=0.5",
        "torch": "torch>=2.6",
        "transformers": "transformers>=5.0",
    },
    "objects": {"obstore": "obstore>=0.12"},
    "peers": {"aeg": "aeg~=0.9.0", "cryptography": "cryptography>=43"},
    "ray": {"ray": "ray[serve]>=2.60"},
    "tracing": {
        "opentelemetry.sdk": "opentelemetry-sdk>=1.30",
        "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http>=1.30",
    },
    "transformers": {"safetensors": "safetensors>=0.5", "torch": "torch>=2.6", "transformers": "transformers>=5.0"},
}
_NO_CUDA: Final = "https://download.pytorch.org/whl/cpu"


def install_command(extra: str, *packages: str) -> str:
    """The command that installs an extra, or `packages` of it. It does not name kvtier, which is on no index."""
    requirements = EXTRAS[extra]
    return f"pip install {shlex.join(requirements[package] for package in packages or requirements)}"


def require_extra(what: str, extra: str) -> None:
    """MissingPackages, if anything is that an extra brings: `what` needs it, and how to install it. Imports nothing."""
    missing = [package for package in EXTRAS[extra] if not _is_there(package)]
    if missing:
        fix = install_command(extra, *missing)
        if "torch" in missing:  # PyPI's brings CUDA
            fix += f"; without a GPU, first {install_command(extra, 'torch')} --index-url {_NO_CUDA}"
        raise MissingPackages(f"{what} needs {', '.join(missing)}: {fix}") from None


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
