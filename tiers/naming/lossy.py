"""The choice to keep KV as fp8 in tiers that nodes share: whose KV that can be, and the name it has then."""

from dataclasses import replace
from typing import Final, Literal

from kvtier.tiers import LEAST_GROUP, MOST_GROUP, ConfigError, fp8_form
from kvtier.tiers.naming.identity import ModelIdentity
from kvtier.tiers.naming.shape import DTYPE_BYTES

Lossy = Literal["none", "fp8"]

_EXACT: Final = "/exact-"  # of a compute_dtype: in this mode an answer is the same bits, loaded or computed
_FIX: Final = "leave it out"


def with_lossy(identity: ModelIdentity, chosen: Lossy, block_bytes: int, *, unlike: str | None = None) -> ModelIdentity:
    """The identity under `[cache] lossy`: another one, so that no exact engine ever finds this one's blocks.

    `block_bytes`: a block's, as tiers have it. `unlike` says what of it is no number of `kv_dtype`, if something is.
    ConfigError if the model's KV cannot be kept so.
    """
    if chosen == "none":
        return identity
    if identity.kv_dtype not in DTYPE_BYTES:
        raise _bad(chosen, f"kv_dtype {identity.kv_dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if identity.kind not in ("full", "sliding"):
        raise _bad(chosen, f"kind {identity.kind!r}: latents and recurrent states bear no such loss")
    if identity.forms is not None:
        raise _bad(chosen, f"forms {identity.forms[0]!r}, …: its layers keep something else than K and V of one shape")
    if _EXACT in identity.compute_dtype:
        raise _bad(chosen, f"compute_dtype {identity.compute_dtype!r}: exact mode promises the same bits")
    if unlike is not None:
        raise _bad(chosen, unlike)
    group = identity.head_dim & -identity.head_dim  # the largest power of two that divides it
    group = min(group, MOST_GROUP)
    if group < LEAST_GROUP or block_bytes % (group * DTYPE_BYTES[identity.kv_dtype]):
        raise _bad(chosen, f"head_dim {identity.head_dim}: no groups of {LEAST_GROUP} numbers or more fill it")
    return replace(identity, lossy=fp8_form(identity.kv_dtype, group))


def _bad(chosen: Lossy, why: str) -> ConfigError:
    return ConfigError(f'[cache] lossy "{chosen}": {why}; {_FIX}')
