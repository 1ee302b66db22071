"""What an engine's requests are to the scheduler side, and what it keeps of each while that lives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.connector.partial import PartialView
from kvtier.connector.plan import CopyOp
from kvtier.tiers import ChainHash, Outcome
from kvtier.tiers.hierarchy import Attribution, Claim, Wanted
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import Hint, RequestEnd


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
