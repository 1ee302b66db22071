"""`/status`, typed: the status of a daemon, of an engine's server and of a router.

The process itself fills it in; `as_json` writes it, `parse` reads what came over HTTP. Operators' tools read the
fields' names as JSON keys: a field may be added, none may change its name or type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvtier.service import Json, first_error, shown
from kvtier.tiers import FormatError

Counts = dict[str, int]  # by reason, tier or event; usually without zeros


class StatusPart(BaseModel):
    """A part of a status, or all of it. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @classmethod
    def parse(cls, page: Mapping[str, Any]) -> Self:
        """Parse a page's JSON. FormatError names the first field that is missing or wrong."""
        try:
            return cls.model_validate(page)
        except ValidationError as error:
            field, why, kind, value = first_error(error)
            what = "missing" if kind == "missing" else f"{shown(value)}: {why}"
            who = f"kvtier {shown(page['version'])}" if "version" in page else "another kvtier"
            raise FormatError(f"answer of {who}: {field}: {what}; run one kvtier on both sides") from None

    def as_json(self) -> Json:
        """The JSON object, without the fields that were never given."""
        return self.model_dump(mode="json", exclude_unset=True)


class BlockFigures(StatusPart):
    lookups: Counts  # blocks looked up, by the tier that had them; "miss" for none
    missed: Counts  # blocks not served, by reason
    stored: Counts  # blocks, by tier
    dropped: dict[str, Counts]  # blocks not stored, by tier and reason
    evicted: Counts  # blocks, by tier
    corrupted: Counts  # blocks, by tier
    moved: dict[str, Counts]  # bytes, by tier and direction
    absent: dict[str, Counts] = {}  # blocks that no tier held, by eviction reason and the tier they left
    ages: dict[str, list[int]] = {}  # by tier: evicted blocks by their age, below 1 s, 2 s, 4 s …, and any


# --- a daemon --------------------------------------------------------------------------------------------------------


class WantingPart(StatusPart):
    part: str
    why: str


class DegradedTier(StatusPart):
    model: str
    tier: str
    direction: str
    breaker: str
    why: str | None = None  # if it is not a count of failures


class MemoryBudget(StatusPart):
    bytes: int
    given: int  # of these, to models


class PublishedEvents(StatusPart):
    """KV events: where they are published, and counts. More keys count batches, events, replays and failures."""

    model_config = ConfigDict(frozen=True, extra="allow")

    publish: str | None
    replay: str | None
    seq: int


class HostTierStatus(StatusPart):
    """A model's host memory (L2). `ready + filling + free + quarantined` is `slots`."""

    slots: int
    bytes: int
    ready_bytes: int
    pinned: int
    quotas: int
    free: int
    filling: int
    ready: int
    leased: int
    quarantined: int
    dirty: int
    tails: int


class StorageRoom(StatusPart):
    """Storage of a tier, in bytes, whatever uses it; and the tier's slab."""

    place: str  # a directory, a server's address, or the slab's file
    used: int
    limit: int | None  # None: no bound is set
    is_own: bool = False  # a slab: nothing else uses it


class LowerTierStatus(StatusPart):
    slots: Counts  # by state
    breakers: dict[str, str]  # by direction
    room: list[StorageRoom] = []
    answering: int = 0  # other nodes, of the tier in their memory
    sure: int = 0  # of these, nodes whose KV events are complete
    failures: Counts = {}  # of these, by reason
    saved: Counts = {}  # bytes that compression saved, sent and received


class AgeCounts(StatusPart):
    """A histogram of seconds: `counts[i]` lie above `bounds[i - 1]` and up to `bounds[i]`; the last has no bound."""

    bounds: list[float]
    counts: list[float]


class OptimumFigures(StatusPart):
    capacity: int  # blocks that the tiers of this node hold
    seconds: float  # covered by the lookups
    asked: int
    found: int
    optimum: int
    steps: list[tuple[float, int, int, int]]  # seconds ago, and these three, for each part of that time


class SavedFigures(StatusPart):
    tokens: int  # loaded instead of computed
    untimed_tokens: int  # of these, without a known rate
    prefill_s: float  # seconds of prefill that the others would have taken
    load_s: float  # seconds of loading from lower tiers, to subtract from the saving
    tokens_per_s: float | None  # of prefill now
    assumed: bool  # by [service] prefill_rate: no engine has reported a measured rate
    million_computed: float | None = None  # price of prefilling a million of these tokens; None: no price or no rate
    million_loaded: float | None = None  # … and of having had them in the cache instead


class _OpenModel(StatusPart):
    model: str  # the first digits of its fingerprint
    name: str | None = None  # the engines' name of it, without the folders of a path
    fingerprint: str
    block_size: int  # tokens
    block_bytes: int
    clients: int
    l2: HostTierStatus
    tiers: dict[str, LowerTierStatus]
    saved: SavedFigures | None = None
    optimum: OptimumFigures | None = None
    return_gaps: AgeCounts | None = None  # how long after a request's end the next one of its conversation came


class ModelStatus(BlockFigures, _OpenModel):  # pydantic takes the last base's fields first, and so does the JSON
    """A model whose tiers are open."""


class ClientStatus(StatusPart):
    pids: list[int]
    uid: int
    connected: bool
    seconds: float  # since it connected
    protocol: int  # version
    claims: int
    leases: int
    reservations: int
    preallocated: int  # slots
    model: str | None  # None until it was welcomed


class RefusedClient(StatusPart):
    """A reason for which the daemon refused engines or their workers, and the last refusal for it."""

    why: str
    count: int
    seconds_ago: float  # of the last one
    pid: int
    uid: int
    model: str | None  # None: refused before it named one


class TierCaption(StatusPart):
    name: str
    label: str
    shown: str
    medium: str
    lower: bool  # below L2


class DaemonStatus(StatusPart):
    version: str
    pid: int
    uptime_s: float
    status: str  # "ok" or "degraded"
    degraded: list[DegradedTier]
    wanting: list[WantingPart] = []
    socket: str
    token_file: str | None = None  # the file with the token of the verbs; None: it was configured
    budget: MemoryBudget
    events: Counts  # events of clients
    tier_captions: list[TierCaption]  # nearest first
    kv_events: PublishedEvents | None
    lent: Counts | None = None  # blocks and bytes to other nodes, and why connections were ended
    gpu_hour: float | None = None  # price of an hour of an engine's GPUs
    models: list[ModelStatus]
    clients: list[ClientStatus]
    refused: list[RefusedClient] = []  # the last one first; removed once an engine of that model is accepted


class TenantMemory(StatusPart):
    tenant: str  # "no salt", "others", "not known", or a label that does not reveal the cache_salt
    cache_salt: str | None = None  # to operators, of a tenant that has a quota
    quota_bytes: int | None = None  # with it: bytes of host memory it may use
    blocks: int
    bytes: int


class PrefixMemory(StatusPart):
    prefix: str  # to operators the name of the first block, to others a label
    tenant: str
    tokens: int  # that all of them share
    branches: int  # branches after these
    blocks: int
    bytes: int


class TierMemory(StatusPart):
    blocks: int
    bytes: int
    num_tenants: int
    tenants: list[TenantMemory]  # the largest first
    prefixes: list[PrefixMemory]  # the largest first


class ModelMemory(StatusPart):
    model: str
    tiers: dict[str, TierMemory]  # those that can list their blocks


class MemoryStatus(StatusPart):
    named: bool  # blocks by their names, as operators see them
    models: list[ModelMemory]


# --- an engine's server ----------------------------------------------------------------------------------------------


class SequenceCounts(StatusPart):
    live: int
    capacity: int
    waiting: int
    loading: int
    running: int


class DeviceTierStatus(StatusPart):
    blocks: int
    free: int


class TokenCounts(StatusPart):
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int


class StepCounts(StatusPart):
    done: int
    failed: int


class SegmentCounts(StatusPart):
    """Results of reused segments (docs/reuse.md)."""

    tokens: Counts  # "reused"; of these "repaired"
    blends: Counts  # requests: repaired "in_part", or computed "in_full"
    outcomes: Counts  # segments
    deviations: Counts  # requests by the upper bound of their unrepaired deviation, each in one bucket
    deviation_sum: float
    shares: Counts  # requests by the upper bound of the share of their reused tokens that was repaired, likewise
    share_sum: float


class EngineStatus(StatusPart):
    version: str
    pid: int
    status: str
    wanting: list[WantingPart] = []
    model: str
    fingerprint: str
    block_size: int
    max_model_len: int
    requests: SequenceCounts
    outcomes: Counts
    refused: Counts  # requests, by HTTP status
    l1: DeviceTierStatus
    tokens: TokenCounts
    cached_tokens: Counts  # by tier
    steps: StepCounts
    preempted: int
    segments: SegmentCounts | None = None  # if it reuses them
    tiers: BlockFigures | None = None  # if the engine has its own tiers


# --- a router --------------------------------------------------------------------------------------------------------


class FeedStatus(StatusPart):
    state: str
    seq: int | None
    gaps: int
    lost: int
    age_s: float | None
    why: str | None = None


class LatencyFigures(StatusPart):
    """Seconds that a replica's requests waited in the last minute, by its own metrics."""

    num: int  # waits
    p50_s: float
    p95_s: float


class ReplicaStatus(StatusPart):
    name: str
    url: str
    state: str
    why: str
    load: float  # blocks of work
    in_flight: int
    requests: int
    errors: Counts
    fingerprint: str | None = None  # of its model
    events: FeedStatus | None  # of its engine
    node_events: FeedStatus | None  # of its node's daemon
    blocks: Counts  # by medium
    latency: dict[str, LatencyFigures] = {}  # of the first token ("ttft") and between two ("itl")


class ReplicaListStatus(StatusPart):
    errors: Counts
    why: str | None


@dataclass(frozen=True, slots=True)  # no pydantic model: the policy makes one for every replica and request
class ReplicaScore:
    name: str
    cached: int  # of the prompt, in any tier; 0 if not known for sure
    load: float
    work: float | None  # estimated work before the first token: least is best. None: it cannot take a request


class RoutingDecision(StatusPart):
    time: float  # seconds since 1970
    prompt_blocks: int
    chosen: str | None
    reason: str
    scores: Sequence[ReplicaScore]


class RoutedTokens(StatusPart):
    prompt: int
    promised: int  # of these, tokens that the answering replica held by the index
    told_prompt: int  # by the usage that replicas report
    told_cached: int
    told_tiers: Counts


class RouterStatus(StatusPart):
    uptime_s: float
    block_size: int | None
    fingerprint: str | None
    models: list[str] = []  # that replicas serve, by name
    wanting: Sequence[WantingPart] = ()
    tier_captions: Sequence[TierCaption]  # nearest first
    replicas: Sequence[ReplicaStatus]
    list: ReplicaListStatus
    decisions: Sequence[RoutingDecision]  # the last one first
    requests: Counts  # by reason
    retries: Counts
    errors: Counts
    unknown_prompts: Counts
    tokens: RoutedTokens
    indexed_blocks: int
    forgotten_blocks: int
    cpu_s: float
    prompt_price: float | None = None  # of a million prompt tokens that replicas compute

    @property
    def million_price(self) -> float | None:
        """What a million prompt tokens cost, those that replicas had cached for nothing; None: not known."""
        tokens = self.tokens
        if self.prompt_price is None or not tokens.told_prompt:
            return None
        return self.prompt_price * (1 - tokens.told_cached / tokens.told_prompt)

    @property
    def num_up(self) -> int:
        return sum(replica.state == "up" for replica in self.replicas)
