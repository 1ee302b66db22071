"""What `kvtier doctor` asks of an object store: reachable, the bucket there, its objects readable. Writes nothing."""

import time
from typing import Final

from kvtier.tiers import ConfigError, Finding, KVTierError, Outcome, error, load_key, ok, warning
from kvtier.tiers.config import ObjectsConfig
from kvtier.tiers.objects.bucket import Bucket, BucketError, ObjectRange
from kvtier.tiers.objects.refusals import explanation, place_of

_CHECK: Final = "objects"
_ANSWER_SECONDS: Final = 2.0  # at the least; a doctor is more patient than a tier
_SLOW_SECONDS: Final = 0.5


def check_objects(config: ObjectsConfig) -> list[Finding]:
    """What is to be said of the bucket, on or off."""
    if config.bucket is None:
        return [ok(_CHECK, "off: no [objects] bucket")]
    patient = config.model_copy(update={"deadline": max(config.deadline, _ANSWER_SECONDS)})
    try:
        if config.key_file is not None:
            load_key(config.key_file, "[objects] key_file")
        bucket = Bucket.connect(patient, 0)
    except ConfigError as refused:
        return [finding_of(refused)]
    try:
        return [_look(config, bucket)]
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
    found = f"bucket {config.bucket} at {place_of(config)} answers in {1000 * took:.0f} ms; nothing was written"
    if took > _SLOW_SECONDS:
        return warning(_CHECK, found, "use a store nearer to this machine: a read waits so long for its first byte")
    return ok(_CHECK, found)
