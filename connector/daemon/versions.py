"""Which versions of the daemon's protocol this side speaks: its own, and those of two releases before."""

from typing import Any, Final

from kvtier.connector.daemon.fields import number
from kvtier.tiers import L1, L2, TIERS, FormatError

VERSION: Final = 7
OLDEST: Final = 6
RELEASES: Final = {6: "0.1", 7: "0.2"}
"""The first release of kvtier with each version."""
LOSSY_SINCE: Final = 7  # `Hello.lossy`
SHARES_SINCE: Final = 7  # `Hello.size` 0

_MOST: Final = 1 << 20
_FIELDS: Final[dict[int, dict[str, int]]] = {6: {"Hello": 6, "Refused": 1}}  # of a handshake, where there were fewer
_TIERS: Final[dict[int, tuple[str, ...]]] = {6: (L1, L2, "file", "redis")}  # that counts are of, where that was fewer


def fields_of(version: int, kind: str, fields: list[Any]) -> list[Any]:
    """The leading fields of a handshake, as many as it has in a version."""
    return fields[: _FIELDS.get(version, {}).get(kind)]


def tiers_of(version: int) -> tuple[str, ...]:
    """Which tiers' counts an answer has. Blocks of others count as those of the last one."""
    return _TIERS.get(version, tuple(TIERS))


def tiers_with(num_counts: int) -> tuple[str, ...]:
    """The tiers of as many counts. FormatError if no version has so many."""
    for tiers in (tuple(TIERS), *_TIERS.values()):
        if len(tiers) == num_counts:
            return tiers
    raise FormatError(f"counts of {num_counts} tiers, there are {len(TIERS)}: run one kvtier on both sides")


class UnspokenVersion(FormatError):
    """The other side has a version of the protocol that this one does not speak."""


def checked_version(version: Any) -> int:
    """UnspokenVersion for one that this side does not speak: it names both, and what to upgrade."""
    if OLDEST <= number(version, _MOST) <= VERSION:
        return int(version)
    ours = f"this side speaks {OLDEST} to {VERSION} (kvtier {RELEASES[OLDEST]} to {RELEASES[VERSION]})"
    which = "this side" if version > VERSION else "the other side"
    raise UnspokenVersion(f"protocol version {version}, {ours}: upgrade {which}; daemons before their engines")
