"""A daemon's own token if none is configured: made at its start, in a file that only its user can read."""

import json
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import SecretStr

from kvtier.service import private_file
from kvtier.tiers import ConfigError

_log = logging.getLogger(__name__)

_BYTES: Final = 32
_MOST: Final = 4096  # bytes of the file


class OperatorToken(NamedTuple):
    """The token that admin requests carry, and the file where `kvtier` finds it; None: the token was configured."""

    secret: SecretStr
    file: Path | None
    http: str = ""

    @classmethod
    def of(cls, given: SecretStr | None, socket: Path, http: str) -> "OperatorToken":
        """The configured token; if there is none, a new one for the daemon at `socket` with pages at `http`.

        Without a writable file, no client has it.
        """
        if given is not None:
            return cls(given, None)
        file, secret = Path(f"{socket.absolute()}.token"), secrets.token_urlsafe(_BYTES)
        try:
            _write(file, http, secret)
        except (OSError, ConfigError) as error:
            _log.warning(
                '[service] token none: "%s" cannot be written (%s), so no verb works; set a token', file, error
            )
            return cls(SecretStr(secret), None, http)
        return cls(SecretStr(secret), file, http)

    def keep(self) -> None:
        """Write the file again if it was removed, with the same token. May wait."""
        if self.file is not None and not self.file.exists():
            with suppress(OSError, ConfigError):
                _write(self.file, self.http, self.secret.get_secret_value())

    def forget(self) -> None:
        """Remove the file at the daemon's end, unless another daemon's is there now."""
        if self.file is not None:
            with suppress(OSError, ConfigError):
                if read_token(self.file)[1].get_secret_value() == self.secret.get_secret_value():
                    self.file.unlink()


def _write(file: Path, http: str, secret: str) -> None:
    """Raises OSError or ConfigError."""
    own = file.with_name(f".{file.name}-{os.getpid()}")
    own.unlink(missing_ok=True)
    with private_file(own) as out:
        out.write(json.dumps({"http": http, "token": secret}).encode())
    own.replace(file)


def token_at(file: Path, http: str) -> SecretStr:
    """The token in a daemon's file. ConfigError unless the file is this user's or root's, for the pages at `http`."""
    address, secret = read_token(file)
    if address != http and not (_is_local(address) and _is_local(http) and _port(address) == _port(http)):
        raise ConfigError(f'"{file}": the token of the daemon at {address}, not of {http}; give --token')
    return secret


def read_token(file: Path) -> tuple[str, SecretStr]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            about = os.fstat(opened.fileno())
            if about.st_uid not in (os.geteuid(), 0) or about.st_mode & 0o077:
                raise ConfigError(f"\"{file}\": another user's, or readable by others: no daemon's token; give --token")
            content = json.loads(opened.read(_MOST))
            return str(content["http"]), SecretStr(str(content["token"]))
    except OSError as error:
        raise ConfigError(f'"{file}": {error.strerror}; run this as the daemon\'s user, or give --token') from None
    except (ValueError, TypeError, LookupError):
        raise ConfigError(f'"{file}": not a daemon\'s token; give --token') from None


def _is_local(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _port(address: str) -> str:
    return address.rpartition(":")[2]
