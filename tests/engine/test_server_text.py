"""An answer's text: whole characters only, and nothing of a stop string, wherever token borders fall."""

import random

import pytest
from server_rig import tokenizer

from kvtier.engine.server_text import AnswerText
from kvtier.service.prompts import Detokenizer

TOKENIZER = tokenizer()
REPLACEMENT = "\ufffd"


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def told(ids: list[int], *stops: str) -> tuple[list[str], bool]:
    """The pieces, and whether a stop string ended them."""
    text = AnswerText(Detokenizer(TOKENIZER), stops)
    pieces = []
    for token_id in ids:
        pieces.append(text.push(token_id))
        if text.is_stopped:
            return pieces, True
    return [*pieces, text.end()], text.is_stopped


def test_no_piece_ends_within_a_character() -> None:
    pieces, _ = told(ids_of("aé€😀z"))
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "z", ""]  # a token is a byte


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_whole_text_whatever_the_bytes(seed: int) -> None:
    dice = random.Random(seed)
    ids = [dice.randrange(258) for _ in range(60)]  # bytes that are no characters, special tokens
    assert "".join(told(ids)[0]) == TOKENIZER.decode(ids)


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    pieces, _ = told(ids_of("a😀")[:-1])
    assert pieces == ["a", "", "", "", REPLACEMENT]


@pytest.mark.parametrize(
    ("stops", "text", "answer", "is_stopped"),
    [
        (["END"], "say no moreEND of it", "say no more", True),
        (["END"], "an EN is no END", "an EN is no ", True),
        (["END"], "ENENEND", "ENEN", True),  # the beginning of one inside another
        (["END"], "it may EN", "it may EN", False),  # held back, and told at the end
        (["aab", "ab"], "xaab", "x", True),  # the earlier one counts
        (["😀"], "a😀b", "a", True),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", True),
    ],
)
def test_stop_strings(stops: list[str], text: str, answer: str, is_stopped: bool) -> None:
    pieces, stopped = told(ids_of(text), *stops)
    assert ("".join(pieces), stopped) == (answer, is_stopped)


def test_nothing_of_a_stop_string_is_told_early() -> None:
    pieces, _ = told(ids_of("abEx"), "END")
    assert pieces == ["a", "b", "", "Ex", ""]
