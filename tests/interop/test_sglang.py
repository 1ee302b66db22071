"""Real SGLang engines over kvtier: what one process stored serves another, verified, or is computed again."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang; run `make test-sglang`")

from sglang_rig import PAGE_SIZE, Sglang, Slab, names_of, needs, settle, wait_until, wait_written
from tiny_models import SIZES, prompt
from transformers import AutoModelForCausalLM, DeepseekV2Config, Lfm2Config, LlamaConfig, MellumConfig

from kvtier.tiers.naming.key_schemes import sglang_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARED: Final = prompt(1, 160)
PROMPTS: Final = [SHARED + prompt(2, 100), SHARED + prompt(3, 75), prompt(4, 200)]
STORED: Final = [len(tokens) // PAGE_SIZE * PAGE_SIZE for tokens in PROMPTS]


def save(config: Any, path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(path)
    return path


def greedy(model: Path, tokens: list[int]) -> list[int]:
    """transformers' own answer."""
    auto: Any = AutoModelForCausalLM
    module = auto.from_pretrained(model, dtype=torch.float32)
    mask = torch.ones(1, len(tokens), dtype=torch.int64)
    output = module.generate(
        torch.tensor([tokens]), attention_mask=mask, do_sample=False, max_new_tokens=8, min_new_tokens=8
    )
    answer: list[int] = output[0, len(tokens) :].tolist()
    return answer


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    """How many tokens of each prompt came from kvtier."""
    return [answer["storage"] for answer in answers]


def holds(directory: Path) -> int:
    """How many pages are in the slab."""
    return len(Slab(directory).names())


@dataclass(frozen=True)
class Stored:
    """What one engine computed and stored before it was killed."""

    model: Path
    directory: Path
    answers: list[list[int]]

    def copy(self, to: Path) -> Path:
        """The same slab for a test of its own."""
        shutil.copytree(self.directory, to)
        return to


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    home = tmp_path_factory.mktemp("sglang")
    model = save(LlamaConfig(**SIZES), home / "llama")
    with Sglang(model, home / "slabs") as engine:
        answers = engine.generate(PROMPTS)
        assert cached(answers) == [0, 0, 0]
        settle(home / "slabs", PROMPTS)
    return Stored(model, home / "slabs", tokens_of(answers))


def test_the_engine_computes_what_transformers_does(stored: Stored) -> None:
    """The stand-ins for its CUDA packages change nothing."""
    assert stored.answers == [greedy(stored.model, tokens) for tokens in PROMPTS]


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_a_new_process_is_served_what_a_killed_one_stored(stored: Stored, tmp_path: Path, layout: str) -> None:
    # One canonical block for every layout of the host pool: what was stored from one is loaded into another.
    with Sglang(stored.model, stored.copy(tmp_path / "slabs"), hicache_mem_layout=layout) as engine:
        first = engine.generate(PROMPTS[:1])
        assert cached(first) == STORED[:1]
        rest = engine.generate(PROMPTS[1:])
        assert cached(rest) == [STORED[1] - len(SHARED), STORED[2]]  # the shared prefix is in SGLang's L1 by now
        assert tokens_of(first + rest) == stored.answers
        counters = engine.detach()
    assert counters['kvtier_lookup_blocks_total{tier="file"}'] == len(names_of(PROMPTS))
    assert "kvtier_corruption_total" not in " ".join(counters)


def test_a_corrupt_page_is_computed_again(stored: Stored, tmp_path: Path) -> None:
    directory = stored.copy(tmp_path / "slabs")
    fifth = sglang_hashes(PROMPTS[2], PAGE_SIZE)[4]
    payload = Slab(directory).payload(fifth).copy()
    payload[1000] ^= 1  # one bit
    Slab(directory).forge(fifth, payload, undetectably=False)
    with Sglang(stored.model, directory) as engine:
        answers = engine.generate(PROMPTS[2:])
        assert cached(answers) == [4 * PAGE_SIZE]
        assert tokens_of(answers) == stored.answers[2:]
        counters = engine.detach()
    assert counters['kvtier_corruption_total{tier="file"}'] == 1


def test_the_test_can_fail_other_bytes_change_the_answer(stored: Stored, tmp_path: Path) -> None:
    """What is loaded is what the engine computes upon: bytes nobody can tell from stored ones change its text."""
    directory = stored.copy(tmp_path / "slabs")
    for name in names_of(PROMPTS[2:]):
        values = Slab(directory).payload(name).view(np.float32)
        Slab(directory).forge(name, (values[::-1] * 2).view(np.uint8), undetectably=True)
    with Sglang(stored.model, directory) as engine:
        answers = engine.generate(PROMPTS[2:])
    assert cached(answers) == STORED[2:]
    assert tokens_of(answers) != stored.answers[2:]


def test_another_model_and_another_page_size_find_nothing(stored: Stored, tmp_path: Path) -> None:
    # A model of the same shape under the same name: its weights tell.
    other = save(LlamaConfig(**SIZES), tmp_path / "llama", seed=1)
    directory = stored.copy(tmp_path / "slabs")
    with Sglang(other, directory) as engine:
        assert cached(engine.generate(PROMPTS)) == [0, 0, 0]
    with Sglang(stored.model, directory, page_size=2 * PAGE_SIZE) as engine:
        answers = engine.generate(PROMPTS)
        assert cached(answers) == [0, 0, 0]
        assert tokens_of(answers) == stored.answers


def test_salts_and_keys_separate_tenants_and_clear_forgets(stored: Stored, tmp_path: Path) -> None:
    one, directory = PROMPTS[2:], stored.copy(tmp_path / "slabs")
    with Sglang(stored.model, directory) as engine:
        # The slab was filled without a salt: a tenant finds nothing of it, and has its own afterwards.
        for tenant in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}):
            engine.flush()
            before = holds(directory)
            answers = engine.generate(one, **tenant)
            assert cached(answers) == [0], tenant
            assert tokens_of(answers) == stored.answers[2:]
            wait_until(lambda known=before: holds(directory) >= known + len(names_of(one)), "pages to be written")
        for tenant in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {}):
            engine.flush()
            assert cached(engine.generate(one, **tenant)) == STORED[2:], tenant
        # What the administrator clears, nobody finds.
        engine.clear()
        engine.flush()
        assert cached(engine.generate(one)) == [0]
        assert cached(engine.generate(one, cache_salt="a")) == [0]


def test_pages_of_other_weights_are_never_found(stored: Stored, tmp_path: Path) -> None:
    directory, one = stored.copy(tmp_path / "slabs"), PROMPTS[2:]
    other = save(LlamaConfig(**SIZES), tmp_path / "other", seed=1)
    with Sglang(stored.model, directory) as engine:
        assert cached(engine.generate(one)) == STORED[2:]
        engine.update(other, flush=True)
        before = holds(directory)
        answers = engine.generate(one)
        assert cached(answers) == [0]
        assert tokens_of(answers) == [greedy(other, one[0])] != stored.answers[2:]
        wait_until(lambda: holds(directory) >= before + len(names_of(one)), "pages to be written")
        engine.flush()
        assert cached(engine.generate(one)) == STORED[2:]  # its own, of these weights
        # SGLang's caches keep the other weights' pages: none of them goes to the tiers, and nothing comes from there.
        engine.update(stored.model, flush=False)
        before = holds(directory)
        assert cached(engine.generate([prompt(9, 200)])) == [0]
        assert "until SGLang has flushed" in engine.log()
        engine.flush()
        assert holds(directory) == before
        answers = engine.generate(one)
        assert cached(answers) == [0]
        assert tokens_of(answers) == stored.answers[2:]
        # A trainer empties the caches first: then nothing of before is left, and the next request is served.
        engine.flush()
        engine.update(other, flush=False)
        assert tokens_of(engine.generate(one)) == [greedy(other, one[0])]
        engine.flush()
        assert cached(engine.generate(one)) == STORED[2:]
    with Sglang(stored.model, directory) as engine:  # the names of the checkpoint are the checkpoint's still
        answers = engine.generate(one)
        assert cached(answers) == STORED[2:]
        assert tokens_of(answers) == stored.answers[2:]


def test_the_engine_outlives_its_store(stored: Stored, tmp_path: Path) -> None:
    directory = stored.copy(tmp_path / "slabs")
    with Sglang(stored.model, directory) as engine:
        assert cached(engine.generate(PROMPTS[2:])) == STORED[2:]
        # The slab's payload is overwritten with zeros, then cut off, under the running engine.
        with Slab(directory).path.open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(size // 2)
            file.write(bytes(size - size // 2))
        for cut in (False, True):
            engine.flush()
            if cut:
                with Slab(directory).path.open("r+b") as file:
                    file.truncate(8192)
            assert tokens_of(engine.generate(PROMPTS)) == stored.answers
        shutil.rmtree(directory)
        engine.flush()
        assert tokens_of(engine.generate(PROMPTS)) == stored.answers


def test_pages_of_a_latent_cache(tmp_path: Path) -> None:
    """MLA: one joint latent a token and layer."""
    sizes = SIZES | {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
    config = DeepseekV2Config(
        **sizes,
        rope_parameters=yarn,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    config.moe_layer_freq = 1  # which SGLang reads and transformers has no more
    model = save(config, tmp_path / "deepseek")
    with Sglang(model, tmp_path / "slabs") as engine:
        answers = tokens_of(engine.generate(PROMPTS))
        settle(tmp_path / "slabs", PROMPTS)
    assert Slab(tmp_path / "slabs").superblock.slot_bytes == 3 * PAGE_SIZE * (32 + 16) * 4
    with Sglang(model, tmp_path / "slabs") as engine:
        again = engine.generate(PROMPTS[2:])
        assert cached(again) == STORED[2:]
        assert tokens_of(again) == answers[2:]


def test_a_sliding_window_beside_full_attention(tmp_path: Path) -> None:
    """Mellum: layers with a window have a pool of their own, and both pools' parts of it make a hit."""
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 64}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    layers = ["sliding_attention", "full_attention"] * 2
    model = save(MellumConfig(**sizes, **experts, layer_types=layers), tmp_path / "mellum")
    directory = tmp_path / "slabs"
    chosen: dict[str, Any] = {"hicache_mem_layout": "page_first_direct"}
    with Sglang(model, directory, **chosen) as engine:
        answers = tokens_of(engine.generate(PROMPTS))
        assert answers == [greedy(model, tokens) for tokens in PROMPTS]
        wait_written(directory)
        told = engine.log()
    windows = Slab(directory).names() - names_of([prompt + text for prompt, text in zip(PROMPTS, answers, strict=True)])
    assert windows
    assert re.search(r"kvtier keeps pages of kv of \d+ bytes, swa of \d+ bytes", told)
    forged = shutil.copytree(directory, tmp_path / "forged")
    with Sglang(model, directory, **chosen) as engine:
        again = engine.generate(PROMPTS[2:])
        assert cached(again) == STORED[2:]
        assert tokens_of(again) == answers[2:]
        assert "kvtier_corruption_total" not in " ".join(engine.detach())
    # The windows are what the engine computes upon, and without the one that a prompt needs there is no hit.
    for name in windows:
        values = Slab(forged).payload(name).view(np.float32)
        Slab(forged).forge(name, (values[::-1] * 2).view(np.uint8), undetectably=True)
    with Sglang(model, forged, **chosen) as engine:
        assert tokens_of(engine.generate(PROMPTS[2:])) != answers[2:]


def test_a_chat_goes_on_from_its_recurrent_state(tmp_path: Path) -> None:
    """LFM2: layers with a state beside layers with KV. SGLang keeps states where requests end."""
    options: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
    model = save(Lfm2Config(**SIZES | {"num_hidden_layers": 4}, **options), tmp_path / "lfm2")
    directory = tmp_path / "slabs"
    chosen: dict[str, Any] = {"hicache_mem_layout": "page_first_direct", **needs(model)}
    with Sglang(model, directory, **chosen) as engine:
        [first] = tokens_of(engine.generate(PROMPTS[2:]))
        assert first == greedy(model, PROMPTS[2])  # the stand-ins for its kernels change nothing
        wait_written(directory)
    turn = [PROMPTS[2] + first + prompt(5, 20)]
    with Sglang(model, directory, **chosen) as engine:
        again = engine.generate(turn)
        assert cached(again)[0] >= len(PROMPTS[2])
        # The KV is there up to the end, the state is not: another turn on the same prompt finds as much as has both.
        engine.flush()
        other = engine.generate([PROMPTS[2][:100] + prompt(6, 50)])
        assert cached(other) == [0]
        engine.clear()
        engine.flush()
        computed = engine.generate(turn)
        assert cached(computed) == [0]
        assert tokens_of(again) == tokens_of(computed)
        counters = engine.detach()
    assert "kvtier_corruption_total" not in " ".join(counters)
