"""Reads a prompt that an operator names: token ids, block names, or text and the tokenizer that cuts it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.cli.options import given
from kvtier.service import Json
from kvtier.tiers import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_INPUT: Final = 64 << 20  # characters of a file of tokens or of text


def require_prompt(tokenizer: Path | None, cache_salt: str | None) -> None:
    """ConfigError for what says more about a prompt, where none is given."""
    for name, value in (("--tokenizer", tokenizer), ("--cache-salt", cache_salt)):
        if value is not None:
            raise ConfigError(f'{name} "{value}": it belongs to a prompt; give one by --blocks or --text')


def which_blocks(
    file: str | None, text: str | None, tokenizer: Path | None, cache_salt: str | None, model: str | None
) -> Json:
    """What a daemon is asked about: a prompt's blocks by their names or by its tokens, of which model and tenant."""
    body = given(model=model, cache_salt=cache_salt)
    if file is not None and text is not None:
        raise ConfigError(f'--text "{text}": --blocks names the prompt, too; give one of them')
    if text is None and tokenizer is not None:
        raise ConfigError(f'--tokenizer "{tokenizer}": it cuts --text, which is not given; give that, or leave it out')
    if file is not None:
        values = read_list(file)
        body["hashes" if values and isinstance(values[0], str) else "tokens"] = values
    if text is not None:
        body["tokens"] = list(require_cutter(text, tokenizer_of(tokenizer)).encode(read(text, "--text")).ids)
    return body


def tokenizer_of(directory: Path | None) -> "Tokenizer | None":
    if directory is None:
        return None
    from kvtier.connector.models import load_tokenizer

    return load_tokenizer(directory, "--tokenizer")


def require_cutter(text: str, cutter: "Tokenizer | None") -> "Tokenizer":
    if cutter is None:
        raise ConfigError(f'--text "{text}": it takes the model\'s tokenizer; name its folder by --tokenizer')
    return cutter


def read(file: str, option: str) -> str:
    try:
        if file == "-":
            text = sys.stdin.read(_MAX_INPUT + 1)
            text.encode()  # without a locale, bytes that are no text come this far
        else:
            with Path(file).open(encoding="utf-8") as opened:
                text = opened.read(_MAX_INPUT + 1)
    except OSError as error:
        raise ConfigError(f'{option} "{file}": {error.strerror}; name a file that can be read') from None
    except UnicodeError:
        raise ConfigError(f'{option} "{file}": not UTF-8 text; name a file of text') from None
    if len(text) > _MAX_INPUT:
        raise ConfigError(f'{option} "{file}": longer than {_MAX_INPUT:,} characters; name one prompt')
    return text


def read_list(file: str) -> list[Any]:
    text = read(file, "--blocks")
    wanted = "write a list of token ids or of block names"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'--blocks "{file}": not JSON ({error}); {wanted}') from None
    if not isinstance(values, list):
        raise ConfigError(f'--blocks "{file}": not a list; {wanted}')
    return values
