"""The client of a node's daemon: tiers in another process, over one socket and one shared region."""

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.link import Peer, is_trusted, join, peer_of, pidfd_of
from kvtier.connector.daemon.wire import ID_BYTES, FrameReader, Hello
