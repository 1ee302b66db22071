"""Without SGLang the adapter's import says what is missing, in one line."""

import subprocess
import sys


def test_the_import_names_the_package_and_its_versions() -> None:
    without = "import sys; sys.modules['sglang'] = None; from kvtier.connector.sglang import KVTierStorage"
    run = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kvtier.connector.sglang needs SGLang, sglang>=0.5.23,<0.6 (")
