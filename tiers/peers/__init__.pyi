from . import wire
from .resets import RESETS
from .stream import PeerFailed, prepare, receive, send

__all__ = ["RESETS", "PeerFailed", "prepare", "receive", "send", "wire"]
