"""How far rounding alone takes the KV probes of equal models apart: what `TOLERANCES` in `kv_probe.py` stands on.

Random models of six shapes, in three dtypes, each computed in every way here: two attention kernels, one and two
threads, the instructions of four CPUs, the probe's tokens alone, in a batch, and one by one. Prints for each model and
dtype the two ways that are furthest apart. Some minutes on two cores.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3Config

from kvtier.connector.models import cache_option
from kvtier.tiers.naming import TOLERANCES, KVProbe

_TINY: Final[dict[str, Any]] = {"hidden_size": 64, "num_hidden_layers": 3, "initializer_range": 0.2}
_HEADS: Final[dict[str, Any]] = {"vocab_size": 500, "num_attention_heads": 8, "num_key_value_heads": 4}
_SMALL: Final[dict[str, Any]] = {**_HEADS, "hidden_size": 128, "intermediate_size": 256}
_DEEP: Final[dict[str, Any]] = {**_HEADS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32}
MODELS: Final[dict[str, Any]] = {
    "llama-3": LlamaConfig(**dict[str, Any](_SMALL | _TINY)),
    "llama-32": LlamaConfig(**_DEEP),
    "llama-32-wide": LlamaConfig(**_DEEP, initializer_range=0.1),
    "qwen3-48": Qwen3Config(**_SMALL, num_hidden_layers=48, head_dim=32, initializer_range=0.05),
    "gemma3-12": Gemma3TextConfig(**_SMALL, num_hidden_layers=12, head_dim=32),
    "mixtral-8": MixtralConfig(**_SMALL, num_hidden_layers=8, num_local_experts=4),
}
WAYS: Final[tuple[tuple[int, dict[str, str]], ...]] = (
    (1, {}),
    (2, {}),
    (1, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    (1, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    (1, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
    (1, {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}),
)
PACKINGS: Final = ("alone", "batch", "pieces")


def main() -> None:
    probes: dict[str, dict[str, KVProbe]] = {}
    for threads, environment in WAYS:
        told = {**os.environ, "OMP_NUM_THREADS": str(threads), **environment}
        output = subprocess.run([sys.executable, __file__, str(threads)], env=told, check=True, capture_output=True)
        for model, way, packed in json.loads(output.stdout.splitlines()[-1]):
            name = f"{threads} threads {' '.join(environment.values())} {way}"
            probes.setdefault(model, {})[name] = KVProbe.unpack(bytes.fromhex(packed))
    for model, ways in probes.items():
        pairs = itertools.combinations(ways.items(), 2)
        worst, first, second = max((one.distance(other), a, b) for (a, one), (b, other) in pairs)
        print(f"{model:24} {worst:.1e} of {TOLERANCES[model.split()[1]]:g}: {first} / {second}")


def measured(threads: int) -> Iterator[tuple[str, str, str]]:
    """Model and dtype, the way, and the packed probe, of all that this process can compute."""
    torch.set_num_threads(threads)
    for (name, config), dtype, attention in itertools.product(MODELS.items(), TOLERANCES, ("sdpa", "eager")):
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        model = model.to(getattr(torch, dtype))
        for packing in PACKINGS:
            cache: Any = filled(model, packing)
            planes = [each[0].float().numpy() for layer in cache.layers for each in (layer.keys, layer.values)]
            yield f"{name} {dtype}", f"{attention} {packing}", KVProbe.of(planes, dtype).packed().hex()


@torch.no_grad()
def filled(model: Any, packing: str) -> DynamicCache:
    """A cache whose first row has seven tokens, computed in that way."""
    tokens, cache = torch.arange(7)[None], DynamicCache(config=model.config)
    batch = torch.cat([tokens, tokens.flip(1), tokens + 9, tokens + 33]) if packing == "batch" else tokens
    for part in torch.split(batch, 1 if packing == "pieces" else 7, dim=1):
        model(part, use_cache=True, **cache_option(model, cache))
    return cache


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(list(measured(int(sys.argv[1])))))
    else:
        main()
