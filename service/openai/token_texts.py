"""Single tokens as texts and as bytes, for those who are told how likely each was."""

import re
from functools import lru_cache
from typing import Final

from tokenizers import Tokenizer, pre_tokenizers

_UNKNOWN: Final = "\ufffd"  # what decoding makes of bytes that are no character
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte by its number, in vocabularies of SentencePiece
_MOST: Final = 1 << 16  # tokens that are remembered


class TokenTexts:
    """Of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(_MOST)(self._of)  # a token's text, and its bytes

    def _of(self, token_id: int) -> tuple[str, bytes]:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if _UNKNOWN not in text:
            return text, text.encode()
        word: str = self._tokenizer.id_to_token(token_id) or ""
        letters = _letters()
        if (byte := _BYTE.fullmatch(word)) is not None:
            return text, bytes.fromhex(byte[1])
        if word and all(letter in letters for letter in word):
            return text, bytes(letters[letter] for letter in word)
        return text, text.encode()


@lru_cache(1)
def _letters() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies (GPT-2's)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    found |= {chr(256 + number): byte for number, byte in enumerate(others)}
    assert set(found) == set(pre_tokenizers.ByteLevel.alphabet())
    return found
