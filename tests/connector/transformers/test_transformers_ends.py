"""What KVTier tells the tiers of its calls' ends, and the hints that callers give it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kv_tier_rig import BLOCK, GREEDY, Open, left_padded, model_of, tiers_over

from kvtier.connector.models import cache_option
from kvtier.tiers.errors import RequestError
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.reuse import Hint, RequestEnd


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    with tiers_over(tmp_path) as factory:
        yield factory


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RequestEnd]:
    ends: list[RequestEnd] = []
    monkeypatch.setattr(Hierarchy, "ended", lambda _, end: ends.append(end))
    return ends


def test_a_call_reports_one_finished_request_per_prompt(open_tier: Open, told: list[RequestEnd]) -> None:
    kv = open_tier(model_of("llama"))
    rows = left_padded([range(3, 43), range(50, 70)])
    kv.generate(**rows, **GREEDY | {"do_sample": True, "num_return_sequences": 2}, hint="tool")
    assert [(end.num_prompt, end.num_output_tokens, end.hint, end.is_derived) for end in told] == [
        (40 // BLOCK, 8, Hint.TOOL, False),
        (20 // BLOCK, 8, Hint.TOOL, False),
    ]
    assert all(len(end.names) >= end.num_prompt and end.seconds > 0 for end in told)
    # Nobody has to say anything; and what a cache is stored of ends, too.
    kv.generate(torch.tensor([list(range(3, 43))]), **GREEDY)
    tokens = torch.tensor([list(range(100, 140))])
    cache = kv.load(tokens)[0]
    kv.model(tokens, **cache_option(kv.model, cache))
    kv.store(tokens, cache, hint=Hint.FINISHED)
    assert [(end.num_prompt, end.num_output_tokens, end.hint) for end in told[2:]] == [
        (2, 8, None),
        (2, 0, Hint.FINISHED),
    ]


def test_a_word_that_is_no_hint_is_refused_before_anything_is_computed(open_tier: Open, told: list[RequestEnd]) -> None:
    kv = open_tier(model_of("llama"))
    tokens = torch.tensor([[3, 4, 5]])
    with pytest.raises(RequestError, match="hint 'maybe': use one of goes_on, tool, finished"):
        kv.generate(tokens, hint="maybe")
    with pytest.raises(RequestError, match="hint 'maybe'"):
        kv.store(tokens, kv.load(tokens)[0], hint="maybe")
    assert not told
