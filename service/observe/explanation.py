"""What a daemon, an engine or a router answers to `kvtier explain`, typed: read by the verb, whoever answers there."""

from collections.abc import Sequence

from kvtier.service.observe.statuses import StatusPart


class BlockRun(StatusPart):
    first: int
    blocks: int
    tier: str | None


class MissingCause(StatusPart):
    name: str
    tier: str
    seconds: int
    block: int


class TokensThatDiffer(StatusPart):
    token: int
    tokens: list[int]
    held_tokens: list[int]
    same: int


class FieldThatDiffers(StatusPart):
    field: str
    here: str
    there: str


class OtherModel(StatusPart):
    model: str
    blocks: int
    block_size: int
    fields: Sequence[FieldThatDiffers] = ()


class ClosedSlab(StatusPart):
    model: str
    bytes: int
    fields: Sequence[FieldThatDiffers] = ()


class OtherTenant(StatusPart):
    tenant: str
    blocks: int


class Explanation(StatusPart):
    """A daemon's answer; `explained` makes lines of it."""

    block_size: int
    tokens: int
    runs: list[BlockRun]
    cause: MissingCause | None
    differs: TokensThatDiffer | None
    nothing_alike: bool = False  # its first block is missing, and no held one that was compared shares tokens with it
    elsewhere: list[OtherModel]
    closed: Sequence[ClosedSlab] = ()
    tenants: Sequence[OtherTenant] = ()
    recompute: str | None = None  # the tier whose blocks take longer to load than to compute
    unreachable: Sequence[str] = ()  # tiers that may hold the missing block, and do not answer now


class ExplainedLines(StatusPart):
    """What an engine's answer has for people, or a router's."""

    lines: list[str]
