"""Which of the daemon's models an operator means, and keeping it open while something is done to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.service.daemon import Daemon
from kvtier.service.loop import now
from kvtier.service.namespaces import Guest, Namespace
from kvtier.tiers.errors import ConfigError, KVTierError

NAME_DIGITS = 16  # hexadecimal ones of a fingerprint that people and Prometheus see


class NotThere(KVTierError):
    """Nothing of that name is here."""


def name_of(fingerprint: bytes) -> str:
    """How people see a model."""
    return fingerprint.hex()[:NAME_DIGITS]


def visit(daemon: Daemon, model: str | None, guest: Guest) -> Namespace:
    """Let the guest into the model whose fingerprint begins so (None: the only one there is). Waits for the loop.

    NotThere and ConfigError where that names none or several, TierUnavailable where the loop does not answer.
    """

    def enter() -> Namespace:
        namespace = _choose(daemon.namespaces(), model)
        namespace.members.add(guest)
        return namespace

    return daemon.call(enter)


def leave(daemon: Daemon, namespace: Namespace, guest: Guest) -> None:
    """The guest holds nothing any more. Does not wait; from any thread."""

    def exit() -> None:
        namespace.members.discard(guest)
        namespace.idle_since = now()

    daemon.submit(exit)  # a daemon that is stopping counts its members no more


@contextmanager
def visiting(daemon: Daemon, model: str | None) -> Iterator[Namespace]:
    """As `visit`, until the block ends."""
    guest = Guest()
    namespace = visit(daemon, model, guest)
    try:
        yield namespace
    finally:
        leave(daemon, namespace, guest)


def _choose(namespaces: Sequence[Namespace], model: str | None) -> Namespace:
    found = [each for each in namespaces if model is None or each.fingerprint.hex().startswith(model)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(name_of(each.fingerprint) for each in namespaces)
    if not namespaces:
        raise NotThere("no model is open; an engine has to attach first")
    if found:
        asked = "none is named" if model is None else f'model "{model}"'
        raise ConfigError(f"{asked}: {len(found)} models are open; name one of {names}")
    raise NotThere(f'model "{model}": not open; name one of {names}')
