from . import wire
from .resets import RESETS
from .store import PeersStore
from .stream import PeerFailed, prepare, receive, receive_into, send

__all__ = ["RESETS", "PeerFailed", "PeersStore", "prepare", "receive", "receive_into", "send", "wire"]
