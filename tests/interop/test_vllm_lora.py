"""An adapter in a real vLLM: its requests are kept apart from the model's, warm and after a restart."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm_rig import Engine, engine, greedy, make_checkpoint, prompt, tiers

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

PROMPT: Final = prompt(1, 200)
LORA: Final[dict[str, Any]] = {"enable_lora": True, "max_lora_rank": 8}


def make_adapter(path: Path) -> Path:
    """Random low-rank weights for every layer's queries and values: large enough to change the text."""
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM", "bias": "none"}))
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(4):
        for part, size in (("q", 128), ("v", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.lora_A.weight"] = 0.3 * torch.randn(8, 128, generator=generator)
            weights[f"{name}.lora_B.weight"] = 0.3 * torch.randn(size, 8, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    return path


def answer(vllm: Engine, adapter: Path | None) -> tuple[list[int], int]:
    lora = None if adapter is None else LoRARequest("tone", 1, str(adapter))
    asked = [{"prompt_token_ids": PROMPT}]
    [output] = vllm.llm.generate(asked, greedy(), use_tqdm=False, lora_request=lora)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_with_an_adapter_and_without(tmp_path: Path) -> None:
    model, adapter = make_checkpoint("llama", tmp_path / "llama"), make_adapter(tmp_path / "adapter")
    with engine(model, **LORA) as plain:
        bare, adapted = answer(plain, None)[0], answer(plain, adapter)[0]
    assert bare != adapted
    with engine(model, tiers(tmp_path / "store"), **LORA) as vllm:
        assert (answer(vllm, None), answer(vllm, adapter)) == ((bare, 0), (adapted, 0))
        vllm.forget_l1()
        assert (answer(vllm, adapter), answer(vllm, None)) == ((adapted, 192), (bare, 192))
    with engine(model, tiers(tmp_path / "store"), **LORA) as vllm:  # after a restart
        assert (answer(vllm, adapter), answer(vllm, None)) == ((adapted, 192), (bare, 192))
