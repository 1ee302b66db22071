from . import wire
from .addresses import address_text
from .announced import AnnouncedNames, NamesRoom
from .events_at import EventsAt
from .following import FEEDS
from .resets import RESETS
from .store import PeersStore
from .stream import PeerFailed, prepare, receive, receive_into, send
from .tags import TAG_BYTES

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
