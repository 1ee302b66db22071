"""Loads a checkpoint's `tokenizer.json`, without torch and transformers."""

from pathlib import Path

from tokenizers import Tokenizer

from kvtier.tiers import ConfigError


def load_tokenizer(directory: Path, option: str = "--model") -> Tokenizer:
    """A checkpoint's tokenizer. Raises ConfigError if its file is not one; `option` is where the user named it."""
    try:
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower type
        why = f"tokenizer.json is not one: {error}"
        raise ConfigError(f'{option} "{directory}": {why}; name a model\'s folder') from error
