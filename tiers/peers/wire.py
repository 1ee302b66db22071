"""The protocol between the daemons of two nodes over TCP, and the proof that each has the key (docs/storage.md).

One connection is for the blocks of one model. The lender, which has the blocks, sends first. All integers are
little-endian:

1. challenge: magic, a nonce
2. hello: magic, a nonce, fingerprint, bytes and tokens of a block, the borrower's id; proof
3. welcome: the reply, the lender's id; proof
4. questions: verb, number of names, the names; proof
5. answers: verb, a number. To HELD then a byte for each name, to EVENTS an `EventsAt`, else nothing; proof. To LEND
   that many blocks follow, the leading ones of the question's: head, payload, tag each

KV_PROBE compares models: the borrower's packed KV probe in place of names, filled up with zeros. If the lender's model
computes otherwise, the number is 1, and it sends no blocks on this connection.

MEMORY is for [peers] transport "nixl": behind the number, NIXL's metadata of the lender's memory, filled up with zeros;
the number is its length, or 0: none. Then PLACES replaces LEND: of each block come head, address (u64) and tag. The
lender keeps the blocks until the next question, which may be DONE: it has no answer.

HOLDERS and REPORT are for the owners of a ring (`ring.py`), who know which nodes hold blocks by keys, the last eight
bytes of their names. In place of names they have a header and keys, filled up with zeros: the number of keys; or
node (16 + u16), epoch (u64), number of the report, keys added, keys removed (u16 each). HOLDERS is answered by three
nodes a key, zeros for none. REPORT is answered by 1, or 0: start over.

A proof is HMAC-SHA256 under a key of the connection alone, over its message and the number of the question. A tag is
a MAC over head and payload, under a key made from the shared one and the fingerprint (`BlockTags`). A block that is
sent again has its tag already. Nothing is encrypted.
"""

import hmac
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import Final

from kvtier.tiers import BlockRecord, ChainHash, ConfigError, FormatError, derive, install_command, load_key
from kvtier.tiers.naming import PROBE_BYTES, KVProbe
from kvtier.tiers.peers.ring import MAX_HOLDERS, MAX_PROBES, MAX_REPORTED, Report
from kvtier.tiers.peers.stream import TAG_BYTES, BlockTags, PeerAddress

MAGIC: Final = b"kvtier peers 1\r\n"
NONCE_BYTES: Final = 32
NODE_BYTES: Final = 16
PROOF_BYTES: Final = 32
MAX_NAMES: Final = 1024  # in one question
HASH_BYTES: Final = 32
CHALLENGE_BYTES: Final = len(MAGIC) + NONCE_BYTES

_HELLO: Final = Struct(f"<{len(MAGIC)}s{NONCE_BYTES}s{HASH_BYTES}sQI{NODE_BYTES}s")
_WELCOME: Final = Struct(f"<B{NODE_BYTES}s")
_WORDS: Final = Struct("<BxxxI")  # verb, number
HELLO_BYTES: Final = _HELLO.size + PROOF_BYTES
WELCOME_BYTES: Final = _WELCOME.size + PROOF_BYTES
WORDS_BYTES: Final = _WORDS.size
ADDRESS: Final = Struct("<Q")
_NODE: Final = Struct("<16sH")  # a node's address and port; IPv4 as ::ffff:a.b.c.d
_REPORT: Final = Struct("<16sHQHHH")
_QUERY: Final = Struct("<H30x")
_KEY_BYTES: Final = 8
HOLDERS_BYTES: Final = _NODE.size * MAX_HOLDERS  # of one key, in an answer
_V4: Final = bytes(10) + b"\xff\xff"
_SEED: Final = os.urandom(NODE_BYTES)


def own_node() -> bytes:
    """This process's id: an address of its own among the nodes is skipped. A fork has another one."""
    return blake2b(os.getpid().to_bytes(8, "little"), key=_SEED, digest_size=NODE_BYTES).digest()


class PeerVerb(IntEnum):
    """The kinds of questions."""

    HELD = 1  # which of these blocks are held?
    LEND = 2  # these blocks
    EVENTS = 3  # where are this node's KV events of the model (whose fingerprint is the one name)?
    KV_PROBE = 4  # does this node's model compute the same KV as these names, a KV probe, say?
    MEMORY = 5  # how is this node's memory read (of the model whose fingerprint is the one name)?
    PLACES = 6  # where do these blocks lie?
    DONE = 7  # the places of the last answer are not needed any more
    HOLDERS = 8  # which nodes hold blocks of these keys?
    REPORT = 9  # this node holds, or no longer holds, blocks of these keys


_VERBS: Final = frozenset(PeerVerb)


class Greeting(IntEnum):
    """The replies to a hello whose proof is right."""

    WELCOME = 0
    OTHER_BLOCKS = 1  # this model's blocks here are of another size
    BUSY = 2  # the limit of connections is reached


class ProtocolError(Exception):
    """A message that no node with the key sends."""


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """The format of the blocks of one connection."""

    fingerprint: bytes  # of the model, 32 bytes
    slot_bytes: int
    block_size: int  # tokens


def shared_key(path: Path) -> bytes:
    """The key that all nodes share, from [peers] key_file. ConfigError if it cannot be used, or `aeg` is missing."""
    try:
        BlockTags(bytes(32))
    except ImportError as error:
        raise ConfigError(
            f'[peers] key_file "{path}": needs aeg 0.9 ({error}); {install_command("peers")}, or leave out [peers]'
        ) from None
    return derive(load_key(path, "[peers] key_file"), b"kvtier peers")


def pack_query(keys: Sequence[int]) -> list[bytes]:
    """The words of a HOLDERS question."""
    return [_QUERY.pack(len(keys)), *_pack_keys(keys)]


def unpack_query(words: Sequence[bytes]) -> list[int]:
    """Inverse of `pack_query`. ProtocolError."""
    (count,) = _QUERY.unpack(words[0])
    keys = _unpack_keys(words, count)
    if not 0 < count <= MAX_PROBES or pack_query(keys) != words:
        raise ProtocolError("keys")
    return keys


def pack_report(report: Report) -> list[bytes]:
    """The words of a REPORT question."""
    host, port = _packed(report.node)
    head = _REPORT.pack(host, port, report.epoch, report.seq, len(report.added), len(report.removed))
    return [head, *_pack_keys([*report.added, *report.removed])]


def unpack_report(words: Sequence[bytes]) -> Report:
    """Inverse of `pack_report`. ProtocolError."""
    host, port, epoch, seq, num_added, num_removed = _REPORT.unpack(words[0])
    count, node = num_added + num_removed, _unpacked(host, port)
    keys = _unpack_keys(words, count)
    report = None if node is None else Report(node, epoch, seq, keys[:num_added], keys[num_added:])
    if report is None or count > MAX_REPORTED or pack_report(report) != words:
        raise ProtocolError("keys")
    return report


def pack_holders(found: Sequence[Sequence[PeerAddress]]) -> bytes:
    return b"".join(
        b"".join(_NODE.pack(*_packed(node)) for node in nodes).ljust(HOLDERS_BYTES, b"\0") for nodes in found
    )


def unpack_holders(data: bytes) -> list[list[PeerAddress]]:
    rows = [_NODE.iter_unpack(data[at : at + HOLDERS_BYTES]) for at in range(0, len(data), HOLDERS_BYTES)]
    return [[node for each in row if (node := _unpacked(*each)) is not None] for row in rows]


def _pack_keys(keys: Sequence[int]) -> list[bytes]:
    packed = Struct(f"<{len(keys)}Q").pack(*keys)
    return [packed[at : at + HASH_BYTES].ljust(HASH_BYTES, b"\0") for at in range(0, len(packed), HASH_BYTES)]


def _unpack_keys(words: Sequence[bytes], count: int) -> list[int]:
    packed = b"".join(words[1:])
    return [int.from_bytes(packed[at : at + _KEY_BYTES], "little") for at in range(0, len(packed), _KEY_BYTES)][:count]


def _packed(node: PeerAddress) -> tuple[bytes, int]:
    host, port = node
    if ":" in host:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0]), port
    return _V4 + socket.inet_pton(socket.AF_INET, host), port


def _unpacked(host: bytes, port: int) -> PeerAddress | None:
    if not port:
        return None
    family, packed = (socket.AF_INET, host[12:]) if host.startswith(_V4) else (socket.AF_INET6, host)
    return socket.inet_ntop(family, packed), port


def pack_challenge(nonce: bytes) -> bytes:
    return MAGIC + nonce


def unpack_challenge(data: bytes) -> bytes:
    """The lender's nonce. ProtocolError."""
    if not data.startswith(MAGIC):
        raise ProtocolError("magic")
    return data[len(MAGIC) :]


class PeerSession:
    """The keys of one connection, and the form of all its messages after the challenge.

    Both ends make one. Questions are counted, and their number is part of every proof. So no message can be repeated,
    reordered, or sent to another node. A block's tag is valid on any connection: its name determines its bytes.
    """

    def __init__(self, key: bytes, challenge: bytes, nonce: bytes, blocks: LentBlocks) -> None:
        self.blocks = blocks
        self._nonce = nonce
        self._key = derive(key, challenge + nonce + blocks.fingerprint)
        self.mac = BlockTags(derive(key, b"blocks" + blocks.fingerprint))
        self._head = Struct(f"<{HASH_BYTES}s{HASH_BYTES}sIQ{4 * blocks.block_size}s")
        self.head_bytes = self._head.size
        self.place_bytes = self._head.size + ADDRESS.size + TAG_BYTES
        self.number = 0  # of the current question, or the last one
        self.probe: KVProbe | None = None  # at the lender: the KV probe of the borrower's model, if it sent one
        self.compared: tuple[KVProbe, bool] | None = None  # … and whether the lender's model computes that, too

    # the handshake

    def hello(self, node: bytes) -> bytes:
        """The borrower's first message."""
        blocks = self.blocks
        message = _HELLO.pack(MAGIC, self._nonce, blocks.fingerprint, blocks.slot_bytes, blocks.block_size, node)
        return message + self._proof(b"hello", message)

    @classmethod
    def accept(cls, key: bytes, challenge: bytes, data: bytes) -> "tuple[PeerSession, bytes]":
        """The other end of `hello`, and the borrower's id. ProtocolError if it is not proven."""
        magic, nonce, fingerprint, slot_bytes, block_size, node = _HELLO.unpack(data[: _HELLO.size])
        if magic != MAGIC:
            raise ProtocolError("magic")
        if not (0 < slot_bytes < 1 << 40 and 0 < block_size <= 1 << 16):
            raise ProtocolError("sizes")
        session = cls(key, challenge, nonce, LentBlocks(fingerprint, slot_bytes, block_size))
        session._require(data[_HELLO.size :], b"hello", data[: _HELLO.size])
        return session, node

    def welcome(self, reply: Greeting, node: bytes) -> bytes:
        message = _WELCOME.pack(reply, node)
        return message + self._proof(b"welcome", message)

    def read_welcome(self, data: bytes) -> tuple[Greeting, bytes]:
        """The reply, and the lender's id. ProtocolError if it is not proven."""
        message = data[: _WELCOME.size]
        self._require(data[_WELCOME.size :], b"welcome", message)
        reply, node = _WELCOME.unpack(message)
        try:
            return Greeting(reply), node
        except ValueError:
            raise ProtocolError("reply") from None

    # questions and answers

    def question(self, verb: PeerVerb, names: Sequence[ChainHash]) -> bytes:
        """A new question, of up to MAX_NAMES names."""
        self.number += 1
        message = _WORDS.pack(verb, len(names)) + b"".join(names)
        return message + self._proof(b"question", message)

    def probe_question(self, packed: bytes) -> bytes:
        """A new question, whether the lender's model computes the KV of this probe."""
        whole = packed.ljust(PROBE_BYTES, b"\0")
        return self.question(PeerVerb.KV_PROBE, [whole[i : i + HASH_BYTES] for i in range(0, PROBE_BYTES, HASH_BYTES)])

    def note_probe(self, names: Sequence[ChainHash]) -> None:
        """Take the probe of a received `probe_question`. ProtocolError if it is none."""
        try:
            self.probe = KVProbe.unpack(b"".join(names))
        except FormatError:
            raise ProtocolError("probe") from None

    @staticmethod
    def question_bytes(words: bytes) -> int:
        """How many bytes follow the first words of a question. ProtocolError if no question begins so."""
        verb, count = _WORDS.unpack(words)
        if verb not in _VERBS or not 0 < count <= MAX_NAMES:
            raise ProtocolError("question")
        return int(count) * HASH_BYTES + PROOF_BYTES

    def read_question(self, words: bytes, rest: bytes) -> tuple[PeerVerb, list[ChainHash]]:
        """The question's verb and names. ProtocolError if it is not proven."""
        self.number += 1
        names = rest[:-PROOF_BYTES]
        self._require(rest[-PROOF_BYTES:], b"question", words + names)
        verb, _ = _WORDS.unpack(words)
        return PeerVerb(verb), [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)]

    def answer(self, verb: PeerVerb, count: int, flags: bytes = b"") -> bytes:
        message = _WORDS.pack(verb, count) + flags
        return message + self._proof(b"answer", message)

    def read_answer(self, verb: PeerVerb, data: bytes, most: int) -> tuple[int, bytes]:
        """The number, at most `most`, and the bytes behind it. ProtocolError if it is not proven."""
        message = data[:-PROOF_BYTES]
        self._require(data[-PROOF_BYTES:], b"answer", message)
        answered, count = _WORDS.unpack(message[:WORDS_BYTES])
        if answered != verb or count > most:
            raise ProtocolError("answer")
        return count, message[WORDS_BYTES:]

    # blocks

    def pack_head(self, record: BlockRecord) -> bytes:
        return self._head.pack(
            record.chain_hash, record.parent, len(record.tokens) // 4, record.checksum, record.tokens
        )

    def read_head(self, head: bytes | memoryview) -> BlockRecord:
        """The block's record by its lender. ProtocolError if encoding it again gives other bytes."""
        chain_hash, parent, num_tokens, checksum, tokens = self._head.unpack(head)
        record = BlockRecord(chain_hash, parent, tokens[: 4 * num_tokens], checksum)
        if self.pack_head(record) != head:
            raise ProtocolError("head")
        return record

    def tag(self, head: bytes | memoryview, payload: memoryview) -> bytes:
        """Of a block: 16 bytes."""
        return self.mac.tag(head, payload)

    def _proof(self, what: bytes, message: bytes) -> bytes:
        return hmac.digest(self._key, what.ljust(16, b"\0") + self.number.to_bytes(8, "little") + message, "sha256")

    def _require(self, proof: bytes, what: bytes, message: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(what, message)):
            raise ProtocolError("proof")
