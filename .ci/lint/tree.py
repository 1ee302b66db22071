"""What rules look at: a checkout with its pages and files, how many things of it a rule has looked at, and programs.

A rule is a function that takes a `Tree` and yields findings, `path:line: what is wrong; the fix`. It goes through what
it checks with `Tree.each`, which counts: a rule that has looked at nothing has failed.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

Thing = TypeVar("Thing")
_TIMEOUT: Final = 300  # seconds for a program that a rule starts


class Skip(Exception):
    """A rule cannot run on this machine; the text says what is missing."""


class Tree:
    """A checkout, and what one rule has looked at in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_checked = 0

    @cached_property
    def pages(self) -> list[str]:
        """Every page that people read, by its path."""
        return [*self.paths("[A-Z]*.md"), *self.paths("docs/*.md")]

    def paths(self, pattern: str) -> list[str]:
        """What matches, from the root on, in order."""
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.glob(pattern))

    def text(self, path: str) -> str:
        """A file's text; FileNotFoundError is the rule's failure."""
        return (self.root / path).read_text()

    def each(self, things: Iterable[Thing]) -> Iterator[Thing]:
        """The same things, counted as checked."""
        for thing in things:
            self.num_checked += 1
            yield thing

    def run(
        self, *command: str, cwd: str = ".", environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """What a program says; Skip if this machine has none of that name."""
        if shutil.which(command[0]) is None:
            raise Skip(f"{command[0]} is not installed")
        return subprocess.run(
            command, cwd=self.root / cwd, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )


class Rule(NamedTuple):
    """A function that yields findings. Its name is the rule's, its docstring says what the rule asks for."""

    find: Callable[[Tree], Iterable[str]]
    things: str  # what it goes through
    at_least: int = 1  # fewer mean that it no longer finds them

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.find.__name__.replace("_", "-")

    def judge(self, tree: Tree) -> list[str]:
        """What is wrong. Skip if the machine lacks what it takes; any other error is a finding."""
        findings: list[str] = []
        try:
            for finding in self.find(tree):
                findings.append(finding)  # one by one: what was found before an error stays
        except Skip as skip:
            if not findings:
                raise
            findings.append(f"the rest was not looked at: {skip}")
        except Exception as error:  # top of the loop over rules: one that breaks has failed, the others go on
            findings.append(f"it could not go on: {type(error).__name__}: {error}")
        if tree.num_checked < self.at_least:
            findings.append(f"only {tree.num_checked} {self.things} to check, at least {self.at_least} expected")
        return findings
