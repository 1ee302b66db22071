"""Attention over the paged pool against attention by hand, for every number of queries about a kernel's tile."""

import numpy as np
import pytest
import torch

from kvtier.connector.segments.paged_attention import AttentionSpan, PackedAttention, PagedKV, Scoring

HEADS, KV_HEADS, DIM, BLOCK, NUM_BLOCKS = 4, 2, 16, 16, 24
SCALING = 0.25
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
    """In float64; `[heads, T, head dim]`."""
    key, value = (states.double().repeat_interleave(HEADS // KV_HEADS, 0) for states in (key, value))
    rows = torch.arange(start, key.shape[1], device=key.device)[:, None]
    scores = query.double() @ key.transpose(1, 2) * SCALING
    unseen = torch.arange(key.shape[1], device=key.device) > rows
    return scores.masked_fill(unseen, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 16, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_chunk_behind_a_prefix_attends_to_all_of_it(
    start: int, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    """A kernel of torch's was wrong for 65 queries, 129, … alone: each number up to two tiles is tried."""
    torch.manual_seed(start)
    kv = PagedKV(torch.zeros(NUM_BLOCKS, 1, 2, BLOCK, KV_HEADS, DIM, dtype=dtype, device=device))
    table = np.random.default_rng(3).permutation(NUM_BLOCKS).tolist()
    for count in [1, 2, 17, 33, *range(63, 68), *range(127, 132), 193]:
        end = start + count
        key, value = (torch.randn(1, KV_HEADS, end, DIM, dtype=dtype, device=device) for _ in range(2))
        query = torch.randn(1, HEADS, count, DIM, dtype=dtype, device=device)
        slots = torch.from_numpy(kv.slots(table, 0, end)).to(device)
        kv.write(0, slots, key, value)
        span = AttentionSpan(0, count, start, end, torch.tensor(table[: -(-end // BLOCK)], device=device))
        step = PackedAttention(kv, [span], slots[start:], None)
        fresh = key[:, :, start:], value[:, :, start:]
        out = step.attend(0, query, *fresh, Scoring(SCALING))[0].transpose(0, 1)
        wanted = by_hand(query[0], key[0], value[0], start)
        assert (out.double() - wanted).abs().max() < tolerance, count
