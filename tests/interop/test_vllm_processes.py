"""vLLM as people run it: scheduler and workers in processes of their own, two tensor-parallel ranks, over HTTP."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from threading import Timer
from typing import Any, Final, NamedTuple

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import httpx
import openai
from node_rig import ROOT, free_port
from pair_rig import serving, variables
from slab_rig import num_on_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_rig import BLOCK, VOCAB, make_checkpoint, prompt, tiers

pytestmark = pytest.mark.timeout(300)

HERE: Final = Path(__file__).resolve().parent
PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 170)]
CACHED = [192, 95, 160]  # tokens: all but the last one of the second prompt's three blocks
NUM_BLOCKS = sum(len(tokens) // BLOCK for tokens in PROMPTS)  # all are stored; the last token is always computed
TWO_RANKS = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.3}


class Answers(NamedTuple):
    """What an engine in processes of its own answered, and what explains it: for a story that finds it wrong."""

    text: list[list[int]]
    cached: list[int]
    counted: dict[str, float]  # of kvtier's, as vLLM had heard of it
    log: str  # of all its processes

    @property
    def told(self) -> str:
        series = "".join(f"{name} {value:g}\n" for name, value in sorted(self.counted.items()))
        return f"{series}{self.log[-4000:]}"


def run(
    model: Path,
    kvtier: dict[str, Any] | None,
    *,
    killed: Callable[[], object] | None = None,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Answers:
    """Ask an engine in processes of its own; where `killed` is given, they get kill -9 once it holds."""
    asked = {
        "model": str(model),
        "kvtier": kvtier,
        "options": options,
        "prompts": PROMPTS,
        "num_tokens": 16,
        "stay": killed is not None,
    }
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "tensor_parallel_size" in options else {}
    env = variables(**bound, **(env or {}))
    command = [sys.executable, str(HERE / "vllm_child.py")]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=log, env=env, text=True, start_new_session=True
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        too_late, line = Timer(200, os.killpg, (child.pid, signal.SIGKILL)), ""
        too_late.start()
        try:
            child.stdin.write(json.dumps(asked))
            child.stdin.close()
            line = next((line for line in child.stdout if line.startswith("{")), "")
            while killed is not None and line and child.poll() is None and not killed():
                time.sleep(0.1)
        finally:
            too_late.cancel()
            if killed is not None or not line:
                with contextlib.suppress(ProcessLookupError):  # it was too late
                    os.killpg(child.pid, signal.SIGKILL)
        child.stdout.read()
        log.seek(0)
        said = log.read()
        assert line, said[-4000:]
    return Answers(**json.loads(line), log=said)


@pytest.mark.timeout(900)  # three starts of three processes each: `run` gives each 200 seconds
@pytest.mark.parametrize(
    ("starts", "share"),
    brief(
        [([TWO_RANKS, {}], 2)],
        [([{}, {}], None), ([TWO_RANKS, TWO_RANKS], None), ([TWO_RANKS, {}, TWO_RANKS], 2), ([{}, TWO_RANKS, {}], 1)],
    ),
)
def test_a_killed_vllm_leaves_its_prompts_to_the_next(
    model: Path, tmp_path: Path, starts: list[dict[str, Any]], share: int | None
) -> None:
    """Also to one of another tensor-parallel size, if both are told the size that blocks are laid out for."""
    kvtier = tiers(tmp_path, cache={"share_across_tp": share} if share else {})
    # An engine with nothing to do writes all it stored: nobody tells it to hurry.
    first = run(model, kvtier, killed=lambda: num_on_disk(tmp_path) == NUM_BLOCKS, **starts[0])
    assert first.cached == [0, 0, 0], first.told
    for options in starts[1:]:
        then = run(model, kvtier, **options)
        assert (then.text, then.cached) == (first.text, CACHED), then.told
    if starts == [{}, {}]:
        assert run(model, None).text == first.text


# --- over HTTP -------------------------------------------------------------------------------------------------------

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}<assistant>"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of whole words and a chat template."""
    path = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "chat")
    words = ["<unk>", "<user>", "<assistant>", *(f"w{number}" for number in range(VOCAB - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE)
    fast.save_pretrained(path)
    return path


def readme_command(model: Path, store: Path) -> list[str]:
    """The README's `vllm serve …`, as printed but for the model, the store and their sizes."""
    [block] = [part for part in (ROOT / "README.md").read_text().split("```") if "vllm serve" in part]
    command = shlex.split(block)
    assert command[:2] == ["vllm", "serve"]
    changes = {"path/to/checkpoint": str(model), "kv-cache": str(store), "16GiB": "32MiB", "256GiB": "64MiB"}
    for printed, here in changes.items():
        assert any(printed in word for word in command)
        command = [word.replace(f'"{printed}"', f'"{here}"') if word != printed else here for word in command]
    return [*command, "--port", str(free_port()), "--num-gpu-blocks-override", "64"]


def series(address: str, name: str) -> float:
    """One series of /metrics, summed over its labels; 0 where it is not there yet."""
    lines = httpx.get(f"{address}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.exhaustive
def test_a_chat_over_http_finds_its_first_turn(chat_model: Path, tmp_path: Path) -> None:
    question = " ".join(f"w{number}" for number in prompt(5, 120))
    again = " ".join(f"w{number}" for number in prompt(6, 20))

    def ask(client: openai.OpenAI, messages: list[Any]) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None and details.cached_tokens else 0
        return str(answer.choices[0].message.content), cached

    first: list[Any] = [{"role": "user", "content": question}]
    with serving(readme_command(chat_model, tmp_path / "kv"), tmp_path / "log") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
        text, cached = ask(client, first)
        assert cached == 0
        time.sleep(1.5)  # an idle engine ends its stores by itself
    turn = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": again}]
    # a new server: only the slab is left
    with serving(readme_command(chat_model, tmp_path / "kv"), tmp_path / "log") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
        _, cached = ask(client, turn)
        assert cached >= 4 * BLOCK  # the question and most of the answer
        _, short = ask(client, [{"role": "user", "content": again}])
        time.sleep(1.5)
        _, short_again = ask(client, [{"role": "user", "content": again}])
        assert short_again > short  # its answer filled the block that it ends in
        assert (
            series(server.url, 'vllm:kvtier_lookup_blocks_total{engine="0",model_name="m",tier="file"}')
            == cached // BLOCK
        )
        assert series(server.url, "vllm:external_prefix_cache_hits_total") == cached + short + short_again
        assert series(server.url, "vllm:kvtier_pool_slots") > 0
