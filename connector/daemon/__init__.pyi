from . import handshake, messages, versions, wire
from .client import RemoteTiers
from .fields import ID_BYTES, decoded, number
from .handshake import Hello, Peer, is_trusted, peer_of
from .link import join
from .wire import MAX_FRAME, MAX_HELLO, MAX_ITEMS, FrameReader

__all__ = [
    "ID_BYTES",
    "MAX_FRAME",
    "MAX_HELLO",
    "MAX_ITEMS",
    "FrameReader",
    "Hello",
    "Peer",
    "RemoteTiers",
    "decoded",
    "handshake",
    "is_trusted",
    "join",
    "messages",
    "number",
    "peer_of",
    "versions",
    "wire",
]
