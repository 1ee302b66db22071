"""The command line in tests: `kvtier ARGUMENTS` in this process, or in one of its own."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Final
from unittest.mock import patch

from service_rig import environment

from kvtier.cli import main

Ended = subprocess.CompletedProcess[str]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def kvtier(*arguments: object, stdin: str = "", columns: str = "80", **options: str) -> Ended:
    """What `kvtier ARGUMENTS` prints and ends with, without the second that a process takes to start.

    `options` are `section__option=value`, as variables; `columns` is how wide a table may be. On the main thread alone:
    the streams and arguments of the whole process are exchanged meanwhile. What a verb leaves behind in its process
    (threads, memory, children that nobody waits for) stays in this one: verbs that serve are for `kvtier_process`.
    """
    with patch.dict(os.environ, {**environment(**options), "COLUMNS": columns, "LINES": "25"}):
        return program(main, "kvtier", *arguments, stdin=stdin)


def program(entry: Callable[[], object], name: str, *arguments: object, stdin: str = "") -> Ended:
    """What a program's `main` prints and ends with, given these arguments; as above."""
    assert threading.current_thread() is threading.main_thread()
    argv = [name, *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", argv))
        stack.enter_context(patch.object(sys, "stdin", io.StringIO(stdin)))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        status: object = 0
        try:
            status = entry() or 0
        except SystemExit as ended:
            status = ended.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    assert isinstance(status, int), status
    return Ended(argv, status, out.getvalue(), err.getvalue())


def kvtier_process(*arguments: object, stdin: str = "", cwd: str = ".", **options: str) -> Ended:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "kvtier.cli", *map(str, arguments)]
    variables = environment(**options)
    return subprocess.run(
        command, cwd=cwd, env=variables, input=stdin, capture_output=True, text=True, timeout=300, check=False
    )
