"""Sliding windows in a real vLLM: each layer's KV of each token is stored once, and what slid out is not loaded.

Gemma 3 slides in two of four layers, so it has two KV groups; gpt-oss too, with attention sinks. Mistral slides in all
four. A window is 64 tokens. Llama 4 has chunks of 64 tokens in two layers, which look at nothing before theirs.
"""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm_rig import BLOCK, Engine, engine, make_checkpoint, prompt, tiers

from kvtier.connector.vllm.scheduler import SchedulerHalf
from kvtier.tiers.copies.transfer import PartCopier
from kvtier.tiers.hierarchy import Hierarchy

pytestmark = pytest.mark.timeout(300)

WINDOW: Final = 64
HEADS, DIM, LAYERS, FLOAT = 2, 32, 4, 4
TOKEN_BYTES: Final = LAYERS * 2 * HEADS * DIM * FLOAT  # K and V of all layers
LONG = prompt(1, 650)  # 20 blocks, which end ten chunks
IN_WINDOW: Final = -(-(WINDOW - 1) // BLOCK)  # blocks: what the next token behind a border looks back to
IN_CHUNK: Final = 0  # of layers with chunks: the next token begins one


class CopiedBytes(Counter[str]):
    """Bytes that went each way between L1 and L2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        copy = PartCopier.copy

        def counted(copier: PartCopier, direction: Any, copies: Any, cancelled: Any = bool) -> str | None:
            for group, numbers, _ in copier._blocks.by_group(copies):
                parts = copier._blocks.select(group, copies.layers)
                self[direction] += len(numbers) * sum(part.num_bytes for part in parts)
            return copy(copier, direction, copies, cancelled)

        monkeypatch.setattr(PartCopier, "copy", counted)


def held(vllm: Engine) -> dict[bytes, bytes]:
    """Every block that L2 holds: its name → its bytes."""
    host = vllm.hierarchy.host
    names = [record.chain_hash for record in host.records if record is not None]
    found = {}
    for name in names:
        lease = host.pool.lease([name])
        for slot in lease.slots:
            found[bytes(name)] = bytes(host.region.slot(slot))
        lease.release()
    return found


@pytest.mark.parametrize(
    ("family", "num_sliding", "num_seen"),
    [
        *brief([], [("gemma3", 2, IN_WINDOW), ("mistral-window", 4, IN_WINDOW)]),
        ("gpt-oss", 2, IN_WINDOW),
        ("llama4", 2, IN_CHUNK),
    ],
)
def test_every_token_is_stored_once_and_what_slid_out_is_not_loaded(
    family: str, num_sliding: int, num_seen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`num_seen` blocks of a sliding or chunked layer are what the next token looks back to."""
    path = make_checkpoint(family, tmp_path / "model")
    with engine(path) as plain:
        right = plain.text([LONG])
    copied = CopiedBytes(monkeypatch)
    with engine(path, tiers()) as vllm:
        assert vllm.text([LONG]) == right
        vllm.forget_l1()
        num_blocks = (len(LONG) + 15) // BLOCK  # of the prompt and its answer
        assert copied == {"store": num_blocks * BLOCK * TOKEN_BYTES}
        assert len(held(vllm)) == num_blocks
        assert {len(payload) for payload in held(vllm).values()} == {BLOCK * TOKEN_BYTES}
        [output] = vllm.run([LONG])
        num_hits = len(LONG) // BLOCK
        assert ([list(output.outputs[0].token_ids)], output.num_cached_tokens) == (right, num_hits * BLOCK)
        vllm.settle()
        layer = BLOCK * TOKEN_BYTES // LAYERS
        assert copied["load"] == layer * ((LAYERS - num_sliding) * num_hits + num_sliding * num_seen)
        assert copied["store"] == num_blocks * BLOCK * TOKEN_BYTES  # nothing is stored twice


@pytest.mark.parametrize("family", brief(["gemma3"], ["gemma3", "mistral-window"]))
def test_blocks_out_of_a_window_leave_no_hole(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loaded prompt's sliding layers only the window is there. The tiers lose blocks, and it offers them anew."""
    path = make_checkpoint(family, tmp_path / "model")
    longer = [*LONG, *prompt(2, 200)]
    prompts = [LONG[:330], LONG, longer]
    with engine(path) as plain:
        right = [plain.text([tokens])[0] for tokens in prompts]
    offer, lost = SchedulerHalf._offer, list[bytes]()

    def losing(self: SchedulerHalf, row: Any, num_scheduled: int, state: Any) -> None:
        if row.stored is None and row.request.num_computed_tokens:
            names = [bytes(name) for name in row.chain.hashes[:8]]
            tiers = self.side.tiers
            assert isinstance(tiers, Hierarchy)
            assert all(tiers.holds(names))
            tiers.host.pool.evict(names)
            lost.extend(names)
            tables = state.get_block_ids(row.request_id)
            slid = [group for group, table in enumerate(tables) if not any(table[:8])]
            assert slid  # vLLM has no such block of that group
        offer(self, row, num_scheduled, state)

    with engine(path, tiers()) as vllm:
        assert vllm.text([LONG])[0] == right[1]
        vllm.forget_l1()
        stored = held(vllm)
        with monkeypatch.context() as patched:
            patched.setattr(SchedulerHalf, "_offer", losing)
            [output] = vllm.run([longer])
            assert (list(output.outputs[0].token_ids), output.num_cached_tokens) == (right[2], 640)
        assert lost
        vllm.forget_l1()
        now = held(vllm)
        assert not any(name in now for name in lost)  # none with a hole came back
        assert all(stored[name] == payload for name, payload in now.items() if name in stored)
        for tokens, text in zip(prompts, right, strict=True):
            assert vllm.text([tokens])[0] == text
            vllm.forget_l1()
        assert all(stored[name] == payload for name, payload in held(vllm).items() if name in stored)


@pytest.mark.parametrize("family", brief(["mistral-window"], ["gemma3", "mistral-window"]))
def test_windows_with_an_l1_too_small_for_all(family: str, tmp_path: Path) -> None:
    """Requests are preempted, and come back with only their windows loaded."""
    path = make_checkpoint(family, tmp_path / "model")
    batch = [prompt(20 + i, 150) for i in range(6)]
    with engine(path) as plain:
        right = [plain.text([tokens], 100)[0] for tokens in batch]
    with engine(path, tiers(), num_gpu_blocks_override=26, max_model_len=256) as vllm:
        for _ in range(2):
            assert vllm.text(batch, 100) == right
        assert vllm.found_in("l2") > 0
        vllm.forget_l1()
        for tokens, text in zip(batch, right, strict=True):  # whatever was stored meanwhile is right
            [output] = vllm.run([tokens], 100)
            assert list(output.outputs[0].token_ids) == text
            assert output.num_cached_tokens >= 128
            vllm.forget_l1()
