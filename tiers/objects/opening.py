"""The object tier from its section of the configuration: how to reach it, and what the doctor asks. A `TierModule`."""

from importlib.util import find_spec

from kvtier.tiers import (
    BATCH_BYTES,
    BlockShape,
    ConfigError,
    ConfiguredTier,
    Finding,
    install_command,
    load_key,
    require_compression,
)
from kvtier.tiers.config import Config, ObjectsConfig
from kvtier.tiers.objects.bucket import client_of
from kvtier.tiers.objects.doctor import check_objects, finding_of
from kvtier.tiers.objects.refusals import place_of
from kvtier.tiers.objects.store import ObjectStore


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [objects] names no bucket. ConfigError if its client is not installed."""
    if config.objects.bucket is None:
        return None
    require_client(config.objects)

    def reach() -> ObjectStore:
        return ObjectStore.open(config.objects, fingerprint, slot_bytes=shape.block_bytes, block_size=shape.block_size)

    # a write may ask three times, the last time just before its deadline
    batch = max(BATCH_BYTES, shape.block_bytes) / config.objects.bandwidth
    return ConfiguredTier(reach, 3 * (config.objects.connect_timeout + config.objects.deadline + batch))


def checked(config: Config) -> str | None:
    """Reads the key and the certificates, and asks no server: one that is away is found later."""
    if config.objects.bucket is None:
        return None
    require_client(config.objects)
    client_of(config.objects, 1.0)
    if config.objects.key_file is not None:
        load_key(config.objects.key_file, "[objects] key_file")
    compressed = ""
    if config.objects.compression != "none":
        require_compression("[objects] compression")
        compressed = f", compressed by {config.objects.compression}"
    return f"[objects] bucket {config.objects.bucket} at {place_of(config.objects)}{compressed}"


def answers(config: Config) -> list[Finding]:
    """The bucket, by one read of an object that need not be there."""
    return [] if config.objects.bucket is None else _looked(config, in_full=False)


def examine(config: Config) -> list[Finding]:
    """The bucket that [objects] names, and whether compression pays. Each answer has a deadline of seconds."""
    return _looked(config, in_full=True)


def _looked(config: Config, *, in_full: bool) -> list[Finding]:
    if config.objects.bucket is not None:
        try:
            require_client(config.objects)
        except ConfigError as refused:
            return [finding_of(refused)]
    return check_objects(config.objects, in_full=in_full)


def require_client(config: ObjectsConfig) -> None:
    """ConfigError, if the package is missing that the extra `objects` brings."""
    if find_spec("obstore") is None:
        raise ConfigError(
            f'[objects] bucket "{config.bucket}": needs obstore; {install_command("objects")}, or leave bucket out'
        )
