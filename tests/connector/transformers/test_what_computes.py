"""A name follows what computes the KV: adapters, weights changed in place, hooks and foreign code, at every call."""

import copy
import functools
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from _architectures import ARCHITECTURES
from adapter_library import ForCausalLM, LoraLinear, Router, each, installed, with_adapters
from extent import brief
from kv_tier_rig import GREEDY, Open, assert_exact, tiers_over
from safetensors.torch import save_file
from state_models import CONFIGS, config_of
from tiny_models import SIZES, plain, prompt
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    dynamic_module_utils,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from kvtier.connector.models import cache_option, live_model, without_adapters
from kvtier.connector.models.computes import base_tensors, parts_of
from kvtier.connector.models.hf_model import weights_name
from kvtier.connector.models.model_watch import ModelWatch
from kvtier.connector.transformers.adapter import KVTier

TOKENS = torch.tensor([prompt(1, 70)])
BY_NAME = {one.name: one for one in ARCHITECTURES if one.name != "t5"}  # which generates by an encoder
HELD = 64  # tokens of it in whole blocks


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers over one directory, and closes those opened before: the next one starts as another process does."""
    with tiers_over(tmp_path) as factory:
        last: list[KVTier] = []

        def one(model: Any, **options: Any) -> KVTier:
            for kv in last:
                assert kv.drain()
                kv.close()
            last[:] = [factory(model, **options)]
            return last[0]

        yield one


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def bare(seed: int = 0) -> Any:
    """A model without anything put into it."""
    return plain("llama", seed=seed)


def answered(kv: KVTier, tokens: torch.Tensor = TOKENS) -> int:
    """Generate; the text is the model's own as it is now. Returns how many tokens were found."""
    with torch.inference_mode():
        expected = kv.model.generate(tokens, **GREEDY)
    assert torch.equal(kv.generate(tokens, **GREEDY), expected)
    return kv.num_cached_tokens


# adapters


def test_each_switch_of_adapters_is_noticed_at_the_next_call_and_what_is_back_is_found(open_tier: Open) -> None:
    model = bare()
    layers = with_adapters(model, a=1, b=2)
    kv = open_tier(model)
    seen = []
    for state in (
        {"active": ["a"]}, {"active": ["b"]}, {"active": ["a", "b"]}, {"active": ["b", "a"]}, {"scaling": {"a": 0.5}},
        {"disabled": True}, {"disabled": False, "active": ["a"]}, {"scaling": {"a": 2.0}},
    ):  # fmt: skip
        each(layers, **state)
        seen.append(answered(kv))
        assert answered(kv) == HELD
    assert seen == [0, 0, 0, 0, 0, 0, 0, HELD]  # the last is the first again
    layers[3].scaling["a"] = 7.0  # in one layer alone
    assert answered(kv) == 0


def test_the_same_adapter_is_found_by_another_process_whatever_it_is_called_there(open_tier: Open) -> None:
    model = bare()
    with_adapters(model, german=1, french=2)
    assert answered(open_tier(model)) == 0
    for names, found in (({"first": 1}, HELD), ({"german": 2}, 0), ({"x": 3, "german": 1}, 0)):
        other = bare()
        with_adapters(other, **names)
        assert answered(open_tier(other)) == found


def test_a_model_whose_adapters_are_off_shares_with_the_bare_model(open_tier: Open) -> None:
    assert answered(open_tier(bare())) == 0
    model = bare()
    layers = with_adapters(model, a=1)
    kv = open_tier(model)
    assert answered(kv) == 0
    each(layers, disabled=True)
    assert answered(kv) == HELD


def test_what_was_merged_into_the_weights_has_their_name(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = bare()
    layers = with_adapters(model, a=1)
    kv = open_tier(model)
    answered(kv)
    for layer in layers:
        layer.merge("a")
    assert answered(kv) == 0
    assert answered(kv) == HELD
    each(layers, disabled=True)  # the next pass takes the adapters out again: what it computes no name told
    assert torch.equal(kv.generate(TOKENS, **GREEDY), model.generate(TOKENS, **GREEDY))
    assert kv.num_cached_tokens == 0
    assert "merged and disabled" in caplog.text
    assert answered(kv) == 0  # nothing of that call was kept; rounding left other weights than the first
    assert answered(kv) == HELD


def test_an_adapter_that_is_trained_is_another_one_after_each_step(open_tier: Open) -> None:
    model = bare()
    layers = with_adapters(model, a=1)
    kv = open_tier(model)
    trained: list[Any] = [layer.lora_B["a"].weight for layer in layers]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(3):
        assert answered(kv) == 0
        assert answered(kv) == HELD
        model.train()
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        model.eval()


def test_an_adapter_swapped_within_tensors_made_larger_before_is_another_one(open_tier: Open) -> None:
    """As PEFT prepares for compiled models: ranks padded with zeros, scaling a tensor, both written past counters."""
    model = bare()
    layers = with_adapters(model, a=1)
    for layer in layers:
        down, up = layer.lora_A["a"].weight, layer.lora_B["a"].weight
        down.data, up.data = (  # type: ignore[union-attr]
            torch.nn.functional.pad(down, (0, 0, 0, 12)).detach(),  # type: ignore[arg-type]
            torch.nn.functional.pad(up, (0, 12)).detach(),  # type: ignore[arg-type]
        )
        layer.scaling["a"] = torch.tensor(layer.scaling["a"])  # type: ignore[assignment]
    kv = open_tier(model)
    assert answered(kv) == 0
    for layer in layers:
        layer.lora_B["a"].weight.data[:, :4] *= -1.0  # type: ignore[index, operator]
    assert answered(kv) == 0
    for layer in layers:
        layer.scaling["a"].fill_(0.5)  # type: ignore[attr-defined]
    assert answered(kv) == 0
    assert answered(kv) == HELD
    for layer in layers:  # who starts with what it has now shares with it
        layer.scaling["a"].fill_(2.0)  # type: ignore[attr-defined]
    assert answered(open_tier(model)) == HELD


def test_adapters_that_look_at_the_whole_text_and_those_of_single_rows_are_refused(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = bare()
    kv = open_tier(model)
    for _ in range(2):
        kv.generate(TOKENS, **GREEDY)
    assert kv.num_cached_tokens == HELD
    model.model.router = Router()
    assert answered(kv) == 0
    assert "adapter of kind 'xlora'" in caplog.text
    del model.model.router
    assert answered(kv) == HELD
    with pytest.raises(ValueError, match="adapter_names"):  # nobody here takes it, and it is not looked up
        kv.generate(TOKENS, **GREEDY, adapter_names=["a"])
    assert kv.num_cached_tokens == 0


# weights


def other_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in bare(seed=5).state_dict().items()}


def copied(model: Any) -> None:
    with torch.no_grad():
        for name, weight in other_weights(model).items():
            model.get_parameter(name).copy_(weight)


def stepped(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()


def past_the_counters(model: Any) -> None:
    for name, weight in other_weights(model).items():
        model.get_parameter(name).data.copy_(weight)


def given_other_memory(model: Any) -> None:
    for name, weight in other_weights(model).items():
        model.get_parameter(name).data = weight


def put_in_its_place(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Linear(64, 32, bias=False)


def one_value(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 5] += 4.0


def its_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def its_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.1


def its_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def without_a_layer_of_weights(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = torch.nn.Identity()


def its_configuration(model: Any) -> None:
    model.config.rms_norm_eps = 0.5


# What a version counter tells, what none does, another module, a buffer; and more of the same kinds.
CHANGES: list[Callable[[Any], Any]] = [
    stepped, past_the_counters, put_in_its_place, its_rope, its_scaling,
    *brief([], [
        copied, its_activation, its_configuration, without_a_layer_of_weights, given_other_memory, one_value,
        lambda model: model.load_state_dict(other_weights(model)),
        lambda model: model.load_state_dict(other_weights(model), assign=True),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_weights_changed_in_place_find_and_leave_nothing_under_the_old_name(
    open_tier: Open, change: Callable[[Any], Any]
) -> None:
    model = bare()
    kv = open_tier(model)
    assert answered(kv) == 0
    change(model)
    assert answered(kv) == 0
    assert answered(kv) == HELD
    answered(kv, torch.tensor([prompt(2, 70)]))
    again = open_tier(bare())  # who starts with the old weights finds what these computed alone
    assert answered(again) == HELD
    assert answered(again, torch.tensor([prompt(2, 70)])) == 0


def test_each_matrix_of_each_layer_changed_past_the_counters_shows() -> None:
    auto: Any = AutoModelForCausalLM
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 12}
    model = auto.from_config(LlamaConfig(**sizes))
    base = base_tensors(parts_of(model))
    watch = ModelWatch(model, base)
    for number, weight in enumerate(base.values()):
        with torch.no_grad() if number % 2 else torch.inference_mode():
            weight.data.mul_(-1.0)
            assert not watch.holds()
            weight.data.mul_(-1.0)
            assert watch.holds()


@pytest.mark.parametrize(
    "options", [{}, {"prompt_lookup_num_tokens": 4, "eos_token_id": 9999}], ids=["plain", "assisted"]
)
def test_a_model_in_an_adapter_librarys_wrapper_keeps_what_it_computes(
    open_tier: Open, options: dict[str, Any]
) -> None:
    model = bare()
    with_adapters(model, a=1)
    wrapped: Any = ForCausalLM(model).eval()
    kv, tokens = open_tier(wrapped), torch.tensor([(prompt(1, 12) * 8)[:90]])
    kv.generate(tokens[:, :50], **GREEDY)
    answer = kv.generate(tokens, **GREEDY | options)
    assert kv.num_cached_tokens == 48
    assert torch.equal(answer, wrapped.generate(tokens, **GREEDY | options))
    assert assert_exact(kv, wrapped, answer[0].tolist()) == (answer.shape[1] - 1) // 16 * 16


def test_weights_made_in_inference_mode_have_no_name_without_a_variant(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    auto: Any = AutoModelForCausalLM
    with torch.inference_mode():
        model = auto.from_config(LlamaConfig(**SIZES)).eval()
    kv = open_tier(model)
    for _ in range(2):
        assert answered(kv) == 0
    assert "embed_tokens.weight was made in torch.inference_mode(), where torch notes no change of it" in caplog.text
    kv = open_tier(model, variant="as loaded")
    answered(kv)
    assert answered(kv) == HELD
    # Others' changes count in that mode, too.
    model = bare()
    kv = open_tier(model)
    answered(kv)
    with torch.inference_mode():
        model.model.layers[0].self_attn.k_proj.weight[0] += 1.0
    assert answered(kv) == 0


def halved(model: Any) -> Any:
    return model.half()


def with_another_rope(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def with_(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return functools.wraps(change)(lambda model: (change(model), model)[1])


ODD = [
    (halved, torch.float16),
    (with_another_rope, torch.bfloat16),  # by less than its probe's rounding
    *brief([], [(with_(each), torch.bfloat16) for each in (its_rope, its_scaling, its_activation)]),
    *brief([], [(with_(without_a_layer_of_weights), torch.float32)]),
]


@pytest.mark.parametrize(("change", "dtype"), ODD, ids=[change.__name__ for change, _ in ODD])
def test_what_a_model_has_beside_weights_is_in_its_name_from_the_start(
    open_tier: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], Any], dtype: torch.dtype
) -> None:
    bare().save_pretrained(tmp_path / "model")

    def loaded(dtype: torch.dtype = dtype) -> Any:
        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(tmp_path / "model", dtype=dtype).eval()

    def changed() -> Any:
        return change(loaded(torch.float32 if change is halved else dtype))

    for made, found in ((loaded, 0), (changed, 0), (loaded, HELD), (changed, HELD)):
        assert answered(open_tier(made())) == found
    assert "computed otherwise" not in caplog.text  # each has its namespace


@pytest.mark.parametrize("kind", brief(["llama", "bamba", "phi3-long"], [*BY_NAME, *CONFIGS]))
def test_an_ordinary_model_is_named_by_its_weights_and_configuration_alone(tmp_path: Path, kind: str) -> None:
    row = BY_NAME.get(kind)
    config = config_of(kind) if row is None else row.make_config()
    auto: Any = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    for dtype in (torch.float32, torch.bfloat16):
        auto.from_config(config, dtype=dtype).save_pretrained(tmp_path / str(dtype))
        model = auto.from_pretrained(tmp_path / str(dtype), dtype=dtype).eval()
        live = live_model(model)
        assert live.weights_name == weights_name(model)
        assert live.variant is live.refusal is None
        with torch.inference_mode():
            model.generate(TOKENS, **GREEDY)
        assert live.holds()  # nothing that a text leaves in it counts


def test_weights_that_are_back_find_what_they_stored(open_tier: Open) -> None:
    model = bare()
    first = {name: each.clone() for name, each in model.state_dict().items()}
    kv = open_tier(model)
    answered(kv)
    copied(model)
    assert answered(kv) == 0
    model.load_state_dict(first)
    assert answered(kv) == HELD


def test_another_dtype_is_refused(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = bare()
    kv = open_tier(model)
    answered(kv)
    model.to(torch.bfloat16)
    assert answered(kv) == 0
    assert "the model was torch.float32 on cpu, and is torch.bfloat16 on cpu now; make another KVTier" in caplog.text
    model.to(torch.float32)
    assert answered(kv) == 0  # rounded


def test_passes_that_differ_by_chance_are_refused(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = bare()
    kv = open_tier(model)
    answered(kv)
    attention = model.model.layers[1].self_attn
    attention.train()
    assert answered(kv) == HELD  # nothing is dropped
    attention.attention_dropout = 0.5
    kv.generate(TOKENS, **GREEDY)
    assert kv.num_cached_tokens == 0
    assert "model.layers.1.self_attn is in training mode with attention_dropout=0.5" in caplog.text
    attention.attention_dropout = 0.0
    assert answered(kv) == HELD


def test_a_call_under_autocast_is_refused_and_counted(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = bare()
    with torch.autocast("cpu", torch.bfloat16):
        kv = open_tier(model)
        for _ in range(2):
            assert answered(kv) == 0
    assert "torch.autocast computes in torch.bfloat16 what the model has in another dtype" in caplog.text
    missed = {name: number for name, number in kv.stats().items() if 'reason="unsupported"' in name}
    assert sum(missed.values()) > 0
    for found in (0, HELD):  # nothing of that was kept
        assert answered(kv) == found
    assert answered(open_tier(bare())) == HELD


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnRotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids.clamp(max=LAST))

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = OwnRotaryEmbedding(config)
"""


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_a_checkpoints_own_code_is_in_the_name_whatever_its_weights_are(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    state = bare().state_dict()
    if weights.endswith(".bin"):
        torch.save(state, checkpoint / weights)
    else:
        save_file(state, checkpoint / weights, metadata={"format": "pt"})
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = {**SIZES, "model_type": "own_llama", "architectures": ["OwnModel"], "auto_map": auto_map}
    (checkpoint / "config.json").write_text(json.dumps(config))

    def loaded(last: int) -> Any:  # its code ends RoPE at this position, past a probe's tokens
        (checkpoint / "own.py").write_text(CODE.replace("LAST", str(last)))
        return AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True).eval()

    first = loaded(1000)
    assert [answered(open_tier(first)) for _ in range(2)] == [0, HELD]
    other = loaded(20)
    assert [answered(open_tier(model)) for model in (other, other, first)] == [
        0,
        HELD,
        HELD if ".bin" in weights else 0,
    ]
    assert answered(open_tier(loaded(1000))) == HELD


def test_reset_forgets_and_names_anew_without_reading_weights(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bare()
    kv = open_tier(model)
    answered(kv)
    read = []
    monkeypatch.setattr("kvtier.connector.models.hf_model.weights_digest", lambda tensors: read.append(tensors))
    model.model.embed_tokens.weight.data[7] += 1.0  # one row, past the counters: nothing shows it
    for _ in range(2):
        copied(model)
        kv.reset()
        assert answered(kv) == 0
        assert answered(kv) == HELD
    assert not read
    kv.close()
    kv.reset()  # nothing to forget


def test_a_cache_loaded_under_other_weights_is_not_kept(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = bare()
    kv = open_tier(model)
    cache, _ = kv.load(TOKENS)
    with torch.inference_mode():
        model(TOKENS, **cache_option(model, cache))
    one_value(model)
    kv.store(TOKENS, cache)
    assert kv.load(torch.cat([TOKENS, TOKENS], dim=1))[1] == 0
    assert "in whose middle the model's weights, adapters or code changed" in caplog.text


def test_weights_that_change_while_a_call_runs_leave_nothing(open_tier: Open) -> None:
    model = bare()
    kv = open_tier(model)

    def change(_: Any, scores: torch.Tensor) -> torch.Tensor:
        one_value(model)
        return scores

    kv.generate(TOKENS, **GREEDY, logits_processor=[change])
    assert answered(kv) == 0
    assert answered(open_tier(bare())) == 0


# there and back


@contextmanager
def switched(model: Any) -> Iterator[None]:
    layers = [each for each in model.modules() if isinstance(each, LoraLinear)]
    each(layers, active=["b"])
    yield
    each(layers, active=["a"])


def disabled(model: Any) -> AbstractContextManager[None]:
    return without_adapters(model)


@contextmanager
def copied_over(model: Any) -> Iterator[None]:
    first = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
        yield
        for name, weight in model.named_parameters():
            weight.copy_(first[name])


def adapted() -> Any:
    model = bare()
    with_adapters(model, a=1, b=2)
    return model


def passed(kv: KVTier, between: Any, step: int, **decoding: Any) -> torch.Tensor:
    """A call of `generate` in whose middle, for some passes from that step on, something is and then is not."""
    steps, stack = [0], ExitStack()

    def look(_: Any, scores: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        if steps[0] == step:
            stack.enter_context(between(kv.model))
        if steps[0] == step + (6 if "prompt_lookup_num_tokens" in decoding else 1):  # guesses are looked at together
            stack.close()
        return scores

    options: dict[str, Any] = {**GREEDY, "max_new_tokens": 40, **decoding}
    made: torch.Tensor = kv.generate(TOKENS, **options, logits_processor=[look])
    assert steps[0] > step
    return made[:1]


DECODING: list[dict[str, Any]] = [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}]


@pytest.mark.parametrize(
    ("between", "decoding"),
    [
        *[(each, {}) for each in ("switched", "disabled", "copied_over", "hooked")],
        ("disabled", {"prompt_lookup_num_tokens": 3}),
        *brief([], [(each, decoding) for each in ("switched", "hooked") for decoding in DECODING]),
    ],
)
def test_what_changes_in_a_call_and_is_put_back_leaves_nothing_of_it(
    open_tier: Open, caplog: pytest.LogCaptureFixture, between: str, decoding: dict[str, Any]
) -> None:
    kv = open_tier(adapted())
    for _ in range(2):  # the second one goes on behind what is kept
        torch.manual_seed(0)
        made = passed(kv, globals()[between], 7, **decoding)
        again = torch.cat([made, TOKENS[:, :9]], dim=1)
        found = kv.num_cached_tokens
        assert kv.load(again)[1] == found
        dropped = [value for name, value in kv.stats().items() if "store_dropped" in name and "unsupported" in name]
        assert sum(dropped) > 0
        kv.generate(TOKENS, **GREEDY)
    assert kv.load(TOKENS)[1] == HELD  # what came behind it is kept as ever
    assert "in whose middle the model's weights, adapters or code changed" in caplog.text


@pytest.mark.parametrize("between", brief(["disabled"], ["switched", "disabled", "copied_over", "hooked"]))
def test_a_pass_of_ones_own_under_something_else_leaves_nothing_of_its_cache(open_tier: Open, between: str) -> None:
    kv = open_tier(adapted())
    model = kv.model
    with torch.inference_mode():
        for copied_cache in (False, True):
            cache, _ = kv.load(TOKENS)
            cache = copy.deepcopy(cache) if copied_cache else cache
            model(TOKENS[:, :30], **cache_option(model, cache))
            with globals()[between](model):
                model(TOKENS[:, 30:50], **cache_option(model, cache))
            model(TOKENS[:, 50:], **cache_option(model, cache))
            kv.store(TOKENS, cache)
            assert kv.load(TOKENS)[1] == 0
        cache, _ = kv.load(TOKENS)
        other = copy.deepcopy(cache)
        with globals()[between](model):
            model(TOKENS, **cache_option(model, other))
        model(TOKENS, **cache_option(model, cache))
        kv.store(TOKENS, cache)  # what became of its copy is no matter of its own
        # … but weights that counted a change are read by the next call alone
        assert kv.load(TOKENS)[1] == (0 if between == "copied_over" else HELD)
        assert pickle.loads(pickle.dumps(cache)).get_seq_length() == 70


# hooks and foreign code


Foreign = AbstractContextManager[Any]


def hooked(model: Any) -> Foreign:
    handle: Foreign = model.model.layers[1].register_forward_hook(
        lambda _, __, out: (out[0] + 1, *out[1:]) if isinstance(out, tuple) else out + 1
    )
    return handle


def hooked_before(model: Any) -> Foreign:
    part = model.model.layers[0].self_attn.k_proj
    handle: Foreign = part.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    return handle


def hooked_everywhere(model: Any) -> Foreign:
    return register_module_forward_hook(lambda part, _, out: out * 0.5 if part is model.model.layers[0].mlp else None)


def patched(model: Any) -> Foreign:
    part = model.model.layers[1].mlp
    own = part.forward
    return patch.object(part, "forward", functools.wraps(own)(lambda x: own(x) * 0.5))


def patched_class(model: Any) -> Foreign:
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    return patch.object(kind, "forward", lambda self, x: own(self, x) * 0.5)


@contextmanager
def of_another_class(model: Any) -> Iterator[None]:
    part = model.model.layers[2].mlp
    own = type(part)
    part.__class__ = type(
        "Steered", (own,), {"forward": lambda self, x: own.forward(self, x) * 0.5, "__module__": __name__}
    )
    yield
    part.__class__ = own


def wrapped(model: Any) -> Foreign:
    own = model.model.layers[2].mlp

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = own

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x) * 0.5

    return patch.object(model.model.layers[2], "mlp", Wrapped())


def with_another_function(model: Any) -> Foreign:
    own = modeling_llama.apply_rotary_pos_emb
    return patch.object(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *rest, **more: own(q * 0.5, k * 0.5, *rest, **more)
    )


def with_an_object_for_a_function(model: Any) -> Foreign:
    own = modeling_llama.apply_rotary_pos_emb
    other = functools.partial(lambda q, k, *rest, **more: own(q * 0.5, k, *rest, **more))
    return patch.object(modeling_llama, "apply_rotary_pos_emb", other)


def with_torchs_function_patched(model: Any) -> Foreign:
    functions, own = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention
    return patch.object(functions, own.__name__, lambda q, *rest, **more: own(q * 0.5, *rest, **more))


def with_every_module_patched(model: Any) -> Foreign:
    own = torch.nn.Module.__call__
    return patch.object(torch.nn.Module, "__call__", lambda self, *rest, **more: own(self, *rest, **more))


@contextmanager
def with_attention_of_ones_own(model: Any) -> Iterator[None]:
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", lambda part, q, *rest, **options: own(part, q * 0.5, *rest, **options))
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", own)


FOREIGN = [
    with_an_object_for_a_function, with_torchs_function_patched, with_every_module_patched, with_attention_of_ones_own,
    hooked, hooked_before, hooked_everywhere, patched, patched_class, of_another_class, wrapped, with_another_function,
]  # fmt: skip


@pytest.mark.parametrize(
    "foreign", brief([*FOREIGN[:4], hooked, patched_class, wrapped], FOREIGN), ids=lambda each: each.__name__
)
def test_a_model_with_foreign_code_finds_and_leaves_nothing(
    open_tier: Open, caplog: pytest.LogCaptureFixture, foreign: Callable[[Any], Any]
) -> None:
    caplog.set_level(logging.WARNING, "kvtier.connector.transformers")
    model = bare()
    kv = open_tier(model)
    answered(kv)
    with foreign(model):
        assert answered(kv) == 0
        assert answered(kv) == 0
        assert answered(kv, torch.tensor([prompt(2, 70)])) == 0
    assert answered(kv) == HELD  # it is gone: the model is its checkpoint again
    assert answered(kv, torch.tensor([prompt(2, 70)])) == 0
    [warning] = [record.message for record in caplog.records]
    assert 'what it computes has no name; take it away, or name what it computes: KVTier(model, variant="…")' in warning


@pytest.mark.parametrize("foreign", brief([hooked, wrapped], FOREIGN), ids=lambda each: each.__name__)
def test_nor_does_one_that_has_it_from_the_start(open_tier: Open, foreign: Callable[[Any], Any]) -> None:
    with ExitStack() as stack:
        model = bare()
        stack.enter_context(foreign(model))
        kv = open_tier(model)
        answered(kv)
        assert answered(kv) == 0
    assert answered(open_tier(bare())) == 0


def test_foreign_code_with_a_name_has_blocks_of_its_own(open_tier: Open) -> None:
    model = bare()
    with hooked(model):
        kv = open_tier(model, variant="one more")
        assert answered(kv) == 0
        assert answered(kv) == HELD
    assert answered(open_tier(bare())) == 0
    with hooked(model):
        assert answered(open_tier(model, variant="two more")) == 0
        assert answered(open_tier(model, variant="one more")) == HELD


def test_known_librarys_hooks_and_wrappers_are_no_foreign_code(open_tier: Open) -> None:
    model = bare()
    kv = open_tier(model)
    answered(kv)
    model.enable_input_require_grads()
    with torch.inference_mode():
        model(TOKENS, output_hidden_states=True, output_attentions=False)  # transformers leaves hooks of its own behind
    model.forward = torch.no_grad()(model.forward)
    assert answered(kv) == HELD


# what does not show in a name


def test_a_model_that_computes_something_else_is_kept_apart_with_one_warning(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    def other(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2.0

    theirs = LlamaMLP.forward.__code__  # under one name: as another release of transformers
    try:
        assert answered(open_tier(bare())) == 0
        for found in (0, HELD):  # each finds its own
            LlamaMLP.forward.__code__ = other.__code__
            assert answered(open_tier(bare())) == found
            LlamaMLP.forward.__code__ = theirs
            assert answered(open_tier(bare())) == HELD
    finally:
        LlamaMLP.forward.__code__ = theirs
    warnings = [record.message for record in caplog.records if record.name == "kvtier.connector.local"]
    assert len(warnings) == 2  # one for each start of the odd one
    assert all("the KV kept under this model's name was computed otherwise" in each for each in warnings)


@pytest.mark.parametrize("active", [[], ["a"]])
def test_known_code_in_anothers_place_is_found_by_what_it_computes(
    open_tier: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, active: list[str]
) -> None:
    model = bare()
    layers = with_adapters(model, a=1, b=2)
    each(layers, active=active)
    kv = open_tier(model)
    answered(kv)
    with monkeypatch.context() as swapped:
        swapped.setattr(LlamaMLP, "forward", torch.nn.Identity.forward)  # nothing of a name tells
        for _ in range(2):
            assert answered(kv) == 0
        for _ in range(2):  # nor under another adapter's name
            each(layers, active=["b"])
            assert answered(kv) == 0
        each(layers, active=active)
    assert "the model computes other KV than when it was named" in caplog.text
    assert answered(kv) == HELD


# attention that is not causal


def sees_all(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def is_an_encoder(model: Any) -> None:
    model.config.is_causal = False


@pytest.mark.parametrize("change", [sees_all, is_an_encoder])
def test_a_model_whose_tokens_see_later_ones_finds_and_leaves_nothing(
    open_tier: Open, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None]
) -> None:
    model, other = bare(), TOKENS.clone()
    other[:, 40:] = torch.tensor([prompt(2, 30)])  # one beginning, and it has other KV
    kv = open_tier(model)
    answered(kv)
    change(model)  # while it is used …
    assert [answered(kv, each) for each in (TOKENS, other, other)] == [0, 0, 0]
    kv = open_tier(model)  # … and from the start
    assert [answered(kv, each) for each in (TOKENS, other, other)] == [0, 0, 0]
    assert caplog.text.count("a token's KV depends on later tokens (attention that is not causal)") == 2


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_model_that_computes_nan_starts_and_is_kept_apart(
    open_tier: Open, caplog: pytest.LogCaptureFixture, number: float
) -> None:
    model = bare()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = number
    assert [answered(open_tier(model)) for _ in range(2)] == [0, HELD]
    warnings = [record.message for record in caplog.records if record.name == "kvtier.connector.local"]
    assert len(warnings) == 2
    assert all("this model computes NaN or infinity of a few plain tokens" in each for each in warnings)
