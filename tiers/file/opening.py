"""The slab tier from its section of the configuration: how to open it, and what the doctor looks at. A `TierModule`."""

import os
from typing import Final

from kvtier.tiers import BATCH_BYTES, BlockShape, ConfiguredTier, Finding, error, load_key
from kvtier.tiers.config import Config
from kvtier.tiers.file.directory import require_directory
from kvtier.tiers.file.doctor import check_disk, check_key, check_naming
from kvtier.tiers.file.store import FileStore

_JOINED: Final = 16  # blocks of requests that want one each: as many as a read has in flight


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [file] names no path. Raises ConfigError if [file] key_file holds no key."""
    path = config.file.path
    if path is None:
        return None
    key = load_key(config.file.key_file, "[file] key_file") if config.file.key_file else None

    def open_slab() -> FileStore:
        return FileStore.open(
            path,
            fingerprint,
            slot_bytes=shape.block_bytes,
            block_size=shape.block_size,
            size=config.file.size,
            mode=config.file.mode,
            durable=config.file.durable,
            key=key,
            partial_blocks=config.cache.partial_blocks,
        )

    joined = max(1, min(_JOINED, BATCH_BYTES // shape.block_bytes))
    return ConfiguredTier(open_slab, config.file.deadline, joined)


def checked(config: Config) -> str | None:
    """Makes the directory if need be, and reads the key."""
    if config.file.path is None:
        return None
    if config.file.key_file is not None:
        load_key(config.file.key_file, "[file] key_file")
    use = require_directory(config.file)
    return f"[file] {use if use is not None else f'{config.file.path} does not answer as it should'}"


def answers(config: Config) -> list[Finding]:
    """Whether the directory can be used. One that is not there is made when a model's slab is opened."""
    path = config.file.path
    if path is None or not path.exists() or (path.is_dir() and os.access(path, os.W_OK | os.X_OK, effective_ids=True)):
        return []
    return [error("file", f'[file] path "{path}": no directory that this user can write in', "make it one")]


def examine(config: Config) -> list[Finding]:
    """The disk under [file] path, the key, old slabs. Some seconds; writes one file there and removes it."""
    return [*check_disk(config.file), check_key(config.file), *check_naming(config.file)]
