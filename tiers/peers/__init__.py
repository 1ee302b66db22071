"""The tier in other nodes' memory: blocks that their daemons send over TCP, under a key that all nodes share."""

from kvtier.tiers.peers import wire
from kvtier.tiers.peers.following import FEEDS, KEY_BYTES, AnnouncedNames, NamesRoom
from kvtier.tiers.peers.link import EventsAt
from kvtier.tiers.peers.one_sided import METADATA_BYTES, RemoteMemory, load_nixl
from kvtier.tiers.peers.owners import AT_ONCE, Owners
from kvtier.tiers.peers.peer import MAX_PEERS
from kvtier.tiers.peers.ring import LAPSE, MAX_HOLDERS, MAX_NODES, PACE, ROUND, Keys, Report, Ring
from kvtier.tiers.peers.store import RESETS, PeersStore
from kvtier.tiers.peers.stream import TAG_BYTES, PeerAddress, PeerFailed, PeerStream, address_text
