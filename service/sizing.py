"""ModelSize: bytes of a model's tokens and blocks, and how many fit into given rooms of each tier."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.connector.transformers import CacheForm, form_of_config
from kvtier.service.breakeven import Table
from kvtier.tiers import L2, ConfigError
from kvtier.tiers.config import show_size
from kvtier.tiers.file import BareSlab
from kvtier.tiers.host import slot_stride
from kvtier.tiers.naming import DTYPE_BYTES
from kvtier.tiers.shared import ClearForm

FORM: Final = 1  # of the JSON: `kvtier_size`
FP8: Final = "fp8"  # as engines' option for KV says
_GIB: Final = 1 << 30
_NO_NAME: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class TierRoom:
    tier: str
    room_bytes: int
    blocks: int
    tokens: int
    tokens_per_gib: int
    conversations: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """One model's KV. `bytes_per_token` and `block_bytes` are of all its layers and heads, each once."""

    model_type: str
    dtype: str
    layers: int  # that keep something for each token
    block_size: int  # tokens
    bytes_per_token: int
    block_bytes: int  # of a slot; of a piece of a state, if no layer keeps KV for each token
    state_bytes: int  # recurrent states behind one token; 0: none
    tensor_parallel: int
    gpu_bytes_per_token: int  # on each GPU
    conversation: int  # tokens
    slots_per_conversation: int  # blocks, and pieces of one state behind its last block
    rooms: tuple[TierRoom, ...]

    @property
    def json(self) -> dict[str, Any]:
        return {"kvtier_size": FORM, **asdict(self)}

    @property
    def table(self) -> Table:
        title = f"{self.model_type}, {self.dtype}, blocks of {self.block_size} tokens"
        columns = ["tier", "room", "blocks", "tokens", "tokens a GiB", f"conversations of {self.conversation:,}"]
        counts = ("blocks", "tokens", "tokens_per_gib", "conversations")
        rows = [
            [each.tier, show_size(each.room_bytes), *(f"{getattr(each, name):,}" for name in counts)]
            for each in self.rooms
        ]
        return Table(title, columns, rows, self._note)

    @property
    def _note(self) -> str:
        lines = [
            f"{self.bytes_per_token:,} bytes of KV a token, {self.block_bytes:,} a block; {self.layers} layers keep it"
        ]
        if self.state_bytes:
            lines.append(f"{self.state_bytes:,} bytes of recurrent states, counted once a conversation")
        if self.tensor_parallel > 1:
            lines.append(f"{self.gpu_bytes_per_token:,} bytes a token on each of {self.tensor_parallel} GPUs")
        return "\n".join(lines)


def sizing_of(
    path: Path, rooms: Mapping[str, int], *, block_size: int, dtype: str, tensor_parallel: int, conversation: int
) -> ModelSize:
    """The sizes of the model whose config.json is at `path`. `rooms`: bytes of l2, file, redis. ConfigError.

    `dtype` "fp8": the engine keeps a number of KV in one byte, and states as the model has them.
    """
    if dtype not in (known := ("auto", FP8, *DTYPE_BYTES)):
        raise ConfigError(f"--dtype {dtype!r}: use one of {', '.join(known)}")
    kind, form = form_of_config(path, block_size, "auto" if dtype == FP8 else dtype)
    item = 1 if dtype == FP8 and form.layers else DTYPE_BYTES[form.dtype]
    block_bytes = form.num_elements * item
    state_bytes = form.states.num_bytes if form.states is not None else 0
    slots = -(-conversation // block_size) if form.layers else 0
    slots += -(-state_bytes // block_bytes)
    found = tuple(_room(tier, num_bytes, form, block_bytes, slots) for tier, num_bytes in rooms.items())
    per_token = block_bytes // block_size if form.layers else 0
    return ModelSize(
        kind,
        dtype if dtype == FP8 else form.dtype,
        len(form.kept),
        block_size,
        per_token,
        block_bytes,
        state_bytes,
        tensor_parallel,
        _of_each_gpu(form, tensor_parallel) * item,
        conversation,
        slots,
        found,
    )


def _room(tier: str, num_bytes: int, form: CacheForm, block_bytes: int, slots: int) -> TierRoom:
    if tier == L2:
        blocks = num_bytes // slot_stride(block_bytes)
    elif tier == "file":
        blocks = BareSlab(num_bytes, block_bytes, form.block_size).num_slots
    else:
        head = ClearForm(_NO_NAME, block_bytes, form.block_size).head_bytes
        blocks = num_bytes // (head + block_bytes)
    tokens = blocks * form.block_size if form.layers else 0
    return TierRoom(tier, num_bytes, blocks, tokens, tokens * _GIB // num_bytes, blocks // slots)


def _of_each_gpu(form: CacheForm, num_gpus: int) -> int:
    """Numbers a token on each: heads are divided, and copied if they are fewer; a latent is on all."""
    elements = 0
    for plane in (plane for layer in form.layers for plane in layer):
        heads = plane.num_heads
        if heads % num_gpus and num_gpus % heads:
            fix = f"use a number that divides {heads}, or a multiple of it"
            raise ConfigError(f"--tensor-parallel {num_gpus}: the model has {heads} KV heads; {fix}")
        elements += max(1, heads // num_gpus) * plane.dim
    return elements
