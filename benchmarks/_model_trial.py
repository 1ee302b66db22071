"""One architecture in one engine, without kvtier and with it: whether answers are equal, and what was found again.

`models.py` runs it in that engine's environment.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from _architectures import ARCHITECTURES, VOCAB, Architecture
from _rig import be_engine

from kvtier import Config, SamplingParams, open_engine
from kvtier.connector.transformers import KVTier
from kvtier.tiers import ConfigError

LENGTH: Final = 150  # tokens of a prompt: more than any window
NEW: Final = 16  # tokens of an answer
_GREEDY: Final[dict[str, Any]] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
_CACHE: Final[dict[str, Any]] = {"load_or_recompute": "load", "prefetch_deadline": "60s"}

PromptTexts = list[list[int]]
TrialRound = tuple[PromptTexts, list[int]]  # the answers, and how many tokens of each prompt were found


class Trial(NamedTuple):
    """What came of it.

    status: "hits", "no hits", "refused" by kvtier, "absent" from the library, "not run" by the engine even without
    kvtier, or "wrong": other answers with kvtier, or answers that prove nothing.
    """

    status: str
    message: str = ""
    warm: int = 0  # tokens of each prompt found by the same process, in the tiers
    restart: int = 0  # the same by the next opening of the slab


class EngineLacksError(Exception):
    """The engine cannot run the model by itself."""


@contextmanager
def by_itself() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EngineLacksError(f"{type(error).__name__}: {_first_line(error)}") from error


def prompts() -> PromptTexts:
    random = np.random.default_rng(0)
    one, two, middle = (random.integers(3, VOCAB - 16, number).tolist() for number in (LENGTH, LENGTH, 64))
    return [one, two, [*one[:48], *middle, *one[112:]]]


def judge(expected: PromptTexts, cold: TrialRound, warm: TrialRound, restart: TrialRound, said: list[str]) -> Trial:
    """The verdict over three rounds with kvtier: nothing held, held by the process, held by the slab alone."""
    if expected[0] == expected[2]:
        return Trial("wrong", "the answers do not depend on the prompt: they prove nothing")
    for name, (texts, _) in (("first", cold), ("warm", warm), ("restarted", restart)):
        if texts != expected:
            return Trial("wrong", f"other answers with kvtier, {name} round")
    found, again = min(warm[1]), min(restart[1])
    status = "hits" if found and again else "no hits"
    return Trial(status, "" if status == "hits" else "; ".join(dict.fromkeys(said)), found, again)


def settings(folder: Path) -> Config:
    file = {"path": str(folder), "size": "64MiB", "deadline": "60s"}
    return Config.load(host={"size": "32MiB"}, file=file, cache={**_CACHE, "block_size": 16})  # prompts are short


def plain_texts(architecture: Architecture) -> PromptTexts:
    with by_itself():
        model = architecture.make_model()
        return [_answer(model, model.generate, tokens) for tokens in prompts()]


def _answer(model: Any, generate: Callable[..., Any], tokens: list[int]) -> list[int]:
    sequence: list[int] = generate(torch.tensor([tokens]), **_GREEDY, eos_token_id=None)[0].tolist()
    return sequence if model.config.is_encoder_decoder else sequence[len(tokens) :]


def three_rounds(
    expected: PromptTexts,
    opened: Callable[[], AbstractContextManager[Any]],
    ask: Callable[[Any], TrialRound],
    forget: Callable[[Any], object],
) -> tuple[Trial, list[str]]:
    """Ask an engine, ask it again once its own cache is empty, and ask the next one; with what kvtier warned of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: not record.getMessage().startswith("[host] size"))  # the trial's own is small
    logging.getLogger("kvtier").addHandler(handler)
    try:
        with opened() as engine:
            cold = ask(engine)
            forget(engine)
            warm = ask(engine)
        with opened() as engine:
            restart = ask(engine)
    finally:
        logging.getLogger("kvtier").removeHandler(handler)
    return judge(expected, cold, warm, restart, said), said


def try_transformers(architecture: Architecture, folder: Path) -> Trial:
    model, expected = architecture.make_model(), plain_texts(architecture)

    def ask(kv: KVTier) -> TrialRound:
        texts, found = [], []
        for tokens in prompts():
            texts.append(_answer(model, kv.generate, tokens))
            found.append(kv.num_cached_tokens)
        assert kv.drain()
        return texts, found[:2]

    trial, said = three_rounds(expected, lambda: KVTier(model, settings(folder)), ask, lambda kv: None)
    refused = [text.removeprefix("nothing is kept of this model: ") for text in said if "this model" in text]
    return Trial("refused", refused[0]) if refused and trial.status == "no hits" else trial


def try_kvtier(architecture: Architecture, folder: Path) -> Trial:
    path, expected = folder / "model", plain_texts(architecture)
    architecture.save(path)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)

    def ask(engine: Any) -> TrialRound:
        answers = []
        for tokens in prompts():  # one by one: what they share, each finds in the same place
            answers += engine.generate([tokens], params)
            assert engine.drain(60)
            assert engine.connector.hierarchy.drain(60)
        return [answer.token_ids for answer in answers], [answer.num_external_tokens for answer in answers[:2]]

    slab = settings(folder / "slab")
    return three_rounds(expected, lambda: open_engine(path, slab), ask, lambda engine: engine.pool.reset())[0]


def try_vllm(architecture: Architecture, folder: Path) -> Trial:
    """vLLM's engine with the connector, all in this process."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm_rig

    path, dtype = folder / "model", architecture.vllm_dtype
    architecture.save(path)
    with by_itself(), vllm_rig.engine(path, dtype=dtype) as plain:
        expected = [plain.text([tokens], NEW)[0] for tokens in prompts()]

    def ask(engine: Any) -> TrialRound:
        outputs = []
        for tokens in prompts():
            outputs += engine.run([tokens], NEW)
            engine.settle()
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        return texts, [output.num_cached_tokens or 0 for output in outputs[:2]]

    tiers = vllm_rig.tiers(folder / "slab", cache=_CACHE)
    opened = partial(vllm_rig.engine, path, tiers, dtype=dtype)
    return three_rounds(expected, opened, ask, lambda engine: engine.forget_l1())[0]


def try_sglang(architecture: Architecture, folder: Path) -> Trial:
    """SGLang's engine over HiCache, in processes of its own; kvtier is its storage.

    What is asked again is a chat's second turn, since SGLang keeps a recurrent state only where a request ended.
    """
    import sglang_rig

    path, slabs = folder / "model", folder / "slab"
    architecture.save(path)
    options: dict[str, Any] = {"hicache_mem_layout": "page_first_direct", **sglang_rig.needs(path)}

    def ask(engine: Any, asked: PromptTexts) -> TrialRound:
        answers = [engine.generate([tokens], num_tokens=NEW)[0] for tokens in asked]
        return [answer["tokens"] for answer in answers], [answer["storage"] for answer in answers[:2]]

    def alone() -> tuple[PromptTexts, PromptTexts, PromptTexts]:
        try:
            with sglang_rig.Sglang(path, slabs, hicache_storage_backend=None, **options) as plain:
                first, _ = ask(plain, prompts())
                turns = [[*prompt, *text, *range(3, 11)] for prompt, text in zip(prompts(), first, strict=True)]
                return first, turns, ask(plain, turns)[0]
        except sglang_rig.Died as died:
            if died.reason == sglang_rig.SILENT:
                raise  # a slow machine, and no word of SGLang's
            raise EngineLacksError(died.reason) from died

    first, turns, expected = alone()
    if expected[0] == expected[2] or len({*first[0], *first[1]}) < 4:  # its loader left weights as they were
        raise EngineLacksError(f"its answers do not depend on the prompt: {first[0][:4]} …")
    try:
        with sglang_rig.Sglang(path, slabs, **options) as engine:
            texts, found = ask(engine, prompts())
            sglang_rig.wait_written(slabs)
            engine.flush()
            warm = ask(engine, turns)
        with sglang_rig.Sglang(path, slabs, **options) as engine:
            restart = ask(engine, turns)
    except sglang_rig.Died as died:
        if "ConfigError: " in died.reason:  # kvtier's own no
            raise ConfigError(died.reason.partition("ConfigError: ")[2]) from died
        raise RuntimeError(died.reason) from died
    cold = expected if texts == first else texts
    trial = judge(expected, (cold, found), warm, restart, [])
    if trial.status == "wrong" and alone()[2] != expected:
        raise EngineLacksError("its answers differ from one start to the next, without a storage")
    return trial


ENGINES: Final = {"kvtier": try_kvtier, "sglang": try_sglang, "transformers": try_transformers, "vllm": try_vllm}


def attempt(engine: str, architecture: Architecture, folder: Path) -> Trial:
    """One trial in a folder of its own. What an engine raises by itself is told as its own."""
    if architecture.make_config() is None:
        return Trial("absent", f"not in transformers {transformers.__version__}")
    try:
        return ENGINES[engine](architecture, folder)
    except ConfigError as error:
        return Trial("refused", str(error))
    except EngineLacksError as error:
        return Trial("not run", str(error))
    except Exception as error:  # kvtier has to say no in words, or work
        return Trial("wrong", f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """What is wrong; pydantic heads that with a line of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "validation error for" not in line), "")[:200]


class Trials:
    """What `models.py` asks for, of one engine."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.engine, self.folder = setup["engine"], Path(setup["folder"])
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)

    def attempt(self, name: str) -> dict[str, Any]:
        [architecture] = [one for one in ARCHITECTURES if one.name == name]
        return attempt(self.engine, architecture, self.folder / name)._asdict()

    def end(self) -> None:
        """Nothing of a trial is left."""


if __name__ == "__main__":
    be_engine(Trials)
