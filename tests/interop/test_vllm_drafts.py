"""Speculative decoding in a real vLLM: draft KV is kept beside the model's, and rejected tokens leave no trace."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm.config import speculative
from vllm_drafters import SuffixCache, let_vllm_register_its_cpu_kernels, make_drafter, make_mtp_checkpoint
from vllm_rig import Engine, engine, prompt, said, tiers

from kvtier.tiers.errors import ConfigError

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 20) * 6]
ANSWER = 40  # tokens: more than a block, so that answers fill blocks, too
CACHED = {
    "whole": [192, 64, 96],
    "part": [199, 95, 119],
}  # tokens; without lookahead also the start of an answer's block


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    let_vllm_register_its_cpu_kernels()


@pytest.fixture(scope="module")
def plain(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    return plainly_said(model)


def plainly_said(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """What a vLLM without kvtier and without a drafter answers, and what it says when it is asked to go on."""
    with engine(model) as vllm:
        answers = vllm.text(PROMPTS, ANSWER)
        return answers, vllm.text(followed(answers))


@pytest.fixture(scope="module")
def expected(plain: tuple[list[list[int]], list[list[int]]]) -> list[list[int]]:
    return plain[0]


def followed(answers: list[list[int]]) -> list[list[int]]:
    """Prompts that go on behind the answers."""
    return [[*asked, *answer] for asked, answer in zip(PROMPTS, answers, strict=True)]


def drafter(method: str, model: Path, path: Path) -> dict[str, Any]:
    path.mkdir()
    return make_drafter(method, path, model)


def accepted(vllm: Engine) -> float:
    """Draft tokens that the model accepted so far."""
    [count] = [each.value for each in vllm.llm.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens"]
    return float(count)


def says_the_same(
    model: Path, plain: tuple[list[list[int]], list[list[int]]], spec: dict[str, Any], cached: list[int], store: Path
) -> float:
    """With the drafter, cold, warm and after a restart. Returns how many drafted tokens were accepted cold."""
    expected, right = plain
    with engine(model, tiers(store), speculative_config=spec) as vllm:
        outputs = vllm.run(PROMPTS, ANSWER)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        cold = accepted(vllm)
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS, ANSWER)) == (expected, cached)
        assert accepted(vllm) == 2 * cold  # the drafter guesses as before: its KV is the same
    # After a restart, prompts go on behind the answers: what was rejected there is in no block.
    with engine(model, tiers(store), speculative_config=spec) as vllm:
        outputs = vllm.run(followed(expected))
        assert [list(output.outputs[0].token_ids) for output in outputs] == right
        assert all(output.num_cached_tokens > len(asked) for output, asked in zip(outputs, PROMPTS, strict=True))
    return cold


METHODS = ["ngram", "suffix", "medusa", "near", "draft_model", "eagle", "eagle3"]


@pytest.mark.parametrize("method", brief(["eagle"], METHODS))  # with KV of its own
def test_the_text_is_the_models_own_cold_warm_and_after_a_restart(
    method: str,
    model: Path,
    plain: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if method == "suffix":
        arctic = ModuleType("arctic_inference.suffix_decoding")
        monkeypatch.setattr(arctic, "SuffixDecodingCache", SuffixCache, raising=False)
        monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", arctic)
        monkeypatch.setattr(speculative, "has_arctic_inference", lambda: True)
    spec = drafter(method, model, tmp_path / "drafter")
    cached = CACHED["whole" if method.startswith("eagle") else "part"]
    cold = says_the_same(model, plain, spec, cached, tmp_path / "store")
    if method == "near":
        assert 0 < cold < 3 * ANSWER - 3  # some accepted, some rejected


@pytest.mark.exhaustive
def test_a_model_that_drafts_itself_with_one_more_layer(tmp_path: Path) -> None:
    """MTP: the KV of MiMo's fifth layer, which reads hidden states, is kept beside that of the four."""
    model = make_mtp_checkpoint(tmp_path / "mimo")
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    says_the_same(model, plainly_said(model), spec, CACHED["whole"], tmp_path / "store")


@pytest.mark.exhaustive
def test_other_drafters_have_other_names(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """The draft KV of one is nothing to another, and nothing to a vLLM without."""
    with engine(model, tiers(tmp_path / "store"), speculative_config=drafter("near", model, tmp_path / "one")) as vllm:
        assert vllm.text(PROMPTS, ANSWER) == expected
    for spec in (drafter("draft_model", model, tmp_path / "two"), None):
        with engine(model, tiers(tmp_path / "store"), speculative_config=spec) as vllm:
            assert said(vllm.run(PROMPTS, ANSWER)) == (expected, [0, 0, 0])


def test_shared_names_are_refused_for_blocks_with_draft_kv(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a draft model's KV has no canonical form; use keys \"vllm\""):
        Engine(model, tiers(keys="kvtier"), speculative_config=drafter("near", model, tmp_path / "near"))
