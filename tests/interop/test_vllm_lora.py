"""Adapters and changed weights in a real vLLM: their requests are kept apart, warm and after a restart."""

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


def make_adapter(path: Path, seed: int = 1) -> Path:
    """Random low-rank weights for every layer's queries and values: large enough to change the text."""
    path.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM", "bias": "none"}))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for part, size in (("q", 128), ("v", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.lora_A.weight"] = 0.3 * torch.randn(8, 128, generator=generator)
            weights[f"{name}.lora_B.weight"] = 0.3 * torch.randn(size, 8, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    return path


def answer(
    vllm: Engine, adapter: Path | None, tokens: list[int] = PROMPT, number: int = 1, **options: Any
) -> tuple[list[int], int]:
    lora = None if adapter is None else LoRARequest("tone", number, str(adapter), **options)
    asked = [{"prompt_token_ids": tokens}]
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


def test_an_adapter_on_other_parts_of_the_model_has_other_kv(tmp_path: Path) -> None:
    """Of this adapter the server leaves out the queries and values; the next one has it whole."""
    model, adapter = make_checkpoint("llama", tmp_path / "llama"), make_adapter(tmp_path / "adapter")
    with engine(model, **LORA) as plain:
        whole = answer(plain, adapter)[0]
    with engine(model, tiers(tmp_path / "store"), **LORA, lora_target_modules=["o_proj"]) as part:
        assert answer(part, adapter)[0] != whole
    with engine(model, tiers(tmp_path / "store"), **LORA) as vllm:
        assert answer(vllm, adapter) == (whole, 0)


@pytest.mark.parametrize("empties", [False, True])
def test_weights_that_change_in_a_running_server(tmp_path: Path, empties: bool) -> None:
    """Whatever resets the caller forgets but vLLM's own, and whichever process comes next."""
    model, trained = make_checkpoint("llama", tmp_path / "m"), make_checkpoint("llama", tmp_path / "trained", seed=1)
    texts = []
    for each in (model, trained):
        with engine(each) as plain:
            texts.append(answer(plain, None)[0])
    assert texts[0] != texts[1]
    with engine(model, tiers(tmp_path / "store")) as vllm:
        assert answer(vllm, None) == (texts[0], 0)
        vllm.settle()
        vllm.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(trained)})
        assert vllm.llm.llm_engine.reset_prefix_cache(reset_connector=empties)
        assert answer(vllm, None) == (texts[1], 0)
        vllm.forget_l1()
        assert answer(vllm, None) == (texts[1], 192)
    for path, text in ((model, texts[0]), (trained, texts[1])):
        with engine(path, tiers(tmp_path / "store")) as vllm:
            assert answer(vllm, None)[0] == text


OTHER: Final = prompt(2, 200)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[int, list[int]]]]:
    """A model, and by the seed of an adapter's weights and of a prompt what it answers without kvtier."""
    root = tmp_path_factory.mktemp("told")
    model = make_checkpoint("llama", root / "llama")
    texts: dict[int, dict[int, list[int]]] = {}
    for seed in (1, 2):
        with engine(model, **LORA) as plain:
            adapter = make_adapter(root / "adapter", seed)
            texts[seed] = {1: answer(plain, adapter)[0], 2: answer(plain, adapter, OTHER)[0]}
    assert all(texts[1][each] != texts[2][each] for each in (1, 2))
    return model, texts


def test_an_adapter_overwritten_in_service(told: tuple[Path, dict[int, dict[int, list[int]]]], tmp_path: Path) -> None:
    """Its name follows what the server computes with, and so does the text after a restart."""
    model, texts = told
    adapter, store = make_adapter(tmp_path / "adapter", 1), tiers(tmp_path / "store")
    with engine(model, store, **LORA) as vllm:
        assert answer(vllm, adapter) == (texts[1][1], 0)
        make_adapter(adapter, 2)
        # the server goes on with the weights it has, and finds their KV
        vllm.forget_l1()
        assert answer(vllm, adapter) == (texts[1][1], 192)
        assert answer(vllm, adapter, OTHER) == (texts[1][2], 0)
        # loaded in place: what vLLM's own cache has of the old weights is never kept as the new ones'
        assert answer(vllm, adapter, OTHER, load_inplace=True)[1] == 192
        vllm.forget_l1()
        assert answer(vllm, adapter, OTHER, load_inplace=True) == (texts[2][2], 0)
    with engine(model, store, **LORA) as vllm:
        assert answer(vllm, adapter) == (texts[2][1], 0)
        assert answer(vllm, adapter, OTHER) == (texts[2][2], 192)
    make_adapter(adapter, 1)
    with engine(model, store, **LORA) as vllm:
        assert answer(vllm, adapter) == (texts[1][1], 192)
        assert answer(vllm, adapter, OTHER) == (texts[1][2], 192)


def test_an_adapter_overwritten_before_its_first_request_and_after_it_lost_its_place(
    told: tuple[Path, dict[int, dict[int, list[int]]]], tmp_path: Path
) -> None:
    model, texts = told
    adapter, other, store = make_adapter(tmp_path / "adapter", 1), make_adapter(tmp_path / "other", 3), tiers()
    with engine(model, store, max_loras=1, max_cpu_loras=1, **LORA) as vllm:
        # the server is told to load it, and does
        assert vllm.llm.llm_engine.add_lora(LoRARequest("tone", 1, str(adapter)))
        make_adapter(adapter, 2)
        assert answer(vllm, adapter) == (texts[1][1], 0)
        vllm.forget_l1()
        assert answer(vllm, adapter) == (texts[1][1], 192)
        # another one takes its place; what is loaded again is what lies there now
        answer(vllm, other, number=2)
        vllm.forget_l1()
        assert answer(vllm, adapter) == (texts[2][1], 0)
        vllm.forget_l1()
        assert answer(vllm, adapter) == (texts[2][1], 0)  # nobody knows which weights these are
