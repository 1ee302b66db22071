"""What a blend costs beside another request's steps in a real vLLM on this CPU, over a prefill of the same prompt.

A random Llama of 57 M parameters and 8 layers, steps of 256 tokens. A prompt has six documents of 512 tokens, each in
host memory, behind a system prompt of its own and before a question. CPU seconds of the one process: "alone" until the
prompt's first token, "longest step" and "all steps" until then while another request decodes, which gets a token in
each. Three prompts an arm, in turns; medians. Runs in `.venv-vllm` (`.ci/beside-engine vllm`).
"""

import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from _rig import beside

beside("vllm")

import numpy as np  # noqa: E402
from _report import Given, Result, Row, Target, program, progress  # noqa: E402
from _rig import random_tokens, saved_llama, scratch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm_rig import Engine, engine, greedy, tiers  # noqa: E402

DOCUMENTS: Final = 6
STEP: Final = 256
UNBOUNDED: Final = 1e9  # weights are random, so all deviates


def asked(marks: list[list[int]], share: float) -> Any:
    given = {"kvtier_segments": marks, "kvtier_repair": {"share": share, "max_deviation": UNBOUNDED}}
    return SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, ignore_eos=True, extra_args={"kv_transfer_params": given}
    )


class Prompts:
    def __init__(self, vllm: Engine, length: int) -> None:
        self._vllm, self._llm, self._length = vllm, vllm.llm.llm_engine, length
        self._rng = np.random.default_rng(1)
        self._documents = [random_tokens(self._rng, length, 5) for _ in range(DOCUMENTS)]
        self._number = 0
        vllm.run(self._documents, 1)

    def steps(self, share: float | None, *, decodes: bool) -> list[float]:
        """CPU seconds of each step until the next prompt's first token. `share` None: it is computed."""
        self._vllm.forget_l1()
        prompt, marks = random_tokens(self._rng, 61, 5), list[list[int]]()
        for place in self._rng.permutation(DOCUMENTS):
            marks.append([len(prompt), len(prompt) + self._length])
            prompt += self._documents[place]
        prompt += random_tokens(self._rng, 30, 5)
        self._number += 1
        name, other, seconds = f"prompt {self._number}", f"decodes {self._number}", list[float]()
        if decodes:
            self._llm.add_request(other, {"prompt_token_ids": prompt[:30]}, greedy(500))
            for _ in range(5):
                self._llm.step()
        params = greedy(1) if share is None else asked(marks, share)
        self._llm.add_request(name, {"prompt_token_ids": prompt}, params)
        is_done = False
        while not is_done:
            began = time.process_time()
            outputs = self._llm.step()
            seconds.append(time.process_time() - began)
            is_done = any(each.request_id.startswith(name) and each.finished for each in outputs)
        if decodes:
            self._llm.abort_request([other])
        return seconds


@program()
def main(args: Given) -> Result:
    length, rounds = (128, 1) if args.quick else (512, 3)
    arms: dict[str, float | None] = {"prefill": None, "blend, 15 %": 0.15, "blend, 0 %": 0.0}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    config = tiers(keys="kvtier", host={"size": "256MiB"}, cache={"segments": "on"})
    with scratch("vllm-segments") as folder:
        path = saved_llama(Path(folder), 768, 8, heads=12, kv_heads=4, head_dim=64)
        options = {"max_model_len": 4096, "num_gpu_blocks_override": 512, "max_num_batched_tokens": STEP}
        with engine(path, config, **options) as vllm:
            prompts = Prompts(vllm, length)
            for turn in range(rounds + 1):
                for arm, share in arms.items():
                    alone, others = prompts.steps(share, decodes=False), prompts.steps(share, decodes=True)
                    progress(f"{arm}: {sum(alone):.2f} s alone, longest of {len(others)} steps {max(others):.3f} s")
                    if turn:  # the first warms up
                        values = {"alone": sum(alone), "longest step": max(others), "all steps": sum(others)}
                        for column, value in {**values, "steps": len(others)}.items():
                            found[arm][column].append(value)
            blended = vllm.stats()['kvtier_blends_total{outcome="blended"}']
            assert blended == 4 * (rounds + 1), blended
    rows: list[Row] = [{"arm": arm, **{name: median(values) for name, values in found[arm].items()}} for arm in arms]
    full, blend, _ = rows
    return rows, [
        Target("blend with 15 % repaired: CPU over a prefill, alone", 0.5, blend["alone"] / full["alone"]),
        Target(
            "longest step beside a blend over one beside a prefill: CPU",
            2.0,
            blend["longest step"] / full["longest step"],
        ),
    ]
