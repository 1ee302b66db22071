"""What the router counts, and its last decisions with the scores behind them."""

import re
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

from kvtier.service.observe import statuses
from kvtier.service.router.policy import Choice
from kvtier.tiers import TIERS

_KEPT: Final = 64  # decisions
# The quotes are unescaped, so no text of a model or a user can match.
_CACHED: Final = re.compile(rb'"cached_tokens":\s*(\d{1,12})\b')
_TIERS: Final = re.compile(rb'"prompt_tokens_details":\s*\{[^{}]{0,400}"kvtier":\s*\{([^{}]{1,200})\}')
_TIER: Final = re.compile(rb'"([^"\\]{1,32})":\s*(\d{1,12})\b')
_PROMPT: Final = re.compile(rb'"prompt_tokens":\s*(\d{1,12})\b')


@dataclass(slots=True)
class Ledger:
    """Counts since the router started. Written and read on one event loop."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, reason) chosen
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, "2xx") passed on
    retries: Counter[str] = field(default_factory=Counter)  # why another replica was tried before a byte was streamed
    errors: Counter[str] = field(default_factory=Counter)  # why the router answered with an error of its own
    untokenised: Counter[str] = field(default_factory=Counter)  # why the prompt of a request was not known
    prompt_tokens: int = 0  # of prompts that were known, and whose answers began
    promised_tokens: int = 0  # of these, held by the answering replica according to the index
    told_prompt_tokens: int = 0  # as reported in the replicas' usage
    told_cached_tokens: int = 0
    told_tiers: Counter[str] = field(default_factory=Counter)  # of these, by tier; only kvtier's engines report it
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by "tokenise", "score"
    decisions: deque[statuses.RoutingDecision] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def decided(self, choice: Choice, num_blocks: int) -> None:
        if choice.name is not None:
            self.requests[choice.name, choice.reason] += 1
        self.decisions.append(
            statuses.RoutingDecision(
                time=time.time(),
                prompt_blocks=num_blocks,
                chosen=choice.name,
                reason=choice.reason,
                scores=choice.scores,
            )
        )

    def read_usage(self, piece: bytes) -> None:
        """Count the usage in a piece of an answer, if there is one; the rest is not parsed."""
        if b'"usage"' not in piece:
            return
        prompts, cached = _PROMPT.findall(piece), _CACHED.findall(piece)
        if prompts:
            self.told_prompt_tokens += int(prompts[-1])
            self.told_cached_tokens += int(cached[-1]) if cached else 0
            for by_tier in _TIERS.findall(piece)[-1:]:
                counts = {label.encode(): label for label in (kind.label for kind in TIERS.values())}
                self.told_tiers.update({counts[tier]: int(n) for tier, n in _TIER.findall(by_tier) if tier in counts})
