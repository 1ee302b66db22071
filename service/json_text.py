"""JSON from outside at the service's edges: an object, what is wrong with it, and text fit for one line of an error."""

import itertools
import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import ValidationError

# Control characters, those that turn the direction of text, and halves of surrogates.
_OBEYED: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_MOST_INSIDE: Final = 100_000  # lists and objects in one body: each costs far more to make than to send
_TEXTS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

Json = dict[str, Any]
"""A JSON object, whatever it holds."""


def writable(text: str) -> str:
    """The text. ValueError if UTF-8 cannot write it, like a lone surrogate from JSON's escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not a text that UTF-8 can write") from None
    return text


def harmless(text: str) -> str:
    """The text for a terminal: what one would obey, or could not write, as Python's escapes. Lines and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def shown(value: object) -> str:
    """A value as JSON, whatever it is: one line of ASCII, 60 characters at most."""
    pieces = json.JSONEncoder(default=str).iterencode(value)  # of a long list, no more than is shown
    text = "".join(itertools.islice(pieces, 61))
    return text if len(text) <= 60 else f"{text[:57]}..."


def object_in(data: bytes) -> Json:
    """The JSON object in a request's body. ValueError says in one line what is there instead."""
    if _num_inside(data) > _MOST_INSIDE and (num := _num_inside(_TEXTS.sub(b"", data))) > _MOST_INSIDE:
        raise ValueError(f"body: {num} lists and objects; at most {_MOST_INSIDE} are taken, so send fewer")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: not JSON ({flat(str(error))[:100]}); send an object") from None
    if not isinstance(values, dict):
        raise ValueError(f"body {shown(values)}: not a JSON object; send one")
    return values


def _num_inside(data: bytes) -> int:
    """Lists and objects that JSON has, and brackets in its texts."""
    return data.count(b"[") + data.count(b"{")


def first_error(error: "ValidationError") -> tuple[str, str, str, object]:
    """Of the first wrong field: name in ASCII without a union's tags (=…), what is wrong, its kind, and the value."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for i, part in enumerate(first["loc"]) if not i or not str(part).startswith("="))
    why = str(first["ctx"]["error"]) if first["type"] == "value_error" else flat(first["msg"])
    return json.dumps(name)[1:-1], why, first["type"], first["input"]


def flat(text: str) -> str:
    return " ".join(text.split())
