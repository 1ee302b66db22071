"""Follows other nodes' KV events for the tier in their memory: which blocks are there, and nothing else of them."""

from kvtier.service import events
from kvtier.tiers import L2, TIERS
from kvtier.tiers.config import EventsConfig
from kvtier.tiers.peers import AnnouncedNames

_KEY_BYTES = 8


class _HostBlocks:
    """One peer's blocks in host memory. Implements `EventSink`."""

    def __init__(self, names: AnnouncedNames) -> None:
        self._names = names
        self._medium = TIERS[L2].medium

    def apply(self, worker: str, event: events.KVEvent) -> None:
        if isinstance(event, events.BlockStored | events.BlockRemoved):
            if event.medium == self._medium:
                keys = [events.as_u64(name).to_bytes(_KEY_BYTES, "big") for name in event.block_hashes]
                (self._names.store if isinstance(event, events.BlockStored) else self._names.remove)(keys)
        else:
            self._names.clear()

    def drop(self, worker: str) -> None:
        self._names.clear()


class PeerFeeds:
    """Opens feeds of other nodes' events, with the CURVE keys of this node's own publisher, if it has some."""

    def __init__(self, config: EventsConfig) -> None:
        """ConfigError for keys that are none."""
        keys = events.CurveKeys.load("events", config.curve_key_file, "curve_reader_file", config.curve_reader_file)
        self._keys = None if keys is None else keys.of_a_node()

    def open(self, fingerprint: bytes, publish: str, replay: str, names: AnnouncedNames) -> events.EventConsumer:
        """As `tiers.peers.following.OpenFeed`."""
        topic = events.topic_of(fingerprint)
        return events.EventConsumer(publish, _HostBlocks(names), publish, replay, topic=topic, keys=self._keys)
