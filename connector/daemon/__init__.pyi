from . import wire
from .client import RemoteTiers
from .link import Peer, is_trusted, join, peer_of, pidfd_of
from .wire import ID_BYTES, FrameReader, Hello

__all__ = [
    "ID_BYTES",
    "FrameReader",
    "Hello",
    "Peer",
    "RemoteTiers",
    "is_trusted",
    "join",
    "peer_of",
    "pidfd_of",
    "wire",
]
