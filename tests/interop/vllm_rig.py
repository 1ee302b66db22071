"""A real vLLM on the CPU over tiny random models, with kvtier's connector in it and within the test's reach.

Import it only where vLLM is there. Everything runs in the test's process, engine after engine, unless a test asks for
vLLM's own processes; `vllm_child.py` runs one of these in a process of its own.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
import pytest
import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.parallel_state import destroy_model_parallel

from kvtier.tiers.copies.transfer import PartCopier

VOCAB: Final = 512
BLOCK: Final = 32  # tokens: vLLM's CPU kernels take multiples of it
FAMILIES: Final = ("llama", "qwen3", "mistral-window", "gemma3", "deepseek")
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # logits far enough apart that greedy text is a fair test
}


def config_of(family: str) -> Any:
    """A fresh config. Windows are 64 tokens; Gemmas slide in two of four layers; DeepSeek keeps one latent (MLA)."""
    if family == "qwen2":
        return transformers.Qwen2Config(**_SIZES)
    if family == "qwen3":
        return transformers.Qwen3Config(**_SIZES)
    if family == "mistral-window":
        return transformers.MistralConfig(**_SIZES, sliding_window=64)
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        return transformers.Gemma3TextConfig(
            **_SIZES, sliding_window=64, layer_types=kinds, query_pre_attn_scalar=32, tie_word_embeddings=False
        )
    if family == "gpt-oss":  # attention sinks, and experts
        kinds = ["sliding_attention", "full_attention"] * 2
        experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.GptOssConfig(**_SIZES, **experts, sliding_window=64, layer_types=kinds)
    if family == "llama4":  # chunks: a token of every other layer looks at nothing before the last multiple of 64
        kinds = ["chunked_attention", "full_attention"] * 2
        experts = {"num_local_experts": 2, "intermediate_size_mlp": 192, "interleave_moe_layer_step": 2}
        rope: dict[str, Any] = {"no_rope_layers": [1, 0] * 2, "layer_types": kinds}
        return transformers.Llama4TextConfig(**_SIZES, **experts, **rope, attention_chunk_size=64)
    if family == "gemma4":  # full layers have larger heads than sliding ones, which so have more tokens in a block
        kinds = ["sliding_attention", "full_attention"] * 2
        heads: dict[str, Any] = {"global_head_dim": 64, "num_kv_shared_layers": 0, "tie_word_embeddings": False}
        extra: dict[str, Any] = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
        return transformers.Gemma4TextConfig(**_SIZES, **heads, **extra, sliding_window=64, layer_types=kinds)
    if family == "deepseek":
        sizes = _SIZES | {"num_key_value_heads": 4, "head_dim": None}
        ranks: dict[str, Any] = {
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
        }
        dense: dict[str, Any] = {
            "v_head_dim": 32,
            "first_k_dense_replace": 4,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
        }
        return transformers.DeepseekV2Config(**{k: v for k, v in sizes.items() if v is not None}, **ranks, **dense)
    if family.startswith("qwen3-next"):  # every other layer has a recurrent state; vLLM's blocks are 160 tokens then
        kinds = ["linear_attention", "full_attention"] * 2
        if family == "qwen3-next-odd":  # more layers with a state than without, and in one group
            kinds = [*kinds, "linear_attention", "full_attention", "linear_attention"]
        sizes = _SIZES | {"num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": len(kinds)}
        linear: dict[str, Any] = {f"linear_{part}_head_dim": 128 for part in ("key", "value")}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return transformers.Qwen3NextConfig(
            **sizes,
            **linear,
            **experts,
            layer_types=kinds,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
        )
    return transformers.LlamaConfig(**_SIZES)


def make_checkpoint(family: str, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint directory with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config_of(family), dtype=dtype)
    model.save_pretrained(path)
    return path


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return tokens


def greedy(num_tokens: int = 16) -> SamplingParams:
    """Text that depends on nothing but the KV."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True)


def said(outputs: Sequence[Any]) -> tuple[list[list[int]], list[int]]:
    """(text, cached tokens) of every output."""
    return [list(one.outputs[0].token_ids) for one in outputs], [one.num_cached_tokens for one in outputs]


class Engine:
    """One vLLM engine. `kvtier` is the connector's extra configuration, None for an engine without it.

    `transfer` is another connector's `kv_transfer_config`.
    """

    def __init__(
        self,
        model: Path,
        kvtier: dict[str, Any] | None = None,
        *,
        policy: str = "recompute",
        transfer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if kvtier is not None:
            transfer = {
                "kv_connector": "KVTierConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": kvtier,
            }
        if transfer is not None:
            options["kv_transfer_config"] = KVTransferConfig(**transfer)
        destroy_model_parallel()  # groups of ranks for experts are made only for a process's first engine otherwise
        defaults = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 128, "block_size": BLOCK}
        self.llm: Any = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            **defaults | options,
        )
        self.core: Any = self.llm.llm_engine.engine_core

    def run(self, prompts: Sequence[list[int]], num_tokens: int = 16, salt: str | None = None) -> list[Any]:
        """vLLM's outputs, in order."""
        asked: list[dict[str, Any]] = [{"prompt_token_ids": tokens} for tokens in prompts]
        if salt is not None:
            asked = [{**one, "cache_salt": salt} for one in asked]
        outputs: list[Any] = self.llm.generate(asked, greedy(num_tokens), use_tqdm=False)
        return outputs

    def text(self, prompts: Sequence[list[int]], num_tokens: int = 16, salt: str | None = None) -> list[list[int]]:
        """The new tokens of each prompt."""
        return said(self.run(prompts, num_tokens, salt))[0]

    def forget_l1(self) -> None:
        """vLLM's own prefix cache is empty."""
        self.settle()
        assert self.llm.llm_engine.reset_prefix_cache()

    @property
    def scheduler(self) -> Any:
        return self.core.engine_core.scheduler

    @property
    def half(self) -> Any:
        """The connector's half in the scheduler (in this process); under MultiConnector it is the last child's."""
        connector = self.scheduler.connector
        return getattr(connector, "sub_connectors", [connector])[-1]._scheduler

    @property
    def hierarchy(self) -> Any:
        return self.half.side.tiers

    @property
    def worker(self) -> Any:
        """vLLM's model runner (in this process)."""
        return self.core.engine_core.model_executor.driver_worker.worker.model_runner

    def settle(self) -> None:
        """Every copy has ended and is in every tier there is. vLLM steps only for requests: this steps for the rest."""
        if not self._is_here() or self.scheduler.connector is None:
            return
        self._step_on()
        assert not self.half._ops
        tiers = self.half.side.tiers
        assert tiers.drain(60, below=not tiers.wanting)  # a tier that is off gets nothing
        self._step_on()  # vLLM stops stepping for a slow disk, and tells of its writes when it steps again

    def _step_on(self) -> None:
        for _ in range(1000):
            if not self.half.pending:
                break
            self.core.engine_core.step()

    def until_attached(self) -> None:
        """The daemon that was started anew has been found."""
        tiers, end = self.half.side.tiers, time.monotonic() + 60
        while tiers.member is None:
            assert time.monotonic() < end
            time.sleep(0.05)
            tiers.tick()

    def stats(self) -> dict[str, float]:
        found: dict[str, float] = self.half.side.tiers.stats()
        return found

    def reported(self) -> dict[str, float]:
        """What vLLM's metrics have of kvtier's by now, but the zeros. vLLM hears of it once a second, in its steps."""
        series = (each for each in self.llm.get_metrics() if each.name.startswith("vllm:kvtier_"))
        values = {f"{each.name}{each.labels}": getattr(each, "value", 0.0) for each in series}
        return {name: value for name, value in values.items() if value}

    def found_in(self, tier: str) -> int:
        """Blocks found in a tier so far, as attributed when first asked."""
        return int(self.stats()[f'kvtier_lookup_blocks_total{{tier="{tier}"}}'])

    def close(self) -> None:
        """Our laws hold, nothing leaked, and the engine goes."""
        if self._is_here() and self.scheduler.connector is not None:
            self.settle()
            self.half.side.tiers.check()
            assert not self.half._rows, "a request was forgotten"
        self.core.shutdown()

    def _is_here(self) -> bool:
        return hasattr(self.core, "engine_core")


def engine(model: Path, kvtier: dict[str, Any] | None = None, **options: Any) -> AbstractContextManager[Engine]:
    """An engine for a `with` block; checked and shut down behind it."""
    return shut_down(Engine(model, kvtier, **options))


@contextmanager
def shut_down(made: Any) -> Iterator[Any]:
    try:
        yield made
    except BaseException:
        made.core.shutdown()
        raise
    made.close()


def tiers(path: Path | None = None, **sections: Any) -> dict[str, Any]:
    """A small configuration: L2, and a slab where a path is given."""
    file = {} if path is None else {"file": {"path": str(path), "size": "64MiB"}}
    return {"host": {"size": "32MiB"}, **file, **sections}


def multi(kvtier: dict[str, Any], *siblings: dict[str, Any], policy: str = "recompute", **child: Any) -> dict[str, Any]:
    """A `kv_transfer_config` with kvtier as the last child of vLLM's MultiConnector; `child` is more for that one."""
    ours = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": kvtier, **child}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [*siblings, ours]},
    }


def before_copies(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Call `act("load" or "store")` before each copy between L2 and vLLM's memory. It fails if that returns a text."""
    copy = PartCopier.copy

    def acted(copier: PartCopier, direction: Any, copies: Any, cancelled: Any = bool) -> str | None:
        failure = act(direction)
        return failure if isinstance(failure, str) else copy(copier, direction, copies, cancelled)

    monkeypatch.setattr(PartCopier, "copy", acted)


class FailingLoads:
    """Copies from host memory to vLLM's, of which a `share` fails while it is `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float = 1.0) -> None:
        self.on, self.num_failed, self.num_well = False, 0, 0
        lot = random.Random(5)

        def maybe(direction: str) -> str | None:
            if direction != "load" or not self.on:
                return None
            fails = lot.random() < share
            self.num_failed, self.num_well = self.num_failed + fails, self.num_well + (not fails)
            return "the test failed this load" if fails else None

        before_copies(monkeypatch, maybe)
