"""What the stories of the OpenAI server share: a tiny model that can chat, and servers as threads and as processes."""

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from doubles import wait_until as wait_for
from fork_rig import ENGINE, Forked
from openai import OpenAI
from service_rig import ReadProcess, environment, patient, patient_options
from tiny_models import SIZES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, set_seed

from kvtier.connector.local import LocalConnector
from kvtier.service.engine.server import EngineServer
from kvtier.tiers.config.config import Config

MODEL: Final = "tiny"
BLOCK: Final = 16
_SPECIAL: Final = ("<|begin|>", "<|end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|begin|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
WITH_TOOLS: Final = "{% if tools %}{{ tools|tojson }}{% endif %}" + TEMPLATE
_START: Final = 100.0  # seconds


def tokenizer(*words: str) -> Tokenizer:
    """Every byte is a token, and so are `words`: a random model's answer is full of bytes that are no character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    made.add_tokens([AddedToken(text, special=False) for text in words])
    return made


def save_checkpoint(
    home: Path, *words: str, template: str | None = TEMPLATE, config: PretrainedConfig | None = None
) -> Path:
    """A directory called `tiny` with weights, tokenizer and chat template; of a Llama by default."""
    directory = home / MODEL
    set_seed(0)
    config = config or LlamaConfig(**SIZES)
    config.vocab_size, config.bos_token_id, config.eos_token_id = 256 + len(_SPECIAL) + len(words), 256, 257
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)
    tokenizer(*words).save(str(directory / "tokenizer.json"))
    settings = {"eos_token": _SPECIAL[1], **({} if template is None else {"chat_template": template})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


class ServerThread:
    """`kvtier engine` in this process: the loop on a thread, as it is on the main one there."""

    def __init__(self, model: Path, *, exact: bool = False, **sections: Mapping[str, object]) -> None:
        given = {
            **sections,
            "host": {"size": "8MiB", **sections.get("host", {})},
            "l1": {"num_blocks": 128, **sections.get("l1", {})},
            "cache": {"block_size": BLOCK, "load_or_recompute": "load", **sections.get("cache", {})},
            "server": {"http": "127.0.0.1:0", "max_num_seqs": 8, **sections.get("server", {})},
        }
        self.server = EngineServer(model, Config.model_validate(patient(given)), exact=exact)
        self.engine, self.loop = self.server.engine, self.server.loop
        self.url = f"http://{self.server.address}"
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.http = httpx2.Client(base_url=self.url, timeout=60)
        self.http.get("/healthz")
        self.client = client(self.url)

    def post(self, path: str, **body: object) -> httpx2.Response:
        return self.http.post(f"/v1/{path}", json=body)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = self.http.get("/status").json()
        return told

    def settle(self) -> None:
        """Nothing is live, everything computed is in L2, the figures say so; on the calling thread, the loop idle."""
        wait_for(lambda: self.loop.num_live == 0 and not self.engine.scheduler.has_copies)
        wait_for(lambda: self.loop.stats == self.engine.stats)  # the turn that ended the last copy has ended, too
        connector = self.engine.connector
        assert isinstance(connector, LocalConnector)
        assert connector.tiers.drain(60)

    @property
    def num_free(self) -> int:
        """Blocks of L1 nobody holds, as of the loop's last turn."""
        return self.loop.stats["free_blocks"]

    def close(self) -> None:
        """Stop it; nothing has leaked."""
        self.client.close()
        self.http.close()
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.engine.pool.check()
        assert self.engine.pool.num_free_blocks == self.engine.pool.num_blocks
        assert self.loop.num_live == 0


class ServerProcess(ReadProcess):
    """`kvtier engine` as a process of its own, by its command line."""

    def __init__(self, model: Path, *arguments: str, **options: str) -> None:
        """Start it and wait until it says that it is ready; `section__option=value` as variables."""
        command = ["-m", "kvtier.cli", "engine", "--model", str(model)]
        own = {"server__http": "127.0.0.1:0", "host__size": "8MiB", "l1__num_blocks": "128"}
        own["cache__block_size"] = str(BLOCK)
        options = {**patient_options(), **own, "cache__load_or_recompute": "load", **options}
        variables = {"OMP_NUM_THREADS": "1", **environment(**options)}
        self._ready = threading.Event()
        super().__init__(Forked([*command, *arguments], ENGINE, env=variables, stderr=subprocess.PIPE))
        if not self._ready.wait(_START):
            self.process.kill()
            raise AssertionError(f"not ready: {''.join(self.lines)}")
        ready = next((line for line in self.lines if "ready on" in line), "")
        assert ready, "".join(self.lines)
        self.url = f"http://{ready.rpartition(' ')[2].strip()}"
        self.client = client(self.url)

    def end(self, signal: int, timeout: float = 60.0) -> int:
        self.client.close()
        return super().end(signal, timeout)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "ready on" in line:
                self._ready.set()
        self._ready.set()


def client(url: str, token: str = "none", **options: Any) -> OpenAI:
    """The official client; it does not try again by itself."""
    chosen: dict[str, Any] = {"max_retries": 0, "timeout": 60, **options}
    return OpenAI(base_url=f"{url}/v1", api_key=token, **chosen)


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[ServerThread]:
    """A server of this process; at its end nothing has leaked."""
    server = ServerThread(model, **options)
    try:
        yield server
    finally:
        server.close()
