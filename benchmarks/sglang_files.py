"""SGLang with kvtier below HiCache, beside SGLang's own file backend and no storage: the same model and prompts.

Each engine answers cold and is killed. The next one answers again from what was stored. Then one byte of a stored page
is changed on the disk, and a third one answers: who serves it? Answers have to be those of the engine without storage.

Runs in `.venv-sglang` (`.ci/beside-engine sglang`), on a CPU, with the stand-ins of tests/interop/sglang_on_cpu.py.
"""

import tempfile
from collections.abc import Sequence
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from _rig import beside

beside("sglang")

import numpy as np  # noqa: E402
from _report import Given, Result, Row, Target, program, progress  # noqa: E402
from _rig import saved_llama  # noqa: E402
from sglang_rig import PAGE_SIZE, Sglang, Slab, names_of, wait_until  # noqa: E402

from kvtier.tiers.naming import sglang_hashes  # noqa: E402

BACKENDS: Final = ("none", "file", "kvtier")
VOCAB: Final = 512

PromptTokens = list[list[int]]


class BackendAnswers(NamedTuple):
    texts: PromptTokens
    seconds: list[float]  # to the first token of each
    cached: float  # share of tokens that came from the storage


class Storage:
    """One backend under SGLang, in a directory of its own, and its pages on the disk."""

    def __init__(self, backend: str, model: Path, home: Path) -> None:
        self.backend, self._model, self._directory = backend, model, home / backend
        self._directory.mkdir()

    def engine(self) -> Sglang:
        options: dict[str, Any] = {"max_total_tokens": 8192}
        if self.backend == "none":
            options["hicache_storage_backend"] = None
        elif self.backend == "file":
            options["hicache_storage_backend"] = "file"
            options["hicache_storage_backend_extra_config"] = f'{{"prefetch_threshold": {PAGE_SIZE}}}'
        extra = {"host": {"size": "32MiB"}, "file": {"path": str(self._directory), "size": "256MiB"}}
        variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._directory)}
        return Sglang(self._model, self._directory, extra=extra, environment=variables, **options)

    def settle(self, prompts: PromptTokens) -> None:
        """Wait until all of the prompts' pages are on the disk."""
        if self.backend != "none":
            wait_until(lambda: names_of(prompts) <= self._held(), "pages to be written", 120)

    def bytes_on_disk(self) -> int:
        """Of pages, with what says which they are."""
        if self.backend == "kvtier":
            block = Slab(self._directory).superblock
            return len(self._held()) * (block.stride + block.entry_bytes)
        return sum(path.stat().st_size for path in self._directory.glob("*.bin"))

    def change(self, name: bytes) -> None:
        """Flip one bit, the highest of an exponent, of the first number that the page holds."""
        if self.backend == "kvtier":
            slab = Slab(self._directory)
            payload = slab.payload(name).copy()
            payload[3] ^= 0x40
            slab.forge(name, payload, undetectably=False)
        elif self.backend == "file":
            [path] = self._directory.glob(f"{name.hex()}*.bin")
            content = bytearray(path.read_bytes())
            content[3] ^= 0x40
            path.write_bytes(content)

    def _held(self) -> set[bytes]:
        if self.backend == "kvtier":
            return Slab(self._directory).names() if list(self._directory.glob("*.slab")) else set()
        return {bytes.fromhex(path.name[:64]) for path in self._directory.glob("*.bin")}


def ask(engine: Sglang, prompts: PromptTokens) -> BackendAnswers:
    answers = [engine.generate([prompt], timed=True)[0] for prompt in prompts]
    texts, seconds, cached = ([answer[name] for answer in answers] for name in ("tokens", "first_token", "storage"))
    return BackendAnswers(texts, seconds, sum(cached) / sum(map(len, prompts)))


def trial(storage: Storage, prompts: PromptTokens, warm_up: PromptTokens) -> Row:
    with storage.engine() as engine:
        ask(engine, warm_up)
        cold = ask(engine, prompts)
        storage.settle(prompts)
    with storage.engine() as engine:
        ask(engine, warm_up[1:])
        again = ask(engine, prompts)
    size = storage.bytes_on_disk()
    for prompt in prompts:
        storage.change(sglang_hashes(prompt, PAGE_SIZE)[2])
    with storage.engine() as engine:
        changed = ask(engine, prompts)
    row: Row = {"backend": storage.backend, "cold, ms": median(cold.seconds) * 1e3}
    row |= {"restart, ms": median(again.seconds) * 1e3, "cached": again.cached, "MB on disk": size / 1e6}
    row["answers right"] = sum(map(eq, again.texts, cold.texts))
    row["right after a changed byte"] = sum(map(eq, changed.texts, cold.texts))
    row |= {"cached after it": changed.cached, "texts": cold.texts}
    told = ", ".join(f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float | int))
    progress(f"{storage.backend:8}{told}")
    return row


def targets(rows: Sequence[Row], num_prompts: int) -> list[Target]:
    none, file, ours = rows
    wrong, after = num_prompts - file["right after a changed byte"], "time to first token after a restart"
    at_least = {
        "answers after a restart that are those without a storage": (num_prompts, ours["answers right"]),
        "answers after a changed byte as cold, kvtier": (num_prompts, ours["right after a changed byte"]),
        "answers that a changed byte makes wrong, SGLang's file backend (the test can fail)": (1, wrong),
        f"{after}: no storage ÷ kvtier": (1.0, none["restart, ms"] / ours["restart, ms"]),
    }
    at_most = {
        f"{after}: kvtier ÷ SGLang's file backend": ours["restart, ms"] / file["restart, ms"],
        "bytes on disk: kvtier ÷ SGLang's file backend": ours["MB on disk"] / file["MB on disk"],
    }
    found = [Target(name, limit, measured, at_most=False) for name, (limit, measured) in at_least.items()]
    return [*found, *(Target(name, 1.1, measured) for name, measured in at_most.items())]


@program()
def main(chosen: Given) -> Result:
    random = np.random.default_rng(0)
    num_prompts, length, layers = (2, 512, 2) if chosen.quick else (5, 1536, 8)
    prompts, warm_up = (random.integers(3, VOCAB, (count, length)).tolist() for count in (num_prompts, 2))
    with tempfile.TemporaryDirectory() as folder:
        sizes: Row = {"vocab_size": VOCAB, "intermediate_size": 1024, "max_position_embeddings": 4096}
        sizes |= {"heads": 8, "kv_heads": 4, "initializer_range": 0.1}
        model = saved_llama(Path(folder) / "model", 512, layers, **sizes)
        rows = [trial(Storage(backend, model, Path(folder)), prompts, warm_up) for backend in BACKENDS]
    if len({str(row.pop("texts")) for row in rows}) > 1:
        raise AssertionError("cold answers differ between storages: nothing here can be compared")
    setup: dict[str, object] = {"prompts": f"{num_prompts} of {length} tokens", "layers": layers, "page": PAGE_SIZE}
    return rows, targets(rows, num_prompts), setup
