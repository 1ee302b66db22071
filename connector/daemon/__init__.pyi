from . import handshake, messages
from .attachment import join
from .connection import Peer, is_trusted, peer_of
from .frames import ID_BYTES, MAX_FRAME, MAX_HELLO, MAX_ITEMS, FrameReader, decoded, number
from .handshake import Hello
from .remote import RemoteTiers

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
]
