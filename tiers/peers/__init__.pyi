from . import wire
from .resets import RESETS
from .store import PeersStore
from .stream import PeerFailed, prepare, receive, receive_into, send
from .tags import TAG_BYTES

__all__ = ["RESETS", "TAG_BYTES", "PeerFailed", "PeersStore", "prepare", "receive", "receive_into", "send", "wire"]
