"""Who may read KV events, since they hold prompts: those who enter a socket's directory, or who have a CURVE key."""

import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from kvtier.tiers import ConfigError

ZAP: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a key may connect (ZeroMQ RFC 27)."""

_MAKE: Final = "make one by zmq.auth.create_certificates (docs/routing.md)"
_KEY_LENGTH: Final = 32  # bytes; 40 characters in Z85
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's key pair and the other side's public key, in Z85. They count at tcp:// addresses alone."""

    public: bytes
    secret: bytes
    other: bytes
    lets_own_in: bool = False  # whoever has this very pair may connect, too: another node's daemon

    @classmethod
    def load(cls, section: str, own: Path | None, other_name: str, other: Path | None) -> "CurveKeys | None":
        """From `[section] curve_key_file`, which nobody else may read, and the other side's file; None without them.

        ConfigError for anything that is no key, or that others can read.
        """
        if own is None or other is None:  # the configuration has both or none
            return None
        option = f'[{section}] curve_key_file "{own}"'
        if not zmq.has("curve"):
            raise ConfigError(f"{option}: this libzmq knows no CURVE; install pyzmq from a wheel")
        public, secret = _certificate(option, own)
        if secret is None:
            raise ConfigError(f"{option}: no secret key in it; name the file that ends with .key_secret")
        if own.stat().st_mode & _OTHERS:
            raise ConfigError(f"{option}: others can read this secret; chmod 600 it")
        return cls(public, secret, _certificate(f'[{section}] {other_name} "{other}"', other)[0])

    def of_a_node(self) -> "CurveKeys":
        """What a daemon presents to another one, whose publisher has the same pair and `lets_own_in`."""
        return CurveKeys(self.public, self.secret, self.public)

    def guard(self, bound: "zmq.Socket[bytes]", domain: bytes = b"kvtier") -> None:
        """Before `bind`: let nobody in but whom `answer` does."""
        bound.curve_server = True
        bound.curve_publickey, bound.curve_secretkey = self.public, self.secret
        bound.zap_domain = domain

    def present(self, connecting: "zmq.Socket[bytes]") -> None:
        """Before `connect`: say who we are, and talk to nobody but who has the other key."""
        connecting.curve_serverkey = self.other
        connecting.curve_publickey, connecting.curve_secretkey = self.public, self.secret

    def answer(self, request: Sequence[bytes]) -> tuple[list[bytes], bool]:
        """The reply to what libzmq asks at `ZAP`, and whether it lets the other side in.

        A request is version, number, domain, address, identity, mechanism and the client's key of 32 bytes.
        """
        mechanism, key = request[5:7] if len(request) == 7 else (b"", b"")
        accepted = [z85.decode(each) for each in ([self.other, self.public] if self.lets_own_in else [self.other])]
        known = mechanism == b"CURVE" and key in accepted
        number = request[1] if len(request) > 1 else b""
        return [b"1.0", number, *((b"200", b"OK") if known else (b"400", b"unknown key")), b"", b""], known


def require_private(option: str, address: str) -> None:
    """ConfigError if other users of this machine can reach an ipc:// address."""
    name = address.removeprefix("ipc://")
    if not address.startswith("ipc://") or name == "*":  # for which libzmq makes a directory of its own
        return
    where = f'[events] {option} "{address}"'
    if name.startswith("@"):
        raise ConfigError(f"{where}: everybody reaches a name without a file; use a path in a directory of mode 0700")
    path = Path(name)
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; make that directory, of mode 0700") from None
    if mode & _OTHERS:
        fix = "chmod 700 it, or set allow_remote"
        raise ConfigError(f"{where}: others can enter {path.parent}, and events hold prompts; {fix}")


def require_unused(option: str, address: str) -> None:
    """ConfigError if somebody listens at an ipc:// address: libzmq would take it from them without notice."""
    if not address.startswith("ipc://") or address == "ipc://*":
        return
    name = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect("\0" + name[1:] if name.startswith("@") else name)
        except OSError:
            return
    raise ConfigError(f'[events] {option} "{address}": another process listens there; choose another path')


def _certificate(option: str, path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError):
        raise ConfigError(f"{option}: no file with a CURVE key; {_MAKE}") from None
    try:
        keys = [z85.decode(key) for key in (public, secret) if key is not None]
    except (KeyError, ValueError, struct.error):
        keys = [b""]
    if not all(len(key) == _KEY_LENGTH for key in keys):
        raise ConfigError(f"{option}: a key in it is not {_KEY_LENGTH} bytes in Z85; {_MAKE}")
    if secret is not None and zmq.curve_public(secret) != public:
        raise ConfigError(f"{option}: the two keys in it are no pair; {_MAKE}")
    return public, secret
