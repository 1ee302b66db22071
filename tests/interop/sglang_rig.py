"""Real SGLang engines over kvtier, each in processes of its own, and the slab between them for tests to look into."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from kvtier.tiers.file import slab
from kvtier.tiers.file.slab import Codec
from kvtier.tiers.naming.key_schemes import sglang_hashes

PAGE_SIZE: Final = 16
CHILD: Final = Path(__file__).with_name("_sglang_child.py")
START: Final = 240  # seconds for an engine to come up on a busy machine
ANSWER: Final = 60
SILENT: Final = "it did not answer in time"
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Which SGLang has to find before it is imported: nothing is fetched or compiled."""
_OPTIONS: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "page_size": PAGE_SIZE,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.1,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "wait_complete",
    "log_level": "info",
}


_RECURRENT: Final = frozenset(
    {"lfm2", "qwen3_next", "qwen3_5_text", "falcon_h1", "granitemoehybrid", "nemotron_h", "kimi_linear"}
)
_YARN: Final = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 1024}
_DEEPSEEK: Final[dict[str, Any]] = {"moe_layer_freq": 1, "rope_parameters": _YARN}
_MISSING: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
}
"""By the kind of model: what SGLang reads of published checkpoints, and transformers does not write."""
_ERROR: Final = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)


class Died(AssertionError):
    """The engine ended, or did not answer in time; its log is in the message."""

    @property
    def reason(self) -> str:
        """The last error that the log names."""
        errors = _ERROR.findall(str(self))
        return errors[-1][:300] if errors else SILENT


class Sglang:
    """An engine over the slabs in a directory. As a context manager it ends with all its processes."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`extra` goes into the storage backend's extra config, `options` are SGLang's own."""
        self._log = directory.with_name(f"{directory.name}-{time.monotonic_ns()}.log")
        self._backend = {
            "backend_name": "kvtier",
            "module_path": "kvtier.connector.sglang",
            "class_name": "KVTierStorage",
            "prefetch_threshold": PAGE_SIZE,
            "host": {"size": "1MiB"},
            "file": {"path": str(directory), "size": "16MiB"},
            **(extra or {}),
        }
        asked = {
            **_OPTIONS,
            "model_path": str(model),
            "hicache_storage_backend_extra_config": json.dumps(self._backend),
            **options,
        }
        asked = {name: value for name, value in asked.items() if value is not None}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD), json.dumps(asked)],
                env={**os.environ, **variables(model), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._unread = b""

    def __enter__(self) -> Self:
        try:
            self._line(b"ready", START)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        """Greedy answers, as {"tokens": …, "storage": cached tokens from its storage, "device": from SGLang's L1}.

        `num_tokens` is the length of an answer. With `timed=True` and one prompt "first_token" is the time until the
        first one, in seconds.
        """
        asked = {"generate": [list(prompt) for prompt in prompts], **options}
        answers: list[dict[str, Any]] = self._ask(asked)
        return answers

    def flush(self) -> None:
        """Empty SGLang's own tiers; it refuses while it is busy."""
        wait_until(lambda: bool(self._ask({"flush": True})), "SGLang to be idle")

    def update(self, checkpoint: Path, *, flush: bool) -> None:
        """Change its weights, and with `flush` empty SGLang's own tiers, which it refuses while a request ends."""
        asked = {"update": str(checkpoint), "flush_cache": flush}
        wait_until(lambda: bool(self._ask(asked)), "SGLang to be idle")

    def clear(self) -> None:
        """What its administrator's "clear storage" does."""
        assert self._ask({"clear": True})

    def attach(self, **extra: Any) -> tuple[bool, str]:
        """Open the storage of a running engine, with more extra config: whether it is open, and what SGLang says."""
        asked = {"hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete"}
        asked["hicache_storage_backend_extra_config_json"] = json.dumps({**self._backend, **extra})
        done, message = self._ask({"attach": asked})
        return done, message

    def detach(self) -> dict[str, float]:
        """Close the storage in order; the counters that it logs then."""
        wait_until(lambda: bool(self._ask({"detach": True})), "SGLang to be idle")
        *_, closed = [line for line in self.log().splitlines() if "kvtier closed: " in line]
        counters: dict[str, float] = json.loads(closed.partition("kvtier closed: ")[2])
        return counters

    def log(self) -> str:
        """Everything its processes said."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End all of its processes, here and now."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _tail(self) -> str:
        """The end of the log, from the first error on that is no consequence of another."""
        log = self.log()
        return log[max(0, min(log.find("Traceback"), len(log) - 6000)) :] if "Traceback" in log else log[-3000:]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Died(self._tail()) from None
        return json.loads(self._line(b"=", ANSWER))

    def _line(self, start: bytes, timeout: float) -> bytes:
        """What follows `start` on the next line of standard output that begins with it."""
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        while True:
            line, found, rest = self._unread.partition(b"\n")
            if found:
                self._unread = rest
                if line.startswith(start):
                    return line.removeprefix(start)
                continue
            left = end - time.monotonic()
            ready = left > 0 and select.select([self._process.stdout], [], [], left)[0]
            piece = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                raise Died(self._tail())
            self._unread += piece


class Slab:
    """The one slab in a directory, read and written behind kvtier's back; its writer must be gone for `forge`."""

    def __init__(self, directory: Path) -> None:
        [self.path] = directory.glob("*.slab")
        header = self.path.read_bytes()[:8192]
        self.superblock = slab.decode(header, self.path.name)
        self._slots = np.arange(self.superblock.num_slots, dtype=np.int64)

    def names(self) -> set[bytes]:
        """The names of all pages stored."""
        return {record.chain_hash for record in Codec(self.superblock).to_records(self._rows()[self._valid()])}

    def payload(self, name: bytes) -> NDArray[np.uint8]:
        """The bytes stored under a name."""
        with self.path.open("rb") as file:
            file.seek(self.superblock.payload_offset(self._slot(name)))
            return np.frombuffer(file.read(self.superblock.slot_bytes), np.uint8)

    def forge(self, name: bytes, payload: NDArray[np.uint8], *, undetectably: bool) -> None:
        """Put other bytes under a name; `undetectably` with checksums to match."""
        slot = self._slot(name)
        row = self._rows()[slot : slot + 1]
        row["payload_checksum"] = xxhash.xxh3_64_intdigest(payload)
        slab.seal_rows(row, self.superblock)
        with self.path.open("r+b") as file:
            file.seek(self.superblock.payload_offset(slot))
            file.write(payload)
            if undetectably:
                file.seek(self.superblock.row_offset(slot))
                file.write(slab.byte_view(row))

    def _rows(self) -> slab.Rows:
        with self.path.open("rb") as file:
            raw = []
            for slot in self._slots.tolist():
                file.seek(self.superblock.row_offset(slot))
                raw.append(file.read(self.superblock.entry_bytes))
        return np.frombuffer(bytearray(b"".join(raw)), slab.entry_dtype(self.superblock.block_size))

    def _valid(self) -> NDArray[np.bool_]:
        return slab.find_valid(self._rows(), self._slots, self.superblock)

    def _slot(self, name: bytes) -> int:
        [slot] = [slot for slot in np.flatnonzero(self._valid()).tolist() if self._name(slot) == name]
        return slot

    def _name(self, slot: int) -> bytes:
        return Codec(self.superblock).to_records(self._rows()[slot : slot + 1])[0].chain_hash


def needs(model: Path) -> dict[str, Any]:
    """Options without which SGLang does not start a model on a CPU."""
    config = json.loads((model / "config.json").read_text())
    options: dict[str, Any] = {}
    missing = dict(_MISSING.get(config["model_type"], {}))
    if config["model_type"] in _RECURRENT:
        options |= {"mamba_radix_cache_strategy": "no_buffer", "page_size": 1}
        if "full_attention" in config.get("layer_types", []):  # which SGLang knows by another name
            missing["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    if missing:
        options["json_model_override_args"] = json.dumps(missing)
    if "vision_config" in config:
        options["enable_multimodal"] = False  # these checkpoints have no image processor
    return options


def wait_written(directory: Path, quiet: float = 1.0) -> None:
    """Wait until nothing new has come to the slab for `quiet` seconds."""
    known, since = -1, time.monotonic()
    end = since + 30
    while time.monotonic() < min(end, since + quiet):
        if (count := len(Slab(directory).names())) != known:
            known, since = count, time.monotonic()
        time.sleep(0.1)


def names_of(prompts: Sequence[Sequence[int]]) -> set[bytes]:
    """What SGLang calls the full pages of prompts."""
    return {name for prompt in prompts for name in sglang_hashes(list(prompt), PAGE_SIZE)}


def settle(directory: Path, prompts: Sequence[Sequence[int]]) -> None:
    """Wait until every full page of the prompts is in the slab."""
    wait_until(lambda: names_of(prompts) <= Slab(directory).names(), "pages to be written")


def wait_until(condition: Any, what: str, timeout: float = 30) -> None:
    """Wait for a condition; AssertionError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.1)


def variables(model: Path) -> dict[str, str]:
    """The above, and of SGLang's models only that of this checkpoint is imported."""
    spec = find_spec("sglang.srt.models")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    files = [path for home in spec.submodule_search_locations for path in Path(home).glob("*.py")]
    config = json.loads((model / "config.json").read_text())
    names: list[str] = config["architectures"]
    for half, classes in (("text_config", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("vision_config", MODEL_MAPPING_NAMES)):
        if (kind := config.get(half, {}).get("model_type")) in classes:
            names = [*names, str(classes[kind])]
    needed = re.compile(rf"\b({'|'.join(names)})\b")
    own = {path.stem for path in files if needed.search(path.read_text())} or {"transformers"}  # its stand-in for all
    others = {path.stem for path in files} - own
    return {**ENVIRONMENT, "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(others))}
