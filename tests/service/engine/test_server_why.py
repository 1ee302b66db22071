"""Stories of why an engine's requests were no hits: its request log, and `kvtier explain --url`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_rig import kvtier
from server_rig import BLOCK, MODEL, ServerThread, save_checkpoint, serving, wait_for

ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 2, "ignore_eos": True}
HEAD = "You answer questions about trains. "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("why")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerThread]:
    with serving(save_checkpoint(home), server={"request_log": str(home / "log")}) as made:
        yield made


def lines(path: Path, number: int) -> list[dict[str, Any]]:
    """Once there are so many."""
    wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= number)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(told) == number
    return told


def says(server: ServerThread, *arguments: str, stdin: str = "", status: int = 0) -> list[str]:
    ended = kvtier("explain", "--url", server.url, *arguments, stdin=stdin)
    assert ended.returncode == status, ended
    print(arguments, stdin, ended.stdout, ended.stderr, sep="\n")  # for whoever looks
    return (ended.stdout or ended.stderr).splitlines()


def test_a_line_for_each_request(home: Path, server: ServerThread) -> None:
    log = home / "log"
    prompt = list(range(2, 2 + 40))  # two blocks of 16, and 8 tokens
    answers = [server.post("completions", prompt=prompt, **ASK).json() for _ in range(2)]
    salted = server.post("completions", prompt=prompt, cache_salt="anna", **ASK).json()
    first, again, other = lines(log, 3)
    assert [each["id"] for each in (first, again, other)] == [each["id"] for each in (*answers, salted)]
    assert first["tokens"] == {"l1": 0, "l2": 0, "file": 0, "peers": 0, "redis": 0, "objects": 0, "computed": 40}
    assert first["missed"] == [{"cause": "never_seen", "tier": "", "blocks": 2}]
    assert (again["tokens"]["l1"], again["tokens"]["computed"], again["missed"]) == (39, 1, [])
    assert (first["tenant"], other["tokens"]["computed"], other["end"]) == ("no salt", 40, "length")
    assert other["tenant"] not in ("no salt", "anna")
    assert all(0 < each["ttft_s"] <= each["seconds"] and each["output_tokens"] == 2 for each in (first, again))
    # who rotates logs moves the file: the next line makes a new one
    log.rename(home / "log.1")
    server.post("completions", prompt=prompt[:20], **ASK)
    assert lines(log, 1)[0]["prompt_tokens"] == 20
    counted = 'kvtier_request_log_lines_total{outcome="written"} 4.0'
    wait_for(lambda: counted in server.http.get("/metrics").text)
    assert oct(log.stat().st_mode & 0o777) == "0o600"


def test_explain_asks_an_engine(server: ServerThread) -> None:
    held, asked = (f"{HEAD}Today is 2026-11-{day}. Which train goes to Rome?" for day in (21, 22))
    answer = server.post("completions", prompt=held, **ASK).json()
    server.settle()
    told = says(server, "--text", "-", stdin=asked)
    num_same = (len(HEAD) + len("Today is 2026-11-2")) // BLOCK
    assert told[0] == f"blocks 0-{num_same - 1} (tokens 0-{num_same * BLOCK - 1}): L1 device"
    assert f"block {num_same} is missing: it was never stored here, or left too long ago" in told
    assert told[-2].endswith("`2026-11-22` for `2026-11-21`")
    assert told[-1].startswith("A date or time changes there")
    # a request that ended, by the id of its answer; another tenant's is not there
    assert says(server, "--request", answer["id"])[-1] == "Every whole block is held: nothing to do."
    for other in (("--request", answer["id"], "--cache-salt", "anna"), ("--request", "cmpl-none")):
        (why,) = says(server, *other, status=1)
        assert "no request of this id and cache_salt ended here lately" in why
    # the same prompt with a salt that the others do not have
    told = says(server, "--text", "-", "--cache-salt", "anna", stdin=held)
    assert told[-2].startswith("another tenant holds the same tokens: a request without a cache_salt, ")
    assert told[-1].startswith("Another cache_salt stored this prompt")
    # what anna asks is nobody else's to know
    server.post("completions", prompt="The secret word is heliotrope, and nobody knows.", cache_salt="anna", **ASK)
    told = says(server, "--text", "-", stdin="The secret word is unknown, and so on and on.")
    assert "heliotrope" not in "".join(told)
    assert "tenant" not in "".join(told)
    # a short prompt, another template, and what cannot be read
    assert (
        says(server, "--text", "-", stdin="Hi")[0]
        == f"block 0 is missing: the prompt has 2 tokens, and a block has {BLOCK}"
    )
    (why,) = says(server, "--blocks", "-", stdin="[999999]", status=2)
    assert "token id 999999" in why


def test_a_template_that_differs_is_named(server: ServerThread) -> None:
    chat = [{"role": "user", "content": "Which train goes to Rome, and when does it leave?"}]
    server.post("chat/completions", messages=chat, **{k: v for k, v in ASK.items() if k != "max_tokens"}, max_tokens=2)
    server.settle()
    bare = [256, *range(130, 160)]  # the token that begins each turn, and other tokens behind it
    told = says(server, "--blocks", "-", stdin=json.dumps(bare))
    assert told[-1].startswith("A special token is there: another chat template"), told
