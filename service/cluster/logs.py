"""The end of the logs of a cluster's services, and what is added to them."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvtier.service import harmless

_TAIL_BYTES: Final = 1 << 20  # of a log, searched for its last lines
_LOOK: Final = 0.25  # seconds between two looks at what was added


def show_logs(logs: Sequence[tuple[str, Path]], num_lines: int, tell: Callable[[str], None], *, follow: bool) -> None:
    """Tell the last lines of each log, its service's name before each, and with `follow` those added, until Ctrl-C."""
    width = max((len(name) for name, _ in logs), default=0)
    ends = {name: _show(f"{name:<{width}} | ", path, None, num_lines, tell) for name, path in logs}
    while follow:
        time.sleep(_LOOK)
        for name, path in logs:
            ends[name] = _show(f"{name:<{width}} | ", path, ends[name], None, tell)


def _show(prefix: str, path: Path, start: int | None, num_lines: int | None, tell: Callable[[str], None]) -> int:
    """Tell whole lines from `start`, None for near the end, or the last of them; returns where they end."""
    try:
        with path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            begin = max(0, size - _TAIL_BYTES) if start is None else start if start <= size else 0
            log.seek(begin)
            data = log.read(size - begin)
    except FileNotFoundError:  # it has said nothing yet
        return 0
    whole = data[: data.rfind(b"\n") + 1] if num_lines is None else data
    lines = whole.decode(errors="replace").splitlines()
    for line in lines if num_lines is None else lines[max(0, len(lines) - num_lines) :]:
        tell(harmless(prefix + line))
    return begin + len(whole)
