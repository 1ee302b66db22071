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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.service import shown
from kvtier.service.openai.errors import OpenAIError, bad_field

Turn = dict[str, Any]  # `role`, `content` (a text, or parts of type text), and other fields of that role

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
    messages, tools, continues = (body.get(name) for name in ("messages", "tools", "continue_final_message"))
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "not a list of messages")
    for name in _ELSEWHERE:
        if body.get(name) is not None:
            raise bad_field(name, "only the replica can apply it")
    if tools is not None and not isinstance(tools, list):
        raise bad_field("tools", "not a list of tools")
    return Chat(
        [_turn(message) for message in messages],
        [(number, part) for number, message in enumerate(messages) for part in _marked(message.get("content"))],
        None if tools is None else [_tool(tool) for tool in tools],
        _variables(body),
        body.get("add_generation_prompt") is None or bool(body["add_generation_prompt"]),
        "content" if continues is True else continues if isinstance(continues, str) else "",
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
    return content if isinstance(content, str) else "\n".join(text for part in content if (text := part["text"]))


def _turn(message: object) -> Turn:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_field("messages", "not a message with a role")
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
            raise bad_field("content", "a part that is not text")
        if (text := part.get(name)) is not None:
            if not isinstance(text, str):
                raise bad_field("content", "a text that is not a string")
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
        raise bad_field("tool_calls", "a call that is not a function call")
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
        raise bad_field("tools", "a tool that is not a function")
    kept = {name: function.get(name) for name in ("name", "description", "parameters")}
    later = function.get("defer_loading", tool.get("defer_loading"))
    kept |= {"strict": function["strict"]} if function.get("strict") is not None else {}
    kept |= {"defer_loading": later} if later is not None else {}
    of_tool = {} if tool.get("defer_loading") is None else {"defer_loading": tool["defer_loading"]}
    return {"type": "function", "function": kept, **of_tool}


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    if given is not None and (not isinstance(given, dict) or not _NOT_THEIRS.isdisjoint(given)):
        raise bad_field("chat_template_kwargs", "not an object of a template's variables")
    return template_variables(body, given or {})


def _list(param: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise bad_field(param, "not a list")
    return value


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
    """Consecutive texts, some of them marked. Unmarked texts up to the next mark become one piece."""
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
    now = datetime.now()  # both renderings have the same time
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
    for number, piece in enumerate(pieces):  # odd numbers are segments; a difference behind one is its fault, too
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


# --- templates -------------------------------------------------------------------------------------------------------

_CPU: Final = 2.0  # CPU seconds for one chat; a million tokens in a thousand turns take a tenth of it
_ROUNDS: Final = 256  # loop rounds between two looks at the clock
_LONGEST: Final = 64 << 20  # characters of any text that a template makes; a request has at most a quarter of it
_MAX_BITS: Final = 4096  # bits of a number
_MAX_INDENT: Final = 64
_MARK: Final = "\ue000kvtier: the answer goes on here\ue000"  # private use characters, which appear in no text


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._environment = _Environment()
        tree = self._environment.parse(source)
        self._takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self._source = source
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._special_tokens = dict(special_tokens)
        repeated: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for each in repeated:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            each.body.insert(0, nodes.ExprStmt(call).set_lineno(each.lineno))
        code = self._environment.compile(tree)
        self._template = Template.from_code(self._environment, code, self._environment.make_globals(None))

    def says(self, text: str) -> bool:
        return text in self._source

    def render(self, chat: Chat, most: int = _LONGEST) -> str:
        """The chat's text. TemplateError, TypeError, ValueError, LookupError: refused, or too slow. TextTooLong."""
        turns = self._turns(chat.turns)
        if chat.continues:
            _mark(turns[-1], chat.continues)
        variables = {**self._special_tokens, "documents": None, **chat.variables}
        adds_prompt = chat.add_generation_prompt and not chat.continues
        own = {"messages": turns, "tools": chat.tools, "add_generation_prompt": adds_prompt}
        self._environment.begin()
        pieces, length = [], 0
        try:
            for piece in self._template.generate({**variables, **own}):
                pieces.append(piece)
                length += len(piece)
                if length > most:
                    raise TextTooLong(length)
        except RecursionError:
            raise TemplateError("they are nested too deeply") from None
        text = "".join(pieces)
        if not chat.continues:
            return text
        before, mark, behind = text.rpartition(_MARK)
        if not mark:
            raise ValueError("the template leaves out the text to continue")
        return before if behind.startswith(" ") else before.rstrip()

    def _turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns as this template takes them. Roles it does not know are converted as vLLM converts them."""
        made = [{**turn, "content": self._content(turn)} for turn in turns]
        if self._knows_developer or not any(turn["role"] == "developer" for turn in made):
            return made
        for turn in made:
            if turn["role"] == "developer":
                turn["role"] = "system"
                turn.pop("tools", None)
        system = [turn for turn in made if turn["role"] == "system"]
        if len(system) == 1 and made[0] is system[0]:
            return made
        texts = [text for turn in system if (text := join_texts(turn["content"]))]
        return [{"role": "system", "content": "\n\n".join(texts)}, *(t for t in made if t["role"] != "system")]

    def _content(self, turn: Turn) -> str | list[dict[str, str]]:
        content: str | list[dict[str, str]] = turn["content"]
        if turn["role"] == "tool" or not self._takes_parts:
            return join_texts(content)
        return [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]


class TextTooLong(ValueError):
    """A template's text is too long. `args[0]` is the number of characters so far."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._allowance = _Allowance()

    def begin(self) -> None:
        self._allowance.rounds, self._allowance.until = _ROUNDS, time.thread_time() + _CPU

    def tick(self) -> None:
        """Count a round of a loop or a call of a macro on this thread. Raises TemplateError if the time is up."""
        self._allowance.rounds -= 1
        if self._allowance.rounds > 0:
            return
        if time.thread_time() > self._allowance.until:
            raise TemplateError(f"it takes more than {_CPU:g} s")
        self._allowance.rounds = _ROUNDS

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`. Raises TemplateError if the result would be larger than any prompt."""
        sized = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        numbers = [value for value in (left, right) if isinstance(value, int)]
        if operator == "+":
            is_large = len(sized) == 2 and len(left) + len(right) > _LONGEST
        elif sized:
            is_large = any(len(value) * number > _LONGEST for value in sized for number in numbers)
        else:
            bits = [number.bit_length() for number in numbers]
            is_large = len(bits) == 2 and (bits[0] * right if operator == "**" else sum(bits)) > _MAX_BITS
        if is_large:
            raise TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Allowance(threading.local):
    rounds = _ROUNDS
    until = float("inf")  # in CPU seconds of this thread


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training. Here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)  # variables set inside are unknown outside, as in transformers


def _is_content(iterated: nodes.Node) -> bool:
    """Whether a loop over this iterates over a message's parts. Such a template takes parts; others take text."""
    while isinstance(iterated, nodes.Filter | nodes.Test) and iterated.node is not None:
        iterated = iterated.node
    if isinstance(iterated, nodes.Getitem) and isinstance(iterated.arg, nodes.Const):
        return bool(iterated.arg.value == "content")
    if isinstance(iterated, nodes.Getattr):
        return iterated.attr == "content"
    return isinstance(iterated, nodes.Name) and iterated.name == "content"


def _mark(turn: Turn, field: str) -> None:
    """Mark where the answer goes on, and put a space behind, to detect trimming. ValueError without such a text."""
    value = turn.get(field)
    if isinstance(value, list):
        part = next((part for part in reversed(value) if "text" in part), None)
        if part is None:
            raise ValueError("the last message has no text to continue")
        part["text"] += f"{_MARK} "
        return
    if not isinstance(value, str):
        raise ValueError("the last message has no text to continue")
    for name in [field] if field == "content" else [name for name in turn if turn[name] == value and name != "role"]:
        turn[name] = f"{value}{_MARK} "


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without jinja2's HTML escapes."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _MAX_INDENT:
        raise TemplateError(f"tojson: an indent of more than {_MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
