"""Reads tool calls out of an answer's text, piece by piece: the forms of Hermes (Qwen's, too) and of Llama.

What is no call stays text, whatever it looks like. A call is told when all of it is there.
"""

import json
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from kvtier.service import Json, writable


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


CallForm = Literal["hermes", "llama"]

HERMES_MARK: Final = "<tool_call>"
LLAMA_MARK: Final = "<|python_tag|>"
_HERMES_END: Final = "</tool_call>"
MARKS: Final[dict[CallForm, tuple[str, ...]]] = {"hermes": (HERMES_MARK, _HERMES_END), "llama": (LLAMA_MARK,)}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is JSON."""

    index: int  # in its answer
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def content(self) -> Json:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Heard:
    """What of an answer can be told by now."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallReader(Protocol):
    """Of one answer."""

    num_calls: int

    def push(self, text: str) -> Heard:
        """One more piece."""

    def end(self) -> Heard:
        """The answer has ended."""


class HermesReader:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, with text before and between.

    White space around calls is no text. The last end mark may be missing: some models end the answer instead.
    """

    def __init__(self, most: int | None = None) -> None:
        """`most` calls are told; those behind them are dropped."""
        self.num_calls = 0
        self._most = most
        self._held = ""
        self._is_inside = False

    def push(self, text: str) -> Heard:
        self._held += text
        told: list[str] = []
        calls: list[ToolCall] = []
        while True:
            mark = _HERMES_END if self._is_inside else HERMES_MARK
            before, found, rest = self._held.partition(mark)
            if not found:
                break
            if self._is_inside:
                told += self._close(before, HERMES_MARK + before + _HERMES_END, calls)
            else:
                told.append(before.rstrip())
            self._is_inside, self._held = not self._is_inside, rest
        if not self._is_inside:
            certain = self._held[: len(self._held) - overlap(self._held, HERMES_MARK)].rstrip()
            told.append(self._held[: len(certain)])
            self._held = self._held[len(certain) :]
        return Heard("".join(told), tuple(calls))

    def end(self) -> Heard:
        calls: list[ToolCall] = []
        left, self._held = self._held, ""
        if self._is_inside:
            told = self._close(left, HERMES_MARK + left, calls)
            return Heard("".join(told), tuple(calls))
        return Heard("" if self.num_calls and not left.strip() else left)

    def _close(self, inside: str, whole: str, calls: list[ToolCall]) -> list[str]:
        """A call's text is complete. Returns what of it is text, because it is no call."""
        try:
            name, arguments = _call_of(_read(inside), ("arguments", "parameters"))
        except (ValueError, RecursionError):
            return [whole]
        if self._most is None or self.num_calls < self._most:
            calls.append(ToolCall(self.num_calls, name, arguments))
            self.num_calls += 1
        return []


class LlamaReader:
    """The whole answer is `{"name": …, "parameters": {…}}`, or several with `;` between them, maybe behind a mark.

    Such an answer counts as calls only if it names tools that the request has: it may be JSON that was asked for.
    """

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self.num_calls = 0
        self._names = names
        self._most = most
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> Heard:
        if self._is_text:
            return Heard(text)
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or LLAMA_MARK.startswith(begun[: len(LLAMA_MARK)]):
            return Heard()
        self._is_text, told, self._held = True, self._held, ""
        return Heard(told)

    def end(self) -> Heard:
        whole, self._held = self._held, ""
        try:
            found = list(self._calls(whole.strip().removeprefix(LLAMA_MARK)))
        except (ValueError, RecursionError):
            return Heard(whole)
        calls = tuple(ToolCall(number, *call) for number, call in enumerate(found[: self._most]))
        self.num_calls = len(calls)
        return Heard("", calls)

    def _calls(self, text: str) -> Iterator[tuple[str, str]]:
        """Names and arguments. ValueError if the text is anything else."""
        decoder, left = json.JSONDecoder(parse_constant=_no_json), text.strip()
        if not left:
            raise ValueError("no call")
        while left:
            value, end = decoder.raw_decode(left)
            name, arguments = _call_of(value, ("parameters", "arguments"))
            if name not in self._names:
                raise ValueError("no tool of this name")
            yield name, arguments
            left = left[end:].lstrip("; \t\r\n")


class GuidedReader:
    """An answer that a guide made a call, or a list of calls: it is nothing else, unless it was cut off."""

    def __init__(self, chosen: str | None) -> None:
        """`chosen`: the tool whose arguments the answer is; None: it is a list of calls."""
        self.num_calls = 0
        self._chosen = chosen
        self._held = ""

    def push(self, text: str) -> Heard:
        self._held += text
        return Heard()

    def end(self) -> Heard:
        whole, self._held = self._held, ""
        try:
            value = _read(whole)
            made = [{"name": self._chosen, "parameters": value}] if self._chosen is not None else value
            found = [_call_of(each, ("parameters", "arguments")) for each in made]
        except (ValueError, TypeError, RecursionError):
            return Heard(whole)
        self.num_calls = len(found)
        return Heard("", tuple(ToolCall(number, *call) for number, call in enumerate(found)))


def _call_of(value: Any, names: tuple[str, str]) -> tuple[str, str]:
    """The name and the arguments, as JSON, of a call. ValueError if it is none; without arguments there are none."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments: Any = next((value[each] for each in names if each in value), {}) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = _read(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no call")
    try:
        return writable(name), writable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:  # half a surrogate in them: an answer can have it as an escape alone
        return writable(name), json.dumps(arguments, allow_nan=False)


def _read(text: str) -> Any:
    """What the text is as JSON. ValueError if it is none, NaN and Infinity included."""
    return json.loads(text, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
