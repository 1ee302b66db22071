"""Two hundred random requests, some of them aborted, through a small vLLM: each answers as it does without kvtier."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm_rig import Engine, engine, greedy, prompt, tiers

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NUM_REQUESTS = 200
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "max_model_len": 512,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 128,
}


def requests(seed: int) -> Iterator[tuple[list[int], int]]:
    """Prompts over a few shared stems, and how many tokens are wanted."""
    random = np.random.default_rng(seed)
    stems = [prompt(100 + i, 320) for i in range(6)]
    for number in range(NUM_REQUESTS):
        stem = stems[random.integers(len(stems))][: random.integers(0, 320)]
        yield stem + prompt(1000 + number, int(random.integers(1, 60))), int(random.integers(1, 40))


def served(vllm: Engine, seed: int, *, disturb: bool) -> dict[int, list[int]]:
    """Every request's tokens. With `disturb` a third of them also run as twins that are aborted on their way."""
    random = np.random.default_rng(seed + 1)
    llm = vllm.llm.llm_engine
    waiting = list(enumerate(requests(seed)))
    answers: dict[int, list[int]] = {}
    doomed: set[str] = set()
    while waiting or llm.has_unfinished_requests():
        for _ in range(int(random.integers(0, 4))):
            if not waiting:
                break
            number, (tokens, wanted) = waiting.pop(0)
            names = [str(number)]
            if disturb and random.random() < 0.33:
                names.append(f"{number}-twin")
                doomed.add(names[1])
            for name in names:
                llm.add_request(name, {"prompt_token_ids": tokens}, greedy(wanted))
        for output in llm.step():
            if output.finished and "twin" not in output.request_id:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        if doomed and random.random() < 0.3:
            llm.abort_request([doomed.pop()])
        if disturb and random.random() < 0.02:
            llm.reset_prefix_cache()
    return answers


@pytest.mark.parametrize("options", brief([{"layerwise": True}], [{}, {"layerwise": True}, {"keys": "kvtier"}]))
def test_every_request_answers_as_without_kvtier(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    seed = 7 + len(options)
    with engine(model, **SMALL) as plain:
        right = served(plain, seed, disturb=False)
    assert len(right) == NUM_REQUESTS
    small = tiers(tmp_path, host={"size": "2MiB"}, file={"path": str(tmp_path), "size": "8MiB"}, **options)
    with engine(model, small, **SMALL) as vllm:
        answers = served(vllm, seed, disturb=True)
        found = {tier: vllm.found_in(tier) for tier in ("l1", "l2", "file", "miss")}
    wrong = [number for number in right if answers.get(number) != right[number]]
    assert not wrong
    assert found["l2"] > 0
    assert found["file"] > 0
