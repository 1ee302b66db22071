"""The engine: requests in, tokens out. `step` is schedule → load → run → store → postprocess."""

import itertools
import logging
import time
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from numpy.typing import ArrayLike
from transformers import PretrainedConfig

from kvtier.connector import LocalConnector, Turn
from kvtier.connector.segments import Repair, Segment, WantedReuse
from kvtier.engine.config import EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_runner import runner_of, scheduler_of
from kvtier.engine.offload import NoOffload, start_copies
from kvtier.engine.requests import NamedPrompt, Output, PromptNames, SamplingParams, checked_tokens, is_text
from kvtier.engine.segments import SegmentRequests, wanted_by_each, wanted_reuse
from kvtier.engine.sequence import Completion, Sequence, SequenceState
from kvtier.tiers import ConfigError, RequestError
from kvtier.tiers.config import Config, ConfigSource
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import KVProbe, KVShape, ModelIdentity

_WAIT: Final = 0.01  # seconds an idle engine waits for a copy or a lookup before it checks again
_POLL: Final = 0.0005  # seconds between checks of copies that cannot be waited for
_CLOSE_DEADLINE: Final = 5.0  # seconds for copies in flight at close

_MIB: Final = 1 << 20
_CLOSED: Final = "the engine is closed; make a new one"
_TORN: Final = "a step of this engine was interrupted half way; close it and make a new one"

_log = logging.getLogger(__name__)

_COUNTED: Final = (
    "steps", "finished", "aborted", "preempted", "failed_loads",
    "prompt_tokens", "computed_tokens", "generated_tokens", "l1_tokens", "external_tokens", "skipped_tokens",
    "unkept_states",
)  # fmt: skip

_OF_CACHE: Final = (
    "block_size", "cache_salt", "epoch", "lossy", "partial_blocks", "repair_rule", "repair_share",
    "segment_min_tokens", "segments", "store_generated",
)  # fmt: skip

Connect = Callable[[ModelIdentity, BlockPool, KVProbe], LocalConnector]
"""Makes the connector from the model's identity, the pool and the model's probe."""


class Engine:
    """Continuous batching over one model and one L1 pool. Token ids in, token ids out.

    Requests wait, load, run and finish inside `step`; `generate` and `stream` call it for you. Threads take turns, step
    by step, and their requests share batches. RequestError refuses one request and leaves the others alone; it refuses
    all in a forked child, and all after a step was interrupted during bookkeeping.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, connect: Connect | None = None) -> None:
        self.model = model
        self.config = model.usable(config or EngineConfig())
        self.identity = model.identity(self.config)
        self.shape = model.shape(self.config.block_size)
        if not self.config.enable_prefix_caching:
            connect = None  # no block is named, so none can be stored or found
        if self.config.preemption == "offload" and connect is None:
            raise ConfigError('preemption "offload": there is no tier to offload to; use "recompute"')
        self.pool = BlockPool(
            self.shape,
            self.config.blocks_for(self.shape.block_bytes),
            device=str(model.device),
            enable_prefix_caching=self.config.enable_prefix_caching,
            partial_blocks=self.config.partial_blocks,
        )
        self.max_model_len = min(self.config.max_model_len or model.max_model_len, model.max_model_len)
        self.fits_l1 = model.room(self.pool.num_blocks, self.config.block_size)  # tokens of a request
        if self.fits_l1 < self.max_model_len:
            _warn_of_l1(self.fits_l1, self.max_model_len, -(-self.max_model_len // self.config.block_size), self.shape)
        self.connector: LocalConnector | NoOffload = NoOffload()
        if connect is not None:
            self.connector = connect(self.identity, self.pool, model.probe)
            self.identity = self.connector.identity or self.identity
        self.worker = self.connector.worker
        scheduler_side = None if connect is None else self.connector.scheduler
        self.runner = runner_of(model, self.pool.tensor, self.config, self.worker.wait_layer)
        self.scheduler = scheduler_of(self.runner, self.config, self.pool, scheduler_side)
        self.segments = (
            None if self.config.segments == "off" else SegmentRequests(model, self.pool, self.scheduler, self.config)
        )
        self._names = PromptNames(self.identity.fingerprint(), self.config)
        self._ids = itertools.count()
        self._order = itertools.count()
        self._requests: dict[str, Sequence] = {}
        self._inboxes: dict[str, deque[Output]] = {}  # of requests that `generate` or `stream` serves
        self._unclaimed: list[Output] = []  # outputs of other requests from their steps, for the next `step`
        self._left: deque[str] = deque()  # requests whose outputs are no longer read, to be aborted
        self._turn = Turn("engine")
        self.is_torn = (
            False  # a step is under way, or an exception ended one during bookkeeping: then only `close` works
        )
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        connect: Connect | None = None,
        *,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> Self:
        """An engine over a local checkpoint directory. ConfigError if it cannot be served."""
        return cls(Model.from_pretrained(path, dtype=dtype, device=device), config, connect)

    @classmethod
    def from_config(
        cls,
        hf_config: PretrainedConfig,
        config: EngineConfig | None = None,
        connect: Connect | None = None,
        *,
        seed: int = 0,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> Self:
        """An engine over random weights: equal ones for equal config, seed and dtype."""
        return cls(Model.from_config(hf_config, seed=seed, dtype=dtype, device=device), config, connect)

    def prompt(self, token_ids: ArrayLike, cache_salt: str | None = None) -> NamedPrompt:
        """Validate a prompt and name its blocks, once for all requests that have it; on any thread.

        RequestError: it is empty or too long, or an id in it out of range.
        """
        return self._names.named(self._checked(token_ids, SamplingParams(max_tokens=1)), cache_salt)

    def add_request(
        self,
        prompt: ArrayLike | NamedPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        segments: abc.Sequence[Segment] | None = None,
        repair: Repair | None = None,
    ) -> str:
        """Queue a prompt (token ids) and return its id. Requests of different `cache_salt` share no KV.

        A `NamedPrompt` has its salt in it. The KV of `segments` may be from another place: approximate, see `Repair`.
        None: as configured, none or those that are found; an empty list: none.
        RequestError: empty prompt, token id out of range, more context than the model or L1 has, id in use, segments
        that overlap or cannot be reused.
        """
        params = params or SamplingParams()
        if isinstance(prompt, NamedPrompt):
            self._require_room(len(prompt.token_ids), params)
            prompt = replace(
                prompt, token_ids=prompt.token_ids.copy(), chain=None if prompt.chain is None else prompt.chain.copy()
            )
        else:
            prompt = self._names.named(self._checked(prompt, params), cache_salt)
        if request_id is not None and not is_text(request_id):
            raise RequestError(f"request_id {request_id!r}: use a string of Unicode characters")
        with self._turn:
            wanted = wanted_reuse(segments, repair, len(prompt.token_ids), self.segments)
            return self._queue(prompt, params, wanted, request_id).request_id

    def step(self) -> list[Output]:
        """Compute one batch. Returns an entry per request that got a token or ended; empty if all wait."""
        with self._turn:
            self._step()  # if that raises, the next step returns what is unclaimed
            outputs, self._unclaimed = self._unclaimed, []
            return outputs

    def generate(
        self,
        prompts: abc.Sequence[ArrayLike],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        segments: abc.Sequence[abc.Sequence[Segment]] | None = None,
        repair: Repair | None = None,
    ) -> list[Completion]:
        """Answer all prompts, in their order; `segments` has a list for each.

        RequestError before anything is computed if one cannot be served.
        """
        chosen = [params or SamplingParams()] * len(prompts) if not isinstance(params, abc.Sequence) else list(params)
        if len(chosen) != len(prompts):
            raise RequestError(f"{len(chosen)} sampling parameters for {len(prompts)} prompts: give one, or one each")
        checked = [self._checked(prompt, one) for prompt, one in zip(prompts, chosen, strict=True)]
        wanted: abc.Sequence[WantedReuse | None] = [None] * len(checked)
        if segments is not None or self.segments is not None:
            wanted = wanted_by_each(segments, repair, checked, self.segments)
        named = [self._names.named(prompt, cache_salt) for prompt in checked]
        with self._turn:
            requests = [self._queue(*one) for one in zip(named, chosen, wanted, strict=True)]
            self._inboxes.update((request.request_id, deque()) for request in requests)
        try:
            return [self._complete(request) for request in requests]
        finally:
            for request in [each for each in requests if each.request_id in self._inboxes]:  # a step raised
                self._leave(request)

    def precompute(self, texts: abc.Sequence[ArrayLike], *, cache_salt: str | None = None) -> None:
        """Compute texts (token ids) that will be segments, each alone, as ordinary blocks in every tier.

        If segments are found without marks, each text's pieces are computed alone, too.
        """
        alone: list[ArrayLike] = list(texts)
        if self.segments is not None and (unmarked := self.segments.unmarked) is not None:
            checked = [self._checked(text, SamplingParams(max_tokens=1)) for text in texts]
            alone += [piece for text in checked for piece in unmarked.texts(text)]
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self.generate(alone, params, cache_salt=cache_salt, segments=[()] * len(alone))

    def stream(
        self,
        prompt: ArrayLike,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        segments: abc.Sequence[Segment] | None = None,
        repair: Repair | None = None,
    ) -> Iterator[Output]:
        """The answer token by token; several streams may be read in turns. `segments` and `repair` as `add_request`.

        The request is queued when the first token is read; closing the iterator aborts it.
        """
        params = params or SamplingParams()
        tokens = self._checked(prompt, params)  # a request that cannot be served is refused here
        return self._stream(tokens, params, cache_salt, wanted_reuse(segments, repair, len(tokens), self.segments))

    def request(self, request_id: str) -> Sequence:
        """A live request's state, tokens and progress; read-only. LookupError if it is not live."""
        request = self._requests.get(request_id)
        if request is None:
            raise LookupError(f"request {request_id!r}: not live")
        return request

    def abort(self, request_id: str) -> bool:
        """Abort a request now; its last output reports it. False: no such request is live."""
        with self._turn:
            return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        if self.segments is not None and request_id in self._requests:
            self.segments.abort(self._requests[request_id])
        return self.scheduler.abort(request_id)

    def reset_cache(self) -> None:
        """Drop every block from every tier, and name new ones after the current weights, which may have changed.

        RequestError while requests are live: their KV would be half old, half new.
        """
        with self._turn:
            if self.is_torn:
                raise RequestError(_TORN)
            if self.has_unfinished:
                raise RequestError("requests are live; finish or abort them before the cache is reset")
            self._drain(_CLOSE_DEADLINE)
            self.pool.reset()
            self.connector.reset()
            self.identity = replace(self.model.identity(self.config), apart=self.identity.apart)
            self._names = PromptNames(self.identity.fingerprint(), self.config)
            if self.segments is not None:
                self.segments.follow()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work or outputs left."""
        return self.scheduler.has_unfinished or bool(self._unclaimed)

    @property
    def stats(self) -> Mapping[str, int]:
        """Counts since the start (steps, tokens by source, preemptions …) and requests by state."""
        scheduler = self.scheduler
        return {
            **dict.fromkeys(_COUNTED, 0),
            **scheduler.stats,
            **(self.segments.stats if self.segments is not None else {}),
            "waiting": len(scheduler.waiting),
            "loading": len(scheduler.loading),
            "running": len(scheduler.running),
            "free_blocks": self.pool.num_free_blocks,
        }

    def drain(self, timeout: float) -> bool:
        """Wait until all copies have ended, at most `timeout` seconds: then only live requests have blocks."""
        with self._turn:
            return self._drain(timeout)

    def _drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while (is_copying := self.scheduler.has_copies) and time.monotonic() < deadline:
            start_copies(self.worker, self.scheduler.flush())
            self.scheduler.apply(self.worker.poll())
            time.sleep(_POLL)
        return not is_copying

    def close(self) -> None:
        """Abort live requests, drain copies up to a deadline, close the connector. Idempotent.

        Does nothing in a forked child. The stores of an interrupted step are dropped.
        """
        if self._closed or self._turn.is_inherited:
            return
        with self._turn:
            self._closed = True
            try:
                if self.is_torn:
                    self.worker.close(_CLOSE_DEADLINE)
                    return
                for request_id in list(self._requests):
                    self._abort(request_id)
                start_copies(self.worker, self.scheduler.flush())  # the last requests' partial blocks
                self.scheduler.apply(self.worker.close(_CLOSE_DEADLINE))
            finally:
                self.connector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self) -> None:
        """Compute one batch, and sort its outputs into their requests' inboxes; the others are `_unclaimed`."""
        if self.is_torn:
            raise RequestError(_TORN)
        if self._left:
            self._end_left()
        self.is_torn = True  # until the scheduler's state is consistent again
        if self.segments is not None:
            self.segments.advance()
        batch = self.scheduler.schedule(self.worker.poll())  # admits what L1, L2 and L3 already have
        logits = None
        try:
            if batch.plan.loads:
                self.worker.start_load(batch.plan)  # h2d on the load stream
            if batch.copies:
                self.pool.copy(batch.copies)  # d2d in the compute's own stream
            if self.segments is not None:
                self.segments.blend(batch)
            if batch.chunks:
                logits = self.runner.run(batch)  # each layer waits for its own load
            elif not batch.has_blended and not batch.plan.loads:
                self._wait()
            samples = [] if logits is None else self.runner.sample(batch, logits)
            if self.config.enable_prefix_caching and (batch.chunks or batch.has_blended):
                self.model.require_same(in_pass=True)  # else this step's KV would have the wrong names
            if batch.plan.stores:  # after everything that can fail: nothing of a failed step is stored
                self.worker.start_store(batch.plan)  # d2h after compute, on the store stream
            if any(op.layerwise for op in batch.plan.loads):
                batch.arrived = self.worker.arrived() and batch.arrived  # a device reports a failed copy only now
        except BaseException:  # out of memory, an interrupt: the engine stays whole, the caller decides
            self.scheduler.fail(batch, self.worker.unstarted(batch.plan))
            self.is_torn = False
            raise
        outputs = self.scheduler.postprocess(batch, samples)
        if batch.plan.loads or self.worker.finished:  # a layerwise load ends with its step, and with it its lease
            self.scheduler.apply(self.worker.poll())
        self.is_torn = False
        for output in outputs:
            if self.segments is not None and self.segments.takes(output):
                continue
            if output.finish_reason is not None:
                self._requests.pop(output.request_id, None)
            self._inboxes.get(output.request_id, self._unclaimed).append(output)

    def _wait(self) -> None:
        """Nothing can be computed: wait a little for copies or lookups."""
        if self.scheduler.loading:
            self.worker.wait(_WAIT)
        elif self.scheduler.has_copies:
            time.sleep(_POLL)
        elif self.scheduler.waiting or self.scheduler.running:  # for the tiers' answers, or an overlapped load
            self.connector.scheduler.wait(_WAIT)

    def _checked(self, prompt: ArrayLike, params: SamplingParams) -> list[int]:
        """The prompt as a list of token ids; RequestError if it is invalid."""
        self._turn.require_here()
        if self._closed:
            raise RequestError(_CLOSED)
        tokens = checked_tokens(prompt, self.model.vocab_size)
        self._require_room(len(tokens), params)
        return tokens

    def _require_room(self, num_tokens: int, params: SamplingParams) -> None:
        """RequestError if prompt and answer do not fit, or the engine does not support `params`."""
        context = min(self.max_model_len, self.fits_l1)
        if num_tokens + params.max_tokens > context:
            is_l1 = context < self.max_model_len
            limit = f"the {context} that fit L1" if is_l1 else f"the model's context of {context}"
            wanted = f"{num_tokens} prompt tokens and max_tokens {params.max_tokens}"
            raise RequestError(f"{wanted}: together more than {limit}; shorten one of them")
        if params.logit_bias and (largest := max(params.logit_bias)) >= self.model.vocab_size:
            raise RequestError(f"logit_bias {largest}: this model's token ids are 0 to {self.model.vocab_size - 1}")
        if params.prompt_logprobs is not None and (self.config.exact or self.model.has_own_cache):
            what = "an exact engine" if self.config.exact else f"model kind {self.model.kind!r}"
            raise RequestError(f"prompt_logprobs {params.prompt_logprobs}: {what} computes none; leave it out")

    def _queue(
        self,
        prompt: NamedPrompt,
        params: SamplingParams,
        wanted: WantedReuse | None = None,
        request_id: str | None = None,
    ) -> Sequence:
        """Queue a request's prompt, under the next free number if it has no id. The caller has the turn."""
        if self.is_torn:
            raise RequestError(_TORN)
        if prompt.chain is not None:  # else no block is named
            self.model.require_same()
            prompt = self._names.current(prompt)  # a reset may have come between
        known = self._requests, self.scheduler.live, self.scheduler.orphans
        if request_id is None:
            request_id = next(name for name in map(str, self._ids) if not any(name in each for each in known))
        elif any(request_id in each for each in known):
            raise RequestError(f"request id {request_id!r}: a live request has it; choose another")
        reuse = find = None
        if self.segments is not None and wanted is not None and params.prompt_logprobs is None:
            if wanted.segments is None:
                find = partial(self.segments.find, wanted.repair)
            else:
                reuse = self.segments.open(request_id, prompt, wanted, self._order)
        request = Sequence(request_id, prompt.token_ids, params, prompt.chain, next(self._order))
        request.reuse, request.find = reuse, find
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    def _stream(
        self, tokens: list[int], params: SamplingParams, cache_salt: str | None, wanted: WantedReuse | None
    ) -> Iterator[Output]:
        named = self._names.named(self._checked(tokens, params), cache_salt)
        with self._turn:
            request = self._queue(named, params, wanted)
            inbox = self._inboxes[request.request_id] = deque[Output]()
        output: Output | None = None
        try:
            while output is None or output.finish_reason is None:
                self._advance(inbox)
                yield (output := inbox.popleft())
        finally:
            self._leave(request)

    def _advance(self, inbox: deque[Output], *, to_end: bool = False) -> None:
        """Compute steps until the inbox has an output, or with `to_end` the last one; others' steps deliver, too."""
        while not inbox or (to_end and inbox[-1].finish_reason is None):
            with self._turn:
                if self._closed:
                    raise RequestError(_CLOSED)
                while not inbox or (to_end and inbox[-1].finish_reason is None):
                    self._step()
                    if self._turn.is_wanted():
                        break

    def _leave(self, request: Sequence) -> None:
        """This request's outputs are no longer read. May run anywhere, even in a garbage collection inside a step."""
        self._inboxes.pop(request.request_id, None)
        if request.state is not SequenceState.FINISHED:
            self._left.append(request.request_id)
        if self._left and self._turn.taken_at_once():
            try:
                self._end_left()
            finally:
                self._turn.leave()

    def _end_left(self) -> None:
        while self._left and not self.is_torn:
            self._abort(self._left.popleft())

    def _complete(self, request: Sequence) -> Completion:
        self._advance(self._inboxes[request.request_id], to_end=True)
        outputs, scores, reuse = self._inboxes.pop(request.request_id), request.sampling.scores or {}, request.reuse
        return Completion(
            request.request_id,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            finish_reason=outputs[-1].finish_reason,
            logits=[output.logits for output in outputs if output.logits is not None],
            logprobs=[output.logprobs for output in outputs if output.logprobs is not None],
            prompt_logprobs=[scores[position] for position in sorted(scores)],
            num_prompt_tokens=request.num_prompt_tokens,
            num_l1_tokens=request.num_l1_tokens,
            num_external_tokens=request.num_external_tokens,
            num_segment_tokens=0 if reuse is None else reuse.num_reused,
            num_repaired_tokens=0 if reuse is None else reuse.num_repaired,
            ttft=request.ttft,
        )


def _warn_of_l1(num_tokens: int, max_model_len: int, num_blocks: int, shape: KVShape) -> None:
    size = -(-num_blocks * shape.block_bytes // _MIB)
    cut = f"[l1] holds {num_tokens} tokens, and longer requests are refused: this model takes {max_model_len}"
    _log.warning('%s; [l1] size = "%dMiB" or num_blocks = %d holds that many', cut, size, num_blocks)


def engine_config(config: Config, **options: Any) -> EngineConfig:
    """The engine's settings from the configuration ([cache] and [l1]); `options` are EngineConfig's own fields."""
    cache = {name: getattr(config.cache, name) for name in _OF_CACHE}
    l1 = {"num_blocks": config.l1.num_blocks, "l1_bytes": config.l1.size}
    l1["enable_prefix_caching"] = config.l1.enable_prefix_caching
    return EngineConfig(**{"hash_scheme": config.cache.hash, **cache, **l1, **options})


def open_engine(
    path: str | Path, config: ConfigSource | None = None, *, dtype: str = "auto", device: str = "auto", **options: Any
) -> Engine:
    """An engine over a local checkpoint directory, with L2 and lower tiers by `config` (default: the environment).

    `config` is a Config, `{section: {option: value}}` or the name of a TOML file.
    `device` "auto" is a GPU if there is one; `options` are further fields of EngineConfig. Raises ConfigError if
    checkpoint, memory or disk cannot be used.
    """
    settings = Config.of(config)
    model = Model.from_pretrained(path, dtype=dtype, device=device)
    return Engine(model, engine_config(settings, **options), LocalConnector.connect(settings))
