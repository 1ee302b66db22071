"""kill -9 of an OpenAI server amid its streams, over a daemon: clean errors, and the next one goes on from its KV."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import httpx2
import openai
import pytest
from node_rig import Node, node
from server_rig import MODEL, ServerProcess, save_checkpoint, wait_for

NUM_CLIENTS = 6
LENGTH = 80  # tokens of an answer
ENDLESS = 600  # of one that is not to end before the kill
PROMPTS = [f"{number}: " + "what one engine computed another finds in the daemon. " * 3 for number in range(6)]
ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def served(model: Path, daemon: Node | None) -> ServerProcess:
    options = {} if daemon is None else {f"service__{name}": value for name, value in daemon.section.items()}
    return ServerProcess(model, "--exact", l1__num_blocks="256", **options)


def answers(server: ServerProcess) -> list[Any]:
    """To all prompts at once."""

    def ask(prompt: str) -> Any:
        return server.client.completions.create(prompt=prompt, max_tokens=LENGTH, **ASK)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        return list(clients.map(ask, PROMPTS))


def broken_off(server: ServerProcess, prompt: str, texts: dict[str, str]) -> None:
    """Read into `texts` until the server is gone: the client is told, it does not take it for an end."""
    try:
        for chunk in server.client.completions.create(prompt=prompt, max_tokens=ENDLESS, stream=True, **ASK):
            texts[prompt] = texts.get(prompt, "") + chunk.choices[0].text
    except (openai.APIError, httpx2.HTTPError):
        return
    raise AssertionError("the stream ended as if it were whole")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_killed_amid_streams_leaves_its_blocks_to_the_next(model: Path) -> None:
    plain = served(model, None)
    expected = [each.choices[0].text for each in answers(plain)]
    assert plain.end(SIGTERM) == 0
    with node() as daemon:
        first = served(model, daemon)
        texts: dict[str, str] = {}
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            streams = [clients.submit(broken_off, first, prompt, texts) for prompt in PROMPTS]
            wait_for(lambda: num_generated(first) >= 20 * NUM_CLIENTS and all(map(texts.get, PROMPTS)))
            first.process.kill()
            for stream in streams:
                stream.result(60)
        first.end(SIGKILL)
        for prompt, whole in zip(PROMPTS, expected, strict=True):
            sure = whole.rstrip("\ufffd")  # its last token may be a part of a character
            assert texts[prompt].startswith(sure) or whole.startswith(texts[prompt])
        # Another engine of the node has the dead one's prompts, and says what any would have said.
        second = served(model, daemon)
        again = answers(second)
        assert [each.choices[0].text for each in again] == expected
        assert all(each.usage.prompt_tokens_details.model_dump()["kvtier"]["L2"] for each in again)
        assert second.end(SIGTERM) == 0


def num_generated(server: ServerProcess) -> int:
    """Tokens of answers so far."""
    told = httpx2.get(f"{server.url}/status", timeout=60).json()
    generated: int = told["tokens"]["generated_tokens"]
    return generated
