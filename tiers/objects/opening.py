"""The object tier from the configuration section [objects]: opening it, and the doctor's checks. `TierModule`."""

import secrets
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Final

from kvtier.tiers import (
    BATCH_BYTES,
    BlockShape,
    ConfigError,
    ConfiguredTier,
    Finding,
    Outcome,
    Status,
    compression_finding,
    install_command,
    load_key,
    ok,
    refusal,
    require_compression,
    warning,
)
from kvtier.tiers.config import Config, ObjectsConfig
from kvtier.tiers.objects.bucket import Bucket, ObjectRange, client_of, explanation, place_of
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.shared import StorageFailed

_CHECK: Final = "objects"
_ANSWER_SECONDS: Final = 2.0  # at the least; the doctor waits longer than the tier
_SLOW_SECONDS: Final = 0.5
_ROUNDS: Final = 4
_LONGEST_SECONDS: Final = 2.0  # no further round begins after it


def check_objects(config: ObjectsConfig, *, in_full: bool = True) -> list[Finding]:
    """The findings about the bucket, on or off; in full also of compression, which takes reads and time."""
    if config.bucket is None:
        return [ok(_CHECK, "off: no [objects] bucket")]
    patient = config.model_copy(update={"deadline": max(config.deadline, _ANSWER_SECONDS)})
    try:
        require_client(config)
        if config.key_file is not None:
            load_key(config.key_file, "[objects] key_file")
        bucket = Bucket.connect(patient)
    except ConfigError as refused:
        return [refusal(_CHECK, refused)]
    try:
        found = _look(config, bucket)
        is_measured = in_full and found.status is not Status.ERROR and find_spec("zstandard") is not None
        if not is_measured or not (rate := _rate(config, bucket)):
            return [found]
        return [found, compression_finding(_CHECK, config.compression, rate)]
    finally:
        bucket.close()


def _look(config: ObjectsConfig, bucket: Bucket) -> Finding:
    began = time.monotonic()
    try:
        bucket.get(ObjectRange(f"{config.prefix}/doctor", 0, 1), began + bucket.timeout)
    except StorageFailed as refused:
        if refused.outcome is not Outcome.ABSENT:
            return refusal(_CHECK, explanation(config, refused))
    took = time.monotonic() - began
    found = f"bucket {config.bucket} at {place_of(config)} answers in {1000 * took:.0f} ms"
    if took > _SLOW_SECONDS:
        return warning(_CHECK, found, "use a store nearer to this machine: a read waits so long for its first byte")
    return ok(_CHECK, found)


def _rate(config: ObjectsConfig, bucket: Bucket) -> float | None:
    """Bytes a second of one request: the best read of a batch-sized object, then deleted. None: no answer."""
    key = f"{config.prefix}/blocks/doctor-{secrets.token_hex(8)}"  # the lifecycle rule removes it if we do not
    began, best = time.monotonic(), 0.0
    try:
        bucket.put(key, [bytes(BATCH_BYTES)])
        for _ in range(_ROUNDS):
            start = time.monotonic()
            came = bucket.get(ObjectRange(key, 0, BATCH_BYTES), start + bucket.timeout)
            best = max(best, came.nbytes / (time.monotonic() - start))
            if time.monotonic() - began > _LONGEST_SECONDS:
                break
    except StorageFailed:
        return None
    finally:
        with suppress(StorageFailed):
            bucket.delete([key])
    return best


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [objects] names no bucket. ConfigError if its client is not installed."""
    if config.objects.bucket is None:
        return None
    require_client(config.objects)

    def reach() -> ObjectStore:
        return ObjectStore.open(config.objects, fingerprint, slot_bytes=shape.block_bytes, block_size=shape.block_size)

    # a write may send three requests, the last one just before its deadline
    batch = max(BATCH_BYTES, shape.block_bytes) / config.objects.bandwidth
    return ConfiguredTier(reach, 3 * (config.objects.connect_timeout + config.objects.deadline + batch))


def checked(config: Config) -> str | None:
    """Reads the key and the certificates, without a connection: a server that is down is found later."""
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
    """The bucket, by one read of an object that may not exist."""
    return [] if config.objects.bucket is None else check_objects(config.objects, in_full=False)


def examine(config: Config) -> list[Finding]:
    """The bucket in [objects], and whether compression pays. Each reply has a deadline of seconds."""
    return check_objects(config.objects)


def require_client(config: ObjectsConfig) -> None:
    """ConfigError, if the package is missing that the extra `objects` brings."""
    if find_spec("obstore") is None:
        raise ConfigError(
            f'[objects] bucket "{config.bucket}": needs obstore; {install_command("objects")}, or leave bucket out'
        )
