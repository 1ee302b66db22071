"""What starts fast imports little: no library that does the work is there before somebody asks for work."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "redis", "msgpack", "xxhash", "aiohttp", "httpx",
    "pydantic", "pydantic_settings", "rich", "prometheus_client", "zmq", "cryptography", "vllm", "sglang",
}  # fmt: skip
HELP = "import sys; sys.argv = ['kvtier', '--help']; from kvtier.cli import main\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize("program", ["import kvtier", HELP], ids=["import kvtier", "kvtier --help"])
def test_nothing_heavy_is_imported_at_the_start(program: str) -> None:
    told = f"{program}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=True)
    imported = set(done.stderr.split())
    assert "kvtier" in imported
    assert not imported & HEAVY


def test_the_face_alone_imports_no_part_of_kvtier() -> None:
    told = "import sys, kvtier; print(*[name for name in sys.modules if name.startswith('kvtier')])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["kvtier"]
