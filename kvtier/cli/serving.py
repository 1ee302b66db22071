"""What the verbs share that serve until they are told to stop."""

import gc
import resource
import signal
import sys
from collections.abc import Callable
from typing import Final

from kvtier.service import LogFormat, LogLevel, log_to_stderr

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_COLLECT: Final = 20_000  # objects more than before that make the collector look at the youngest; Python's are 700


def begin(switch_interval: float, log_level: LogLevel, log_format: LogFormat) -> None:
    """Log to stderr, allow as many open files as can be, and let a thread wait so long for the GIL."""
    log_to_stderr(log_level, log_format)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each client takes one or more
    sys.setswitchinterval(switch_interval)


def settle() -> None:
    """Behind all imports: the garbage collector never looks at what is there by now, and at the rest less often.

    Else it goes through all modules now and then while somebody waits for an answer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT)


def on_signal(stop: Callable[[], None], *, once: bool = False) -> None:
    """Call `stop` at SIGTERM and at Ctrl-C. `once`: whoever insists ends the process at once."""

    def handle(*_: object) -> None:
        if once:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        stop()

    for number in _SIGNALS:
        signal.signal(number, handle)
