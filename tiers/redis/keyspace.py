"""What a model's blocks are called in Redis, in which form they are, and how long their values (docs/format.md)."""

from collections.abc import Iterable

from kvtier.tiers import ChainHash
from kvtier.tiers.shared import RecordForm, format_epoch


class Keyspace:
    """Keys and records of one model's blocks, below a key prefix, in the form [redis] asks for. Immutable.

    Every record of a namespace has the same length, `value_bytes`: a head of `head_bytes`, then `slot_bytes` of
    payload. So a reader knows what to expect before it reads, and refuses any other length. Records of a form that
    compresses are at most as long, and refused if they are not as long as their head says.
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
        return self._stem + b"epoch"

    @property
    def probe_key(self) -> bytes:
        return self._stem + b"probe"

    def kv_probe_key(self, epoch: int) -> bytes:
        """Of what the epoch's first process computes of a few tokens."""
        return self._stem + b"kv-probe:" + format_epoch(epoch)

    def keys(self, hashes: Iterable[ChainHash], epoch: int) -> list[bytes]:
        """`{prefix}:{the form's name}:{epoch}:{the block's name}` of each: all of one length."""
        stem = self._stem + format_epoch(epoch) + b":"
        return [stem + name for name in self.form.names(hashes)]
