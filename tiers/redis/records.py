"""Keys of a namespace in Redis: of its blocks, its epoch, its probe (docs/format.md)."""

from collections.abc import Iterable
from typing import Final

from kvtier.tiers import ChainHash
from kvtier.tiers.redis.forms import RecordForm

_EPOCH_END: Final = 1 << 62  # beyond it a reset could not raise it any more


def format_epoch(epoch: int) -> bytes:
    """Sixteen hexadecimal digits, as in keys and in the epoch's own."""
    return b"%016x" % epoch


def parse_epoch(value: object) -> int:
    """What `format_epoch` made such digits from; 0 for anything else, which no epoch is."""
    if not isinstance(value, bytes) or len(value) != 16 or not set(value) <= set(b"0123456789abcdef"):
        return 0
    epoch = int(value, 16)
    return epoch if epoch < _EPOCH_END else 0


class Keyspace:
    """Keys and records of one model's blocks, below a key prefix, in the form [redis] asks for. Immutable.

    Every record of a namespace has the same length, `value_bytes`: a head of `head_bytes`, then `slot_bytes` of
    payload. So a reader knows what to expect before it reads, and refuses any other length.
    """

    def __init__(self, prefix: str, form: RecordForm, slot_bytes: int, block_size: int) -> None:
        self.form = form
        self.slot_bytes = slot_bytes
        self.block_size = block_size
        self._stem = f"{prefix}:{form.name}:".encode()
        self.head_bytes = form.head_bytes
        self.value_bytes = self.head_bytes + slot_bytes

    @property
    def epoch_key(self) -> bytes:
        """Where the namespace's epoch stands."""
        return self._stem + b"epoch"

    @property
    def probe_key(self) -> bytes:
        """What a probe writes."""
        return self._stem + b"probe"

    def keys(self, hashes: Iterable[ChainHash], epoch: int) -> list[bytes]:
        """`{prefix}:{the form's name}:{epoch}:{the block's name}` of each: all of one length."""
        stem = self._stem + format_epoch(epoch) + b":"
        return [stem + name for name in self.form.names(hashes)]
