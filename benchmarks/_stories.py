"""Runs the scripts that docs/storage.md and docs/operate.md have one type, and writes what they print below them.

`python benchmarks/_stories.py [PAGE …]`, on an idle machine with Redis; `KVTIER_…` variables count and are named there.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from _readme import machine_line
from _report import commit, machine, progress

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = ("storage.md", "operate.md")
BEGIN: Final = "<!-- printed by the script above, which benchmarks/_stories.py ran -->\n"
END: Final = "<!-- end of what was printed -->\n"
_TIMEOUT: Final = 900.0  # seconds for a whole script, on a busy machine too
_FIRST: Final = re.compile(r"\[[\d,]+ tokens of prompt|\w+: \S+ had of ")  # of what is worth showing
_ANSWER: Final = re.compile(r"\[[\d,]+ tokens of prompt")  # stands below a text of random weights


def script(page: str) -> str:
    """What a page of docs/ has one type: its one block of `bash`."""
    [found] = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return str(found)


def typed(
    lines: str,
    home: Path,
    environment: Mapping[str, str],
    timeout: float = _TIMEOUT,
    virtual_environment: Path = Path(sys.prefix),
) -> list[str]:
    """What a shell in `home`, an empty folder that is made to look like a checkout, prints when one types `lines`.

    AssertionError where it ends badly; nothing it started in the foreground is left when the time is up.
    """
    (home / ".venv").symlink_to(virtual_environment)
    for name in ("docs", "CONTRIBUTING.md"):
        (home / name).symlink_to(ROOT / name)
    shell = subprocess.Popen(
        ["bash", "-eu", "-c", lines],
        cwd=home,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complaints = shell.communicate(timeout=timeout)
    except BaseException:
        os.killpg(shell.pid, signal.SIGKILL)  # with all that it has started
        shell.communicate()
        raise
    assert shell.returncode == 0, told + complaints
    return re.sub(r"\x1b\[[0-9;]*m", "", told).splitlines()  # redis-cli's colours


def shown(lines: list[str]) -> Iterator[str]:
    """What of them stands in the page: from the first figure on, without texts that random weights wrote."""
    begun = False
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        begun = begun or bool(_FIRST.match(line))
        if (begun and not _ANSWER.match(after)) or _ANSWER.match(line):
            yield line


def main() -> None:
    for page in sys.argv[1:] or PAGES:
        progress(f"{page}: running its script")
        with tempfile.TemporaryDirectory() as home:
            lines = typed(script(page), Path(home), os.environ)
        options = [f"`{name}={value}`" for name, value in sorted(os.environ.items()) if name.startswith("KVTIER_")]
        under = f", with {', '.join(options)}" if options else ""
        load = f"load average {os.getloadavg()[0]:.1f}"
        origin = f"Printed on {machine_line(machine())}, {load}, at commit `{commit()}`{under}."
        path = ROOT / "docs" / page
        before, rest = path.read_text().split(BEGIN)
        block = "\n".join(shown(lines))
        path.write_text(f"{before}{BEGIN}```\n{block}\n```\n\n{origin}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
