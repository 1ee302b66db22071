"""Chats as a template gets them, and prompts in pieces.

A chat must agree with vLLM's server (`renderers/chat_utils.py`), or the router looks for tokens that no replica ever
computes. So:
- the arguments of a call become an object, and an empty list of calls is dropped;
- reasoning has all its names, and a tool's answer is a text;
- a tool has its description and parameters even if they are null.

Only text is supported. A text marked as a segment is tokenized by itself, so that it has the same tokens anywhere. Such
a chat is rendered twice: as it is, and with a placeholder for each marked text. Where the placeholders come out, the
texts lie, and with the texts in their places it must be the first rendering. Otherwise the template changes a text.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.service import shown
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


# --- prompts in pieces -----------------------------------------------------------------------------------------------

_LEFT_OUT: Final = "leaves this text out, or changes it; do not mark it"
_REPEATED: Final = "writes this text several times; do not mark it"
_CHANGED: Final = "changes this text (white space at its ends, say); send what the template writes, or do not mark it"


class PromptPiece(NamedTuple):
    text: str
    is_segment: bool = False
    field: str = ""  # of a segment: which field of the request holds it


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: list[int]
    segments: Sequence[tuple[int, int]] = ()  # start and end of each marked text, in tokens


def text_pieces(param: str, parts: Iterable[tuple[str, bool]]) -> list[PromptPiece]:
    """Texts that follow each other, of which some are marked. What is not marked is one piece, up to the next mark."""
    pieces: list[PromptPiece] = []
    for number, (text, is_segment) in enumerate(parts):
        if is_segment:
            pieces.append(PromptPiece(text, True, f"{param}.{number}"))
        elif pieces and not pieces[-1].is_segment:
            pieces[-1] = PromptPiece(pieces[-1].text + text)
        else:
            pieces.append(PromptPiece(text))
    return pieces


def chat_pieces(chat: Chat, render: Callable[[Chat], str]) -> list[PromptPiece]:
    """A chat's text in pieces. Raises OpenAIError if the template leaves out, repeats or changes a marked text."""
    if not chat.segments:
        return [PromptPiece(render(chat))]
    now = datetime.now()  # both renderings tell the same time
    chat = replace(chat, variables={"strftime_now": lambda form: now.strftime(form), **chat.variables})
    whole = render(chat)
    name = f"kvtier{secrets.token_hex(8)}"  # letters and digits, which templates leave as they are
    rendered = re.split(rf"{name}x(\d+)x", render(_with_placeholders(chat, name)))
    found = [int(number) for number in rendered[1::2]]
    num_found = Counter(found)
    for number, place in enumerate(chat.segments):
        if num_found[number] != 1:
            raise _bad_segment(chat, place, _REPEATED if num_found[number] else _LEFT_OUT)
    pieces = [PromptPiece(rendered[0])]
    places = [chat.segments[number] for number in found]
    for place, behind in zip(places, rendered[2::2], strict=True):
        pieces += [PromptPiece(_text(chat, place), True, _field(place)), PromptPiece(behind)]
    _require_equal(chat, places, pieces, whole)
    return pieces


def _with_placeholders(chat: Chat, name: str) -> Chat:
    turns: list[Turn] = [dict(turn) for turn in chat.turns]
    for turn in {turn for turn, _ in chat.segments}:
        turns[turn]["content"] = list(turns[turn]["content"])
    for number, (turn, part) in enumerate(chat.segments):
        content = turns[turn]["content"]
        content[part] = {**content[part], "text": f"{name}x{number}x"}
    return replace(chat, turns=turns)


def _require_equal(chat: Chat, places: Sequence[tuple[int, int]], pieces: Sequence[PromptPiece], whole: str) -> None:
    """Raise OpenAIError, about the first marked text that is not as it was sent, unless the pieces are the whole."""
    end = 0
    for number, piece in enumerate(pieces):  # an odd number is a segment's; what differs behind it is its fault, too
        if not whole.startswith(piece.text, end):
            raise _bad_segment(chat, places[max(0, number - 1) // 2], _CHANGED)
        end += len(piece.text)
    if end != len(whole):
        raise _bad_segment(chat, places[-1], _CHANGED)


def _text(chat: Chat, place: tuple[int, int]) -> str:
    text: str = chat.turns[place[0]]["content"][place[1]]["text"]
    return text


def _field(place: tuple[int, int]) -> str:
    return f"messages.{place[0]}.content.{place[1]}"


def _bad_segment(chat: Chat, place: tuple[int, int], what: str) -> OpenAIError:
    field = _field(place)
    why = f"a segment, but the model's template {what}"
    return OpenAIError(400, f"{field} {shown(_text(chat, place))}: {why}", param=field, code="invalid_value")
