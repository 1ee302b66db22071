"""Makes the TLS context that verifies https replicas."""

import ssl
from pathlib import Path

from kvtier.tiers import ConfigError


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Verify certificates and their host names by `ca_file` alone, or by the system's authorities if that is None.

    Raises ConfigError if the file has no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or str(error)
        raise ConfigError(f'[router] replica_ca "{ca_file}": {why}; give a file of PEM certificates') from None
    context.set_alpn_protocols(["http/1.1"])
    return context
