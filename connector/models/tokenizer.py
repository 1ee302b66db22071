"""Loads a checkpoint's `tokenizer.json`, without torch and transformers."""

from pathlib import Path

from tokenizers import Tokenizer

from kvtier.tiers import ConfigError


def load_tokenizer(directory: Path, option: str = "--model") -> Tokenizer:
    """A checkpoint's tokenizer, which neither cuts a text off nor fills it up, whatever its file says.

    Raises ConfigError if the file is not one; `option` is where the user named it.
    """
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower type
        why = f"tokenizer.json is not one: {error}"
        raise ConfigError(f'{option} "{directory}": {why}; name a model\'s folder') from error
    tokenizer.no_truncation()  # a prompt that is too long is refused, never cut
    tokenizer.no_padding()
    return tokenizer
