"""JSON from outside at the service's edges: the type of an object, and text fit for one line of an error."""

import itertools
import json
from typing import Any

Json = dict[str, Any]
"""A JSON object, whatever it holds."""


def writable(text: str) -> str:
    """The text. ValueError if UTF-8 cannot write it, like a lone surrogate from JSON's escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not a text that UTF-8 can write") from None
    return text


def shown(value: object) -> str:
    """A value as JSON, whatever it is: one line of ASCII, 60 characters at most."""
    pieces = json.JSONEncoder(default=str).iterencode(value)  # of a long list, no more than is shown
    text = "".join(itertools.islice(pieces, 61))
    return text if len(text) <= 60 else f"{text[:57]}..."


def flat(text: str) -> str:
    return " ".join(text.split())
