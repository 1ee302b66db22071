"""One step of the engine crosses to the device once, and back once: nothing else in it waits for a GPU."""

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from lazy_cuda import LazyCuda
from tiny_models import config_of, prompt
from torch.overrides import TorchFunctionMode

from kvtier.connector.segments import Repair, Segment
from kvtier.connector.segments.paged_attention import uploaded
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.engine.requests import SamplingParams

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero")


class Crossings(TorchFunctionMode):
    """Counts what would cross between host and device, by name; of `to` those where the caller would wait.

    RoPE's frequencies are on the device: `to` does nothing to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        is_move = name == "to" and any(isinstance(each, torch.device | str) for each in (*args[1:], *options.values()))
        caller = sys._getframe(1).f_code.co_filename
        if name in (*READS, "tensor", "as_tensor") or (
            is_move and "rope" not in caller and "transformers" not in caller
        ):
            self.seen["upload" if options.get("non_blocking") else name] += 1
        return func(*args, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_a_step_uploads_once_and_reads_the_tokens_once(family: str) -> None:
    model = Model.from_config(config_of(family), dtype="float32")
    draws = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=1)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    with Engine(model, EngineConfig(block_size=16, num_blocks=128)) as engine:
        for number in range(8):
            engine.add_request(prompt(number, 20 + 3 * number), draws if number % 2 else greedy)
        num_steps = 0
        while engine.has_unfinished:
            with Crossings() as crossings:
                engine.step()
            num_steps += 1
            # The greedy tokens; the logits of those that draw, together.
            assert crossings.seen == {"upload": 1, "tolist": 1, "cpu": 1, "numpy": 1}
        assert num_steps >= 6


def test_a_blend_uploads_without_waiting() -> None:
    """Only its choice of tokens reads what the device found."""
    model = Model.from_config(config_of("llama"), dtype="float32")
    tokens = [*prompt(3, 5), *prompt(1, 64), *prompt(2, 53), *prompt(4, 9)]
    with Engine(model, EngineConfig(block_size=16, num_blocks=128, segments="on")) as engine:
        segments = [[Segment(5, 69), Segment(69, 122)]]
        with Crossings() as crossings:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            engine.generate([tokens], params, segments=segments, repair=Repair("deviation", 0.25, max_deviation=9))
        assert not crossings.seen["tensor"]
        assert not crossings.seen["to"]


def test_uploads_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = LazyCuda()
    cuda.patch(monkeypatch)
    arrays = [np.arange(5), np.empty(0, np.int64), np.array([7])]
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        tensors = uploaded(arrays, torch.device("cuda"))
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2, 3, 4], [], [7]]
    assert cuda.num_ops == 1
    cuda.finish()  # of pageable memory it complains
