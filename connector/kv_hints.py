"""Reads vLLM's `kv_hints` and Anthropic's `cache_control` as hints; what is unknown or malformed counts as none."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvtier.tiers.reuse import Hint

_MOST: Final = 16  # actions, and directives of one, that are read
_VERSION: Final = "1"  # of both kinds of actions


def is_cache_mark(value: object) -> bool:
    """Whether this is `cache_control` as Anthropic has it: the prompt up to there is going to be asked for again."""
    return isinstance(value, Mapping) and value.get("type") == "ephemeral"


def hint_in(envelope: Any, ignored: Callable[[str], None]) -> Hint | None:
    """What the actions of an envelope say of a request's blocks; `ignored` is called with why one says nothing.

    The envelope is vLLM's object, or its JSON. To keep any of the blocks goes before letting them go.
    """
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        ignored("malformed")
        return None
    said: set[Hint | None] = set()
    for action in actions[:_MOST]:
        kind, version, payload = (_field(action, name) for name in ("action_type", "action_version", "payload"))
        if not isinstance(kind, str) or not isinstance(version, str) or not isinstance(payload, Mapping):
            ignored("malformed")
        elif kind not in _READ or version.partition(".")[0] != _VERSION:
            ignored("unknown_action")
        else:
            try:
                said.add(_READ[kind](payload))
            except (TypeError, ValueError):
                ignored("malformed")
    return next((hint for hint in (Hint.GOES_ON, Hint.FINISHED) if hint in said), None)


def _retained(payload: Mapping[str, Any]) -> Hint | None:
    """Of `kv.retain`: a priority above 0 keeps a range of tokens, 0 lets it go."""
    directives = payload.get("directives")
    if not isinstance(directives, list):
        raise TypeError(directives)
    read = [(_number(each.get("priority")), each) for each in directives[:_MOST] if isinstance(each, Mapping)]
    if any(priority > 0 for priority, _ in read):
        return Hint.GOES_ON
    whole = (each for _, each in read if not each.get("start") and each.get("end") is None)
    return Hint.FINISHED if any(not each.get("covers_output") for each in whole) else None


def _set_priority(payload: Mapping[str, Any]) -> Hint | None:
    """Of `vllm.set_priority`: blocks without one have 0, and those of the lowest go first; null takes it back."""
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
