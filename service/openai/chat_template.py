"""Renders a model's chat template as transformers' `apply_chat_template` does, in a sandbox with time and size limits.

A template is the model's program, and it gets what clients send. Whatever a request contains, rendering ends, and the
text has a bounded size.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtier.service.openai.chat import Chat, Turn, join_texts

_CPU: Final = 2.0  # CPU seconds for one chat; a million tokens in a thousand turns take a tenth of it
_ROUNDS: Final = 256  # loop rounds between two looks at the clock
_LONGEST: Final = 64 << 20  # characters of any text that a template makes; a request has at most a quarter of it
_MAX_BITS: Final = 4096  # bits of a number
_MAX_INDENT: Final = 64
_MARK: Final = "\ue000kvtier: the answer goes on here\ue000"  # private use characters, which appear in no text


class ChatTemplate:
    """One template, compiled. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateError if the template cannot be compiled."""
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
        """Whether its source has this text."""
        return text in self._source

    def render(self, chat: Chat, most: int = _LONGEST) -> str:
        """The chat's text. Raises TemplateError, TypeError, ValueError or LookupError if the template refuses the chat.

        Raises TextTooLong for a text of more than `most` characters, and TemplateError for a template that takes too
        long.
        """
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
        return _up_to_mark(text) if chat.continues else text

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
        told = [text for turn in system if (text := join_texts(turn["content"]))]
        return [{"role": "system", "content": "\n\n".join(told)}, *(t for t in made if t["role"] != "system")]

    def _content(self, turn: Turn) -> str | list[dict[str, str]]:
        content: str | list[dict[str, str]] = turn["content"]
        if turn["role"] == "tool" or not self._takes_parts:
            return join_texts(content)
        return [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]


class TextTooLong(ValueError):
    """A template's text is too long. `args[0]` is the number of characters so far."""


class _Environment(ImmutableSandboxedEnvironment):
    """The environment chat templates expect. Loops check the clock, and no operator makes a huge value."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._allowance = _Allowance()

    def begin(self) -> None:
        """Start the time allowance of this thread's next text."""
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
    """Put the mark after the text that the answer continues, and a space after it, to detect trimming.

    Raises ValueError if the turn has no such text.
    """
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


def _up_to_mark(text: str) -> str:
    """The text before the mark. Raises ValueError if the template left the mark out."""
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise ValueError("the template leaves out the text to continue")
    return before if behind.startswith(" ") else before.rstrip()


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
