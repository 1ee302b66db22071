"""Stories of answers that have to be JSON of a schema, and of tools that have to be called."""

import json
import sys
from typing import Any

import pytest
from openai import OpenAI
from server_rig import MODEL, ServerThread, tokenizer

from kvtier.engine.requests import Guide
from kvtier.service.engine.request_parser import JsonGuides, calls_schema
from kvtier.service.openai.bodies import ChatBody, parse
from kvtier.service.openai.errors import OpenAIError

pytest.importorskip("llguidance", reason="the extra `engine` brings it")

ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "A pet?"}],
    "max_tokens": 150,
    "seed": 3,
}
END = 257  # the token that ends an answer
PET: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "is_old": {"type": "boolean"}},
    "required": ["kind", "is_old"],
    "additionalProperties": False,
}


def patient_client(server: ServerThread) -> OpenAI:
    """These answers have many tokens: each letter is one."""
    return server.client.with_options(timeout=400)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def formatted(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema, "strict": True}}


def test_an_answer_follows_its_schema_whole_and_streamed(server: ServerThread) -> None:
    asked: dict[str, Any] = {**ASK, "response_format": formatted(PET)}
    choice = patient_client(server).chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop"
    pet = json.loads(choice.message.content or "")
    assert pet["kind"] in ("cat", "dog")
    assert isinstance(pet["is_old"], bool)
    assert set(pet) == {"kind", "is_old"}
    chunks = list(patient_client(server).chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    # Each choice of one request goes its own way, beside one that is free.
    several = patient_client(server).chat.completions.create(**asked | {"temperature": 1.5}, n=4)
    assert all(set(json.loads(each.message.content or "")) == set(pet) for each in several.choices)


def test_an_object_of_any_kind_begins_as_one(server: ServerThread) -> None:
    asked: dict[str, Any] = {**ASK, "response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 20}
    choice = patient_client(server).chat.completions.create(**asked).choices[0]
    assert (choice.message.content or "").lstrip().startswith("{")
    assert choice.finish_reason in ("stop", "length")
    free = patient_client(server).chat.completions.create(**asked | {"response_format": {"type": "text"}}).choices[0]
    assert not (free.message.content or "").startswith("{")


@pytest.mark.parametrize("chosen", ["required", "pet"])
def test_a_tool_has_to_be_called(server: ServerThread, chosen: str) -> None:
    choice: Any = "required" if chosen == "required" else {"type": "function", "function": {"name": "pet"}}
    age = {"properties": {"of": {"$ref": "#/$defs/Age"}}, "required": ["of"], "additionalProperties": False}
    aged = {"type": "object", **age, "$defs": {"Age": {"enum": ["young", "old"]}}}
    asked: dict[str, Any] = {**ASK, "tools": [tool("pet", PET), tool("age", aged)], "tool_choice": choice}
    answer = patient_client(server).chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    expected = {"pet": {"kind", "is_old"}, "age": {"of"}}
    assert set(json.loads(call.function.arguments)) == expected[call.function.name]
    assert chosen == "required" or call.function.name == "pet"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": formatted({"type": "objekt"})}, "response_format.json_schema.schema"),
        ({"response_format": formatted({"not": {"type": "string"}})}, "response_format.json_schema.schema"),
        ({"response_format": formatted({"$ref": "http://localhost/x"})}, "response_format.json_schema.schema"),
        ({"response_format": formatted({"$ref": "#"})}, "response_format.json_schema.schema"),  # it never begins
        ({"tools": [tool("pet", {"type": "objekt"})], "tool_choice": "required"}, "tools.0.function.parameters"),
    ],
)
def test_an_impossible_schema_is_the_clients_error(server: ServerThread, wrong: dict[str, Any], param: str) -> None:
    answer = server.post("chat/completions", **ASK, **wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_answer_that_can_be_followed_no_further_is_cut_off(server: ServerThread) -> None:
    asked: dict[str, Any] = {**ASK, "response_format": formatted({"type": "string", "pattern": "(.{1,500}){1,500}z"})}
    assert patient_client(server).chat.completions.create(**asked).choices[0].finish_reason == "length"


def follows(guide: Guide, text: str) -> bool:
    """Whether an answer may be this text, and end behind it."""
    given: list[int] = []
    answer = guide.start(given, 0)
    for token_id in (*tokenizer().encode(text).ids, END):
        if not answer.allowed()[token_id // 32] >> token_id % 32 & 1:
            return False
        given.append(token_id)
    return True


def test_every_tools_references_are_its_own() -> None:
    def one_of(**defined: object) -> dict[str, Any]:
        place = "#/$defs/I" if "$defs" in defined else "#/definitions/I"
        return {"type": "object", "properties": {"c": {"$ref": place}}, "required": ["c"], **defined}

    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "child": {"$ref": "#"}}, "required": ["v"]}
    schemas = {
        "number": one_of(**{"$defs": {"I": {"type": "integer"}}}),
        "text": one_of(**{"$defs": {"I": {"type": "string"}}}),
        "old": one_of(definitions={"I": {"type": "boolean"}}),
        "tree": tree,
        "strange": {"type": "object", "$defs": []},
    }
    body = {**ASK, "tools": [tool(*each) for each in schemas.items()], "tool_choice": "required"}
    schema = calls_schema(parse(ChatBody, json.dumps(body).encode()))
    assert schema is not None
    guide = JsonGuides(tokenizer().to_str, 258, [END]).of(schema, "tool_choice")
    for name, parameters, is_right in (
        ("number", '{"c":7}', True),
        ("number", '{"c":"x"}', False),
        ("text", '{"c":"x"}', True),
        ("old", '{"c":true}', True),
        ("tree", '{"v":1,"child":{"v":2}}', True),
        ("tree", '{"v":1,"child":[]}', False),
        ("strange", "{}", True),
    ):
        call = f'[{{"name":"{name}","parameters":{parameters}}}]'
        assert follows(guide, call) is is_right, call


def test_what_no_guide_can_be_made_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    guides = JsonGuides(tokenizer().to_str, 258, [])
    with pytest.raises(OpenAIError, match="no token that ends an answer"):
        guides.of(PET, "response_format")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OpenAIError, match=r"needs llguidance: pip install 'llguidance>=1\.7'$"):
        JsonGuides(tokenizer().to_str, 258, [257]).of(PET, "response_format")
