"""The scheduler half's records of vLLM's requests and their states, hints from finished ones, and hand-overs."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import try_to_load_from_cache

from kvtier.connector import Answered, BlockChain, ClosedRequest, StatePieces, hint_in, prefill_of
from kvtier.connector.daemon import RemoteTiers
from kvtier.connector.models import ToolCalls, load_tokenizer
from kvtier.connector.vllm.keys import AheadChain, OwnChain, VllmChain
from kvtier.connector.vllm.slots import GroupLane
from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.hierarchy import CacheTiers, Hierarchy, Rates, Span
from kvtier.tiers.naming import state_name
from kvtier.tiers.reuse import Hint

if TYPE_CHECKING:
    from kvtier.connector.vllm.slots import SlotPlan


_log = logging.getLogger(__name__)

_BORDERS: Final = 32  # borders that are tried, from the last stored one backwards: a step ends at one of them
_PATIENCE: Final = 0.02  # seconds for that: with a daemon each try is a round trip
_STEPS: Final = 64  # under way at most; vLLM has one for each stage of its pipeline, and one more
_MARK: Final = "\0"  # in the ids derived from a request's; vLLM's ids have none


def owner(request_id: str) -> str:
    """The vLLM request that a `ClosedRequest` or `StateRequest` with this id belongs to."""
    return request_id.partition(_MARK)[0]


def part_id(request_id: str, part: object) -> str:
    """The id of a part of this request: of the lookup up to a border, or of its states."""
    return f"{request_id}{_MARK}{part}"


class GroupStates(StatePieces):
    """The states after a block, one for each of vLLM's groups. Each follows the block: others may be missing."""

    __slots__ = ()

    def parent(self, block: int) -> ChainHash:
        return self.root


class PrefillClock:
    """Measures how fast this vLLM prefills, from when steps are built and when their results are taken, in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = Rates("auto")
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=_STEPS)  # tokens, their mean position, start
        self._ended = 0.0  # when the last step's results were taken

    def began(self, num_tokens: int, position: float) -> None:
        """A step was built that prefills so many tokens; 0: it measures nothing. `position`: their mean position."""
        self._steps.append((num_tokens, position, self._clock()))

    def ended(self) -> tuple[int, float, float] | None:
        """The oldest step's results are taken: its tokens, seconds and mean position, if it measures prefill.

        With several steps under way, one runs from the end of the one before.
        """
        if not self._steps:
            return None
        num_tokens, position, began = self._steps.popleft()
        began, self._ended = max(began, self._ended), self._clock()
        if not num_tokens:
            return None
        measured = num_tokens, self._ended - began, position
        self._rates.computed(*measured)
        return measured

    def seconds(self, num_tokens: int) -> float | None:
        """Predicted time to prefill so many tokens; None before the first measurement."""
        return self._rates.prefill_seconds(0, num_tokens)


@dataclass(frozen=True, slots=True)
class UnnamedStates:
    """The states of a step that ended at a border, while its last token is being sampled: they have no name yet."""

    border: int
    blocks: tuple[tuple[int, int], ...]  # groups, and vLLM's block of each


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Stores a request's states: a `Request` for the scheduler side."""

    request_id: str
    chain: BlockChain
    num_tokens: int = 0  # nothing is looked up by it


def last_border(
    tiers: CacheTiers, blocks: BlockChain, among: range, groups: Sequence[int], *, keeps_blocks: bool = True
) -> int:
    """The last border in `among` at which blocks and states are known to be stored; 0: none.

    `keeps_blocks`: the model keeps K and V, too; otherwise states are looked up at every border. Covers L2 and this
    node's tiers. Shared tiers are queried by a claim, for one border.
    """
    until = time.monotonic() + _PATIENCE
    first, last = among.start, among.stop - 1
    if keeps_blocks:
        found = tiers.locate(blocks.hashes[:last], 0.0)
        last = min(last, found.blocks - found.miss)
        first = max(first, last - _BORDERS + 1)
    for border in range(last, first - 1, -1):
        if time.monotonic() >= until:
            return 0
        states = [state_name(blocks.hashes[border - 1], group) for group in groups]
        if all(not tiers.locate([state], 0.0).miss for state in states):
            return border
    return 0


def params_of(request: Any) -> Mapping[str, Any]:
    """A request's `kv_transfer_params`; none if a client has given something else there, in its `vllm_xargs`."""
    given = request.kv_transfer_params
    return given if isinstance(given, Mapping) else {}


HINT_KEY: Final = "kvtier_hint"  # in `kv_transfer_params`
_STOPPED: Final = "FINISHED_STOPPED"  # vLLM's status of an answer that was not cut off


def answered_of(
    request: Any, calls_tool: Callable[[Sequence[int]], bool], ignored: Callable[[str], None]
) -> Answered | None:
    """The outcome of a vLLM request; None if it has no answer, or if another node generates the answer.

    An explicit hint takes precedence over one derived from the answer. An unknown hint is ignored, and `ignored` is
    called with the reason, since vLLM has already accepted the request.
    """
    given = params_of(request)
    if not request.num_output_tokens or given.get("do_remote_decode"):
        return None
    word = given.get(HINT_KEY)
    if word is not None and word not in list(Hint):
        ignored("unknown_word")
    hint, is_derived = Hint(word) if word in list(Hint) else None, False
    if hint is None and (envelope := getattr(request, "kv_hints", None)) is not None:  # from vLLM 0.32 on
        hint = hint_in(envelope, ignored)
    if hint is None and request.status.name == _STOPPED and calls_tool(request.output_token_ids):
        hint, is_derived = Hint.TOOL, True
    lasted = max(0.0, time.time() - request.arrival_time)
    return Answered(int(request.num_prompt_tokens), int(request.num_output_tokens), hint, is_derived, lasted)


class AnswerReader:
    """Detects tool calls in answers. The tokenizer is loaded in the background; until then it detects none."""

    def __init__(self, tokenizer: str | None, revision: str | None = None) -> None:
        """`tokenizer` is a directory, or a repository in the hub's cache; None: vLLM loads none."""
        self._read: ToolCalls | None = None
        if tokenizer is not None:
            threading.Thread(
                target=self._load, args=(tokenizer, revision), name="kvtier-tokenizer", daemon=True
            ).start()

    def __call__(self, token_ids: Sequence[int]) -> bool:
        return self._read is not None and self._read(token_ids)

    def _load(self, tokenizer: str, revision: str | None) -> None:
        directory = Path(tokenizer)
        if not directory.is_dir():
            cached = try_to_load_from_cache(tokenizer, "tokenizer.json", revision=revision)
            if not isinstance(cached, str):
                _log.info("tool calls are not read from answers: no tokenizer.json of %s here", tokenizer)
                return
            directory = Path(cached).parent
        try:
            self._read = ToolCalls(load_tokenizer(directory))
        except ConfigError as error:
            _log.info("tool calls are not read from answers: %s", error)


Tables = Sequence[Sequence[int]]
"""A request's block ids, one table for each KV group."""

NULL: Final = 0  # vLLM's id for "not kept", e.g. before a sliding window


@dataclass(slots=True)
class Awaited:
    """The blocks that a prefill node says it stored, and how long a request waits for them."""

    num_tokens: int
    names: list[ChainHash]  # of the blocks, and of the states after them
    patience: float  # seconds
    until: float  # on the monotonic clock
    away_since: float = math.inf  # when the tiers stopped answering while it waited
    look_at: float = 0.0


@dataclass(slots=True)
class TrackedRequest:
    """A live request of vLLM. Implements the scheduler side's `Request`."""

    request: Any
    request_id: str
    keys: VllmChain | AheadChain | OwnChain
    stored: int | None = None  # leading blocks stored, loaded or found; None: not scheduled yet
    refused: int | None = None  # the first of them without a slot: retried with the next ones, or at the end
    adapter: bytes | None = None  # digest of its adapter's weights
    num_l1_tokens: int = 0  # that vLLM had at the last lookup
    answer: tuple[int | None, bool] | None = None
    good_until: float = 0.0
    patient_until: float | None = None  # for other requests' stores under way; None: not looked up yet
    synchronous: bool = False  # how the answer's load would be made
    tables: Tables = ()  # as of its last load or store
    closed: ClosedRequest | None = None  # its lookup, if the model has states
    states: StateRequest | None = None  # if the model has states
    has_guessed: bool = False  # shared tiers were queried for its last border
    gives_up: bool = False  # no more loads with states: one failed
    is_counted: bool = False  # its misses, if there was nothing to look up
    awaited: Awaited | None = None  # until a prefill node's blocks are here or late
    border: int = 0  # the last one in its prompt with all blocks and states stored
    loaded: int = 0  # tokens that the tiers promised to load for it
    most_loaded: int | None = None  # tokens that its client lets it load beyond L1's; None: no bound
    most_stored: int | None = None  # leading tokens that its client lets it store

    def __post_init__(self) -> None:
        given = params_of(self.request)
        self.most_loaded, self.most_stored = (_limit(given, name) for name in ("max_load_tokens", "max_offload_tokens"))

    @property
    def chain(self) -> BlockChain:
        return self.keys.current()

    @property
    def num_tokens(self) -> int:
        return int(self.request.num_tokens)


def _limit(given: Mapping[str, Any], name: str) -> int | None:
    """A bound in `kv_transfer_params`, by the name that vLLM's own offloading has for it."""
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 0):
        _log.warning("kv_transfer_params, %s %.60r: ignored; use a number of tokens from 0 on", name, value)
        return None
    return value


@dataclass(slots=True)
class NextStep:
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    targets: set[int] = field(default_factory=set)  # blocks that loads write to, by vLLM's ids


def whole_runs(
    lanes: Sequence[tuple[int, GroupLane]], tables: Tables, blocks: range, block_size: int
) -> list[Sequence[int]]:
    """Split kvtier's blocks into runs for which vLLM has everything that a prompt needs to continue after them.

    For nearly every request that is one run of all. `lanes` are those of K and V; `block_size` is in tokens.
    """
    first, last = blocks.start, blocks.stop
    if all(NULL not in tables[lane.group][first * lane.count : last * lane.count] for _, lane in lanes):
        return [blocks]

    def is_whole(block: int) -> bool:
        return all(
            tables[lane.group][lane.position(block)] != NULL or not lane.is_needed(block, block_size)
            for _, lane in lanes
        )

    return [list(run) for kept, run in groupby(blocks, is_whole) if kept]


def touched(output: Any) -> set[int]:
    """Blocks that vLLM zeroes, or copies others to, before a step's compute."""
    copied = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
    return copied.union(output.new_block_ids_to_zero or ())


def prefilled_by(output: Any) -> tuple[int, float]:
    """`prefill_of` a step. A request that decodes computes one token and its drafts."""
    scheduled, num_tokens = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    if num_tokens <= len(scheduled):
        return 0, 0.0
    drafts, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    prefilled = [(n, before[key]) for key, n in scheduled.items() if n > 1 and n > 1 + len(drafts.get(key, ()))]
    return prefill_of(prefilled, num_tokens)


def handed_out(output: Any, group_sizes: Sequence[int]) -> set[int]:
    """Blocks that vLLM allocates in this step: only those can be written to while a store still reads them.

    They include those that it zeroes or copies others to. `group_sizes`: tokens in a block of each KV group.
    """
    others = touched(output)
    new: list[tuple[Tables, int]] = [(data.block_ids, data.num_computed_tokens) for data in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    for request_id, tables, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if tables is not None:
            new.append((tables, num_computed if request_id in cached.resumed_req_ids else 0))
    return others | {
        block
        for tables, num_computed in new
        for table, size in zip(tables, group_sizes, strict=True)
        for block in table[num_computed // size :]
    }


_KEY: Final = "kvtier"
_LOOK: Final = 0.02  # seconds between two checks: with a daemon each is a round trip
_BACK: Final = 1.5  # seconds for tiers that stop answering meanwhile: their breaker's first probe comes after one
_LEAST_WAIT: Final = 0.5  # seconds: 0.41 is the longest that a store was on its way at load 14 on two cores
_LATE: Final = (
    "a prompt is computed here: its KV from a prefill node did not come within %.3g s: [cache] prefetch_deadline, or "
    "what computing it takes"
)
_AWAY: Final = (
    "a prompt is computed here: no daemon and no tier that this node shares with its prefill node answers, or loading "
    "from it takes longer"
)
_OTHER_NAMES: Final = "the prefill node's blocks have other names than this node's, so the %s differs: %s"
_FIXES: Final = {
    "model": "give both nodes one checkpoint, dtype, --block-size, drafter, parallel sizes, keys and [cache] epoch",
    "prompt": "have the proxy send both nodes the same prompt, cache_salt and adapter",
}


class Handovers:
    """The hand-overs of one engine, as prefill or decode node. Called from the scheduler's thread; never waits."""

    def __init__(
        self, tiers: CacheTiers, plan: "SlotPlan", store: bytes, cache: CacheConfig, prefill: PrefillClock
    ) -> None:
        """`store` is the namespace."""
        self._tiers = tiers
        self._size = plan.block_size
        self._groups = [state.group for state in plan.states]
        self._lookahead = plan.lookahead
        self._keeps_blocks = bool(plan.attention)  # or states alone
        self._store = store.hex()
        self._cache = cache
        self._prefill = prefill
        self._quiet_until = 0.0

    def offer(self, row: TrackedRequest) -> dict[str, Any] | None:
        """The `kv_transfer_params` of a finished request's answer; None if they were not requested.

        With states it names the last border after which the decode node can continue. vLLM has few of those.
        """
        given = params_of(row.request)
        if not given.get("do_remote_decode") or _KEY in given:
            return None
        in_prompt = (row.request.num_prompt_tokens - self._lookahead) // self._size  # named by the prompt alone
        num_blocks = row.border if self._groups else min(row.stored or 0, in_prompt)
        if not num_blocks:
            return None
        offered = {"store": self._store, "blocks": num_blocks, "last": row.chain.hashes[num_blocks - 1].hex()}
        # Set in the request, too: under MultiConnector a second kvtier must not answer under the same key.
        row.request.kv_transfer_params = {**given, _KEY: offered}
        return {_KEY: offered}

    def admit(self, row: TrackedRequest, num_requests: int = 1) -> None:
        """Record which blocks a new request waits for, if a prefill node says that it stored some for it.

        `num_requests`: of this engine. Computing the prompt would delay each of them.
        """
        given, hashes = params_of(row.request), row.chain.hashes
        offered = given.get(_KEY)
        if not isinstance(offered, Mapping) or given.get("do_remote_prefill") or given.get("do_remote_decode"):
            return  # if another connector delivers the KV, there is nothing to wait for
        if self._cache.load_or_recompute == "recompute":
            return
        num_blocks = offered.get("blocks")
        if not isinstance(num_blocks, int) or not 0 < num_blocks <= len(hashes):
            return
        if offered.get("store") != self._store:
            return self._warn(_OTHER_NAMES, "model", _FIXES["model"])
        if offered.get("last") != hashes[num_blocks - 1].hex():
            return self._warn(_OTHER_NAMES, "prompt", _FIXES["prompt"])
        states = [state_name(hashes[num_blocks - 1], group) for group in self._groups]
        blocks = hashes[:num_blocks] if self._keeps_blocks else ()
        patience = self._patience(num_blocks * self._size, num_requests)
        row.awaited = Awaited(num_blocks * self._size, [*blocks, *states], patience, time.monotonic() + patience)

    def _patience(self, num_tokens: int, num_requests: int) -> float:
        """Seconds to wait: as long as computing the prompt would delay all requests together; 0 if nothing can come.

        A wait of that length before computing costs at most twice as much as the better of both.
        """
        if not self._may_come(num_tokens):
            return 0.0
        longest, seconds = self._cache.prefetch_deadline, self._prefill.seconds(num_tokens)
        if self._cache.load_or_recompute == "load" or seconds is None:
            return longest
        return min(longest, max(_LEAST_WAIT, seconds * num_requests))

    def is_coming(self, row: TrackedRequest, now: float) -> bool:
        """Whether to delay a lookup: blocks are missing, may still arrive, and there is time."""
        awaited = row.awaited
        if awaited is None or now < awaited.look_at:
            return awaited is not None
        awaited.look_at = now + _LOOK
        if row.num_l1_tokens >= awaited.num_tokens or self._is_there(awaited.names):
            row.awaited = None
        elif now >= awaited.until:
            row.awaited = None
            self._warn(*((_LATE, awaited.patience) if awaited.patience else (_AWAY,)))
        elif self._may_come(awaited.num_tokens):
            awaited.away_since = math.inf
        elif now - (since := min(awaited.away_since, now)) < _BACK:
            awaited.away_since = since
        else:
            row.awaited = None
            self._warn(_AWAY)
        return row.awaited is not None

    def _is_there(self, names: Sequence[ChainHash]) -> bool:
        """Whether all blocks are here. The last one stored is looked up first: usually that is enough."""
        last = names[-1 - len(self._groups) :]
        return not (self._tiers.locate(last, 0.0).miss or self._tiers.locate(names, 0.0).miss)

    def _may_come(self, num_tokens: int) -> bool:
        """Whether other nodes' stores become visible here: through the daemon, or a shared tier that answers.

        A tier from which the tokens are slower to load than to compute counts as away.
        """
        if isinstance(self._tiers, RemoteTiers):
            return self._tiers.member is not None
        if not isinstance(self._tiers, Hierarchy):
            return True
        num_bytes, rates = num_tokens // self._size * self._tiers.host.region.slot_bytes, self._tiers.rates
        spans = [Span(0, num_tokens, {port.name: num_bytes}) for port in self._tiers.ports if port.locates]
        return not all(map(rates.is_quicker_computed, spans))

    def _warn(self, message: str, *values: object) -> None:
        """Log it, at most once a minute."""
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + 60.0
            _log.warning(message, *values)
