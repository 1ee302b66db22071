"""What a prompt may be: a list of plain ids takes a short way, and every other one gives the same answer or error."""

import random

import numpy as np
import pytest
from numpy.typing import ArrayLike

from kvtier.engine.config import EngineConfig
from kvtier.engine.requests import PromptNames, checked_tokens
from kvtier.tiers.errors import RequestError
from kvtier.tiers.naming.chain import chain_hashes, root_hash

VOCAB = 100


@pytest.mark.parametrize(
    "prompt", [[1, 2, 99], (1, 2, 99), np.array([1, 2, 99]), [np.int64(1), 2, 99], [1, np.int64(2), 99], [True, 2, 99]]
)
def test_a_prompt_becomes_a_list_of_its_own_of_plain_ids(prompt: ArrayLike) -> None:
    tokens = checked_tokens(prompt, VOCAB)
    assert tokens == [1, 2, 99]
    assert {type(token) for token in tokens} == {int}
    assert tokens is not prompt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, VOCAB], f"token id {VOCAB} at position 1: this model's are 0 to {VOCAB - 1}"),
        ([1, -1, 2**70], "dimensional object"),
        ([1, -1], "token id -1 at position 1"),
        ([1, 2**40], f"token id {2**40} at position 1"),
        ([1, 2.0], "1-dimensional float64"),
        ([1, None], "1-dimensional object"),
        ([1, "2"], "1-dimensional <U"),
        ([True, False], "1-dimensional bool"),
        ([[1, 2], [3, 4]], "2-dimensional int64"),
        ([1, [2]], "not one list"),
    ],
)
def test_a_prompt_that_is_none_is_refused_with_what_is_wrong(prompt: ArrayLike, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_tokens(prompt, VOCAB)


def test_prompts_are_named_as_if_each_were_the_first() -> None:
    names = PromptNames(b"f" * 32, EngineConfig(block_size=2))
    draw = random.Random(0)
    prompt = [draw.randrange(VOCAB) for _ in range(1000)]
    for salt in (None, "t1", "t2"):
        root = root_hash(b"f" * 32, cache_salt=salt)
        for length in (1000, 600, 1000, 3):
            named = names.named(prompt[:length], salt)
            assert named.chain is not None
            assert named.chain.hashes == chain_hashes(root, prompt[:length], 2)
