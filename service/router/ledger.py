"""What the router remembers of its decisions: counters, and the last few with all that spoke for and against."""

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.service.routing_policy import Choice

_KEPT: Final = 64  # decisions
# Unescaped quotes, so that no text of a model or a user can be taken for it.
_CACHED: Final = re.compile(rb'"cached_tokens":\s*(\d{1,12})\b')
_TIERS: Final = re.compile(rb'"kvtier":\s*\{([^{}]{1,200})\}')
_TIER: Final = re.compile(rb'"(L1|L2|file|redis)":\s*(\d{1,12})\b')
_PROMPT: Final = re.compile(rb'"prompt_tokens":\s*(\d{1,12})\b')


@dataclass(slots=True)
class Ledger:
    """Counts since the router started. One event loop writes, and reads it."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, reason) chosen
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, "2xx") passed on
    retries: Counter[str] = field(default_factory=Counter)  # why a replica was given up before a byte was streamed
    errors: Counter[str] = field(default_factory=Counter)  # why a client got an error of the router's own
    untokenised: Counter[str] = field(default_factory=Counter)  # why a prompt was routed without being known
    prompt_tokens: int = 0  # of prompts that were known and answered
    promised_tokens: int = 0  # of these, what the replica that answered held by the index
    told_prompt_tokens: int = 0  # as the replicas' usage said
    told_cached_tokens: int = 0
    told_tiers: Counter[str] = field(default_factory=Counter)  # of these, by the tier our engines had them in
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by "tokenise", "score"
    decisions: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def decided(self, choice: Choice, num_blocks: int) -> None:
        """Another choice was made, for a prompt of so many blocks."""
        if choice.name is not None:
            self.requests[choice.name, choice.reason] += 1
        self.decisions.append(
            {
                "time": time.time(),
                "prompt_blocks": num_blocks,
                "chosen": choice.name,
                "reason": choice.reason,
                "scores": [score._asdict() for score in choice.scores],
            }
        )

    def told(self, piece: bytes) -> None:
        """Read the usage in a piece of an answer, if there is one; the rest of it is not looked at."""
        if b'"usage"' not in piece:
            return
        prompts, cached = _PROMPT.findall(piece), _CACHED.findall(piece)
        if prompts:
            self.told_prompt_tokens += int(prompts[-1])
            self.told_cached_tokens += int(cached[-1]) if cached else 0
            for by_tier in _TIERS.findall(piece)[-1:]:
                self.told_tiers.update({tier.decode(): int(count) for tier, count in _TIER.findall(by_tier)})
