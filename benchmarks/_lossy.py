"""What `compression.py` tells of KV as fp8: bytes, error and rates of packing, and what it does to answers."""

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from kvtier.connector.models import cache_option
from kvtier.tiers import BlockCodec, Fp8Codec, Fp8Loops
from kvtier.tiers.compiled import extension

ROUNDS: Final = 3
SAMPLES: Final = 100  # of four documents, each with four questions
DOCUMENTS: Final = 4
TORCH: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Loss = Callable[[torch.Tensor], torch.Tensor]


def packed(whose: str, dtype: str, blocks: NDArray[np.uint8], group: int) -> dict[str, object]:
    """One row for blocks `[blocks, bytes]`, a scale for each `group` numbers. What comes back packs to the same."""
    python, loops = Fp8Codec(dtype, group, blocks.shape[1]), extension("kvtier.tiers.fp8_compiled")
    codec = python if loops is None else Fp8Codec(dtype, group, blocks.shape[1], cast(Fp8Loops, loops))
    zstd = BlockCodec(codec.packed_bytes)
    errors, largest, shorter = [list[float]() for _ in range(3)]
    rates: dict[str, list[float]] = {}
    for block in blocks:
        payload, target = memoryview(block.tobytes()), memoryview(bytearray(len(block)))
        stored = codec.pack(payload)
        assert stored is not None
        assert codec.unpack(stored, target)
        assert codec.pack(target) == stored
        before, after = (torch.frombuffer(bytearray(each), dtype=TORCH[dtype]).double() for each in (payload, target))
        errors.append(float((after - before).norm() / before.norm()))
        largest.append(float((after - before).abs().max() / before.abs().max()))
        shorter.append(len(block) / zstd.shrink(stored)[1].nbytes)
        for which, way in ((codec, ""), (python, ", Python")):
            pack, unpack = partial(which.pack, payload), partial(which.unpack, stored, target)
            rates.setdefault(f"pack{way} GB/s", []).append(len(block) / _fastest(pack))
            rates.setdefault(f"unpack{way} GB/s", []).append(len(block) / _fastest(unpack))
    return {
        "KV of": whose,
        "as fp8 from": dtype,
        "ratio": round(blocks.shape[1] / codec.packed_bytes, 3),
        "with zstd": round(statistics.median(shorter), 3),
        "error": round(statistics.median(errors), 4),
        "largest error": round(max(largest), 4),
        **{name: round(statistics.median(each) / 1e9, 3) for name, each in rates.items()},
    }


def answers(fixture: Path, quick: bool) -> Iterator[dict[str, object]]:
    """A row for each way in which the KV of documents may come back to a trained model."""
    sys.path.append(str(fixture))
    made = importlib.import_module("task").gen(8 if quick else SAMPLES, DOCUMENTS, 24, 4, np.random.default_rng(5))
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(fixture / "recall-llama-bf16", dtype=torch.bfloat16).eval()
    expected = torch.tensor(made["qv"]).flatten()
    exact = _logits(model, made, lambda kv: kv)
    for name, loss in (("exact", lambda kv: kv), ("as fp8, with scales", _scaled), ("cast to e4m3", _cast)):
        logits = exact if name == "exact" else _logits(model, made, loss)
        said, meant = logits.log_softmax(-1), exact.log_softmax(-1)
        apart = (meant.exp() * (meant - said)).sum(-1)
        yield {
            "KV of the documents": name,
            "questions": len(expected),
            "right": round(float((logits.argmax(-1) == expected).double().mean()), 4),
            "as exact": round(float((logits.argmax(-1) == exact.argmax(-1)).double().mean()), 4),
            "KL, mean": round(float(apart.mean()), 6),
            "KL, most": round(float(apart.max()), 5),
            "logits apart, most": round(float((logits - exact).abs().max()), 3),
        }


def _logits(model: Any, made: Any, loss: Loss) -> torch.Tensor:
    """Of the answer to each question, `[questions, vocabulary]`: computed over the documents' KV, which lost that."""
    found = []
    with torch.inference_mode():
        for documents, tail in zip(made["docs"], made["tail"], strict=True):
            cache = model(torch.tensor(documents.reshape(1, -1)), use_cache=True).past_key_values
            kept = [(loss(layer.keys), loss(layer.values)) for layer in cache.layers]
            for number in range(made["qv"].shape[1]):
                again = DynamicCache()
                for index, (keys, values) in enumerate(kept):
                    again.update(keys.clone(), values.clone(), index)
                asked = torch.tensor(tail[3 * number : 3 * number + 2].reshape(1, -1))
                found.append(model(asked, use_cache=True, **cache_option(model, again)).logits[0, -1].double())
    return torch.stack(found)


def _scaled(kv: torch.Tensor) -> torch.Tensor:
    """As it comes back from a tier: `[1, heads, tokens, dim]`."""
    payload = memoryview(bytearray(kv.contiguous().view(torch.uint8).numpy().tobytes()))
    codec = Fp8Codec("bfloat16", kv.shape[-1], len(payload))
    stored = codec.pack(payload)
    assert stored is not None
    assert codec.unpack(stored, payload)
    return torch.frombuffer(payload, dtype=torch.bfloat16).reshape(kv.shape)


def _cast(kv: torch.Tensor) -> torch.Tensor:
    return kv.to(torch.float8_e4m3fn).to(kv.dtype)


def _fastest(work: Callable[[], object]) -> float:
    """CPU seconds."""
    seconds = list[float]()
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return max(min(seconds), 1e-9)
