from . import wire
from .following import FEEDS, AnnouncedNames, NamesRoom
from .link import EventsAt
from .peer import address_text
from .store import RESETS, PeersStore
from .stream import TAG_BYTES, PeerFailed, prepare, receive, receive_into, send

__all__ = [
    "FEEDS",
    "RESETS",
    "TAG_BYTES",
    "AnnouncedNames",
    "EventsAt",
    "NamesRoom",
    "PeerFailed",
    "PeersStore",
    "address_text",
    "prepare",
    "receive",
    "receive_into",
    "send",
    "wire",
]
