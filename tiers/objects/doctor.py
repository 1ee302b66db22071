"""What `kvtier doctor` asks of an object store: is it reachable, is there the bucket, how fast is it."""

import secrets
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Final

from kvtier.tiers import (
    BATCH_BYTES,
    ConfigError,
    Finding,
    KVTierError,
    Outcome,
    Status,
    compression_finding,
    error,
    load_key,
    ok,
    warning,
)
from kvtier.tiers.config import ObjectsConfig
from kvtier.tiers.objects.bucket import Bucket, BucketError, ObjectRange
from kvtier.tiers.objects.refusals import explanation, place_of

_CHECK: Final = "objects"
_ANSWER_SECONDS: Final = 2.0  # at the least; a doctor is more patient than a tier
_SLOW_SECONDS: Final = 0.5
_ROUNDS: Final = 4
_LONGEST_SECONDS: Final = 2.0  # then no further round begins


def check_objects(config: ObjectsConfig, *, in_full: bool = True) -> list[Finding]:
    """What is to be said of the bucket, on or off; in full also of compression, which takes reads and time."""
    if config.bucket is None:
        return [ok(_CHECK, "off: no [objects] bucket")]
    patient = config.model_copy(update={"deadline": max(config.deadline, _ANSWER_SECONDS)})
    try:
        if config.key_file is not None:
            load_key(config.key_file, "[objects] key_file")
        bucket = Bucket.connect(patient)
    except ConfigError as refused:
        return [finding_of(refused)]
    try:
        found = _look(config, bucket)
        is_measured = in_full and found.status is not Status.ERROR and find_spec("zstandard") is not None
        if not is_measured or not (rate := _rate(config, bucket)):
            return [found]
        return [found, compression_finding(_CHECK, config.compression, rate)]
    finally:
        bucket.close()


def finding_of(refused: KVTierError) -> Finding:
    """A refusal in one line, as a finding and its fix."""
    found, _, fix = str(refused).partition("; ")
    return error(_CHECK, found, fix)


def _look(config: ObjectsConfig, bucket: Bucket) -> Finding:
    began = time.monotonic()
    try:
        bucket.get(ObjectRange(f"{config.prefix}/doctor", 0, 1), began + bucket.timeout)
    except BucketError as refused:
        if refused.outcome is not Outcome.ABSENT:
            return finding_of(explanation(config, refused))
    took = time.monotonic() - began
    found = f"bucket {config.bucket} at {place_of(config)} answers in {1000 * took:.0f} ms"
    if took > _SLOW_SECONDS:
        return warning(_CHECK, found, "use a store nearer to this machine: a read waits so long for its first byte")
    return ok(_CHECK, found)


def _rate(config: ObjectsConfig, bucket: Bucket) -> float | None:
    """Bytes a second that one request brings: the best of some reads of an object as long as a batch, which goes again.

    None of a store that is slow or gone, or if nobody may write there.
    """
    key = f"{config.prefix}/blocks/doctor-{secrets.token_hex(8)}"  # what is left of it the lifecycle rule removes
    began, best = time.monotonic(), 0.0
    try:
        bucket.put(key, [bytes(BATCH_BYTES)])
        for _ in range(_ROUNDS):
            start = time.monotonic()
            came = bucket.get(ObjectRange(key, 0, BATCH_BYTES), start + bucket.timeout)
            best = max(best, came.nbytes / (time.monotonic() - start))
            if time.monotonic() - began > _LONGEST_SECONDS:
                break
    except BucketError:
        return None
    finally:
        with suppress(BucketError):
            bucket.delete([key])
    return best
