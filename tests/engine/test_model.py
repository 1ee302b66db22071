"""Stories of the model: every family against plain transformers, checkpoints, identity, what is refused."""

from pathlib import Path

import pytest
import torch
from _architectures import ARCHITECTURES
from extent import brief
from tiny_models import FAMILIES, VOCAB, config_of, plain, plain_logits, prompt
from transformers import T5Config

from kvtier.connector.models.checkpoint import revision_of
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.errors import ConfigError

OPTIONS = EngineConfig(block_size=16, num_blocks=64, max_num_batched_tokens=512)
KEEP = SamplingParams(max_tokens=12, ignore_eos=True, keep_logits=True)


def engine_of(family: str, options: EngineConfig = OPTIONS, dtype: str = "float32") -> Engine:
    return Engine.from_config(config_of(family), options, dtype=dtype)


def distance(engine: Engine, module: torch.nn.Module, tokens: list[int], params: SamplingParams = KEEP) -> float:
    """The largest difference of any logit to plain transformers'; asserts that greedy text is equal."""
    [answer] = engine.generate([tokens], params)
    expected = plain_logits(module, tokens + answer.token_ids[:-1])[len(tokens) - 1 :]
    found = torch.stack([torch.from_numpy(row) for row in answer.logits])
    assert found.shape == (params.max_tokens, VOCAB)
    if found.dtype == module.parameters().__next__().dtype:
        assert expected.argmax(-1).tolist() == answer.token_ids
    engine.pool.check()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    return float((found - expected).abs().max())


@pytest.mark.parametrize("family", brief(["llama", "qwen2-mixed", "qwen3"], FAMILIES))
def test_fp32_logits_and_text_are_those_of_plain_transformers(family: str) -> None:
    module = plain(family)
    engine = engine_of(family)
    for length in (1, 15, 16, 17, 100):  # around the block size, the window, and beyond both
        assert distance(engine, module, prompt(length, length)) < 1e-4
    # The same again, now from L1: prefix found, tail computed.
    assert distance(engine, module, prompt(100, 100)) < 1e-4
    assert engine.stats["l1_tokens"] >= 96


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", brief(["llama", "qwen2-mixed"], FAMILIES))
def test_half_precision_stays_near_plain_transformers(family: str, dtype: str) -> None:
    module = plain(family, getattr(torch, dtype))
    scale = float(plain_logits(module, prompt(9, 70)).abs().max())
    bound = scale * (0.1 if dtype == "bfloat16" else 0.02)
    engine = engine_of(family, EngineConfig(num_blocks=64, max_num_batched_tokens=32), dtype)
    assert engine.pool.tensor.dtype == getattr(torch, dtype)
    assert distance(engine, module, prompt(9, 70)) < bound


def test_a_wrong_kv_byte_shows_in_the_logits() -> None:
    """The comparisons above can fail."""
    engine, module = engine_of("llama"), plain("llama")
    assert distance(engine, module, prompt(3, 50)) < 1e-4
    engine.pool.tensor += 0.5
    [answer] = engine.generate([prompt(3, 50)], SamplingParams(max_tokens=1, keep_logits=True))
    assert answer.num_l1_tokens == 49
    expected = plain_logits(module, prompt(3, 50))[-1]
    assert float((torch.from_numpy(answer.logits[0]) - expected).abs().max()) > 1e-2


def test_a_checkpoint_directory_loads_with_the_same_answers(tmp_path: Path) -> None:
    made = engine_of("qwen3")
    made.model.module.save_pretrained(tmp_path)
    loaded = Engine.from_pretrained(tmp_path, OPTIONS)
    tokens = prompt(1, 40)
    assert loaded.generate([tokens], KEEP)[0].token_ids == made.generate([tokens], KEEP)[0].token_ids
    # A model from a directory is named after it, as every engine does; one made in memory after its own weights.
    assert loaded.identity.revision == revision_of(tmp_path)
    # Another dtype is asked for by name.
    assert Engine.from_pretrained(tmp_path, OPTIONS, dtype="bfloat16").shape.dtype == "bfloat16"


def test_our_attention_survives_the_callers_use_of_the_config() -> None:
    config = config_of("llama")
    engine = Engine.from_config(config, OPTIONS)
    config._attn_implementation = "eager"  # as a second model made from it does
    assert distance(engine, plain("llama"), prompt(2, 40)) < 1e-4


def test_identity_distinguishes_everything_that_changes_kv() -> None:
    def fingerprint(family: str = "llama", seed: int = 0, dtype: str = "float32", **options: object) -> bytes:
        model = Model.from_config(config_of(family), seed=seed, dtype=dtype)
        return model.identity(EngineConfig(**options)).fingerprint()  # type: ignore[arg-type]

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(seed=1),
        fingerprint(dtype="bfloat16"),
        fingerprint(block_size=32),
        fingerprint("qwen2"),
        fingerprint("qwen3"),
        fingerprint(hash_scheme="xxh3"),
        fingerprint(epoch=1),
        fingerprint(exact=True),
        fingerprint(exact=True, exact_rows=128),
    ]
    assert len({fingerprint(), *others}) == 1 + len(others)
    # What the scheduler does with the tokens changes nothing.
    assert fingerprint(max_num_batched_tokens=64, num_blocks=9) == fingerprint()


def test_what_cannot_be_served_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model kind 't5': K and V also depend on the encoder's text.*; use transformers"
    ):
        Engine.from_config(T5Config())
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="dtype 'int8': use one of auto, float32"):
        Engine.from_config(config_of("llama"), dtype="int8")
    with pytest.raises(ConfigError, match="there is no tier to offload to"):
        Engine.from_config(config_of("llama"), EngineConfig(preemption="offload"))
    with pytest.raises(ConfigError, match="l1_bytes 10: one block"):
        Engine.from_config(config_of("llama"), EngineConfig(l1_bytes=10))


def test_layers_that_differ_are_refused_before_anything_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a kind that `PAGED` names once have them."""
    row = next(one for one in ARCHITECTURES if one.name == "gemma4")
    monkeypatch.setattr("kvtier.engine.model.PAGED", ("gemma4_text",))
    with pytest.raises(ConfigError, match=r"model kind 'gemma4_text': its layers keep rows of .*; use KVTier for"):
        Engine.from_config(row.make_config())


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model = Model.from_config(config_of("llama"))
    state = {name: tensor for name, tensor in model.module.state_dict().items() if "layers.1.mlp" not in name}
    model.module.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match="the checkpoint lacks 3 weights"):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("block_size", 0, "block_size 0: use a whole number of at least 1"),
        ("num_blocks", 1.5, "num_blocks 1.5: use"),
        ("max_num_seqs", True, "max_num_seqs True: use"),
        ("preemption", "swap", "preemption 'swap': use one of recompute, offload"),
        ("loading", "lazy", "loading 'lazy': use one of"),
        ("max_num_seqs", 600, "max_num_seqs 600: more than the 512 tokens of a step"),
    ],
)
def test_options_out_of_range_are_refused_by_name(option: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{option: value})  # type: ignore[arg-type]
