"""Which of the daemon's models an operator means, and keeping it open while something is done to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtier.service.node.daemon import Daemon
from kvtier.service.node.loop import now
from kvtier.service.node.namespaces import Namespace, OperatorHold
from kvtier.tiers import ConfigError, KVTierError

NAME_DIGITS = 16  # hexadecimal ones of a fingerprint that people and Prometheus see


class NotThere(KVTierError):
    """Nothing of that name is here."""


def name_of(fingerprint: bytes) -> str:
    """How people see a model."""
    return fingerprint.hex()[:NAME_DIGITS]


def hold_open(daemon: Daemon, model: str | None, hold: OperatorHold) -> Namespace:
    """Keep the model open whose fingerprint begins with `model` (None: the only one), until `release_hold`.

    Waits for the loop. NotThere and ConfigError if that names none or several, TierUnavailable if the loop does not
    answer.
    """

    def enter() -> Namespace:
        namespace = _choose(daemon.namespaces(), model)
        namespace.members.add(hold)
        return namespace

    return daemon.call(enter)


def release_hold(daemon: Daemon, namespace: Namespace, hold: OperatorHold) -> None:
    """End a hold: its owner uses nothing of the model any more. Does not wait; from any thread."""

    def exit() -> None:
        namespace.members.discard(hold)
        namespace.idle_since = now()

    daemon.submit(exit)  # a daemon that is stopping counts its members no more


@contextmanager
def held_open(daemon: Daemon, model: str | None) -> Iterator[Namespace]:
    """As `hold_open`, until the block ends."""
    hold = OperatorHold()
    namespace = hold_open(daemon, model, hold)
    try:
        yield namespace
    finally:
        release_hold(daemon, namespace, hold)


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
