"""The engine's settings: one frozen, validated object."""

from dataclasses import dataclass
from typing import Final, Literal

from kvtier.connector.segments import REPAIR_RULES, Share
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import Lossy

TILE: Final = 16  # tokens: the absolute attention tile of `exact` mode


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine schedules and computes. Raises ConfigError naming the field, the value and the fix.

    In `exact` mode every forward is padded to `exact_rows` rows and attention runs in absolute 16-token tiles. Then
    logits are bit-identical however a prompt is cut, packed or loaded, for equal `exact_rows` and `max_num_seqs`.
    Otherwise they are bit-identical to a run without cache with equal chunk boundaries and batch shape.
    """

    block_size: int = 64  # tokens per KV block
    num_blocks: int | None = None  # L1's size in blocks; None: as many as fit `l1_bytes`
    l1_bytes: int = 256 << 20
    enable_prefix_caching: bool = True  # False: L1 neither hashes nor looks up
    max_num_seqs: int = 16  # sequences that run or load at once
    max_num_batched_tokens: int = 512  # per step: longer prompts are prefilled in chunks of this
    max_model_len: int | None = None  # tokens, prompt and answer; None: the model's
    preemption: Literal["recompute", "offload"] = "recompute"
    loading: Literal["async", "layerwise"] = "async"  # wait for a whole load, or compute each layer as it arrives
    max_passed_over: int = 8  # how often an earlier request may be overtaken by a longer cached prefix
    partial_blocks: bool = True  # reuse leading tokens of a block, and store partial last blocks
    # False: only prompt blocks are cached, and what preemption offloads. "answers": nothing after the block in which
    # reasoning begins, if the scheduler knows how the model reasons.
    store_generated: bool | Literal["answers"] = True
    exact: bool = False
    exact_rows: int = 256
    hash_scheme: Literal["sha256", "xxh3"] = "sha256"
    epoch: int = 0
    lossy: Lossy = "none"  # fp8: the encoding of K and V in shared tiers
    cache_salt: str | None = None  # for requests without one
    # on: a prompt's segments may reuse KV from another place, approximately; auto: segments without marks, too
    segments: Literal["off", "on", "auto"] = "off"
    segment_min_tokens: int = 32  # shorter segments are computed
    repair_share: Share = 0.15  # of reused tokens, for requests without a `Repair`
    repair_rule: str = "deviation"

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            _at_least(field, getattr(self, field), 1)
        for field in ("num_blocks", "max_model_len"):
            if getattr(self, field) is not None:
                _at_least(field, getattr(self, field), 1)
        for field in ("max_passed_over", "epoch"):
            _at_least(field, getattr(self, field), 0)
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ConfigError(f"{field} {getattr(self, field)!r}: use one of {', '.join(map(str, choices))}")
        if self.repair_share != "auto" and not 0 <= self.repair_share <= 1:
            raise ConfigError(f'repair_share {self.repair_share!r}: use a number from 0 to 1, or "auto"')
        if self.segments != "off" and not self.enable_prefix_caching:
            found = f'segments "{self.segments}": they are found by name'
            raise ConfigError(f"{found}, and enable_prefix_caching is off; switch it on")
        if self.segments == "auto" and self.exact:
            raise ConfigError('segments "auto": answers are approximate, and this engine is "exact"; use "off" or "on"')
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_seqs {self.max_num_seqs}: more than the {self.token_budget} tokens of a step; "
                f"lower it or raise {'exact_rows' if self.exact else 'max_num_batched_tokens'}"
            )

    @property
    def token_budget(self) -> int:
        """Tokens a step may compute."""
        return min(self.max_num_batched_tokens, self.exact_rows) if self.exact else self.max_num_batched_tokens

    def blocks_for(self, block_bytes: int) -> int:
        """L1's size in blocks of `block_bytes` each."""
        num_blocks = self.num_blocks if self.num_blocks is not None else self.l1_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(f"l1_bytes {self.l1_bytes}: one block of this model takes {block_bytes} bytes; raise it")
        return num_blocks


_POSITIVE: Final = (
    "block_size", "l1_bytes", "max_num_seqs", "max_num_batched_tokens", "exact_rows", "segment_min_tokens",
)  # fmt: skip
_CHOICES: Final = {
    "store_generated": (True, False, "answers"),
    "segments": ("off", "on", "auto"),
    "repair_rule": REPAIR_RULES,
    "preemption": ("recompute", "offload"),
    "loading": ("async", "layerwise"),
    "hash_scheme": ("sha256", "xxh3"),
    "lossy": ("none", "fp8"),
}


def _at_least(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{field} {value!r}: use a whole number of at least {least}")
