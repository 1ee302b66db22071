"""Names for the blocks of a vLLM request: vLLM's own hashes as they are, or our chain over its tokens."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from kvtier.tiers.chain import TokenChain, pack_tokens, root_hash
from kvtier.tiers.tier import ChainHash

_DIGEST: Final = 32  # bytes of a name


class VllmChain:
    """A request's blocks under vLLM's hashes."""

    __slots__ = ("_hashes", "_lora", "_request", "block_size", "root", "tenant")

    def __init__(self, request: Any, root: ChainHash, block_size: int, lora: bytes | None) -> None:
        """`lora` is what the adapter's weights are: vLLM's hashes know its name and path alone."""
        self._request = request
        self._lora = lora
        self._hashes: list[ChainHash] = []
        self.block_size = block_size
        self.root = root
        salt = request.cache_salt  # in vLLM's hashes of its first block
        self.tenant = root if salt is None else root_hash(root, cache_salt=salt)

    def current(self) -> "VllmChain":
        """The chain over all tokens the request has now."""
        return self

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks. vLLM's own list, where its hashes can be taken as they are."""
        theirs: list[bytes] = self._request.block_hashes
        if self._lora is None and (not theirs or len(theirs[0]) == _DIGEST):
            return theirs
        for name in theirs[len(self._hashes) :]:
            if self._lora is not None:
                name = hashlib.sha256(self._lora + name).digest()
            self._hashes.append(name if len(name) == _DIGEST else name * 2)  # 16 bytes of xxh3, as our own scheme's
        return self._hashes

    def parent(self, block: int) -> ChainHash:
        """The name before block `block`: the root for block 0."""
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        """The tokens of a full block, u32 little-endian."""
        start = block * self.block_size
        return pack_tokens(self._request.all_token_ids[start : start + self.block_size])


class OwnChain:
    """A request's blocks under our own names, the same for every engine: costs a SHA-256 a block."""

    __slots__ = ("_chain", "_request")

    def __init__(
        self, request: Any, named: tuple[bytes, str | None, str | None, bytes | None], block_size: int, scheme: str
    ) -> None:
        """`named` is what the root is made of: fingerprint, salt, name and digest of an adapter."""
        fingerprint, salt, lora_name, lora_digest = named
        root = root_hash(fingerprint, cache_salt=salt, lora_name=lora_name, lora_digest=lora_digest)
        self._request = request
        self._chain = TokenChain(root, block_size, scheme)

    def current(self) -> TokenChain:
        """The chain over all tokens the request has now."""
        if (known := self._chain.num_tokens) < self._request.num_tokens:
            self._chain.extend(self._request.all_token_ids[known:])
        return self._chain
