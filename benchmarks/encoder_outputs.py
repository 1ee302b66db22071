"""A real vLLM on this CPU with a BLIP-2: the first token about images seen before, with and without encoder outputs.

Arms: no connector, vLLM's example connector (files read from the page cache, nothing verified) and kvtier's. Each has
three engines of its own, in turns: a hit differs by a third from one engine to the next. Before each round vLLM's own
caches of images and KV are emptied, as they are when they are too small. "restart": the first answers of the next
engine over the same storage. Random weights; every answer is compared with that of the engine without a connector. Runs
in `.venv-vllm` (`.ci/beside-engine vllm`).
"""

import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

from _rig import beside

beside("vllm")

from _report import Given, Result, Row, Target, program, progress  # noqa: E402
from vllm_images import image, image_engine, kvtier, make_model  # noqa: E402

ARMS: Final = ("none", "example", "kvtier")


def transfer(arm: str, folder: Path) -> dict[str, Any] | None:
    if arm == "none":
        return None
    if arm == "example":
        extra = {"shared_storage_path": str(folder)}
        return {"ec_connector": "ECExampleConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}
    return kvtier({"host": {"size": "64MiB"}, "file": {"path": str(folder), "size": "256MiB"}})


def asked(engine: Any, images: list[Any], texts: dict[int, list[int]]) -> float:
    """Median milliseconds to the first token, one request at a time."""
    seconds = []
    for number, each in enumerate(images):
        began = time.perf_counter()
        [text] = engine.text([each], num_tokens=1)
        seconds.append(time.perf_counter() - began)
        if texts.setdefault(number, text) != text:
            raise AssertionError(f"image {number}: another answer than without a connector")
    return median(seconds) * 1e3


def trial(
    arm: str, model: Path, folder: Path, images: list[Any], rounds: int, texts: dict[int, list[int]]
) -> dict[str, float]:
    with image_engine(model, transfer(arm, folder)) as engine:
        first = asked(engine, images, texts)
        again = median(asked(engine, images, texts) for _ in range(rounds))
    with image_engine(model, transfer(arm, folder)) as engine:
        restart = asked(engine, images, texts)
    progress(f"{arm:8} first {first:.1f}, again {again:.1f}, restart {restart:.1f} ms")
    return {"first, ms": first, "again, ms": again, "restart, ms": restart}


@program()
def main(chosen: Given) -> Result:
    width, layers, side, count, rounds, times = (64, 2, 112, 3, 1, 1) if chosen.quick else (768, 12, 364, 6, 7, 3)
    images, texts = [image(seed, side) for seed in range(count)], dict[int, list[int]]()
    with tempfile.TemporaryDirectory() as home:
        model = make_model(Path(home) / "model", width=width, layers=layers, side=side)
        trials = {arm: list[dict[str, float]]() for arm in ARMS}
        for turn, arm in product(range(times), ARMS):
            folder = Path(home) / f"{arm}-{turn}"
            folder.mkdir()
            trials[arm].append(trial(arm, model, folder, images, rounds, texts))
    rows: list[Row] = [
        {"connector": arm, **{name: median(each[name] for each in made) for name in made[0]}}
        for arm, made in trials.items()
    ]
    none, example, ours = rows
    found = [
        Target(f"{when}: none ÷ kvtier", 2.0, none[f"{when}, ms"] / ours[f"{when}, ms"], at_most=False)
        for when in ("again", "restart")
    ]
    found += [
        Target(f"{when}: kvtier ÷ vLLM's example connector", 1.05, ours[f"{when}, ms"] / example[f"{when}, ms"])
        for when in ("again", "restart")
    ]
    found.append(Target("first: kvtier ÷ none", 1.05, ours["first, ms"] / none["first, ms"]))
    setup: dict[str, object] = {"images": f"{count} of {side} × {side} pixels", "encoder": f"{layers} × {width}"}
    return rows, found, setup
