"""Prompts in pieces: a text marked as a segment is tokenized by itself, so that it has the same tokens anywhere.

A chat is rendered twice: as it is, and with a placeholder for each marked text. Where the placeholders come out, the
texts lie, and with the texts in their places it must be the first rendering. Otherwise the template changes a text.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, NamedTuple

from kvtier.service import shown
from kvtier.service.openai.chat_turns import Chat, Turn
from kvtier.service.openai.errors import OpenAIError

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
            raise _refused(chat, place, _REPEATED if num_found[number] else _LEFT_OUT)
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
            raise _refused(chat, places[max(0, number - 1) // 2], _CHANGED)
        end += len(piece.text)
    if end != len(whole):
        raise _refused(chat, places[-1], _CHANGED)


def _text(chat: Chat, place: tuple[int, int]) -> str:
    text: str = chat.turns[place[0]]["content"][place[1]]["text"]
    return text


def _field(place: tuple[int, int]) -> str:
    return f"messages.{place[0]}.content.{place[1]}"


def _refused(chat: Chat, place: tuple[int, int], what: str) -> OpenAIError:
    field = _field(place)
    why = f"a segment, but the model's template {what}"
    return OpenAIError(400, f"{field} {shown(_text(chat, place))}: {why}", param=field, code="invalid_value")
