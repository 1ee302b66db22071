"""Turns an OpenAI chat request into what a chat template gets, in the same way as vLLM's server.

It must agree with vLLM (`renderers/chat_utils.py`), or the router looks for tokens that no replica ever computes. So:
- the arguments of a call become an object, and an empty list of calls is dropped;
- reasoning has all its names, and a tool's answer is a text;
- a tool has its description and parameters even if they are null.

Only text is supported.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.service.openai.errors import OpenAIError

Turn = dict[str, Any]
"""`role`, `content` (a text, or parts of type text), and what else that role may have."""

_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type: its field
_REASONING: Final = ("reasoning", "reasoning_content", "thinking")  # one field: a template reads one of the names
_ELSEWHERE: Final = ("chat_template", "truncate_prompt_tokens", "mm_processor_kwargs")  # only the replica applies them
_NOT_THEIRS: Final = frozenset(("chat_template", "tokenize", "messages", "tools", "conversation"))


@dataclass(frozen=True, slots=True)
class Chat:
    turns: Sequence[Turn]
    segments: Sequence[tuple[int, int]] = ()  # marked parts: each one's turn, and its number in the content
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`, `documents`, …
    add_generation_prompt: bool = True
    continues: str = ""  # the field of the last turn that the answer continues; empty: the answer is a new turn
    add_special_tokens: bool = False  # add special tokens before those that the template writes


def chat_of(body: Mapping[str, Any], prefix: ChatPrefix = AS_SENT) -> Chat:
    """The chat of a request. Raises OpenAIError if it is wrong, or if only the replica can read it: an image, say."""
    body = prefix.body(body)
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise _unreadable("messages", "not a list of messages")
    for name in _ELSEWHERE:
        if body.get(name) is not None:
            raise _unreadable(name, "only the replica can apply it")
    if tools is not None and not isinstance(tools, list):
        raise _unreadable("tools", "not a list of tools")
    return Chat(
        [_turn(message) for message in messages],
        [(number, part) for number, message in enumerate(messages) for part in _marked(message.get("content"))],
        None if tools is None else [_tool(tool) for tool in tools],
        _variables(body),
        body.get("add_generation_prompt") is None or bool(body["add_generation_prompt"]),
        _continues(body.get("continue_final_message")),
        bool(body.get("add_special_tokens")),
    )


def template_variables(body: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a request sets: those `given` in `chat_template_kwargs`, and those in fields of their own."""
    found, effort = dict(given), body.get("reasoning_effort")
    found |= {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) not in (None, "auto")}
    if effort is not None and "enable_thinking" not in found:
        found["enable_thinking"] = effort != "none"
    return found


def join_texts(content: str | Sequence[Mapping[str, str]]) -> str:
    """A content as one text, with one line for each part."""
    return content if isinstance(content, str) else "\n".join(text for part in content if (text := part["text"]))


def _turn(message: object) -> Turn:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _unreadable("messages", "not a message with a role")
    role = message["role"]
    turn: Turn = {"role": role, "content": _content(message.get("content"))}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            turn["tool_calls"] = [_call(call) for call in _list("tool_calls", calls)]
        reasoning = next((text for name in _REASONING if (text := message.get(name)) is not None), None)
        if reasoning is not None:
            turn |= dict.fromkeys(_REASONING, reasoning)
    elif role == "tool" and "tool_call_id" in message:
        turn["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        turn["tools"] = message["tools"]
    return turn | {name: text for name in ("name", "task") if isinstance(text := message.get(name), str)}


def _content(content: object) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in _list("content", content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        name = _TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if name is None:
            raise _unreadable("content", "a part that is not text")
        if (text := part.get(name)) is not None:
            if not isinstance(text, str):
                raise _unreadable("content", "a text that is not a string")
            parts.append({"type": "text", "text": text})
    return parts


def _marked(content: object) -> list[int]:
    """Which parts of a content are marked as segments, counted as `_content` counts them."""
    if not isinstance(content, list):
        return []
    marks = [part.get("kvtier") if isinstance(part, dict) else None for part in content if _has_text(part)]
    return [number for number, mark in enumerate(marks) if isinstance(mark, dict) and mark.get("segment") is True]


def _has_text(part: object) -> bool:
    return not isinstance(part, dict) or part.get(_TEXTS[str(part.get("type"))]) is not None


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _unreadable("tool_calls", "a call that is not a function call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise _unreadable("tools", "a tool that is not a function")
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    later = function.get("defer_loading", tool.get("defer_loading"))
    told |= {"strict": function["strict"]} if function.get("strict") is not None else {}
    told |= {"defer_loading": later} if later is not None else {}
    of_tool = {} if tool.get("defer_loading") is None else {"defer_loading": tool["defer_loading"]}
    return {"type": "function", "function": told, **of_tool}


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    if given is not None and (not isinstance(given, dict) or not _NOT_THEIRS.isdisjoint(given)):
        raise _unreadable("chat_template_kwargs", "not an object of a template's variables")
    return template_variables(body, given or {})


def _continues(value: object) -> str:
    if value is True:
        return "content"
    return value if isinstance(value, str) else ""


def _list(param: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _unreadable(param, "not a list")
    return value


def _unreadable(param: str, why: str) -> OpenAIError:
    return OpenAIError(400, f"{param}: {why}", param=param, code="invalid_value")
