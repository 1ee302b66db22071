"""AnnouncedBlocks against what tiers hold: told is just what a lookup can find, and a late reader is told the same."""

from functools import partial

from doubles import chain_over
from extent import brief
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.publisher import MAX_RUN, AnnouncedBlocks
from kvtier.service.events.wire import BlockRemoved, BlockStored, KVEvent, external_hash, namespace_of
from kvtier.tiers.hierarchy.hierarchy import Removed, Stored
from kvtier.tiers.kinds import TIERS
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import BlockRecord

FINGERPRINT = b"a model whose blocks are told".ljust(32, b".")
SIZE = 4
chain_of = partial(chain_over, fingerprint=FINGERPRINT)


def records(chain: TokenChain, *blocks: int) -> tuple[BlockRecord, ...]:
    return tuple(BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in blocks)


CHAIN = chain_of(range(16))
NAMES = [external_hash(name) for name in CHAIN.hashes]


def test_runs_become_events() -> None:
    told = AnnouncedBlocks(FINGERPRINT)
    assert told.apply(Stored("l2", records(CHAIN, 0, 1))) == [
        BlockStored(NAMES[:2], None, [*range(8)], SIZE, None, "CPU", None)
    ]
    assert told.apply(Stored("redis", records(CHAIN, 2))) == [
        BlockStored(NAMES[2:3], NAMES[1], [*range(8, 12)], SIZE, None, "EXTERNAL", None)
    ]
    assert told.apply(Stored("l1", records(CHAIN, 2, 3)))[0] == BlockStored(
        NAMES[2:], NAMES[1], [*range(8, 16)], SIZE, None, "GPU", None
    )
    assert told.apply(Removed("redis", (CHAIN.hashes[2],))) == [BlockRemoved([NAMES[2]], "EXTERNAL")]
    assert told.num_announced == 4
    told.check()


def test_tenants_have_a_namespace_and_are_told_when_it_is_known() -> None:
    told = AnnouncedBlocks(FINGERPRINT)
    salted = chain_of(range(8), "t1")
    assert told.apply(Stored("l2", records(salted, 0, 1))) == []  # its parent may be a root, or missing
    namespace = namespace_of(salted.root)
    [event] = told.begin_at(salted.root)
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.extra_keys) == (None, [(namespace,), None])
    assert "t1" not in str(event)
    assert told.begin_at(salted.root) == []
    index = PrefixIndex(SIZE)
    for line in told.snapshot():
        index.apply("w", line)
    assert index.matches(prompt_hashes([*range(8)], SIZE)) == {}
    assert index.matches(prompt_hashes([*range(8)], SIZE, namespace=namespace)) == {"w": {"CPU": 2}}


def test_names_that_tokens_do_not_explain_are_not_told() -> None:
    told = AnnouncedBlocks(FINGERPRINT)
    image = chain_of(range(8), extra_keys={0: [("mm", b"1")]})
    assert told.apply(Stored("l2", records(image, 0, 1))) == []
    assert told.num_withheld == 1
    assert told.apply(Removed("l2", tuple(image.hashes))) == []
    assert len(told.apply(Stored("l2", records(chain_of(range(8), scheme="xxh3"), 0, 1)))) == 1
    told.check()


def test_long_chains_are_told_in_pieces() -> None:
    told = AnnouncedBlocks(FINGERPRINT)
    chain = chain_of(range((MAX_RUN + 1) * SIZE))
    events = told.apply(Stored("l2", records(chain, *range(MAX_RUN + 1))))
    assert [len(event.block_hashes) for event in events if isinstance(event, BlockStored)] == [MAX_RUN, 1]
    [*removed] = told.apply(Removed("l2", tuple(chain.hashes), all=True))
    assert sum(len(event.block_hashes) for event in removed if isinstance(event, BlockRemoved)) == MAX_RUN + 1


# Chains that share their beginnings, one of another tenant's; each block named by chain and place.
CHAINS = [
    chain_of(range(16)),
    chain_of([*range(8), *range(100, 108)]),
    chain_of([*range(4), *range(200, 204)]),
    chain_of(range(12), "t1"),
]
BLOCKS = {chain.hashes[i]: record for chain in CHAINS for i in range(len(chain.hashes)) for record in records(chain, i)}
NAMESPACES = [None, None, None, namespace_of(CHAINS[3].root)]


class AnnouncedMachine(RuleBasedStateMachine):
    """A reader from the beginning, and one that comes now: both know what a lookup in the tiers would find."""

    def __init__(self) -> None:
        super().__init__()
        self.told = AnnouncedBlocks(FINGERPRINT)
        self.index = PrefixIndex(SIZE, strict=True)
        self.held: set[tuple[str, bytes]] = set()
        self.knows_tenant = False

    tiers = st.sampled_from(list(TIERS))

    def read(self, events: list[KVEvent]) -> None:
        for event in events:
            self.index.apply("w", event)

    @rule(tier=tiers, names=st.lists(st.sampled_from(list(BLOCKS)), min_size=1, max_size=4, unique=True))
    def store(self, tier: str, names: list[bytes]) -> None:
        for name in names:  # in any order, as tiers don't wait for each other
            if (tier, name) not in self.held:
                self.read(self.told.apply(Stored(tier, (BLOCKS[name],))))
                self.held.add((tier, name))

    @rule(tier=tiers, chain=st.sampled_from(CHAINS), first=st.integers(0, 3))
    def store_chain(self, tier: str, chain: TokenChain, first: int) -> None:
        new = [i for i in range(first, len(chain.hashes)) if (tier, chain.hashes[i]) not in self.held]
        self.read(self.told.apply(Stored(tier, records(chain, *new))))
        self.held |= {(tier, chain.hashes[i]) for i in new}

    @rule(tier=tiers, data=st.data())
    def remove(self, tier: str, data: st.DataObject) -> None:
        there = sorted(name for where, name in self.held if where == tier)
        if there:
            names = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
            self.read(self.told.apply(Removed(tier, tuple(names))))
            self.held -= {(tier, name) for name in names}

    @rule(tier=tiers)
    def reset(self, tier: str) -> None:
        names = tuple(name for where, name in self.held if where == tier)
        self.read(self.told.apply(Removed(tier, names, all=True)))
        self.held = {(where, name) for where, name in self.held if where != tier}

    @rule()
    def close(self) -> None:
        self.read(self.told.clear())
        self.held.clear()

    @rule()
    def hear_of_the_tenant(self) -> None:
        self.knows_tenant = True
        self.read(self.told.begin_at(CHAINS[3].root))

    @invariant()
    def is_right(self) -> None:
        self.told.check()
        late = PrefixIndex(SIZE, strict=True)
        for event in self.told.snapshot():
            late.apply("w", event)
        for index in (self.index, late):
            index.check()
            assert not index.counts
            for chain, namespace in zip(CHAINS, NAMESPACES, strict=True):
                found = index.matches(prompt_hashes(chain._tokens, SIZE, namespace=namespace)).get("w", {})
                assert found == self.expected(chain)

    def expected(self, chain: TokenChain) -> dict[str, int]:
        found: dict[str, int] = {}
        if chain is CHAINS[3] and not self.knows_tenant:
            return found
        for name in chain.hashes:
            tier = next((tier for tier in TIERS if (tier, name) in self.held), None)
            if tier is None:
                break
            medium = TIERS[tier].medium
            found[medium] = found.get(medium, 0) + 1
        return found


TestAnnouncedBlocks = AnnouncedMachine.TestCase
TestAnnouncedBlocks.settings = settings(max_examples=brief(10, 40), stateful_step_count=30)
