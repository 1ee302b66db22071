"""A process that forks with kvtier open in it, for test_forks.py: what the fork comes to is printed as JSON.

`_forking_child.py WHAT DIRECTORY [SOCKET]`: WHAT is `engine` or `transformers`, over a slab in DIRECTORY or over the
daemon at SOCKET; or `stays`: a fork outlives it.
"""

import gc
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

import torch  # noqa: E402
from tiny_models import config_of, plain, prompt  # noqa: E402

from kvtier.connector import LocalConnector  # noqa: E402
from kvtier.connector.transformers import KVTier  # noqa: E402
from kvtier.engine import Engine, EngineConfig, SamplingParams  # noqa: E402
from kvtier.tiers import RequestError  # noqa: E402
from kvtier.tiers.config import Config  # noqa: E402

PROMPT = prompt(1, 100)
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def config(directory: Path, socket: str | None) -> Config:
    sections: dict[str, Any] = {"host": {"size": "16MiB"}, "cache": {"block_size": 16, "load_or_recompute": "load"}}
    if socket is None:
        return Config.load(None, **sections, file={"path": str(directory), "size": "64MiB"})
    return Config.load(None, **sections, service={"socket": socket})


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except RequestError as error:
        return str(error)
    return "not refused"


def in_fork(story: Callable[[], Any]) -> Any:
    """What the story returns in a forked child, and its exit status: it ends as any program does."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        signal.alarm(60)
        with os.fdopen(writing, "w") as pipe:
            json.dump(story(), pipe)
        sys.exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return {"status": status, **(json.loads(said) if said else {})}


def use_much_memory() -> list[mmap.mmap]:
    """Mappings all over the place, also where the parent's pool lies."""
    return [mmap.mmap(-1, 16 << 20) for _ in range(8)]


def of_an_engine(directory: Path, socket: str | None) -> Any:
    def opened(path: Path, tiers: Config) -> Engine:
        settings = EngineConfig(block_size=16, num_blocks=64, partial_blocks=False)
        return Engine.from_config(config_of("llama"), settings, LocalConnector.connect(tiers))

    engines = [opened(directory, config(directory, socket))]
    [answer] = engines[0].generate([PROMPT], GREEDY)
    stream = engines[0].stream(PROMPT, GREEDY)
    next(stream)

    def calls(engine: Engine) -> dict[str, str]:
        return {
            "generate": refused(lambda: engine.generate([PROMPT], GREEDY)),
            "stream": refused(lambda: next(stream)),
            "add_request": refused(lambda: engine.add_request(PROMPT, GREEDY)),
            "step": refused(engine.step),
            "abort": refused(lambda: engine.abort("0")),
            "drain": refused(lambda: engine.drain(1)),
            "reset_cache": refused(engine.reset_cache),
        }

    def story() -> Any:
        said = calls(engines[0])
        engines[0].connector.close()
        engines[0].close()
        held = use_much_memory()
        engines.clear()
        gc.collect()
        for each in held:
            each[:4] = b"mine"
        # one of its own works
        with opened(directory / "own", config(directory / "own", socket)) as own:
            [again] = own.generate([PROMPT], GREEDY)
        return {"refused": said, "own": again.token_ids == answer.token_ids, "found": again.num_external_tokens}

    child = in_fork(story)
    rest = len(list(stream))
    engines[0].close()
    with opened(directory, config(directory, socket)) as engine:
        [again] = engine.generate([PROMPT], GREEDY)
    return {**child, "rest": rest, "after": [again.token_ids == answer.token_ids, again.num_external_tokens]}


def of_transformers(directory: Path, socket: str | None) -> Any:
    model: Any = plain("llama")
    ids = torch.tensor([PROMPT])
    kv = KVTier(model, config(directory, socket))

    def answer(kv: KVTier) -> tuple[list[int], int]:
        made = kv.generate(ids, max_new_tokens=4, do_sample=False)
        return made[0, len(PROMPT) :].tolist(), kv.num_cached_tokens

    text, _ = answer(kv)

    def story() -> Any:
        in_child, cached = answer(kv)
        num_loaded = kv.load(ids)[1]
        kv.store(ids, kv.load(ids)[0])
        drained = kv.drain(1)
        kv.close()
        held = use_much_memory()
        gc.collect()
        with KVTier(model, config(directory / "own", socket)) as own:
            in_own = [answer(own)[0] == text, answer(own)[1]]
        del held
        return {"text": in_child == text, "cached": cached, "loaded": [num_loaded, drained], "own": in_own}

    child = in_fork(story)
    again, cached = answer(kv)
    kv.close()
    return {**child, "after": [again == text, cached]}


def stay(directory: Path) -> None:
    """Its fork goes on after it was killed, with everything open that it had."""
    kv = KVTier(plain("llama"), config(directory, None))  # type: ignore[arg-type]
    kv.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)
    kv.drain()
    if not (pid := os.fork()):
        time.sleep(120)
        os._exit(0)
    print(pid, flush=True)
    threading.Event().wait(120)


if __name__ == "__main__":
    what, home, *at = sys.argv[1:]
    if what == "stays":
        stay(Path(home))
    else:
        made = {"engine": of_an_engine, "transformers": of_transformers}[what]
        print(json.dumps(made(Path(home), at[0] if at else None)), flush=True)
