"""What a user must fix if the bucket refuses, in one line without secrets."""

import logging
from threading import Lock
from typing import Final

from kvtier.tiers import ConfigError, KVTierError, TierUnavailable
from kvtier.tiers.config import ObjectsConfig
from kvtier.tiers.objects.bucket import BROKE_OFF, CERTIFICATE, NO_S3, BucketError

_log = logging.getLogger(__name__)

RIGHTS: Final = "s3:GetObject, s3:PutObject and s3:DeleteObject on its objects and s3:ListBucket on itself"
_WRONG_KEY: Final = ("SignatureDoesNotMatch", "AuthFailure")
_WRONG_ID: Final = ("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId")
_IN_TIME: Final = {  # what mends itself, or is mended, with no other setting
    "ExpiredToken": "its credentials have expired; renew them",
    "ExpiredTokenException": "its credentials have expired; renew them",
    "RequestTimeTooSkewed": "the store's clock and this machine's differ; set them",
}
_MOST_TOLD: Final = 16


def place_of(config: ObjectsConfig) -> str:
    """Where the bucket is."""
    return config.endpoint or f"AWS, {config.region}"


def explanation(config: ObjectsConfig, error: BucketError) -> KVTierError:
    """ConfigError if trying again later would not help, else TierUnavailable."""
    where = place_of(config)
    if error.code == "credentials":
        return ConfigError(
            "[objects] access_key_id: none is given, and neither AWS's variables nor this machine's role have one; set "
            "it and secret_access_key"
        )
    if error.code == "NoSuchBucket":
        return ConfigError(f'[objects] bucket "{config.bucket}": {where} has none of that name; create it, or fix it')
    if error.code in _WRONG_KEY:
        return ConfigError(f"[objects] secret_access_key (not shown): {where} refuses it; set the right one")
    if error.code in _WRONG_ID:
        return ConfigError(f"[objects] access_key_id: {where} refuses it ({error.code}); set the right one")
    if error.code in ("AccessDenied", "AllAccessDisabled", "AccountProblem"):
        return ConfigError(f'[objects] bucket "{config.bucket}": {where} denies access; grant {RIGHTS}')
    if error.code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
        return ConfigError(f'[objects] region "{config.region}": the bucket is in another; set its own')
    if error.code in _IN_TIME:
        return TierUnavailable(f"[objects] {where}: {_IN_TIME[error.code]}")
    if error.code == CERTIFICATE:
        return TierUnavailable(f"[objects] {where}: {error}; name the file of who signed it as ca")
    if error.code == BROKE_OFF:
        return TierUnavailable(
            f"[objects] {where}: {error}; see whether AWS's variables, or what the role gives, hold a line's end"
        )
    if error.code == NO_S3:
        return TierUnavailable(f"[objects] {where}: no S3 ({error}); set endpoint to the address of one")
    if error.code:
        return TierUnavailable(f"[objects] {where}: it answers {error.code}; see what that means there")
    return TierUnavailable(f"[objects] {where}: {error}; see whether it runs, and is reached from here")


class ToldRefusals:
    """Logs why the bucket refuses what it is asked, each of S3's words once: counters say no more than `io_error`."""

    def __init__(self, config: ObjectsConfig) -> None:
        self._config = config
        self._lock = Lock()
        self._told: set[str] = set()

    def tell(self, error: BucketError) -> None:
        with self._lock:
            if not error.code or error.code in self._told or len(self._told) >= _MOST_TOLD:
                return
            self._told.add(error.code)
        _log.warning("blocks are not stored: %s", explanation(self._config, error))
