"""What the replicas hold: follows every publisher of events, and keeps an index of blocks for each model version."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from kvtier.service.events import CurveKeys, EventConsumer, Feeds, PrefixIndex, namespace_of, prompt_hashes, topic_of
from kvtier.service.observe import statuses
from kvtier.service.router.replica_list import Publishers
from kvtier.tiers import TIERS, ConfigError
from kvtier.tiers.config import MAX_BLOCKS
from kvtier.tiers.naming import root_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

V = TypeVar("V", bound=Hashable)

_LAST: Final = 2.0  # seconds that all event threads may take to end; a stop may take five
_LONG: Final = 1 << 15  # tokens; the blocks of longer prompts are named on a thread
_MOST: Final = 16_384  # leading blocks of a prompt to look up: more would block the event loop too long


WIDTH: Final = 8  # columns of `Prefixes.counts`
_MEDIA: Final = [kind.medium for kind in TIERS.values()]  # nearest first


class Prefixes(Mapping[str, Mapping[str, int]]):
    """Replica → medium → blocks of a prompt that it need not compute. `counts` is `[n, 8]` uint32, by tier."""

    def __init__(self, rows: Mapping[str, int], counts: "NDArray[np.uint32]") -> None:
        self.rows, self.counts = rows, counts

    def __getitem__(self, replica: str) -> Mapping[str, int]:
        counts = self.counts[self.rows[replica]].tolist()
        return {medium: count for medium, count in zip(_MEDIA, counts, strict=False) if count}

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


NO_PREFIXES: Final = Prefixes({}, np.zeros((0, WIDTH), np.uint32))


@dataclass(frozen=True, slots=True)
class Held:
    num_blocks: int = 0  # whole blocks of the prompt
    prefixes: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: NO_PREFIXES)
    sure: frozenset[str] = frozenset()  # replicas whose events are up to date, so that their prefix can be believed
    names: Sequence[int] = ()  # of the prompt's leading blocks


class _Followed(NamedTuple):
    """What look-ups need of the replicas, for as long as no publisher comes, goes, or changes its state."""

    change: int
    rows: Mapping[str, int]  # by replica
    feeds: Feeds
    sure: frozenset[str]


class FeedsState(NamedTuple):
    events: statuses.FeedStatus | None  # of its engine
    node_events: statuses.FeedStatus | None  # of its node's daemon
    blocks: dict[str, int]  # by medium


class FleetHoldings(Mapping[V, "VersionHoldings"]):
    """What all replicas hold, by their model's version: any value, kept while a replica has it. For one thread."""

    def __init__(self, *, strict: bool, max_blocks: int = MAX_BLOCKS, keys: CurveKeys | None = None) -> None:
        self._make = partial(VersionHoldings, strict=strict, max_blocks=max_blocks, keys=keys)
        self._empty = self._make()
        self._by_version: dict[V, VersionHoldings] = {}
        self._versions: dict[str, V] = {}  # by replica

    def __getitem__(self, version: V) -> "VersionHoldings":
        return self._by_version[version]

    def __iter__(self) -> Iterator[V]:
        return iter(list(self._by_version))

    def __len__(self) -> int:
        return len(self._by_version)

    def follow(self, replica: str, version: V, publishers: Publishers, size: int | None, digest: str | None) -> None:
        """Follow a replica's publishers, in place of those it named before; `digest` is its fingerprint."""
        if self._versions.get(replica, version) != version:
            self.leave(replica)
        self._versions[replica] = version
        holdings = self._by_version.get(version) or self._by_version.setdefault(version, self._make())
        holdings.follow(replica, publishers, size, None if digest is None else bytes.fromhex(digest))

    def leave(self, replica: str) -> None:
        """Stop following a replica, and forget its version if no other has it."""
        if replica not in self._versions:
            return
        version = self._versions.pop(replica)
        self._by_version[version].leave(replica)
        if version not in self._versions.values():
            gone = self._by_version.pop(version)
            threading.Thread(target=gone.close, name="kvtier-forget-version", daemon=True).start()

    def of(self, replica: str) -> "VersionHoldings":
        """Those of a replica's version; empty ones of a replica that is not followed."""
        return self._by_version[self._versions[replica]] if replica in self._versions else self._empty

    @property
    def num_blocks(self) -> int:
        return sum(index.num_blocks for index in self._indexes)

    @property
    def num_forgotten(self) -> int:
        return sum(index.num_forgotten for index in self._indexes)

    @property
    def skipped(self) -> Mapping[str, int]:
        return sum((Counter(index.counts) for index in self._indexes), Counter[str]())

    @property
    def _indexes(self) -> list[PrefixIndex]:
        return [each.index for each in self._by_version.values() if each.index is not None]

    def close(self) -> None:
        """Stop following. Returns within seconds."""
        while self._by_version:
            self._by_version.popitem()[1].close()
        self._versions.clear()


class VersionHoldings:
    """Follows the publishers of one version's replicas. All but `names` belongs to one thread."""

    def __init__(self, *, strict: bool, max_blocks: int = MAX_BLOCKS, keys: CurveKeys | None = None) -> None:
        """`strict` and `max_blocks` are passed to `PrefixIndex`, `keys` to `EventConsumer`."""
        self._strict, self._max_blocks, self._keys = strict, max_blocks, keys
        self._fingerprint: bytes | None = None
        self.index: PrefixIndex | None = None
        self._publishers: dict[str, Publishers] = {}  # by replica
        self._consumers: dict[str, EventConsumer] = {}  # by the address they follow
        self._followed: _Followed | None = None
        self._numbers = count(2)
        self._leaving: dict[str, threading.Thread] = {}  # publishers whose blocks are being removed from the index

    def follow(self, replica: str, publishers: Publishers, block_size: int | None, fingerprint: bytes | None) -> None:
        """Follow a replica's publishers from now on, in place of those it named before."""
        if publishers == self._publishers.get(replica):
            return
        if block_size is None:
            if publishers.events or publishers.node:
                _log.warning("replica %s: its events cannot be read without a block size; add block_size=N", replica)
            return
        self.index = self.index or PrefixIndex(block_size, strict=self._strict, max_blocks=self._max_blocks)
        self._fingerprint = self._fingerprint or fingerprint
        self._publishers[replica] = publishers
        topic = None if fingerprint is None else topic_of(fingerprint)
        # an engine publishes one model, under any topic; a daemon publishes several
        for publish, replay, wanted in (
            (publishers.events, publishers.replay, None),
            (publishers.node, publishers.node_replay, topic),
        ):
            if publish is not None and publish not in self._consumers:
                try:
                    self._consumers[publish] = EventConsumer(
                        self._worker(publish), self.index, publish, replay, topic=wanted, keys=self._keys
                    )
                except ConfigError as error:
                    _log.warning("replica %s: %s", replica, error)
        self._drop_unnamed()

    def leave(self, replica: str) -> None:
        if self._publishers.pop(replica, None) is not None:
            self._drop_unnamed()

    def _drop_unnamed(self) -> None:
        self._followed = None
        named = {address for each in self._publishers.values() for address in (each.events, each.node)}
        if self.index is not None:
            for address in self._consumers.keys() - named:
                self._forget(self._consumers.pop(address), self.index)

    def names(self, tokens: Sequence[int], cache_salt: str | None, default: str | None, lora: str | None) -> list[int]:
        """A prompt's leading blocks, as the index names them. Any thread. `default`: unsalted's namespace."""
        if self.index is None:
            return []
        namespace = default if cache_salt is None else cache_salt
        if cache_salt is not None and self._fingerprint is not None:
            namespace = namespace_of(root_hash(self._fingerprint, cache_salt=cache_salt))
        leading = tokens[: _MOST * self.index.block_size]
        return prompt_hashes(leading, self.index.block_size, lora, namespace)

    async def held(self, tokens: Sequence[int], cache_salt: str | None, default: str | None, lora: str | None) -> Held:
        """What the replicas hold of a prompt. The blocks of a long one are named on a thread."""
        what = tokens, cache_salt, default, lora
        names = await asyncio.to_thread(self.names, *what) if len(tokens) > _LONG else self.names(*what)
        return self.of(len(tokens), names)

    def of(self, num_tokens: int, names: Sequence[int]) -> Held:
        if self.index is None:
            return Held()
        if self._followed is None or self._followed.change != EventConsumer.last_change:
            self._followed = self._look()
        followed = self._followed
        found = Prefixes(followed.rows, self.index.prefixes(names, followed.feeds))
        return Held(num_tokens // self.index.block_size, found, followed.sure, names)

    def _look(self) -> _Followed:
        change = EventConsumer.last_change  # before the states: a later one shows
        live: dict[str | None, str] = {at: each.worker for at, each in self._consumers.items() if each.is_live}
        workers: dict[str | None, str] = {at: each.worker for at, each in self._consumers.items()}
        named = self._publishers.values()
        tellers = [
            workers.get(each.node or each.events) for each in named
        ]  # who has a shared tier publishes its blocks
        feeds = Feeds([live.get(each.events) for each in named], [live.get(each.node) for each in named], tellers)
        sure = frozenset(replica for replica, each in self._publishers.items() if (each.events or each.node) in live)
        return _Followed(change, {replica: row for row, replica in enumerate(self._publishers)}, feeds, sure)

    def state(self, replica: str) -> FeedsState:
        publishers = self._publishers.get(replica, Publishers())
        blocks: dict[str, int] = {}
        for address in (publishers.events, publishers.node):
            if self.index is not None and address in self._consumers:
                for medium, num_blocks in self.index.holdings(self._consumers[address].worker).items():
                    blocks[medium] = blocks.get(medium, 0) + num_blocks
        return FeedsState(self._feed(publishers.events), self._feed(publishers.node), blocks)

    def close(self) -> None:
        """Stop following. Returns within `_LAST` seconds; a thread that is late ends by itself."""
        end = time.monotonic() + _LAST
        for consumer in self._consumers.values():
            consumer.stop()
        late = [at for at, consumer in self._consumers.items() if not consumer.close(max(0.0, end - time.monotonic()))]
        for worker, thread in self._leaving.items():
            thread.join(max(0.0, end - time.monotonic()))
            late += [worker] * thread.is_alive()
        if late:
            _log.warning("still reading events of %s: not waited for", ", ".join(late))
        self._consumers.clear()
        self._leaving.clear()

    def _worker(self, address: str) -> str:
        """The publisher's name in the index: its address, plus a number while older blocks of it are being removed."""
        leaving = self._leaving.get(address)
        return address if leaving is None or not leaving.is_alive() else f"{address} #{next(self._numbers)}"

    def _forget(self, consumer: EventConsumer, index: PrefixIndex) -> None:
        """Stop following a publisher, on a thread: a million blocks take half a second, a batch under way seconds."""

        def forget() -> None:
            while not consumer.close():  # events after the drop would stay in the index for ever
                continue
            index.drop(consumer.worker)

        self._leaving = {worker: thread for worker, thread in self._leaving.items() if thread.is_alive()}
        forgetting = threading.Thread(target=forget, name=f"kvtier-forget-{consumer.worker}", daemon=True)
        self._leaving[consumer.worker] = forgetting
        forgetting.start()

    def _feed(self, address: str | None) -> statuses.FeedStatus | None:
        if address not in self._consumers:
            return None
        state = self._consumers[address].state
        gaps, lost = (state.counts.get(name, 0) for name in ("gaps", "lost"))
        feed = statuses.FeedStatus(state=state.state, seq=state.seq, gaps=gaps, lost=lost, age_s=state.age)
        return feed if state.why is None else feed.model_copy(update={"why": state.why})
