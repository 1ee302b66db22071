"""A process of test_transformers_process.py: it answers one request, and is gone by SIGKILL.

The request is its argument, in JSON: `checkpoint`, `slab`, `dtype`, `verb` and `prompts` (a list of lists of tokens).
It answers in one line of JSON.
`generate` and `engine` answer by KVTier and by our engine: per prompt the new tokens and how many were found.
`segments` answers over prompts whose tokens 5 to 69 are a segment; it tells how many were reused, what was computed.
`store`, `load` and `spoil` tell, per prompt, how many tokens were found and what their KV hashes to.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from kvtier import Config, Repair, SamplingParams, Segment, open_engine  # noqa: E402
from kvtier.connector.models import cache_option  # noqa: E402
from kvtier.connector.transformers.adapter import KVTier  # noqa: E402

GREEDY: Final[dict[str, Any]] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
Reply = list[dict[str, Any]]


def generate(kv: KVTier, prompts: list[list[int]]) -> Reply:
    replies = []
    for tokens in prompts:
        answer = kv.generate(torch.tensor([tokens]), **GREEDY)[0, len(tokens) :].tolist()
        replies.append({"tokens": answer, "found": kv.num_cached_tokens})
    return replies


def segments(kv: KVTier, prompts: list[list[int]]) -> Reply:
    replies = []
    for tokens in prompts:
        reuse: Any = {"segments": [Segment(5, 69)], "repair": Repair(max_deviation=9)}
        answer = kv.generate(torch.tensor([tokens]), **reuse, **GREEDY)[0, len(tokens) :].tolist()
        stats = kv.stats()
        replies.append({
            "tokens": answer, "found": kv.num_cached_tokens, "reused": kv.num_segment_tokens,
            "loaded": stats["segments_loaded"], "computed": stats["segments_computed"],
        })  # fmt: skip
    return replies


def store(kv: KVTier, prompts: list[list[int]]) -> Reply:
    """Computes all and keeps it, whatever was known."""
    return [_computed(kv, tokens, spoilt=False) for tokens in prompts]


def spoil(kv: KVTier, prompts: list[list[int]]) -> Reply:
    """The same, but a block is wrong before its checksum is made, so that nothing can find that out."""
    return [_computed(kv, tokens, spoilt=True) for tokens in prompts]


def _computed(kv: KVTier, tokens: list[int], spoilt: bool) -> dict[str, Any]:
    cache: Any = DynamicCache()
    with torch.inference_mode():
        kv.model(torch.tensor([tokens]), **cache_option(kv.model, cache))
        if spoilt:
            cache.layers[1].values[:, :, 16:32] *= -3
    kv.store(torch.tensor([tokens]), cache)
    return {"found": 0, "digest": _digest(cache, len(tokens) // 16 * 16)}


def load(kv: KVTier, prompts: list[list[int]]) -> Reply:
    replies = []
    for tokens in prompts:
        cache, num_cached = kv.load(torch.tensor([tokens]))
        replies.append({"found": num_cached, "digest": _digest(cache, num_cached)})
    return replies


def _digest(cache: Any, num_tokens: int) -> str:
    """SHA-256 of every bit of the first tokens' KV."""
    digest = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            digest.update(tensor[:, :, :num_tokens].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def answer(checkpoint: str, config: Config, dtype: str, verb: str, prompts: list[list[int]]) -> Reply:
    if verb == "engine":
        with open_engine(checkpoint, config, dtype=dtype, device="cpu") as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            answers = [engine.generate([tokens], params)[0] for tokens in prompts]
        return [{"tokens": one.token_ids, "found": one.num_external_tokens} for one in answers]
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    verbs: dict[str, Callable[[KVTier, list[list[int]]], Reply]] = {
        "generate": generate, "segments": segments, "store": store, "spoil": spoil, "load": load,
    }  # fmt: skip
    kv = KVTier(model, config)
    replies = verbs[verb](kv, prompts)
    assert kv.drain()  # and no close(): SIGKILL comes first
    return replies


def be_killed(asked: dict[str, Any]) -> None:
    """Answer, and end by SIGKILL, whatever is open."""
    file = {"path": asked["slab"], "size": "64MiB"}
    cache = {"block_size": 16, "load_or_recompute": "load", "segments": "on" if asked["verb"] == "segments" else "off"}
    settings = Config.load(host={"size": "8MiB"}, file=file, cache=cache)
    replies = answer(asked["checkpoint"], settings, asked["dtype"], asked["verb"], asked["prompts"])
    print(json.dumps(replies), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    be_killed(json.loads(sys.argv[1]))
