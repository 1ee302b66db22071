"""An engine's requests as the scheduler side sees them: chains, views of stored blocks, and copies under way."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeGuard

import numpy as np

from kvtier.connector.plan import CopyOp
from kvtier.tiers import L1, L2, TIERS, ChainHash, ChildBlock, Outcome
from kvtier.tiers.hierarchy import Attribution, Claim, Wanted
from kvtier.tiers.naming import state_name
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import Hint, RequestEnd

LEAST: Final = 8  # 1/8 of a block is the smallest part worth a load of its own


class BlockChain(Protocol):
    """The named blocks of one growing sequence: a `TokenChain`, or the engine's own hashes."""

    block_size: int  # tokens

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks."""

    @property
    def tenant(self) -> ChainHash:
        """The root of chains with this request's cache_salt."""

    @property
    def root(self) -> ChainHash:
        """The parent of block 0."""

    def parent(self, block: int) -> ChainHash:
        """The name of the block before block `block`."""

    def block_tokens(self, block: int) -> bytes:
        """The tokens of a full block, u32 little-endian."""


class NamedByTokens(BlockChain, Protocol):
    """A chain that knows whether equal tokens mean equal KV, such as a `TokenChain`."""

    def next_tokens(self, block: int) -> bytes:
        """The tokens that block `block` has so far, u32 little-endian; none if its KV also depends on other inputs."""

    def is_plain(self, child: ChildBlock, parent: ChainHash) -> bool:
        """Whether the child's name follows from its parent and tokens alone."""


def is_named_by_tokens(chain: object) -> TypeGuard[NamedByTokens]:
    """Whether this is such a chain. Called at each lookup, so it checks one method."""
    return hasattr(chain, "is_plain")


@dataclass(frozen=True, slots=True)
class PartialView:
    """A chain that is loaded for a request: its own leading blocks, then one that begins like its next block.

    It is loaded in the request's name, but only `shared` tokens of the last block are the request's own.
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
        """The request's own tokens in the view."""
        return self.num_own * self.block_size + self.shared

    def covered(self, num_blocks: int) -> int:
        """The request's own tokens in the view's first `num_blocks`."""
        return self.num_tokens if num_blocks > self.num_own else num_blocks * self.block_size


def best_child(
    chain: NamedByTokens, children: Sequence[ChildBlock], block: int, own: bytes
) -> tuple[ChildBlock, int] | None:
    """The child that shares the most leading tokens with the chain's block `block`, and how many; None: none does.

    `own`: the loadable tokens of that block, as bytes.
    """
    first = own[:4]  # rejects most children cheaply
    if not first:
        return None
    counted = [(_num_shared(own, child.tokens), child) for child in children if child.tokens.startswith(first)]
    for num_shared, child in sorted(counted, key=lambda pair: -pair[0]):
        if chain.is_plain(child, chain.parent(block)):
            return child, num_shared
    return None


def pays(num_found: int, shared: int, block_size: int, *, in_l1: int, least: int) -> bool:
    """Whether a child's `shared` tokens after `num_found` blocks bring more than the `least` tokens available anyway.

    If nothing else is loaded, they must be an eighth of a block: the first token of all prompts is often the same, and
    a load costs a step.
    """
    is_alone = num_found <= in_l1
    return num_found * block_size + shared > least and (not is_alone or LEAST * shared >= block_size)


def tier_of_last(of_view: Attribution | None, of_own: Attribution | None) -> str:
    """The tier with one block more in the view than of the request's own: it has the view's last. L2 if unclear."""
    if of_view is None or of_own is None:
        return L2
    more = [tier for tier, count in of_view.by_tier.items() if count > of_own[tier]]
    return more[0] if len(more) == 1 else L2  # blocks moved in between; a load is from L2 anyway


def _num_shared(own: bytes, other: bytes) -> int:
    size = min(len(own), len(other))
    if own[:size] == other[:size]:
        return size // 4
    return int((np.frombuffer(own[:size], "<u4") != np.frombuffer(other[:size], "<u4")).argmax())


class StatePieces:
    """The recurrent states after a block, as a chain that begins at that block. A `BlockChain`."""

    __slots__ = ("_blocks", "block_size", "border", "hashes", "root", "spares", "tenant")

    def __init__(self, blocks: BlockChain, border: int, groups: Iterable[int]) -> None:
        """`border` is the number of blocks before the states. A slot has the state of one of `groups`, or a piece."""
        self._blocks = blocks
        self.block_size = blocks.block_size
        self.border = border
        self.tenant = blocks.tenant
        self.root = blocks.hashes[border - 1]
        self.hashes: Sequence[ChainHash] = [state_name(self.root, group) for group in groups]

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self._blocks.block_tokens(self.border - 1)


_SHORTEST: Final = 512  # tokens before the first state that a long prompt stores at a power of two


def borders_to_keep(border: int, last: int, parted: int, block_size: int) -> list[int]:
    """The borders after `border` at which a prompt's states are stored, if several tokens at once may follow them.

    These are its `last` one, the end of the blocks that were known (`parted`), and powers of two.
    """
    powers = [1 << power for power in range(last.bit_length())]
    wanted = {last, parted, *(each for each in powers if each * block_size >= _SHORTEST)}
    return [each for each in sorted(wanted) if border < each <= last]


_MOST_SPARED: Final = (1 << 20) - 1  # tokens: the daemon's protocol takes no more for one block
_PREFILL: Final = 64  # tokens: a step that prefills so many measures how long they take


def prefill_of(chunks: Iterable[tuple[int, int]], num_tokens: int) -> tuple[int, float]:
    """Of a step of `num_tokens`: how many it prefills, and how many precede each of these, on average.

    `chunks`: of each request that prefills, its tokens and those before them. 0 if they are too few to measure prefill.
    """
    num_prefilled, seen = 0, 0.0
    for num_new, num_before in chunks:
        num_prefilled += num_new
        seen += num_new * (num_before + num_new / 2)
    if num_prefilled < max(_PREFILL, num_tokens / 2):
        return 0, 0.0
    return num_prefilled, seen / num_prefilled


class ClosedChain(StatePieces):
    """A request's blocks up to a border, then the states to continue from: for lookups only.

    For a model that keeps only states, it has the states alone. All of it is loaded or nothing: each block `spares`
    its part of the prefix's tokens.
    """

    __slots__ = ()

    def __init__(self, blocks: BlockChain, border: int, groups: Iterable[int], *, keeps_blocks: bool) -> None:
        super().__init__(blocks, border, groups)
        self.hashes = [*(blocks.hashes[:border] if keeps_blocks else ()), *self.hashes]
        self.root = blocks.root
        self.spares = min(border * blocks.block_size // len(self.hashes), _MOST_SPARED)


@dataclass(slots=True)
class ClosedRequest:
    """The target of a lookup: a request's blocks up to a border, and the states there. All of it, or nothing."""

    request_id: str
    chain: ClosedChain

    @property
    def num_tokens(self) -> int:
        """One more than the records have: all of them may be promised."""
        return len(self.chain.hashes) * self.chain.block_size + 1


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
        """How many tokens it has now: the last of them is always computed, never loaded."""


class Answered(NamedTuple):
    """How a request with an answer finished."""

    num_prompt_tokens: int
    num_output_tokens: int
    hint: Hint | None = None
    is_derived: bool = False  # the hint follows from the answer, no client sent it
    seconds: float = 0.0  # from its arrival to its end; 0: unknown
    ttft: float = 0.0  # from its arrival to its first token; 0: unknown

    def finish_of(self, chain: BlockChain, request_id: str = "") -> RequestEnd:
        """The report to the tiers. Requests with one cache_salt are one client: each tenant is judged by itself."""
        client, names = int.from_bytes(chain.tenant[:4], "little"), chain.hashes
        num_prompt_blocks = min(self.num_prompt_tokens // chain.block_size, len(names))  # some get a name later
        return RequestEnd(
            names, num_prompt_blocks, self.num_output_tokens, self.hint, client, self.is_derived, self.seconds,
            request_id, self.num_prompt_tokens, self.ttft,
        )  # fmt: skip


@dataclass(slots=True)
class ConnectedRequest:
    """A live request and the state of its lookup."""

    request: Request
    epoch: int  # the tiers' at admission
    num_l1: int = 0  # blocks in L1 at the last lookup
    claim: Claim | None = None
    view: PartialView | None = None  # what is claimed, if not its own blocks alone
    found: Attribution | None = None  # where its blocks were at the first lookup
    found_in_part: str | None = None  # the tier that had the view's last block
    causes: Causes | None = None  # why the missing ones were missing then
    spares: int = 0  # tokens that each block of an all-or-nothing claim spares; 0: any part of it is useful
    looked_behind: int = -1  # number of found blocks at the last fruitless search for a child
    look_again: float = 0.0
    whole_only: bool = False  # no more views: one was refused
    was_crowded: bool = False  # others used all of L2 for longer than it waits
    recompute: bool = False  # final: loading is slower, or has failed

    def loaded_by_tier(self, num_tokens: int) -> dict[str, int]:
        """Where the tokens that were loaded were at first. Found but not loaded ones were computed."""
        size = self.request.chain.block_size
        in_part = num_tokens % size if self.found_in_part else 0
        loaded, left = dict.fromkeys(TIERS, 0), num_tokens - in_part
        for tier in (name for name in TIERS if name != L1):  # nearest first
            loaded[tier] = min(left, 0 if self.found is None else self.found[tier] * size)
            left -= loaded[tier]
        loaded[L2] += left  # moved to L2 meanwhile: a load is always from there
        if self.found_in_part:
            loaded[self.found_in_part] += in_part
        return loaded

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
    num_bytes: int
    planned_at: float
    copied: Callable[[bool], None] | None = None  # for a group of an overlapped load: called with its success


@dataclass(eq=False, slots=True, kw_only=True)
class StoringOp(Wanted):
    """Blocks to be stored: first without slots, then with a reservation."""

    request_id: str
    tokens_of: Callable[[int], bytes]  # the tokens of a block of its chain
    first_block: int
    epoch: int
    blocks: list[int]  # in L1, not released yet
    reservation: Reservation | None = None
    until: float = 0.0  # on the monotonic clock: retried until then; set at the first late or short answer
