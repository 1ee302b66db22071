"""Stories of `kvtier engine` with the official client: chats, completions, streams, and where their KV came from."""

import json
import signal
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from command_rig import kvtier
from extent import brief
from fork_rig import ENGINE, Forked
from node_rig import event_ports
from prometheus_client.parser import text_string_to_metric_families
from server_rig import BLOCK, MODEL, ServerProcess, ServerThread, client, save_checkpoint, serving, tokenizer, wait_for
from service_rig import environment
from state_models import config_of

from kvtier.service.events.consumer import EventConsumer
from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.wire import namespace_of, topic_of
from kvtier.service.openai.prompts import Detokenizer
from kvtier.tiers.naming.chain import root_hash

LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 3
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
SERVER = {"cache": {"store_generated": True}}


def cached(usage: Any) -> dict[str, int]:
    """Cached prompt tokens by tier, those that are not nought."""
    details = usage.prompt_tokens_details
    found: dict[str, int] = details.model_dump()["kvtier"]
    assert sum(found.values()) == details.cached_tokens
    return {tier: count for tier, count in found.items() if count}


def test_a_completion_is_what_the_engine_makes_of_its_tokens(server: ServerThread) -> None:
    done = server.client.completions.create(model=MODEL, prompt=LONG, max_tokens=12, **GREEDY)
    (choice,) = done.choices
    assert (choice.finish_reason, choice.index, done.object, done.model) == ("length", 0, "text_completion", MODEL)
    assert done.usage is not None
    ids = tokenizer().encode(LONG).ids
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids), 12)
    # The same by token ids, and a second time from the cache. A client may name its request.
    named = {"x-request-id": "trace-7"}
    again = server.client.completions.create(model=MODEL, prompt=ids, max_tokens=12, extra_headers=named, **GREEDY)
    assert again.id.startswith("cmpl-trace-7-")
    assert again.choices[0].text == choice.text
    assert cached(again.usage) == {"L1": len(ids) - 1}


def test_prompts_in_one_request_and_choices_of_each(server: ServerThread) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": [LONG, "another"], "max_tokens": 5, "n": 2, "seed": 7}
    done, again = (server.client.completions.create(**ask) for _ in range(2))
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in done.choices]
    assert texts == [choice.text for choice in again.choices]  # by the seed
    assert texts[0] != texts[1]  # each choice draws for itself
    assert done.usage.prompt_tokens == len(LONG) + len("another")  # a prompt counts once
    assert done.usage.completion_tokens == 20


def test_a_stream_tells_the_same_text(server: ServerThread) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "a stream of", "max_tokens": 40, **GREEDY}
    whole = server.client.completions.create(**ask)
    chunks = list(server.client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert len(list(server.client.completions.create(**ask, stream=True))) == len(chunks) - 1  # no usage unless asked


def test_an_event_is_one_line_for_every_client(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Detokenizer, "push", lambda *_: "\u2028\u0085\v\r\n😀")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    assert [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines] == [
        "\u2028\u0085\v\r\n😀"
    ] * 3


def test_a_chat_and_its_second_turn(server: ServerThread) -> None:
    messages: list[Any] = [{"role": "system", "content": "Answer."}, {"role": "user", "content": LONG}]
    ask: dict[str, Any] = {"model": MODEL, "max_completion_tokens": 8, **GREEDY}
    first = server.client.chat.completions.create(messages=messages, **ask)
    answer = first.choices[0].message
    assert (answer.role, first.choices[0].finish_reason, first.object) == ("assistant", "length", "chat.completion")
    messages += [{"role": "assistant", "content": answer.content or " "}, {"role": "user", "content": "And then?"}]
    second = server.client.chat.completions.create(messages=messages, **ask)
    assert first.usage is not None
    assert cached(second.usage)["L1"] >= first.usage.prompt_tokens // BLOCK * BLOCK > 0
    # The header says the same where nothing is streamed.
    raw = server.client.chat.completions.with_raw_response.create(messages=messages, **ask)
    assert json.loads(raw.headers["x-kvtier-cached"])["L1"] > 0
    # A stream begins with the role; its pieces are the same text.
    stream = list(server.client.chat.completions.create(messages=messages, stream=True, **ask))
    assert stream[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in stream[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == second.choices[0].message.content


@pytest.mark.parametrize("kind", brief(["qwen3.5"], ["qwen3.5", "mamba2"]))
def test_a_model_with_recurrent_states_is_served(tmp_path: Path, kind: str) -> None:
    with serving(save_checkpoint(tmp_path, config=config_of(kind))) as server:
        ids = tokenizer().encode(LONG).ids
        answers = [server.client.completions.create(model=MODEL, prompt=ids, max_tokens=8, **GREEDY) for _ in range(2)]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        assert cached(answers[1].usage) == {"L1": (len(ids) - 1) // BLOCK * BLOCK}
        server.settle()
        server.engine.pool.reset()
        again = server.client.completions.create(model=MODEL, prompt=ids, max_tokens=8, **GREEDY)
        assert again.choices[0].text == answers[0].choices[0].text
        assert cached(again.usage) == {"L2": (len(ids) - 1) // BLOCK * BLOCK}


def test_a_stop_string_ends_the_answer_and_the_work(server: ServerThread) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 60, **GREEDY}
    text = server.client.completions.create(**ask).choices[0].text
    stop = next(text[at : at + 2] for at in range(10, len(text)) if text.count(text[at : at + 2]) == 1)
    stopped = server.client.completions.create(**ask, stop=[stop, "never"])
    assert stopped.choices[0].text == text.partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 60
    chunks = list(server.client.completions.create(**ask, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.choices[0].text
    server.settle()
    assert server.status()["outcomes"]["stop"] >= 2
    assert server.num_free == server.engine.pool.num_blocks


def test_a_stop_token_is_no_text(server: ServerThread) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": LONG, "max_tokens": 40, "temperature": 0}
    text = server.client.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].text
    at = next(at for at, letter in enumerate(text) if letter.isascii())
    body = {"ignore_eos": True, "stop_token_ids": tokenizer().encode(text[at]).ids}
    stopped = server.client.completions.create(**ask, extra_body=body)
    assert (stopped.choices[0].finish_reason, stopped.choices[0].text) == ("stop", text[:at])


def test_salts_do_not_share(server: ServerThread) -> None:
    def ask(salt: str | None) -> dict[str, int]:
        prompt = "~ no other prompt begins so; two tenants, each with a cache_salt of its own " * 2
        body = {} if salt is None else {"cache_salt": salt}
        done = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body=body)
        return cached(done.usage)

    assert ask("alice") == {}
    assert ask("bob") == {}
    assert ask(None) == {}
    assert ask("alice")["L1"] > 0
    assert ask(None)["L1"] > 0


def test_the_model_is_listed_with_what_a_router_needs(server: ServerThread) -> None:
    (listed,) = server.client.models.list().data
    assert listed.id == MODEL
    told = listed.model_dump()["kvtier"]
    fingerprint = server.engine.identity.fingerprint().hex()
    assert told["fingerprint"] == fingerprint
    assert (told["block_size"], told["max_model_len"], told["namespace"]) == (BLOCK, 1024, None)
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("another")


def test_an_engines_own_salt_is_listed_only_as_events_name_it(model: Path) -> None:
    with serving(model, cache={"cache_salt": "nobody else's"}) as server:
        listed = server.http.get("/v1/models")
        root = root_hash(server.engine.identity.fingerprint(), cache_salt="nobody else's")
        assert listed.json()["data"][0]["kvtier"]["namespace"] == namespace_of(root)
        assert "nobody" not in listed.text


def test_the_pages(server: ServerThread) -> None:
    for _ in range(2):  # the second finds the first in L1
        server.client.completions.create(model=MODEL, prompt=LONG, max_tokens=2)
    assert server.http.get("/healthz").json() == {"status": "ok"}
    assert server.http.get("/readyz").json() == {"ready": True, "missing": [], "wanting": []}
    server.settle()
    told = server.status()
    assert told["requests"] == {"live": 0, "capacity": 8 + 64, "waiting": 0, "loading": 0, "running": 0}
    assert told["outcomes"]["length"] >= 1
    assert told["l1"] == {"blocks": 128, "free": 128}
    assert told["cached_tokens"]["L1"] > 0
    assert set(told["tiers"]["lookups"]) == {"l1", "l2", "file", "peers", "redis", "objects", "miss"}
    families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}
    by_tier = {s.labels["tier"]: s.value for s in families["kvtier_engine_cached_tokens"].samples if "_total" in s.name}
    assert by_tier["L1"] == told["cached_tokens"]["L1"]
    assert families["kvtier_engine_ttft_seconds"].type == "histogram"
    assert {s.labels["fingerprint"] for s in families["kvtier_lookup_blocks"].samples} == {told["fingerprint"][:16]}
    # What the commands of a daemon print of an engine.
    url = str(server.http.base_url)
    shown = kvtier("status", "--url", url)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].endswith(f"engine of {MODEL}, pid {told['pid']}: ok")
    assert "  L1           0 of 128 blocks used" in lines
    assert any(f"L1 {told['cached_tokens']['L1']}" in line for line in lines if line.startswith("  cached"))
    row = json.loads(kvtier("top", "--url", url, "--interval", "20ms", "--count", "1", "--json").stdout)
    assert (row["running"], row["waiting"], row["used"], row["cached"], row["state"]) == (0, 0, 0.0, None, "ok")


def test_whatever_tier_the_prompt_was_in_the_greedy_text_is_the_same(model: Path, disk_dir: Path) -> None:
    """L1 of 40 blocks, in `exact` mode; the reference caches nothing at all."""
    prompts = [f"{number}: {LONG}" for number in range(6)]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 6, **GREEDY}
    with serving(model, exact=True, l1={"enable_prefix_caching": False}) as plain:
        reference = [plain.client.completions.create(prompt=prompt, **ask) for prompt in prompts]
        assert all(cached(done.usage) == {} for done in reference)
    tiers: dict[str, Any] = {"l1": {"num_blocks": 40}, "file": {"path": str(disk_dir), "size": "16MiB"}}
    for where in ("L2", "file"):  # the second server finds the first's slab
        with serving(model, exact=True, **tiers) as server:
            done = []
            for _ in range(2 if where == "L2" else 1):
                done = [server.client.completions.create(prompt=prompt, **ask) for prompt in prompts]
                server.settle()
            assert [each.choices[0].text for each in done] == [each.choices[0].text for each in reference]
            found = cached(done[0].usage)
            assert sum(found.values()) == len(prompts[0]) - 1
            whole_blocks = (len(prompts[0]) - 1) // BLOCK * BLOCK
            assert found[where] >= whole_blocks  # the rest of a block may have come to L2 by then
            assert server.status()["cached_tokens"][where] > 0


def test_the_command_from_a_model_of_ours_to_the_end(tmp_path: Path) -> None:
    """`kvtier model` makes what `kvtier engine` serves; it chats, and finds its own first turn on the second."""
    with Forked(["-m", "kvtier.cli", "model", str(tmp_path / "llama")], ENGINE, env=environment()) as made:
        assert made.wait(100) == 0
    options = {"server__token": "a secret nobody sees", "l1__num_blocks": "1024"}  # room for the longest request
    server = ServerProcess(tmp_path / "llama", "--name", "llama-tiny", **options)
    try:
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client.models.list()
        assert "secret" not in str(refused.value)
        chat = client(server.url, "a secret nobody sees")
        messages: list[Any] = [{"role": "user", "content": LONG}]
        ask: dict[str, Any] = {"model": "llama-tiny", "max_tokens": 4, "temperature": 0}
        first = chat.chat.completions.create(messages=messages, **ask)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content or ""},
            {"role": "user", "content": "Go on."},
        ]
        second = chat.chat.completions.create(messages=messages, **ask)
        assert first.usage is not None
        assert cached(second.usage)["L1"] >= (first.usage.prompt_tokens - 1) // BLOCK * BLOCK > 0
        chat.close()
    finally:
        assert server.end(signal.SIGTERM) == 0
    assert len(server.lines) == 1, server.lines  # ready, and not a word more


@pytest.mark.parametrize(
    ("arguments", "options", "line"),
    [
        (["--model", "nowhere"], {}, '--model "nowhere": no config.json there; name a local checkpoint directory'),
        (
            ["--http", "0.0.0.0:0"],
            {},
            '[server] http "0.0.0.0:0": other machines reach it; use 127.0.0.1 or set allow_remote',
        ),
        (
            ["--http", "192.0.2.1:8000"],
            {"server__allow_remote": "true", "server__token": "a secret"},
            '[server] http "192.0.2.1:8000": Cannot assign requested address; choose another address or port',
        ),
        (
            ["--http", "127.0.0.1:0"],
            {"server__max_num_seqs": "2", "server__max_num_batched_tokens": "1"},
            "max_num_seqs 2: more than the 1 tokens of a step; lower it or raise max_num_batched_tokens",
        ),
    ],
)
def test_a_bad_command_line_is_one_line_and_status_2(
    model: Path, arguments: list[str], options: dict[str, str], line: str
) -> None:
    done = kvtier("engine", "--model", model, *arguments, **options)
    assert (done.returncode, done.stderr) == (2, f"kvtier: {line}\n")


def test_events_tell_what_the_engine_holds(model: Path, disk_dir: Path) -> None:
    """L1, and the tiers below where they are its own; a tenant's blocks are not anybody's."""
    index = PrefixIndex(BLOCK)
    events = event_ports()
    tiers: dict[str, Any] = {"file": {"path": str(disk_dir), "size": "16MiB"}, "l1": {"num_blocks": 40}}
    ids, room = tokenizer().encode(LONG).ids, len(LONG) // BLOCK
    node = {"node": "tcp://10.0.0.5:5557", "node_replay": "tcp://10.0.0.5:5558"}
    with serving(model, events=events | node, **tiers) as server:
        (listed,) = server.client.models.list().data
        told = listed.model_dump()["kvtier"]
        assert told["events"] == events
        assert told["node"] == {"publish": node["node"], "replay": node["node_replay"]}  # for a router
        fingerprint = server.engine.identity.fingerprint()
        consumer = EventConsumer("engine", index, events["publish"], events["replay"], topic=topic_of(fingerprint))

        def known(salt: str | None = None) -> dict[str, int]:
            namespace = None if salt is None else namespace_of(root_hash(fingerprint, cache_salt=salt))
            return index.matches(prompt_hashes(ids, BLOCK, namespace=namespace)).get("engine", {})

        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
        server.client.completions.create(prompt=ids, **ask)
        wait_for(lambda: known() == {"GPU": room})
        assert known("alice") == {}
        server.client.completions.create(prompt=ids, extra_body={"cache_salt": "alice"}, **ask)
        wait_for(lambda: known("alice") == {"GPU": room})
        # Others push it out of L1; below, it stays.
        for number in range(6):
            server.client.completions.create(prompt=f"{number}: {LONG}", **ask)
        wait_for(lambda: known() == {"CPU": room})
    wait_for(lambda: known() == {})  # an engine that ends holds nothing
    assert not index.counts
    consumer.close()


def test_events_follow_new_weights(model: Path) -> None:
    """A router that follows the model's new topic knows what the engine has now, and what it no longer has."""
    ids, room = tokenizer().encode(LONG).ids, len(LONG) // BLOCK
    events, index = event_ports(), PrefixIndex(BLOCK)
    with serving(model, events=events) as server, ExitStack() as consumers:

        def send_and_wait(name: str) -> str:
            fingerprint = server.engine.identity.fingerprint()
            consumer = EventConsumer(name, index, events["publish"], events["replay"], topic=topic_of(fingerprint))
            consumers.enter_context(closing(consumer))
            server.client.completions.create(model=MODEL, prompt=ids, max_tokens=1)
            wait_for(lambda: index.matches(prompt_hashes(ids, BLOCK)).get(name) == {"GPU": room})
            return fingerprint.hex()

        before = send_and_wait("before")
        with torch.no_grad():
            next(server.engine.model.module.parameters()).mul_(2.0)
        assert server.http.post("/admin/reset", json={}).json() != {"reset": [before]}
        wait_for(lambda: not index.matches(prompt_hashes(ids, BLOCK)))
        assert send_and_wait("after") != before
        assert list(index.matches(prompt_hashes(ids, BLOCK))) == ["after"]
