"""Hierarchy, slab and a strict reader of their KV events: whatever happens, replaying them gives what tiers hold."""

import os
import shutil
import tempfile
from pathlib import Path

from doubles import SLOT_BYTES, chain_of, store
from event_rig import Shelf, held, tiered
from extent import brief
from fault_rig import rest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.hierarchy.hierarchy import EventSource, Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.naming.chain import TokenChain

SLOTS = 16
SIZES = (60_000, 160_000)  # of the slab: some two or three extents, or eight
# Six chains, two of which share their first blocks, as requests with a common system prompt do.
CHAINS = [chain_of(6, first_token=1000 * i) for i in range(6)]
CHAINS.append(TokenChain(CHAINS[0].root, CHAINS[0].block_size))
CHAINS[-1].extend([*range(12), *range(9000, 9012)])
NAMES = list({name: None for chain in CHAINS for name in chain.hashes})

chains = st.sampled_from(CHAINS)
positions = st.integers(0, 5)


class EventsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-events-"))

    @initialize(size=st.sampled_from(SIZES), write_back=st.booleans(), late=st.booleans())
    def begin(self, size: int, write_back: bool, late: bool) -> None:
        self.size = size
        self.settings = HierarchySettings(write_policy="write_back" if write_back else "write_through")
        self.hierarchy: Hierarchy = tiered(SLOTS, self.directory, self.size, self.settings)
        if late:  # a reader who finds the tiers full of blocks nobody told it of
            store(self.hierarchy, CHAINS[0])
            assert self.hierarchy.drain(60)
        self.listen()

    @rule()
    def listen(self) -> None:
        """Somebody who knows nothing starts to listen, or starts over."""
        self.shelf = Shelf()
        self.source = EventSource(self.hierarchy)

    @rule(chain=chains, first=positions)
    def store(self, chain: TokenChain, first: int) -> None:
        store(self.hierarchy, chain, first)

    @rule(chain=chains, position=positions, num_tokens=st.integers(1, 3))
    def store_partial(self, chain: TokenChain, position: int, num_tokens: int) -> None:
        """A tail behind one of the chain's blocks: no reader is ever told of it."""
        first = position * chain.block_size
        tokens = chain.next_tokens(position)[: 4 * num_tokens]
        tail = chain.partial_block(first + num_tokens)
        assert tail is not None
        assert tail.tokens == tokens
        [reservation] = self.hierarchy.reserve([Wanted([tail.chain_hash], tail.parent, chain.root, is_partial=True)])
        if reservation is not None and len(reservation):
            self.hierarchy.seal(reservation, [tail], self.hierarchy.epoch)
            assert self.hierarchy.stores.sealing_queue.drain(60)

    @rule(chain=chains)
    def load(self, chain: TokenChain) -> None:
        """From the slab to L2, with whatever that evicts there."""
        prefetch = self.hierarchy.submit(chain.hashes, chain.root)
        assert self.hierarchy.ports[0].queue.drain(60)
        self.hierarchy.cancel(prefetch)

    @rule(chain=chains, first=positions)
    def evict(self, chain: TokenChain, first: int) -> None:
        self.hierarchy.host.pool.evict(chain.hashes[first : first + 2])

    @rule(chain=chains, first=positions)
    def discard(self, chain: TokenChain, first: int) -> None:
        tier = self.hierarchy.ports[0].tier
        assert tier is not None
        tier.discard(chain.hashes[first : first + 2])

    @rule(chain=chains, position=positions, byte=st.integers(0, SLOT_BYTES - 1))
    def rot(self, chain: TokenChain, position: int, byte: int) -> None:
        """A byte on disk turns; who reads it finds out."""
        slab = self.hierarchy.ports[0].tier
        assert isinstance(slab, FileStore)
        slot = slab._blocks.index.find_one(chain.hashes[position])
        if slot < 0:
            return
        offset = slab.superblock.payload_offset(slot) + byte
        fd = os.open(slab.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
        os.close(fd)

    @rule(chain=chains, position=positions)
    def rot_in_memory(self, chain: TokenChain, position: int) -> None:
        """A byte in L2 turns: a demotion that has not read it yet finds out, and the block leaves L2."""
        store(self.hierarchy, chain)
        with self.hierarchy.host.pool.lease([chain.hashes[position]]) as lease:
            for slot in lease.slots:
                self.hierarchy.host.region.slot(slot)[0] ^= 1

    @rule()
    def reset(self) -> None:
        self.hierarchy.reset()

    @rule()
    def lose_the_file(self) -> None:
        """The slab vanishes; the next probe finds out and opens a new one."""
        port = self.hierarchy.ports[0]
        assert isinstance(port.tier, FileStore)
        rest(self.hierarchy)
        port.tier.path.unlink()
        assert port.probe("read")

    @rule()
    def reopen(self) -> None:
        """A new process finds the slab as it was left, and tells its reader of it."""
        self.hierarchy.close()
        self.hierarchy = tiered(SLOTS, self.directory, self.size, self.settings)
        self.listen()

    @rule(limit=st.integers(1, 9))
    def read_some(self, limit: int) -> None:
        self.shelf.apply(self.source.take(limit))

    @rule()
    def read_all(self) -> None:
        rest(self.hierarchy)  # what comes behind a block that rotted stays unwritten
        self.shelf.read(self.source)
        assert {tier: self.shelf.names(tier) for tier in ("l2", "file")} == held(self.hierarchy, NAMES)
        for blocks in self.shelf.blocks.values():
            for chain in CHAINS:
                for position, name in enumerate(chain.hashes):
                    if (record := blocks.get(name)) is not None:
                        assert (record.chain_hash, record.parent) == (name, chain.parent(position))
                        assert record.tokens == chain.block_tokens(position)

    @invariant()
    def nothing_is_lost_on_the_way(self) -> None:
        """What the reader knows and what waits for it is what is held: `check` compares the logs with the tiers."""
        if hasattr(self, "hierarchy"):
            rest(self.hierarchy)
            self.hierarchy.check()

    def teardown(self) -> None:
        if hasattr(self, "hierarchy"):
            self.read_all()
            self.hierarchy.close()
        shutil.rmtree(self.directory)


EventsMachine.TestCase.settings = settings(max_examples=brief(12, 50), stateful_step_count=30)
TestEventsMachine = EventsMachine.TestCase
