"""What an engine's requests are to the scheduler side: their chains, views of held blocks, and copies under way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeGuard

import numpy as np

from kvtier.connector.plan import CopyOp
from kvtier.tiers import L2, BlockRecord, ChainHash, ChildBlock, Outcome
from kvtier.tiers.hierarchy import Attribution, Claim, Wanted
from kvtier.tiers.naming import state_name
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import Hint, RequestEnd

LEAST: Final = 8  # of a block, one part of so many is worth a load of its own


class BlockChain(Protocol):
    """The named blocks of one growing sequence: a `TokenChain`, or an engine's own hashes."""

    block_size: int  # tokens

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks."""

    @property
    def tenant(self) -> ChainHash:
        """Whose blocks they are: the root of chains with this request's cache_salt."""

    @property
    def root(self) -> ChainHash:
        """The name before block 0."""

    def parent(self, block: int) -> ChainHash:
        """The name before block `block`."""

    def block_tokens(self, block: int) -> bytes:
        """The tokens of a full block, u32 little-endian."""


class NamedByTokens(Protocol):
    """A chain that can say where equal tokens mean equal KV. A `TokenChain` is one."""

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    def parent(self, block: int) -> ChainHash:
        """The name before block `block`."""

    def next_tokens(self, block: int) -> bytes:
        """The tokens of block `block`, u32 little-endian, as many as it has; none if more shapes its KV."""

    def is_plain(self, child: ChildBlock, parent: ChainHash) -> bool:
        """Whether this name is what the parent and the tokens alone make it."""


def is_named_by_tokens(chain: object) -> TypeGuard[NamedByTokens]:
    """Whether this is such a chain. Asked at each lookup, so it looks at one method."""
    return hasattr(chain, "is_plain")


@dataclass(frozen=True, slots=True)
class PartialView:
    """The chain that is held in a request's stead: its own leading blocks, then one that begins as its next one does.

    What is promised of it may be loaded in the request's name, but the last block is the request's own only up to
    `shared` tokens.
    """

    hashes: list[ChainHash]  # the last one is the child's
    shared: int  # leading tokens of the child that are the request's own
    block_size: int

    @property
    def num_own(self) -> int:
        """Leading blocks that are the request's own."""
        return len(self.hashes) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the request that it brings, if it is held whole."""
        return self.num_own * self.block_size + self.shared

    def covered(self, num_blocks: int) -> int:
        """Tokens of the request in the view's first `num_blocks`."""
        return self.num_tokens if num_blocks > self.num_own else num_blocks * self.block_size


def best_child(
    chain: NamedByTokens, children: Sequence[ChildBlock], block: int, own: bytes
) -> tuple[ChildBlock, int] | None:
    """The child that shares most of the leading tokens of the chain's block `block`, and how many; None: none does.

    `own`: those tokens of the block that may be had, as bytes.
    """
    first = own[:4]  # most children part here, and cost nothing more
    if not first:
        return None
    counted = [(_num_shared(own, child.tokens), child) for child in children if child.tokens.startswith(first)]
    for num_shared, child in sorted(counted, key=lambda pair: -pair[0]):
        if chain.is_plain(child, chain.parent(block)):
            return child, num_shared
    return None


def pays(num_held: int, shared: int, block_size: int, *, in_l1: int, least: int) -> bool:
    """Whether a child's `shared` tokens behind `num_held` blocks bring more than the `least` tokens had anyway.

    Where nothing else is to be loaded, they must be an eighth of a block: the first token of all prompts is often the
    same, and a load costs a step.
    """
    is_alone = num_held <= in_l1
    return num_held * block_size + shared > least and (not is_alone or LEAST * shared >= block_size)


def tier_of_last(of_view: Attribution | None, of_own: Attribution | None) -> str:
    """The tier that had a view's last block: it had one more than of the request's own. L2 where others came there."""
    if of_view is None or of_own is None:
        return L2
    more = [tier for tier, count in of_view.by_tier.items() if count > of_own[tier]]
    return more[0] if len(more) == 1 else L2  # blocks moved in between; whatever is loaded comes from L2


def _num_shared(own: bytes, held: bytes) -> int:
    size = min(len(own), len(held))
    if own[:size] == held[:size]:
        return size // 4
    return int((np.frombuffer(own[:size], "<u4") != np.frombuffer(held[:size], "<u4")).argmax())


class StatePieces:
    """The records of the states behind a block, as a chain that begins at that block. A `BlockChain`."""

    __slots__ = ("_blocks", "block_size", "border", "hashes")

    def __init__(self, blocks: BlockChain, border: int, count: int) -> None:
        """`border` is the number of blocks before the states, which lie in `count` slots."""
        self._blocks = blocks
        self.block_size = blocks.block_size
        self.border = border
        self.hashes: Sequence[ChainHash] = [state_name(self.root, piece) for piece in range(count)]

    @property
    def tenant(self) -> ChainHash:
        return self._blocks.tenant

    @property
    def root(self) -> ChainHash:
        """The name of the block that the states stand behind."""
        return self._blocks.hashes[self.border - 1]

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self._blocks.block_tokens(self.border - 1)


class ClosedChain:
    """A request's blocks up to a border, and behind them the states to go on from. A `BlockChain` that is only read.

    Of a model that keeps states alone it is the states alone.
    """

    __slots__ = ("_blocks", "block_size", "border", "hashes")

    def __init__(self, blocks: BlockChain, border: int, groups: Sequence[int], *, keeps_blocks: bool) -> None:
        self._blocks = blocks
        self.block_size = blocks.block_size
        self.border = border
        last = blocks.hashes[border - 1]
        own = blocks.hashes[:border] if keeps_blocks else ()
        self.hashes: Sequence[ChainHash] = [*own, *(state_name(last, group) for group in groups)]

    @property
    def tenant(self) -> ChainHash:
        return self._blocks.tenant

    @property
    def root(self) -> ChainHash:
        return self._blocks.root

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self._blocks.block_tokens(min(block, self.border - 1))


@dataclass(slots=True)
class TailChain:
    """A `BlockChain` of one tail. It says nothing of the blocks before."""

    tail: BlockRecord
    tenant: ChainHash
    block_size: int  # tokens in a whole block

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The tail's name."""
        return [self.tail.chain_hash]

    @property
    def root(self) -> ChainHash:
        """Where this chain of one block begins."""
        return self.tail.parent

    def parent(self, block: int) -> ChainHash:
        """The name of the last whole block; the root if there is none."""
        return self.tail.parent

    def block_tokens(self, block: int) -> bytes:
        """The tail's tokens, fewer than a block has."""
        return self.tail.tokens


class Request(Protocol):
    """What the scheduler side reads of an engine's request."""

    @property
    def request_id(self) -> str:
        """Unique among the live requests."""

    @property
    def chain(self) -> BlockChain:
        """The hashes of its tokens so far, prompt and answer."""

    @property
    def num_tokens(self) -> int:
        """How many tokens it has now: at least the last of them is always computed, never loaded."""


class Answered(NamedTuple):
    """What a request came to that has its answer."""

    num_prompt_tokens: int
    num_output_tokens: int
    hint: Hint | None = None
    is_derived: bool = False  # nobody said the hint: the answer shows it
    seconds: float = 0.0  # from its arrival to its end; 0: not known
    ttft: float = 0.0  # from its arrival to its first token; 0: not known

    def end_of(self, chain: BlockChain, request_id: str = "") -> RequestEnd:
        """What the tiers are told. Whoever has the same cache_salt is one client: each tenant is judged by itself."""
        client = int.from_bytes(chain.tenant[:4], "little")
        num_prompt = self.num_prompt_tokens // chain.block_size
        return RequestEnd(
            chain.hashes, num_prompt, self.num_output_tokens, self.hint, client, self.is_derived, self.seconds,
            request_id, self.num_prompt_tokens, self.ttft,
        )  # fmt: skip


@dataclass(slots=True)
class ConnectedRequest:
    """A live request, and how far its lookup has come."""

    request: Request
    epoch: int  # the tiers' at admission
    asked: int = 0  # blocks found in L1 at the last lookup
    claim: Claim | None = None
    view: PartialView | None = None  # what the claim is of, if not of its own blocks alone
    found: Attribution | None = None  # where its blocks were when first asked
    found_in_part: str | None = None  # the tier that had the view's last block
    causes: Causes | None = None  # why the others were nowhere then
    looked_behind: int = -1  # so many held blocks: nothing there was of use
    look_again: float = 0.0
    whole_only: bool = False  # no view any more: one was refused
    was_crowded: bool = False  # others had all of L2, for longer than it waits
    recompute: bool = False  # decided once: loading is slower, or has failed

    @property
    def missed(self) -> Causes:
        """Why blocks of it were in no tier, as far as this process knows: (cause, tier) → blocks."""
        if self.causes is not None or self.found is None or not self.found.miss:
            return self.causes or {}
        return {(str(Outcome.ABSENT), ""): self.found.miss}


@dataclass(slots=True)
class LoadingOp:
    """A load that was planned and has not been reported."""

    op: CopyOp
    first_block: int
    lease: Lease
    slot_bytes: int
    planned_at: float


@dataclass(eq=False, slots=True, kw_only=True)
class StoringOp(Wanted):
    """Blocks to be stored: first wanted, then with their slots."""

    request_id: str
    chain: BlockChain
    first_block: int
    epoch: int
    blocks: list[int]  # in L1, that are not released yet
    reservation: Reservation | None = None
    until: float = 0.0  # on the monotonic clock: it is offered again until then. Set once the tiers answered too late
