"""What the replicas hold: a consumer for each publisher of events, one index, and whose share can be believed."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.connector.events import namespace_of, topic_of
from kvtier.service.event_consumer import EventConsumer
from kvtier.service.prefix_index import MEDIA, PrefixIndex, prompt_hashes
from kvtier.service.router_spec import Publishers
from kvtier.tiers.chain import root_hash
from kvtier.tiers.errors import ConfigError

_log = logging.getLogger(__name__)

_SHARED: Final = "EXTERNAL"  # the tier that nodes share
_MOST: Final = 16_384  # leading blocks of a prompt that are looked for: more would keep the event loop too long


@dataclass(frozen=True, slots=True)
class Held:
    """What is held of one prompt."""

    num_blocks: int = 0  # whole ones, of the prompt
    prefixes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # replica → medium → blocks
    sure: frozenset[str] = frozenset()  # replicas whose prefix can be believed


class Holdings:
    """Follows the publishers of all replicas. All but `names` belongs to one thread; the consumers have their own."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._fingerprint: bytes | None = None
        self._index: PrefixIndex | None = None
        self._publishers: dict[str, Publishers] = {}  # by replica
        self._consumers: dict[str, EventConsumer] = {}  # by the address they follow, which is the worker's name, too
        self._leaving: dict[str, threading.Thread] = {}  # addresses that are being forgotten

    @property
    def num_blocks(self) -> int:
        """Different blocks that anybody holds."""
        return 0 if self._index is None else self._index.num_blocks

    @property
    def skipped(self) -> Mapping[str, int]:
        """Events that could not be true, by why."""
        return {} if self._index is None else dict(self._index.counts)

    def follow(self, replica: str, publishers: Publishers, block_size: int | None, fingerprint: bytes | None) -> None:
        """Hear of what a replica holds from now on; instead of what it named before, where that was other."""
        if publishers == self._publishers.get(replica):
            return
        if block_size is None:
            if publishers.events or publishers.node:
                _log.warning("replica %s: its events say nothing without a block size; add block_size=N", replica)
            return
        self._index = self._index or PrefixIndex(block_size, strict=self._strict)
        self._fingerprint = self._fingerprint or fingerprint
        self._publishers[replica] = publishers
        topic = None if fingerprint is None else topic_of(fingerprint)
        # an engine tells of its one model, under whatever topic; a daemon of several
        for publish, replay, wanted in (
            (publishers.events, publishers.replay, None),
            (publishers.node, publishers.node_replay, topic),
        ):
            if publish is not None and publish not in self._consumers:
                self._forgotten(publish)
                try:
                    self._consumers[publish] = EventConsumer(publish, self._index, publish, replay, topic=wanted)
                except ConfigError as error:
                    _log.warning("replica %s: %s", replica, error)
        named = {address for each in self._publishers.values() for address in (each.events, each.node)}
        for address in self._consumers.keys() - named:
            self._forget(address, self._consumers.pop(address), self._index)

    def names(
        self, tokens: Sequence[int], cache_salt: str | None, default: str | None, lora_name: str | None
    ) -> list[int]:
        """A prompt's leading blocks as the index names them; on any thread. `default`: the namespace without a salt."""
        if self._index is None:
            return []
        namespace = default if cache_salt is None else cache_salt
        if cache_salt is not None and self._fingerprint is not None:
            namespace = namespace_of(root_hash(self._fingerprint, cache_salt=cache_salt))
        leading = tokens[: _MOST * self._index.block_size]
        return prompt_hashes(leading, self._index.block_size, lora_name, namespace)

    def of(self, num_tokens: int, names: Sequence[int]) -> Held:
        """What is held of a prompt of these `names`, and by whom."""
        if self._index is None:
            return Held()
        found = self._index.matches(names)
        live = {address for address, consumer in self._consumers.items() if consumer.is_live}
        shared = self._index.shared(names, _SHARED)
        prefixes = {}
        for replica, publishers in self._publishers.items():
            own, node = (found.get(at, {}) if at in live else {} for at in (publishers.events, publishers.node))
            prefixes[replica] = joined(own, node, shared if self._has_shared(publishers) else 0)
        sure = {replica for replica, each in self._publishers.items() if (each.events or each.node) in live}
        return Held(num_tokens // self._index.block_size, prefixes, frozenset(sure))

    def state(self, replica: str) -> dict[str, Any]:
        """How its events stand, as JSON: `events`, `node_events`, and `blocks` by medium."""
        publishers = self._publishers.get(replica, Publishers())
        blocks: dict[str, int] = {}
        for address in (publishers.events, publishers.node):
            held = {} if self._index is None or address is None else self._index.holdings(address)
            for medium, count in held.items():
                blocks[medium] = blocks.get(medium, 0) + count
        return {
            "events": self._feed(publishers.events),
            "node_events": self._feed(publishers.node),
            "blocks": blocks,
        }

    def close(self) -> None:
        """Hear no more."""
        for consumer in self._consumers.values():
            consumer.close()
        self._consumers.clear()
        for address in list(self._leaving):
            self._forgotten(address)

    def _forget(self, address: str, consumer: EventConsumer, index: PrefixIndex) -> None:
        """Hear no more of a publisher, on a thread: a million blocks take half a second."""

        def forget() -> None:
            consumer.close()
            index.drop(address)

        self._leaving[address] = threading.Thread(target=forget, name=f"kvtier-forget-{address}", daemon=True)
        self._leaving[address].start()

    def _forgotten(self, address: str) -> None:
        """Wait until nothing is left of a publisher that was followed before."""
        if address in self._leaving:
            self._leaving.pop(address).join()

    def _feed(self, address: str | None) -> dict[str, Any] | None:
        if address not in self._consumers:
            return None
        state = self._consumers[address].state
        told = {name: state.counts.get(name, 0) for name in ("gaps", "lost")}
        why = {} if state.why is None else {"why": state.why}
        return {"state": state.state, "seq": state.seq, **told, "age_s": state.age, **why}

    def _has_shared(self, publishers: Publishers) -> bool:
        """Whether its tiers have what nodes share: whoever has, tells of blocks there."""
        at = publishers.node or publishers.events
        return self._index is not None and at is not None and _SHARED in self._index.holdings(at)


def joined(own: Mapping[str, int], node: Mapping[str, int], shared: int) -> dict[str, int]:
    """The longest prefix by medium of who has these of its own, behind it these of its node, and then of all nodes'.

    Of the node's prefix, the leading blocks, as many as are its own, are taken for those of the best tiers.
    """
    found, known = dict(own), sum(own.values())
    for medium in MEDIA:
        count = node.get(medium, 0)
        if count > known:
            found[medium] = found.get(medium, 0) + count - known
        known = max(0, known - count)
    length = sum(found.values())
    if shared > length:
        found[_SHARED] = found.get(_SHARED, 0) + shared - length
    return found
