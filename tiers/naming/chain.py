"""Names of blocks: the fingerprint of all that changes KV bytes, a chain's root, and the hash of each full block.

    fingerprint = SHA-256(canonical msgpack of `ModelIdentity`), see `identity.py`
    root        = SHA-256("kvtier-root-v1" ‖ fingerprint ‖ cache_salt ‖ LoRA name ‖ LoRA digest)
                  each of the three as 00 if there is none, else 01 ‖ u64 length ‖ bytes
    hash i      = H(parent ‖ u32 token count ‖ tokens, u32 each ‖ extra keys)
                  each extra key as u32 length ‖ tag ‖ u64 length ‖ value

All integers little-endian; the parent of block 0 is the root. H is SHA-256, or by the scheme "xxh3" xxh3-128 with its
16-byte digest written twice (so that any 8 bytes of a name differ between blocks). That is four times faster, and no
defence against an attacker who searches for collisions. Nothing here depends on `hash()`, the process or the machine.
"""

import hashlib
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, ChildBlock
from kvtier.tiers.compiled import extension

Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids, each in [0, 2**32). Lists, tuples, `array` and one-dimensional integer ndarrays are equally good."""

BlockExtraKeys = Mapping[int, Sequence[tuple[str, bytes]]]
"""Block index → (tag, value) pairs that name what else shapes that block's KV (an image, a soft prompt), in order."""

_MAX_TOKEN: Final = 2**32 - 1
_ROOT_TAG: Final = b"kvtier-root-v1"
_IS_LITTLE: Final = sys.byteorder == "little"
_STATE_TAG: Final = b"kvtier-state-v1"
_POOL_TAG: Final = b"kvtier-pool-v1"
_ONE: Final = array("I", (0,))

PIECE: Final = 8192  # blocks named in one call: the GIL is kept while their names become objects
IDS: Final = 1 << 16  # ids read in one call: the GIL is kept meanwhile

RUN: Final = 64  # blocks in a run
_MOST: Final = 32 << 20  # bytes: at blocks of 16 the names of 3.6 million tokens, at blocks of 64 of 6.4 million
_OVERHEAD: Final = 512 + RUN * (32 + 41)  # bytes of a run besides its key: its names as Python keeps them


@cache
def compiled() -> ModuleType | None:
    """The extension module of these loops, or None: it was not built, or this machine is big-endian."""
    usual = sys.byteorder == "little" and array("I").itemsize == 4
    return extension("kvtier.tiers.naming.chain_compiled") if usual else None


def token_array(tokens: Tokens) -> "array[int]":
    """The ids as an array of native u32. ValueError names the first one outside [0, 2**32); TypeError for no ids."""
    if isinstance(tokens, np.ndarray | array):
        return _from_buffer(tokens)
    if isinstance(tokens, bytes | bytearray | memoryview | str):
        raise TypeError(f"tokens: {type(tokens).__name__} is not a sequence of token ids")
    try:
        if type(tokens) is not list:
            return array("I", tokens)
        module = compiled()
        ids = _ONE * len(tokens)
        if module is not None and all(
            module.fill(ids, tokens, first, min(first + IDS, len(ids))) for first in range(0, len(ids), IDS)
        ):
            return ids
        ids = array("I")
        ids.fromlist(tokens)  # two thirds of the constructor's time
        return ids
    except OverflowError:
        raise _out_of_range(tokens) from None


def unpack_tokens(packed: Any) -> "array[int] | None":
    """The ids of a msgpack array, as an array of native u32; None where that is not compiled, or it has other items."""
    module = compiled()
    ids = None if module is None else module.unpacked(packed)
    return None if ids is None else array("I", ids)


def pack_tokens(tokens: Tokens) -> bytes:
    """The ids as u32 little-endian, back to back; errors as `token_array`."""
    return _little_endian(token_array(tokens))


def state_name(block: ChainHash, group: int) -> ChainHash:
    """The name of group `group`'s recurrent state behind a block: SHA-256("kvtier-state-v1" ‖ u32 group ‖ its name)."""
    return hashlib.sha256(_STATE_TAG + struct.pack("<I", group) + block).digest()


def pool_name(page: ChainHash, pool: str, piece: int) -> ChainHash:
    """The name of a part of an engine's extra pool for a page, or for its end.

    SHA-256("kvtier-pool-v1" ‖ u32 length ‖ pool, UTF-8, with all that changes its bytes ‖ u32 piece ‖ the page's name).
    """
    text = pool.encode()
    return hashlib.sha256(_POOL_TAG + struct.pack("<I", len(text)) + text + struct.pack("<I", piece) + page).digest()


def root_hash(
    fingerprint: bytes, *, cache_salt: str | None = None, lora_name: str | None = None, lora_digest: bytes | None = None
) -> ChainHash:
    """Where the chains of one model, tenant and adapter begin; None and the empty value give different roots.

    `fingerprint` is 32 bytes (`ModelIdentity.fingerprint`), `lora_digest` digests the adapter's weights.
    """
    if len(fingerprint) != 32:
        raise ValueError(f"fingerprint of {len(fingerprint)} bytes: must be 32")
    digest = hashlib.sha256(_ROOT_TAG + fingerprint)
    salt = None if cache_salt is None else cache_salt.encode()
    name = None if lora_name is None else lora_name.encode()
    for value in (salt, name, lora_digest):
        digest.update(b"\x00" if value is None else b"\x01" + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def chain_hashes(root: ChainHash, tokens: Tokens, block_size: int, scheme: str = "sha256") -> list[ChainHash]:
    """Hashes of the full blocks of `tokens`; errors as `TokenChain`."""
    chain = TokenChain(root, block_size, scheme)
    chain.extend(tokens)
    return chain.hashes


def is_named_by(record: BlockRecord) -> bool:
    """Whether a block's name follows from its parent and tokens alone: no extra keys, no other engine's scheme."""
    frames = [(struct.pack("<I", len(record.tokens) // 4) + record.tokens,)]
    return any([record.chain_hash] == hashes(record.parent, frames) for hashes in _SCHEMES.values())


NamedRun = tuple[bytes, Sequence[ChainHash]]
"""The input of the names (kind ‖ the name before ‖ tokens), and the names."""


class HashCache:
    """Names of runs of blocks, found by all of their input. Thread-safe.

    A name depends on the scheme and the block size (the run's kind), on the name before it and on its tokens. These are
    compared byte by byte, so a found name is the one that hashing gives. A chain begins at its root, which has the
    fingerprint and the tenant's salt in it: no other tenant's chain finds its runs.
    At most `num_bytes` are kept, those used last; of one prompt its beginning stays longest.
    """

    def __init__(self, num_bytes: int = _MOST) -> None:
        """`num_bytes`: the memory of all kept runs, as Python keeps them."""
        self.num_bytes = 0
        self._most = num_bytes
        self._runs: OrderedDict[int, NamedRun] = OrderedDict()  # those used last at the end
        self._lock = Lock()

    def __len__(self) -> int:
        """How many runs are kept."""
        return len(self._runs)

    def find(self, kind: bytes, parent: ChainHash, tokens: memoryview, run_bytes: int) -> list[ChainHash]:
        """The names of the leading runs that are kept. `tokens` are bytes, of which each run has `run_bytes`."""
        names: list[ChainHash] = []
        used: list[int] = []
        with self._lock:
            for end in range(run_bytes, len(tokens) + 1, run_bytes):
                made_of = kind + parent + tokens[end - run_bytes : end]
                key = xxhash.xxh3_64_intdigest(made_of)
                run = self._runs.get(key)
                if run is None or run[0] != made_of:
                    break
                names += run[1]
                parent = names[-1]
                used.append(key)
            for key in reversed(used):  # a prompt's end is dropped first: without its beginning it is never found
                self._runs.move_to_end(key)
        return names

    def enter(
        self, kind: bytes, parent: ChainHash, tokens: memoryview, run_bytes: int, names: Sequence[ChainHash]
    ) -> None:
        """Keep whole runs: `names` are those of the tokens behind `parent`, 64 for each `run_bytes`."""
        runs: list[tuple[int, NamedRun]] = []
        before = kind + parent
        for first in range(0, len(names) - RUN + 1, RUN):
            start = first // RUN * run_bytes
            made_of = before + tokens[start : start + run_bytes]
            runs.append((xxhash.xxh3_64_intdigest(made_of), (made_of, names[first : first + RUN])))
            before = kind + names[first + RUN - 1]
        with self._lock:
            kept = self._runs
            for key, run in reversed(runs):
                if (known := kept.pop(key, None)) is not None:
                    self.num_bytes -= len(known[0]) + _OVERHEAD
                kept[key] = run
                self.num_bytes += len(run[0]) + _OVERHEAD
            while self.num_bytes > self._most:
                self.num_bytes -= len(kept.popitem(last=False)[1][0]) + _OVERHEAD


class TokenChain:
    """The chain hashes of one growing sequence. Every token is hashed once, when its block is full.

    `hashes` names the full blocks, the first one's parent is `root` (32 bytes); callers read it, `extend` alone
    changes it, by appending. One thread at a time.
    """

    __slots__ = ("_extra", "_hash_frames", "_kept", "_tokens", "block_size", "hashes", "root", "scheme", "tenant")

    def __init__(
        self,
        root: ChainHash,
        block_size: int,
        scheme: str = "sha256",
        extra_keys: BlockExtraKeys | None = None,
        kept: HashCache | None = None,
    ) -> None:
        """`kept`: names of earlier chains. Runs in it are not hashed again; new ones are added."""
        if len(root) != 32:
            raise ValueError(f"root of {len(root)} bytes: must be 32")
        if block_size < 1:
            raise ValueError(f"block_size {block_size}: must be at least 1")
        if scheme not in _SCHEMES:
            raise ValueError(f"scheme {scheme!r}: use one of {', '.join(_SCHEMES)}")
        self.root = self.tenant = root  # identifies the tenant, whose salt is in it
        self.block_size = block_size
        self.scheme = scheme
        self.hashes: list[ChainHash] = []
        self._hash_frames = _SCHEMES[scheme]
        self._kept = kept if not extra_keys else None
        self._tokens = array("I")
        self._extra = {block: _encode_extra(keys) for block, keys in (extra_keys or {}).items()}

    def __repr__(self) -> str:
        return f"TokenChain({self.num_tokens} tokens, {len(self.hashes)} full blocks of {self.block_size})"

    @property
    def num_tokens(self) -> int:
        """All tokens so far, with those of the unfinished last block."""
        return len(self._tokens)

    def copy(self) -> "TokenChain":
        """The same chain, to be extended separately; nothing is hashed again."""
        made = TokenChain(self.root, self.block_size, self.scheme, kept=self._kept)
        made.hashes, made._tokens, made._extra = self.hashes.copy(), self._tokens[:], self._extra
        return made

    def extend(self, tokens: Tokens) -> None:
        """Append ids, hash full blocks. ValueError for an id outside [0, 2**32), TypeError for none; then no change."""
        module = compiled()
        ids = _ONE * len(tokens) if module is not None and type(tokens) is list and len(tokens) <= IDS else None
        if module is None or ids is None or not module.fill(ids, tokens, 0, len(ids)):
            ids = token_array(tokens)
        if self._tokens:
            self._tokens.extend(ids)
        else:
            self._tokens = ids
        first = len(self.hashes)
        num_new = len(self._tokens) // self.block_size - first
        if num_new >= RUN and self._kept is not None:
            self._extend_by_runs(self._kept, first, first + num_new)
        elif 0 < num_new <= PIECE and module is not None and not self._extra:
            size, parent = self.block_size, self.hashes[-1] if first else self.root
            self.hashes += module.names(self.scheme, parent, self._tokens, first * size, num_new, size)
        elif num_new:
            self._hash(first, num_new)

    def parent(self, block: int) -> ChainHash:
        """The hash before block `block` (0 ≤ block ≤ full blocks): the root for block 0."""
        if not 0 <= block <= len(self.hashes):
            raise self._no_block(block)
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        """The tokens of a full block, u32 little-endian, as they were hashed."""
        if not 0 <= block < len(self.hashes):
            raise self._no_block(block)
        words = self._tokens[block * self.block_size : (block + 1) * self.block_size]
        return _little_endian(words)

    def records(self, start: int, end: int) -> list[BlockRecord]:
        """The records of the full blocks `start … end`, without checksums."""
        names = [self.parent(start), *self.hashes[start:end]]
        return [BlockRecord(names[i + 1], names[i], self.block_tokens(start + i), 0) for i in range(end - start)]

    def next_tokens(self, block: int) -> bytes:
        """The tokens of block `block`, full or not, u32 little-endian; none if an extra key is part of its name."""
        if block in self._extra:
            return b""
        return _little_endian(self._tokens[block * self.block_size : (block + 1) * self.block_size])

    def partial_block(self, num_tokens: int) -> BlockRecord | None:
        """The tokens behind the last full block among the first `num_tokens`, as a block of its own; None: none."""
        block, module = num_tokens // self.block_size, compiled()
        first = block * self.block_size
        words = self._tokens[first:num_tokens]
        if not words or block > len(self.hashes) or block in self._extra:
            return None
        parent = self.hashes[block - 1] if block else self.root
        tokens = _little_endian(words)
        if module is None:
            return BlockRecord(self._name(parent, tokens), parent, tokens, 0)
        [name] = module.names(self.scheme, parent, self._tokens, first, 1, len(words))
        return BlockRecord(name, parent, tokens, 0)

    def is_plain(self, child: ChildBlock, parent: ChainHash) -> bool:
        """Whether this name follows from the parent and the tokens alone."""
        return child.chain_hash == self._name(parent, child.tokens)

    def _hash(self, first: int, count: int) -> None:
        """Name `count` blocks from `first`, the next one to be named."""
        size, end, module = self.block_size, first + count, compiled()
        if module is None or self._extra:
            if count:
                self.hashes += self._hash_frames(self.parent(first), self._frames(first, count))
            return
        for at in range(first, end, PIECE):
            count = min(PIECE, end - at)
            self.hashes += module.names(self.scheme, self.parent(at), self._tokens, at * size, count, size)

    def _extend_by_runs(self, kept: HashCache, first: int, end: int) -> None:
        """Name the blocks from `first` to `end`: whole runs from `kept`, then the rest, which is added to it."""
        self._hash(first, -first % RUN)
        first += -first % RUN
        kind, block_bytes = struct.pack("<8sI", self.scheme.encode(), self.block_size), 4 * self.block_size
        with memoryview(self._tokens) as words, words.cast("B") as tokens:
            self.hashes += kept.find(kind, self.parent(first), tokens[first * block_bytes :], RUN * block_bytes)
            first = len(self.hashes)
            self._hash(first, end - first)
            kept.enter(kind, self.parent(first), tokens[first * block_bytes :], RUN * block_bytes, self.hashes[first:])

    def _name(self, parent: ChainHash, tokens: bytes) -> ChainHash:
        [name] = self._hash_frames(parent, [(struct.pack("<I", len(tokens) // 4) + tokens,)])
        return name

    def _frames(self, first: int, count: int) -> Iterable[tuple[bytes]]:
        """The bytes hashed after each parent: u32 token count ‖ tokens ‖ extra keys; by numpy, not by loops."""
        size = self.block_size
        words = np.frombuffer(self._tokens, np.uintc, count * size, first * size * self._tokens.itemsize)
        rows = np.empty((count, 1 + size), "<u4")
        rows[:, 0] = size
        rows[:, 1:] = words.reshape(count, size)
        frames = struct.iter_unpack(f"{rows.strides[0]}s", rows)
        if not self._extra:
            return frames
        return [(frame + self._extra.get(block, b""),) for block, (frame,) in enumerate(frames, first)]

    def _no_block(self, block: int) -> IndexError:
        return IndexError(f"block {block} of a chain with {len(self.hashes)} full blocks")


def _hash_sha256(parent: ChainHash, frames: Iterable[tuple[bytes]]) -> list[ChainHash]:
    digest = hashlib.sha256
    return [parent := digest(parent + frame).digest() for (frame,) in frames]


def _hash_xxh3(parent: ChainHash, frames: Iterable[tuple[bytes]]) -> list[ChainHash]:
    digest = xxhash.xxh3_128_digest
    return [parent := digest(parent + frame) * 2 for (frame,) in frames]


_SCHEMES: Final[dict[str, Callable[[ChainHash, Iterable[tuple[bytes]]], list[ChainHash]]]] = {
    "sha256": _hash_sha256,
    "xxh3": _hash_xxh3,
}


def _encode_extra(keys: Sequence[tuple[str, bytes]]) -> bytes:
    """Each pair as u32 length ‖ tag ‖ u64 length ‖ value: no two lists of pairs share an encoding."""
    tagged = ((tag.encode(), value) for tag, value in keys)
    return b"".join(struct.pack("<I", len(tag)) + tag + struct.pack("<Q", len(value)) + value for tag, value in tagged)


def _swapped(words: "array[int]") -> bytes:
    words = words[:]
    words.byteswap()
    return words.tobytes()


_little_endian: Final = array.tobytes if _IS_LITTLE else _swapped


def _from_buffer(tokens: "NDArray[np.integer[Any]] | array[int]") -> "array[int]":
    words = np.asarray(tokens)
    if words.ndim != 1 or (words.dtype.kind not in "iu" and words.size):
        raise TypeError(f"tokens: a {words.ndim}-dimensional array of {words.dtype}, not of one integer per token")
    if words.size and (words.min() < 0 or words.max() > _MAX_TOKEN):
        raise _out_of_range(words.tolist())
    packed = array("I")
    packed.frombytes(words.astype(np.uintc, copy=False).tobytes())
    return packed


def _out_of_range(tokens: Sequence[int]) -> ValueError:
    position, token = next((i, token) for i, token in enumerate(tokens) if not 0 <= token <= _MAX_TOKEN)
    return ValueError(f"token id {token} at position {position}: must be in [0, 2**32)")
