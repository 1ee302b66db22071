"""An answer's text: whole characters only, and nothing of a stop string, wherever token borders fall."""

import random
from typing import Any

import pytest
from server_rig import tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvtier.service.engine.completion import AnswerText
from kvtier.service.openai.prompts import Detokenizer, TokenTexts

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
        if text.stopped_by is not None:
            return pieces, True
    return [*pieces, text.end()], (text.stopped_by is not None)


def test_no_piece_ends_within_a_character() -> None:
    pieces, _ = told(ids_of("aé€😀z"))
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "z", ""]  # a token is a byte


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_whole_text_whatever_the_bytes(seed: int) -> None:
    dice = random.Random(seed)
    ids = [dice.randrange(258) for _ in range(60)]  # bytes that are no characters, special tokens
    assert "".join(told(ids)[0]) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_rubbish_is_told_as_it_comes_and_characters_in_it_are_whole(seed: int) -> None:
    """A model without sense may never end a character: what has to be looked back at must not grow with the answer."""
    dice = random.Random(seed)
    rubbish = ids_of("é😀")[:-1]
    ids = [token for _ in range(20) for token in [*dice.choices(rubbish, k=dice.randrange(60)), *ids_of("a€😀")]]
    assert "".join(told(ids)[0]) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("token", [ids_of("é")[0], 257])
def test_what_is_looked_back_at_stays_short(token: int) -> None:
    detokenizer = Detokenizer(TOKENIZER, frozenset([256, 257]))
    pieces = [detokenizer.push(each) for each in [*ids_of("a"), *[token] * 200, *ids_of("b")]]
    assert len(detokenizer._ids) < 30
    assert "".join(pieces) == ("ab" if token == 257 else f"a{REPLACEMENT * 200}b")


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    pieces, _ = told(ids_of("a😀")[:-1])
    assert pieces == ["a", "", "", "", REPLACEMENT]


def sentencepiece() -> Tokenizer:
    """As Llama 2's and Mistral's: a word has its space before it, and a text's first space is dropped."""
    words = [
        "<unk>",
        "<s>",
        "<call>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581so",
        "\u2581it",
        "\u2581",
        "s",
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(word, special=True) for word in words[1:3]])
    return made


SO, IT, SPACE, S = range(259, 263)


@pytest.mark.parametrize("cut", range(1, 9))
def test_an_answers_text_is_what_it_adds_to_its_prompt(cut: int) -> None:
    made, ids = sentencepiece(), [1, SO, IT, S, SPACE, SPACE, SO, 1, IT, 3 + 0xC3, 3 + 0xA9, SO]
    detokenizer = Detokenizer(made, frozenset([1]), prompt=ids[:cut])
    answer = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.end()
    assert made.decode(ids[:cut]) + answer == made.decode(ids)


def test_a_word_behind_a_mark_has_its_space() -> None:
    detokenizer = Detokenizer(sentencepiece(), spoken={2: "<call>"})
    assert [*map(detokenizer.push, [SO, 2, IT]), detokenizer.end()] == ["so", "<call>", " it", ""]


def test_half_a_character_of_the_prompt_is_no_part_of_the_answer() -> None:
    detokenizer = Detokenizer(sentencepiece(), prompt=[SO, 3 + 0xC3])
    assert [detokenizer.push(3 + 0xA9), detokenizer.push(S), detokenizer.end()] == ["", f"{REPLACEMENT}s", ""]


def test_a_tokens_text_has_its_space() -> None:
    texts = TokenTexts(sentencepiece())
    assert [texts.of(each) for each in (SO, S, 3 + 0xC3)] == [(" so", b" so"), ("s", b"s"), (REPLACEMENT, b"\xc3")]


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
