"""Who is at the other end, and the first frame each way: a client says what it wants, the daemon lets it in or not.

A client's is a `Hello` or a `Join`, the daemon's a `Welcome`, `Joined` or `Refused`. The version stands
before everything that may change with it. Each side takes the versions of two releases before its own, and answers in
the one it was spoken to. A client that is refused in a lower one speaks that.
"""

import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from kvtier.connector.daemon.fields import ID_BYTES, decoded, flag, number, octets, octets_up_to, seconds, text
from kvtier.connector.daemon.versions import VERSION, checked_version, fields_of
from kvtier.connector.daemon.wire import pack_frame
from kvtier.tiers import FormatError
from kvtier.tiers.naming import PROBE_BYTES

_MAGIC: Final = "kvtier"
_MAX_SLOTS: Final = 1 << 32
_PEER: Final = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77  # Linux 6.5, asm-generic/socket.h; Python has no name for it


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int  # 0: it lives in a pid namespace this process does not see
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected; asked by a client, the one that listens."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Peer(pid, uid)


def pidfd_of(connection: socket.socket, peer: Peer) -> int:
    """A pidfd of the process that connected. OSError if it is gone, or nobody can watch it from here.

    From Linux 6.5 on the socket itself has it. So it can't be another process that got the same pid since, and it may
    live in a pid namespace this process does not see.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(peer.pid)


def is_trusted(uid: int) -> bool:
    """Whether a user may have this one's blocks, or serve them."""
    return uid in (os.geteuid(), 0)


class Hello(NamedTuple):
    """A client asks for the tiers of one model."""

    fingerprint: bytes  # 32
    block_size: int  # tokens
    block_bytes: int
    size: int  # bytes of L2 it would like the model to have; 0: a share, as the daemon thinks right
    reset: bool  # a reset the daemon was not told of: everything is to be forgotten first
    about: Sequence[tuple[str, str]] = ()  # the fields that the fingerprint was made from, for people; none: not known
    lossy: str | None = None  # how tiers that nodes share keep the blocks (`ModelIdentity.lossy`); None: as they are
    kv_probe: bytes | None = None  # what the model computes of a few tokens, packed; None: it was not asked


class Join(NamedTuple):
    """A process that copies for a client says so: what the client holds is held until it has ended too."""

    client: bytes


class Welcome(NamedTuple):
    """The tiers are open; the region's file descriptor comes with this frame."""

    client: bytes  # how the client is called
    instance: bytes  # names this opening of the tiers: equal means the same region
    num_slots: int
    slot_bytes: int
    epoch: int
    has_lower: bool
    lease_deadline: float  # seconds a promise holds that nobody renews


class Joined(NamedTuple):
    """The process is watched from now on."""


class Refused(NamedTuple):
    """No, and why: one line for a person."""

    why: str
    is_other_kv: bool = False  # the namespace has the KV of a model that computes something else: KVMismatch


Handshake: TypeAlias = Hello | Join
HandshakeReply: TypeAlias = Welcome | Joined | Refused


def pack_handshake(handshake: Handshake | HandshakeReply, version: int = VERSION) -> bytes:
    """Its frame. What a version has no field for is left out."""
    kind = type(handshake).__name__
    return pack_frame([_MAGIC, version, kind, *fields_of(version, kind, list(handshake))])


@decoded
def version_of(body: Any) -> int:
    """Which version a frame is of. UnspokenVersion if this side does not speak it."""
    magic, version, *_ = body
    if magic != _MAGIC:
        raise FormatError("not a handshake of kvtier")
    return checked_version(version)


@decoded
def unpack_handshake(body: Any) -> Handshake:
    """A client's first frame. FormatError; UnspokenVersion."""
    kind, fields = _header(body)
    if kind == Join.__name__:
        (client,) = fields
        return Join(octets(client, ID_BYTES))
    if kind != Hello.__name__:
        raise FormatError(f"unknown handshake {kind!r:.40}")
    fingerprint, block_size, block_bytes, size, reset, about, *later = fields
    lossy, kv_probe = later or (None, None)
    hello = Hello(
        octets(fingerprint, 32), number(block_size, 1 << 20), number(block_bytes, 1 << 40), number(size), flag(reset),
        tuple((text(name), text(value)) for name, value in about), None if lossy is None else text(lossy),
        None if kv_probe is None else octets_up_to(kv_probe, PROBE_BYTES),
    )  # fmt: skip
    if not hello.block_size or not hello.block_bytes:
        raise FormatError(f"blocks of {hello.block_size} tokens and {hello.block_bytes} bytes")
    return hello


@decoded
def unpack_handshake_reply(body: Any) -> HandshakeReply:
    """The daemon's first frame. FormatError; UnspokenVersion."""
    kind, fields = _header(body)
    if kind == Refused.__name__:
        why, *later = fields
        (is_other_kv,) = later or (False,)
        return Refused(text(why), flag(is_other_kv))
    if kind == Joined.__name__ and not fields:
        return Joined()
    if kind != Welcome.__name__:
        raise FormatError(f"unknown answer to a handshake {kind!r:.40}")
    client, instance, num_slots, slot_bytes, epoch, has_lower, lease_deadline = fields
    return Welcome(
        octets(client, ID_BYTES),
        octets(instance, ID_BYTES),
        number(num_slots, _MAX_SLOTS),
        number(slot_bytes, 1 << 40),
        number(epoch),
        flag(has_lower),
        seconds(lease_deadline),
    )


def _header(body: Any) -> tuple[str, list[Any]]:
    version = version_of(body)
    _, _, kind, *fields = body
    if fields_of(version, kind, fields) != fields:
        raise FormatError(f"{kind!r:.40}: more fields than version {version} has")
    return text(kind), fields
