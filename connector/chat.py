"""Chat requests: normalises messages and tools so that prefixes match, and reads hints about block retention."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvtier.tiers.reuse import Hint

if TYPE_CHECKING:
    from kvtier.tiers.config import ChatConfig


# The order of a schema's keys in models' training data; all others follow by name.
_CUSTOMARY: Final = ("type", "function", "name", "description", "parameters", "properties", "required")
_KNOWN: Final = frozenset(_CUSTOMARY)
_ROLES: Final = ("system", "developer")
_SYSTEM: Final = ("system", "instructions")  # outside of the messages, in Anthropic's bodies and the Responses API's
_DAY: Final = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:mon|tue|wed|thu|fri|sat|sun)"
_MONTH: Final = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_NAMED: Final = {  # lines that differ in every request, by their name in the options
    "billing": re.compile(r"x-anthropic-billing-header:"),
    # what says "now", then a date, a time of day or a day of the week alone: a bare number is none of them
    "date": re.compile(
        rf"""(?ix:[-*•\#>_\ \t]{{0,9}}
        (?:<(?:current[_-]?)?(?:date|time)>|(?:it|today|now)\ is|(?:today|now|date|time|date\ and\ time)[*_\ ]{{0,3}}:
          |(?:today(?:'s|’s)?|(?:the\ )?current)\ (?:date|time|day)(?:\W{{0,3}}(?:and\W)?time)?(?:\ \(\w{{1,5}}\))?)
        (?:[^\w\n]{{0,6}}(?:is|now|the|{_DAY})\b){{0,4}}[^\w\n]{{0,6}}
        (?:(?:19|20)\d\d\b|\d{{4}}年|\d{{1,4}}[-/.]\d{{1,2}}[-/.]\d|\d{{1,2}}:\d\d|\d{{1,2}}\ ?[ap]\.?m\b
          |\d{{8}}(?:\d\d)?\b|\d{{1,2}}\.?\ \w+\ (?:19|20)\d\d\b
          |\d{{1,2}}(?:st|nd|rd|th|\.)?(?:\ of)?[-\ ]{_MONTH}\b|{_MONTH}\b[.\ ]{{0,2}}\d|(?:{_DAY})\W{{0,3}}$))"""
    ),
}


@dataclass(frozen=True, slots=True)
class ChatPrefix:
    """Applies `[chat]` to messages and tools as clients send them. What it cannot parse is unchanged."""

    sort_tools: bool = False
    drop_lines: tuple[str, ...] = ()
    move_lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: "ChatConfig") -> "ChatPrefix":
        return cls(config.sort_tools, config.drop_lines, config.move_lines)

    def body(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's JSON with messages, system text and tools normalised; itself if nothing changes. Idempotent."""
        made = {
            "messages": self.messages(body.get("messages")),
            "tools": self.tools(body.get("tools")),
            "input": self.messages(body.get("input")),  # of the Responses API
            **{name: self._content(body.get(name)) for name in _SYSTEM},
        }
        changed = {name: value for name, value in made.items() if value is not body.get(name)}
        return {**body, **changed} if changed else body

    def tools(self, tools: Any) -> Any:
        """Tools with every object's keys in one order. Lists keep their order."""
        if not self.sort_tools or not isinstance(tools, list):
            return tools
        try:
            return [_sorted(tool) for tool in tools]
        except (RecursionError, TypeError):  # too deep, or keys that are not strings
            return tools

    def messages(self, messages: Any) -> Any:
        """Messages without the lines to drop; the lines to move are at the end of their message."""
        if not (self.drop_lines or self.move_lines) or not isinstance(messages, list):
            return messages
        made = [self._message(message) for message in messages]
        return messages if all(one is other for one, other in zip(made, messages, strict=True)) else made

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return message
        content = message.get("content")
        made = self._content(content)
        return message if made is content else {**message, "content": made}

    def _content(self, content: Any) -> Any:
        """A system message's text or parts; itself if nothing changes."""
        if not (self.drop_lines or self.move_lines):
            return content
        made = self._parts(content) if isinstance(content, list) else self._text(content)
        return content if made == content else made

    def _text(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        kept, moved = self._split(text)
        return "\n".join(kept + moved)

    def _parts(self, parts: list[Any]) -> list[Any]:
        """The same for a list of parts. Parts keep their numbers, for segment marks; a marked part is unchanged."""
        made, moved, last = list(parts), [], None
        for number, part in enumerate(parts):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str) and not part.get("kvtier"):
                kept, own = self._split(part["text"])
                made[number], last = {**part, "text": "\n".join(kept)}, number
                moved += own
        if last is None or not moved:
            return made
        if last == len(parts) - 1:
            before = [made[last]["text"]] if made[last]["text"] else []
            made[last] = {**made[last], "text": "\n".join([*before, *moved])}
        else:
            made.append({"type": parts[last].get("type", "text"), "text": "\n".join(moved)})
        return made

    def _split(self, text: str) -> tuple[list[str], list[str]]:
        """The lines that stay, and those that move to the end."""
        kept: list[str] = []
        moved: list[str] = []
        to_drop, to_move = _lines_of(self.drop_lines), _lines_of(self.move_lines)
        for line in text.split("\n"):
            if not to_drop.match(line):
                (moved if to_move.match(line) else kept).append(line)
        return kept, moved


AS_SENT: Final = ChatPrefix()


def named_line(line: str) -> str | None:
    """The option's name for such a line; None: it has none."""
    return next((name for name, pattern in _NAMED.items() if pattern.match(line.lstrip())), None)


@cache
def _lines_of(options: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the lines that an option lists; nothing if it lists none."""
    starts = [_NAMED[one].pattern if one in _NAMED else re.escape(one) for one in options]
    return re.compile(rf"\s*(?:{'|'.join(starts)})" if starts else r"(?!)")


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        names = [*[name for name in _CUSTOMARY if name in value], *sorted(value.keys() - _KNOWN)]
        return {name: _sorted(value[name]) for name in names}
    return [_sorted(each) for each in value] if isinstance(value, list) else value


_MOST: Final = 16  # actions, and directives of an action, that are read
_VERSION: Final = "1"  # of both kinds of actions


def is_cache_mark(value: object) -> bool:
    """Whether this is Anthropic's `cache_control`: the prompt up to there will be reused."""
    return isinstance(value, Mapping) and value.get("type") == "ephemeral"


def agent_hint(extension: Any, ignored: Callable[[str], None]) -> Hint | None:
    """The hint in Dynamo's `nvext`; `ignored` is called with the reason if it is malformed.

    A closed session is finished. An open one goes on, as does one with a prefill ahead of its next turn, a priority
    above 0 or `cache_control`; below 0 it is finished.
    Source: NVIDIA Dynamo 1.5, "NVIDIA Request Extensions (nvext)" and "Agent Hints".
    """
    if not isinstance(extension, Mapping):
        ignored("malformed")
        return None
    session, hints = (extension.get(name) or {} for name in ("session_control", "agent_hints"))
    if not isinstance(session, Mapping) or not isinstance(hints, Mapping):
        ignored("malformed")
        return None
    if (action := session.get("action")) == "close":
        return Hint.FINISHED
    try:
        priority = _number(hints.get("priority") or 0)
    except (TypeError, ValueError):
        ignored("malformed")
        priority = 0
    goes_on = action == "open" or hints.get("speculative_prefill") is True or priority > 0
    if goes_on or is_cache_mark(extension.get("cache_control")):
        return Hint.GOES_ON
    return Hint.FINISHED if priority < 0 else None


def hint_in(envelope: Any, ignored: Callable[[str], None]) -> Hint | None:
    """The hint in an envelope's actions; `ignored` is called with the reason when an action is skipped.

    The envelope is vLLM's object, or its JSON. Retention of any block takes precedence over release.
    """
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        ignored("malformed")
        return None
    hints: set[Hint | None] = set()
    for action in actions[:_MOST]:
        kind, version, payload = (_field(action, name) for name in ("action_type", "action_version", "payload"))
        if not isinstance(kind, str) or not isinstance(version, str) or not isinstance(payload, Mapping):
            ignored("malformed")
        elif kind not in _READ or version.partition(".")[0] != _VERSION:
            ignored("unknown_action")
        else:
            try:
                hints.add(_READ[kind](payload))
            except (TypeError, ValueError):
                ignored("malformed")
    return next((hint for hint in (Hint.GOES_ON, Hint.FINISHED) if hint in hints), None)


def _retained(payload: Mapping[str, Any]) -> Hint | None:
    """For `kv.retain`: a priority above 0 retains a range of tokens, 0 releases it."""
    directives = payload.get("directives")
    if not isinstance(directives, list):
        raise TypeError(directives)
    read = [(_number(each.get("priority")), each) for each in directives[:_MOST] if isinstance(each, Mapping)]
    if any(priority > 0 for priority, _ in read):
        return Hint.GOES_ON
    whole = (each for _, each in read if not each.get("start") and each.get("end") is None)
    return Hint.FINISHED if any(not each.get("covers_output") for each in whole) else None


def _set_priority(payload: Mapping[str, Any]) -> Hint | None:
    """For `vllm.set_priority`: the default is 0, the lowest are evicted first; null resets it."""
    value = 0 if payload.get("value") is None else _number(payload["value"])
    return Hint.GOES_ON if value > 0 else Hint.FINISHED if value < 0 else None


_READ: Final[Mapping[str, Callable[[Mapping[str, Any]], Hint | None]]] = {
    "kv.retain": _retained,
    "vllm.set_priority": _set_priority,
}


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
