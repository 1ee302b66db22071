"""Agents before the router: chats with tools are known token by token, turns that nobody can place stay together."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chat_shapes import HERMES
from extent import brief
from router_rig import PATIENCE, RoutedReplicas, ToldReplica, routed, until
from server_rig import tokenizer
from transformers import PreTrainedTokenizerFast

from kvtier.service.router.replica_tokenizer import _tokens

Pair = tuple[ToldReplica, ToldReplica]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for number in range(3)
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose template puts the tools first."""
    home = tmp_path_factory.mktemp("model")
    tokenizer().save(str(home / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": HERMES}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return home


def turns(system: str, task: object) -> Iterator[list[dict[str, Any]]]:
    """An agent's chat, as it grows by calls and what they say."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for number in range(4):
        yield list(messages)
        called = {"name": "tool_1", "arguments": json.dumps({"path": f"/{number}"})}
        call = {"id": f"call_{number}", "type": "function", "function": called}
        messages.append({"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": "nothing " * number})


def chat(router: RoutedReplicas, messages: object, **fields: object) -> httpx2.Response:
    return router.client.post("/v1/chat/completions", json={"model": "m", "messages": messages, **fields})


def homes(router: RoutedReplicas, system: str, task: object, **fields: object) -> set[str]:
    """Who answers the four turns of an agent."""
    return {chat(router, talk, **fields).headers["x-kvtier-replica"] for talk in turns(system, task)}


def test_a_chat_with_tools_is_known_to_the_last_token(pair: Pair, model: Path) -> None:
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=HERMES
    )
    num_tokens = 0
    with routed(*(replica.url for replica in pair), model=str(model)) as router:
        for talk in turns("You are an agent.", "Find it."):
            assert chat(router, talk, tools=TOOLS).status_code == 200
            for message in talk:  # as transformers wants them
                for call in message.get("tool_calls", ()):
                    if isinstance(call["function"]["arguments"], str):
                        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            made = theirs.apply_chat_template(talk, tools=TOOLS, add_generation_prompt=True, return_dict=False)
            num_tokens += len(made)
        assert router.status()["unknown_prompts"] == {}
        assert router.metrics()["kvtier_route_prompt_tokens_total"] == num_tokens


def test_chats_that_mean_the_same_reach_replicas_alike(pair: Pair, model: Path) -> None:
    chat_section = {"sort_tools": True, "drop_lines": ["billing"], "move_lines": ["date"]}
    own = "x-anthropic-billing-header: cch={};\nToday is 2026-11-28 12:03:{}\nYou are an agent."
    said: dict[str, object] = {"role": "user", "content": "Today is a date: 2026-11-28"}
    with routed(pair[0].url, model=str(model), chat=chat_section) as router:
        for number, tools in enumerate((TOOLS, [dict(reversed(tool.items())) for tool in TOOLS])):
            talk = [{"role": "system", "content": own.format(number, 22)}, said]
            assert chat(router, talk, tools=tools, seed=number).status_code == 200
        assert router.status()["unknown_prompts"] == {}
    one, other = (each["body"] for each in pair[0].client.get("/seen").json()[-2:])
    assert (one.pop("seed"), other.pop("seed")) == (0, 1)
    assert json.dumps(one) == json.dumps(other)
    assert one["messages"] == [{"role": "system", "content": "You are an agent.\nToday is 2026-11-28 12:03:22"}, said]
    assert json.dumps(one["tools"]) == json.dumps(TOOLS)


TASKS: dict[str, object] = {"text": "Find it.", "image": [{"type": "text", "text": "See:"}, IMAGE]}


@pytest.mark.parametrize("task", [TASKS[name] for name in brief(["image"], [*TASKS])])
def test_an_agents_turns_stay_together_where_no_replica_has_events(pair: Pair, model: Path, task: object) -> None:
    with routed(*(replica.url for replica in pair), model=str(model)) as router:
        found = [homes(router, f"You are agent {number}.", task, tools=TOOLS) for number in range(20)]
        assert all(len(home) == 1 for home in found)
        assert set.union(*found) == {replica.name for replica in pair}  # agents spread
        assert router.status()["decisions"][0]["reason"] == "session"
        assert router.status()["unknown_prompts"] == ({} if task == "Find it." else {"unreadable": 80})
    # another router, as after a restart, sends them to the same
    with routed(*(replica.url for replica in pair), model=str(model)) as router:
        again = [homes(router, f"You are agent {number}.", task, tools=TOOLS) for number in range(20)]
        assert again == found


def test_a_key_keeps_requests_together_whatever_they_say(pair: Pair) -> None:
    with routed(*(replica.url for replica in pair)) as router:
        by_key: dict[str, set[str]] = {}
        for key in "abcdefghijklmnopqrst":  # one replica has them all once in 500,000 runs
            for number in range(3):
                talk = [{"role": "user", "content": f"{key}{number}"}]
                answers = [
                    chat(router, talk, prompt_cache_key=key),
                    router.complete(f"{number}", prompt_cache_key=key),
                    router.client.post("/v1/responses", json={"input": f"{number}", "prompt_cache_key": key}),
                ]
                by_key.setdefault(key, set()).update(answer.headers["x-kvtier-replica"] for answer in answers)
        assert all(len(home) == 1 for home in by_key.values())
        assert set.union(*by_key.values()) == {replica.name for replica in pair}


@pytest.mark.parametrize(
    ("own", "parent"),
    [
        ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
        ("x-claude-code-agent-id", "x-claude-code-session-id"),
        ("x-session-id", "x-parent-session-id"),
    ],
)
def test_an_agents_header_keeps_its_requests_and_its_sub_agents_together(pair: Pair, own: str, parent: str) -> None:
    """A sub-agent has another conversation, and often its parent's beginning."""
    with routed(*(replica.url for replica in pair)) as router:
        families: list[set[str]] = []
        for family in "abcdefghijklmnopqrst":
            root = {parent if "claude" in own else own: family}
            asked = [root, root, {own: f"{family} helps", parent: family}]
            answers = [
                router.client.post(
                    "/v1/chat/completions",
                    json={"model": "m", "messages": [{"role": "user", "content": f"{family}{number}"}]},
                    headers=headers,
                )
                for number, headers in enumerate(asked)
            ]
            families.append({answer.headers["x-kvtier-replica"] for answer in answers})
        assert all(len(home) == 1 for home in families)
        assert set.union(*families) == {replica.name for replica in pair}


def test_turns_of_other_apis_stay_together_too(pair: Pair) -> None:
    with routed(*(replica.url for replica in pair)) as router:
        for number in range(8):
            first = {"role": "user", "content": f"task {number}"}
            rest = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
            messages = {"system": "You are an agent.", "max_tokens": 9}
            bodies = [("messages", {**messages, "messages": talk}) for talk in ([first], [first, *rest])]
            found = [router.client.post(f"/v1/{path}", json=body) for path, body in bodies]
            assert len({answer.headers["x-kvtier-replica"] for answer in found}) == 1
            responses = ({"input": first["content"]}, {"input": [first, *rest]})
            found = [router.client.post("/v1/responses", json=body) for body in responses]
            assert len({answer.headers["x-kvtier-replica"] for answer in found}) == 1


def test_a_head_that_all_have_overloads_nobody(pair: Pair) -> None:
    talk = [{"role": "system", "content": "You are everybody's agent."}, {"role": "user", "content": "Go."}]
    with routed(*(replica.url for replica in pair)) as router, ThreadPoolExecutor(24) as clients:
        home = chat(router, talk).headers["x-kvtier-replica"]
        for replica in pair:
            replica.behave(wait=PATIENCE)
        held = [clients.submit(chat, router, talk) for _ in range(24)]
        until(lambda: sum(each["in_flight"] for each in router.status()["replicas"]) == 24)
        had = {each["name"]: each["in_flight"] for each in router.status()["replicas"]}
        assert 12 <= had[home] <= 16  # 1.25 times the mean of 12, and one that was on its way
        for replica in pair:
            replica.behave()
        found = Counter(each.result().headers["x-kvtier-replica"] for each in held)
        assert found == had
        assert chat(router, talk).headers["x-kvtier-replica"] == home  # and back again


def test_a_replica_that_has_a_tokenizer_is_asked_where_the_router_has_none(pair: Pair) -> None:
    for replica in pair:
        replica.behave(tokenizer=["/tokenize"])
    with routed(*(replica.url for replica in pair), tokenize_timeout="20s") as router:
        before = sum(len(replica.client.get("/asked").json()) for replica in pair)
        assert router.complete("hello").status_code == 200
        assert router.metrics()["kvtier_route_prompt_tokens_total"] == 5
        assert router.complete("hello").status_code == 200  # known by now
        assert sum(len(replica.client.get("/asked").json()) for replica in pair) == before + 1
        # a chat's: with all that decides on them, under the names the page knows
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]
        chat(router, talk, tools=TOOLS, reasoning_effort="low", documents=[{"title": "t", "text": "x"}], seed=7)
        asked = max((replica.client.get("/asked").json() for replica in pair), key=lambda told: len(json.dumps(told)))
        body = next(each["body"] for each in asked if "messages" in each["body"])
        assert body["messages"] == [talk[0], {"role": "assistant", "content": "b", "reasoning": "c"}]
        assert body["tools"] == TOOLS
        assert body["chat_template_kwargs"] == {
            "reasoning_effort": "low",
            "enable_thinking": True,
            "documents": [{"title": "t", "text": "x"}],
        }
        assert "seed" not in body
        assert router.status()["unknown_prompts"] == {}
        # an image would be fetched for its tokens, and they would tell nothing of the blocks' names
        chat(router, [{"role": "user", "content": [IMAGE]}])
        assert router.status()["unknown_prompts"] == {"unreadable": 1}
    # the page that takes the request as it is comes first, where it is there
    for replica in pair:
        replica.behave(tokenizer=["/render"])
    with routed(*(replica.url for replica in pair), tokenize_timeout="20s") as router:
        chat(router, [{"role": "user", "content": "rendered"}], seed=8)
        paths = [each for replica in pair for each in replica.client.get("/asked").json()]
        assert [each["body"]["seed"] for each in paths if each["path"].endswith("/render")] == [8]


def test_nobody_waits_for_a_tokenizer_longer_than_said(pair: Pair) -> None:
    for replica in pair:
        replica.behave(tokenizer=["/tokenize"], tokenizer_wait=PATIENCE)
    with routed(*(replica.url for replica in pair), tokenize_timeout="500ms") as router:
        for number in range(20):
            answer = router.complete(f"hello {number}")
            assert answer.status_code == 200
            assert answer.elapsed.total_seconds() < PATIENCE
        assert router.status()["unknown_prompts"] == {"no_tokenizer": 20}
    asked = [each["body"].get("prompt", "") for replica in pair for each in replica.client.get("/asked").json()]
    assert 1 <= sum(prompt.startswith("hello ") for prompt in asked) <= 6  # three late ones, and it is left alone


def test_what_a_tokenizer_says_must_be_tokens() -> None:
    assert _tokens({"tokens": [1, 2]}, "tokens") == [1, 2]
    told: list[object] = [None, [], {}, *({"tokens": it} for it in ([], [1.0], [True], [-1], "ab"))]
    for page in told:
        assert _tokens(page, "tokens") is None
    assert _tokens({"tokens": [1 << 32]}, "tokens") is None
