"""What programs that load engines share: random prompts and models, tiers over a slab, pictures."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from _process import drop_caches
from _report import ROOT, Row

from kvtier.tiers.config import Config

matplotlib.use("Agg")
from matplotlib import pyplot

VLLM: Final = ROOT / ".venv-vllm" / "bin" / "python"
VOCABULARY: Final = 8192
_SETTLE: Final = 120.0  # seconds for everything stored to reach the slab


def random_tokens(draw: np.random.Generator, count: int, first: int = 3, end: int = VOCABULARY) -> list[int]:
    tokens: list[int] = draw.integers(first, end, count).tolist()
    return tokens


def llama(size: int, layers: int, *, heads: int, kv_heads: int, **options: Any) -> Any:
    from transformers import LlamaConfig  # takes torch along

    sizes: Row = {"hidden_size": size, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": size * 8 // 3}
    return LlamaConfig(**sizes | {"max_position_embeddings": VOCABULARY} | options)


def scratch(name: str) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix=f".{name}-", dir=ROOT / "benchmarks")


def over_slab(home: Path | str, host: str, size: str, **cache: Any) -> Config:
    """Tiers over a slab; what is held is waited for and loaded, however long that takes."""
    file = {"path": str(home), "size": size, "deadline": "60s"}
    cache = {"load_or_recompute": "load", "prefetch_deadline": "120s", **cache}
    return Config.load(host={"size": host}, file=file, cache=cache)


def settle(engine: Any) -> None:
    """Every copy has ended, in every tier. SystemExit if that takes two minutes."""
    if not engine.drain(_SETTLE) or not engine.connector.hierarchy.drain(_SETTLE):
        raise SystemExit(f"what was stored has not reached the slab in {_SETTLE:.0f} s: the disk is too slow for this")


def leave_only(engine: Any, tier: str, *, page_cache: bool = False) -> None:
    """Empty the tiers above this one: "l1", "l2", or "file", with or without what the page cache has of it."""
    if tier != "l1":
        engine.pool.reset()
    if tier == "file":
        engine.connector.hierarchy.host.pool.reset()
        if not page_cache:
            drop_caches()


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    figure, axes = pyplot.subplots(rows, columns, layout="constrained", **options)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def grouped_bars(
    path: Path, series: Mapping[str, Sequence[float]], labels: Sequence[str], what: str, title: str
) -> None:
    """A picture of bars on a log scale: a group for each label, in it a bar of each series."""
    with picture(path, figsize=(7, 3.6)) as (_, axes):
        for place, (name, heights) in enumerate(series.items()):
            bars = axes.bar(np.arange(len(labels)) + 0.2 * (place - 1.5), heights, 0.19, label=name)
            axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7)
        axes.set(yscale="log", ylabel=what)
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8)
