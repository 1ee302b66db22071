"""`kvtier generate`: an engine in this process answers one prompt, and reports which tiers had its KV."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar

from kvtier.connector import LocalConnector
from kvtier.connector.models import load_tokenizer, require_checkpoint
from kvtier.engine import Engine, Model, SamplingParams, engine_config
from kvtier.engine.demo.story import train_tokenizer
from kvtier.engine.demo.worker import demo_model
from kvtier.tiers import ConfigError
from kvtier.tiers.config import Config

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 and 2 of the model saved here
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_STORE_DEADLINE: Final = 60.0  # seconds for computed blocks to reach the lowest tier


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    model: Path
    text: str
    max_tokens: int = 32
    exact: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """The greedy answer, and the tiers that had the prompt's tokens; the rest was computed."""

    text: str
    prompt_tokens: int
    cached_tokens: dict[str, int]
    computed_tokens: int
    ttft_ms: float


def generate(prompt: GenerateOptions, config: Config) -> None:
    """Answer and print; returns once every computed block is in the lowest tier. Raises ConfigError."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    require_checkpoint(prompt.model)
    tokenizer = load_tokenizer(prompt.model)
    options = {"exact": True, "exact_rows": 128} if prompt.exact else {}
    model = Model.from_pretrained(prompt.model, device="auto")
    console = Console(stderr=True)
    with (
        Engine(model, engine_config(config, **options), LocalConnector.connect(config)) as engine,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        answer = _answer(engine, tokenizer, prompt, progress)
        assert isinstance(engine.connector, LocalConnector)
        engine.drain(_STORE_DEADLINE)
        engine.connector.tiers.drain(_STORE_DEADLINE)
    if prompt.as_json:
        print(json.dumps(asdict(answer)))
        return
    print(answer.text)
    found = " · ".join(f"{tier} {count:,}" for tier, count in answer.cached_tokens.items())
    print(
        f"[{answer.prompt_tokens:,} tokens of prompt: {found} · computed {answer.computed_tokens:,}; "
        f"first token after {answer.ttft_ms:,.0f} ms]"
    )


def save_model(directory: Path) -> None:
    """Save the demo's model as a checkpoint: random weights and a tokenizer. Raises ConfigError if one exists there."""
    if (directory / "config.json").exists():
        raise ConfigError(f'"{directory}": a model exists there already; name another directory')
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_seed(0)
    config = demo_model()
    config.tie_word_embeddings = False  # with random tied embeddings the model repeats one word
    config.initializer_range = 0.06
    end, begin, turn_end = range(len(_SPECIAL))
    config.bos_token_id, config.eos_token_id = begin, [end, turn_end]
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="unfinished-", dir=directory) as name:
        draft = Path(name)
        LlamaForCausalLM(config).save_pretrained(draft)
        train_tokenizer(_SPECIAL).save(str(draft / "tokenizer.json"))
        settings = {"eos_token": _SPECIAL[turn_end], "chat_template": _TEMPLATE}
        (draft / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
        # the configuration is moved last: if it exists, the model is complete, despite any interruption
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(directory / file.name)


def _answer(engine: Engine, tokenizer: Tokenizer, prompt: GenerateOptions, progress: Progress) -> GeneratedAnswer:
    tokens = tokenizer.encode(prompt.text).ids
    if not tokens:
        raise ConfigError("--prompt: it has no tokens; write some text")
    params = SamplingParams(max_tokens=prompt.max_tokens, ignore_eos=True)
    request = engine.request(engine.add_request(tokens, params))
    task = progress.add_task("prompt", total=len(tokens))
    answer: list[int] = []
    while engine.has_unfinished:
        for output in engine.step():
            answer += [output.token_id] if output.token_id is not None else []
        progress.update(task, completed=min(request.num_computed, len(tokens)))
    assert request.ttft is not None
    return GeneratedAnswer(
        text=tokenizer.decode(answer),
        prompt_tokens=len(tokens),
        cached_tokens=request.cached_tokens,
        computed_tokens=len(tokens) - sum(request.cached_tokens.values()),
        ttft_ms=request.ttft * 1000,
    )
