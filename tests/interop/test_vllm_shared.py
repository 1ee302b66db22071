"""One store, several engines: under our own names vLLM, transformers and our engine find what another computed."""

from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
import transformers
from slab_rig import num_on_disk
from test_vllm_processes import NUM_BLOCKS, TWO_RANKS, Answers, run
from vllm_rig import BLOCK, engine, make_checkpoint, prompt, tiers

from kvtier import Config, SamplingParams, open_engine
from kvtier.connector.transformers.adapter import KVTier

pytestmark = pytest.mark.timeout(300)

PROMPT = prompt(1, 200)
LOADED = 6 * BLOCK
NEW = 16


@pytest.fixture(scope="module", params=brief(["llama"], ["llama", "qwen3"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param)


def options(path: Path) -> dict[str, Any]:
    return tiers(path, keys="kvtier")


def config(path: Path) -> Config:
    return Config.load(host={"size": "32MiB"}, file={"path": str(path), "size": "64MiB"}, cache={"block_size": BLOCK})


def by_vllm(model: Path, path: Path | None) -> tuple[list[int], int]:
    with engine(model, None if path is None else options(path)) as vllm:
        output = vllm.run([PROMPT], NEW)[0]
        return list(output.outputs[0].token_ids), output.num_cached_tokens


def by_transformers(model: Path, path: Path) -> tuple[list[int], int]:
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with KVTier(module, config(path)) as kv:
        settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = kv.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
        kv.drain()
        return text, kv.num_cached_tokens


def by_our_engine(model: Path, path: Path) -> tuple[list[int], int]:
    with open_engine(model, config(path), dtype="float32", partial_blocks=False) as ours:
        [answer] = ours.generate([PROMPT], SamplingParams(max_tokens=NEW, ignore_eos=True))
        return list(answer.token_ids), answer.num_external_tokens


def two_ranks(model: Path, path: Path, **given: Any) -> Answers:
    """The answers of a vLLM of two ranks, of which the first is that to `PROMPT`."""
    return run(model, tiers(path, keys="kvtier", cache={"share_across_tp": 1}), **TWO_RANKS, **given)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (by_vllm, by_transformers),
        *brief([], [(by_vllm, by_our_engine), (by_transformers, by_vllm)]),
        (by_our_engine, by_vllm),
    ],
)
def test_one_writes_another_reads(model: Path, tmp_path: Path, writer: Any, reader: Any) -> None:
    right, _ = by_vllm(model, None)
    assert writer(model, tmp_path) == (right, 0)
    assert reader(model, tmp_path) == (right, LOADED)


def test_what_two_ranks_of_vllm_store_the_others_find_whole(model: Path, tmp_path: Path) -> None:
    ranks = two_ranks(model, tmp_path, killed=lambda: num_on_disk(tmp_path) == NUM_BLOCKS)
    assert ranks.cached == [0, 0, 0], ranks.told
    for reader in (by_transformers, by_our_engine):
        assert reader(model, tmp_path) == (ranks.text[0], LOADED)


def test_two_ranks_of_vllm_find_their_heads_in_what_another_stored(model: Path, tmp_path: Path) -> None:
    text, _ = by_transformers(model, tmp_path)
    ranks = two_ranks(model, tmp_path)
    assert (ranks.text[0], ranks.cached) == (text, [LOADED, 0, 0]), ranks.told


def test_vllms_own_names_are_a_store_of_their_own(model: Path, tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path)) as vllm:
        vllm.text([PROMPT], NEW)
    assert by_transformers(model, tmp_path)[1] == 0
    assert len(list(tmp_path.glob("*.slab"))) == 2
