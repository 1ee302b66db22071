"""A record's head: a msgpack map whose values are of fixed width, so that no block needs msgpack again."""

import hmac
from collections.abc import Mapping
from struct import Struct
from typing import Final

import msgpack

from kvtier.tiers import checksum

_MAC: Final = "sha256"
_CHECKSUM_BYTES: Final = 8
_MAC_BYTES: Final = 32
_PREFIX_BYTES: Final = 4  # u32: length of the header behind it


def layout(fields: Mapping[str, int | str | bytes]) -> tuple[bytes, dict[str, slice]]:
    """The head with zeros for what differs from block to block, and where in it each of its values lies."""
    header = msgpack.packb(fields)
    places, so_far = {}, {}
    for name, value in fields.items():
        so_far[name] = value
        end = _PREFIX_BYTES + len(msgpack.packb(so_far))  # up to 15 fields, a map's own mark is one byte
        places[name] = slice(end - len(value) if isinstance(value, bytes) else end, end)
    return len(header).to_bytes(_PREFIX_BYTES, "little") + header, places


def packer(blank: bytes, at: Mapping[str, slice], codes: Mapping[str, str]) -> tuple[Struct, list[bytes]]:
    """What packs the fields of `codes`, each at its place, and what is equal in all heads: around them, and between."""
    shape, between, end = "<", [], 0
    for name, code in codes.items():
        between.append(blank[end : at[name].start])
        shape += f"{at[name].start - end}s{code}"
        end = at[name].stop
    return Struct(f"{shape}{len(blank) - end}s"), [*between, blank[end:]]


class HeadSeal:
    """What ends a head in the clear: xxh3 of all before it, which tells accidents. A secret seals all, which tells
    forgeries too: HMAC-SHA256 over head and payload, by a key made from the secret for one `purpose`.
    """

    def __init__(self, secret: str | None, purpose: bytes) -> None:
        self.num_bytes = _CHECKSUM_BYTES if secret is None else _MAC_BYTES
        self._mac = None if secret is None else hmac.new(derived(secret, purpose), digestmod=_MAC)

    def of(self, unsealed: bytes, payload: memoryview) -> bytes:
        if self._mac is None:
            return checksum(memoryview(unsealed)).to_bytes(_CHECKSUM_BYTES, "little")
        mac = self._mac.copy()
        mac.update(unsealed)
        mac.update(payload)  # lets go of the GIL
        return mac.digest()


def derived(secret: str, purpose: bytes) -> bytes:
    """What stands for a secret in one use."""
    return hmac.digest(secret.encode("utf-8", "surrogatepass"), purpose, _MAC)


def purpose(tier: str, use: str) -> bytes:
    """One use of a tier's secret or key: each tier has its own."""
    return f"kvtier {tier} {use}".encode()
