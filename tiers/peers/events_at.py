"""Where a node's KV events are, as its lender says it to a peer: two ZMQ addresses, and whether they tell of all."""

import ipaddress
from dataclasses import dataclass
from struct import Struct
from typing import Final

from kvtier.tiers.peers.wire import ProtocolError

_FORM: Final = Struct("<B128s128s")  # tells_all, publish, replay: padded with zeros
_TCP: Final = "tcp://"
EVENTS_BYTES: Final = _FORM.size


@dataclass(frozen=True, slots=True)
class EventsAt:
    """Empty addresses: no other machine can follow this node, or it lends nothing of the model."""

    publish: str = ""
    replay: str = ""
    tells_all: bool = False  # every block that the node lends of this model is announced there

    @classmethod
    def bound(cls, publish: str | None, replay: str | None) -> "EventsAt":
        """Of a publisher by where it listens: TCP alone, and only if it repeats what was missed."""
        addresses = (publish or "", replay or "")
        is_told = all(each.startswith(_TCP) and len(each) <= 128 for each in addresses)
        return cls(*addresses) if is_told else cls()

    def pack(self) -> bytes:
        return _FORM.pack(self.tells_all, self.publish.encode(), self.replay.encode())

    @classmethod
    def unpack(cls, data: bytes) -> "EventsAt":
        """Inverse of `pack`. ProtocolError."""
        tells_all, *addresses = _FORM.unpack(data)
        try:
            publish, replay = (each.rstrip(b"\0").decode("ascii") for each in addresses)
        except UnicodeDecodeError:
            raise ProtocolError("events") from None
        at = cls.bound(publish, replay)
        if tells_all > 1 or (at.publish, at.replay) != (publish, replay):
            raise ProtocolError("events")
        return cls(publish, replay, bool(tells_all))

    def reached_at(self, host: str) -> "EventsAt":
        """The addresses as whoever reached its node at `host` reaches them; none if that cannot be.

        A publisher on loopback is another one on another machine: its own.
        """
        publish, replay = (_reached(each, host) for each in (self.publish, self.replay))
        return EventsAt(publish, replay, self.tells_all) if publish and replay else EventsAt()


def _reached(address: str, host: str) -> str:
    """One address; empty if it cannot be reached."""
    bound, _, port = address.removeprefix(_TCP).rpartition(":")
    there = _plain(bound)
    try:
        ip = None if there == "*" else ipaddress.ip_address(there)
    except ValueError:  # a name: it is for whoever can look it up
        return address
    if ip is None or ip.is_unspecified:
        there = _plain(host)
    elif ip.is_loopback != _is_loopback(host):
        return ""
    return f"{_TCP}[{there}]:{port}" if ":" in there else f"{_TCP}{there}:{port}"


def _plain(host: str) -> str:
    return host.strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(_plain(host)).is_loopback
    except ValueError:
        return False
