"""Loads a checkpoint's `tokenizer.json`, without torch and transformers."""

from pathlib import Path

from tokenizers import Tokenizer

from kvtier.tiers import ConfigError


def load_tokenizer(directory: Path) -> Tokenizer:
    """A checkpoint's tokenizer. Raises ConfigError if its file is not one."""
    try:
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower type
        raise ConfigError(f'--model "{directory}": tokenizer.json is not one: {error}') from error
