"""Forked children: they inherit objects without the threads behind them, and must not touch what is their parent's."""

import os
import weakref
from typing import Final, Protocol


class Inherited(Protocol):
    """What holds memory of one process."""

    def forked(self) -> None:
        """Called in a forked child before anything else runs there: cut it off from what is the parent's."""


_owners: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()
_descriptors: Final[set[int]] = set()


def cut_off_in_children(owner: Inherited) -> None:
    """Have `owner.forked()` called in every child that is forked while it lives."""
    _owners.add(owner)


def hide_from_children(descriptor: int) -> int:
    """Have it lead to /dev/null in children, its number taken: what they do there would be the parent's."""
    _descriptors.add(descriptor)
    return descriptor


def forget_descriptor(descriptor: int) -> None:
    """Say that it is about to be closed, or is no child's business any more. Idempotent."""
    _descriptors.discard(descriptor)


def _in_child() -> None:
    for owner in list(_owners):
        owner.forked()
    if _descriptors:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _descriptors:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)


os.register_at_fork(after_in_child=_in_child)
