"""The exceptions kvtier raises, at start-up and from tools; never into a running engine.

KVTierError
├── ConfigError          a value the user gave cannot be used (names the field, the value and the fix)
├── FormatError          bytes on disk or wire are not in a format this version reads
├── FingerprintMismatch  the bytes belong to another model, dtype or layout
│   └── KVMismatch       … or to one of the same weights that computes other KV
├── StoreLocked          another process owns the store (names its pid)
├── TierUnavailable      a tier could not be opened or reached
├── RequestError         a request cannot be served
└── MissingPackages      what an extra brings is not installed (names the packages)
"""


class KVTierError(Exception):
    """Root of every exception raised by kvtier."""


class ConfigError(KVTierError):
    """A value the user gave cannot be used. The message names the field, the value and the fix."""


class FormatError(KVTierError):
    """Bytes on disk or wire are not in a format this version reads; they were left untouched."""


class FingerprintMismatch(KVTierError):
    """The bytes belong to another model, dtype, block size or layout."""


class KVMismatch(FingerprintMismatch):
    """The namespace holds KV that a model of the same name computed otherwise. The message says how far it is apart."""


class StoreLocked(KVTierError):
    """Another process owns the store; the message names its pid."""


class TierUnavailable(KVTierError):
    """A tier could not be opened or reached."""


class RequestError(KVTierError, ValueError):
    """A request cannot be served. The engine goes on serving the others."""


class MissingPackages(KVTierError, ImportError):
    """Packages of an extra are not installed. The message names them all, and the command that installs them."""
