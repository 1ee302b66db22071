"""Names the blocks of a vLLM request: by vLLM's own hashes, or by kvtier's chain over its tokens."""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.connector.vllm.adapters import ServedAdapters
from kvtier.connector.vllm.drafts import AheadChain
from kvtier.tiers import ChainHash, ChildBlock
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.naming import HashCache, TokenChain, pack_tokens, root_hash

if TYPE_CHECKING:
    from kvtier.connector.vllm.slots import SlotPlan

_DIGEST: Final = 32  # bytes of a name

NameInstead = Callable[[Any, int, Sequence[int]], bytes]
"""What vLLM would call a request's block (by its number) if these were its tokens, all else being as it is."""


class VllmChain:
    __slots__ = ("_hash_size", "_hashes", "_lora", "_name_instead", "_request", "block_size", "root", "tenant")

    def __init__(
        self,
        request: Any,
        root: ChainHash,
        sizes: tuple[int, int],
        lora: bytes | None,
        name_instead: NameInstead | None = None,
    ) -> None:
        """`sizes` are the tokens of kvtier's block and those from one of vLLM's hashes to the next, which divide it.

        `lora` identifies the adapter's weights: vLLM's hashes cover only its name and path. Without `name_instead` no
        block counts as named by its tokens, so only whole blocks are ever reused.
        """
        block_size, self._hash_size = sizes
        self._request = request
        self._lora = lora
        self._name_instead = name_instead
        self._hashes: list[ChainHash] = []
        self.block_size = block_size
        self.root = root
        salt = request.cache_salt  # vLLM hashes it into the first block
        self.tenant = root if salt is None else root_hash(root, cache_salt=salt)

    def current(self) -> "VllmChain":
        return self

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks; vLLM's own list if its hashes can be used unchanged.

        A hash covers all tokens before it. So the last one in a block names that block.
        """
        theirs: list[bytes] = self._request.block_hashes
        per_block = self.block_size // self._hash_size
        if per_block == 1 and self._lora is None and (not theirs or len(theirs[0]) == _DIGEST):
            return theirs
        at = per_block * len(self._hashes) - 1
        if self._hashes and (at >= len(theirs) or self._ours(theirs[at]) != self._hashes[-1]):
            self._hashes = []  # vLLM took tokens back, and perhaps has others since
        self._hashes += map(self._ours, theirs[per_block * (len(self._hashes) + 1) - 1 :: per_block])
        return self._hashes

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self.next_tokens(block)

    def next_tokens(self, block: int) -> bytes:
        """The tokens of block `block`, full or not, u32 little-endian."""
        start = block * self.block_size
        return pack_tokens(self._request.all_token_ids[start : start + self.block_size])

    def is_plain(self, child: ChildBlock, parent: ChainHash) -> bool:
        """Whether a held block behind `parent` has the name that its tokens give it in this request.

        The root is the parent of every tenant's and adapter's first block, and tokens say nothing of an image. So the
        name has to agree, with this request's salt, adapter, images and embeddings for that block in it.
        """
        tokens = np.frombuffer(child.tokens, "<u4").tolist()
        if self._name_instead is None or len(tokens) != self.block_size:
            return False
        block = 0 if parent == self.root else 1 + self.hashes.index(parent)
        return self._ours(self._name_instead(self._request, block, tokens)) == child.chain_hash

    def _ours(self, name: bytes) -> ChainHash:
        """The name under which a block that vLLM calls so is kept."""
        if self._lora is not None:
            name = hashlib.sha256(self._lora + name).digest()
        return name if len(name) == _DIGEST else name * 2  # 16 bytes of xxh3 are doubled, as in kvtier's own scheme


class OwnChain:
    """A request's blocks under kvtier's own names, the same for every engine. Costs a SHA-256 for each new block."""

    __slots__ = ("_chain", "_kept", "_last", "_request")

    def __init__(
        self,
        request: Any,
        named: tuple[bytes, str | None, str | None, bytes | None],
        block_size: int,
        scheme: str,
        kept: HashCache | None = None,
    ) -> None:
        """`named` is what the root is made of: fingerprint, salt, and an adapter's name and digest.

        `kept`: names of requests before this one.
        """
        fingerprint, salt, lora_name, lora_digest = named
        root = root_hash(fingerprint, cache_salt=salt, lora_name=lora_name, lora_digest=lora_digest)
        self._request = request
        self._kept = kept
        self._chain = TokenChain(root, block_size, scheme, kept=kept)
        self._last: int | None = None  # token of the chain

    def current(self) -> TokenChain:
        """The chain over all tokens the request has now.

        Between the turns of a session vLLM takes the last sampled token back: then the chain is made anew.
        """
        tokens, known, chain = self._request.all_token_ids, self._chain.num_tokens, self._chain
        if known > self._request.num_tokens or (known and tokens[known - 1] != self._last):
            self._chain, known = TokenChain(chain.root, chain.block_size, chain.scheme, kept=self._kept), 0
        if known < self._request.num_tokens:
            self._chain.extend(tokens[known:])
            self._last = tokens[self._chain.num_tokens - 1]
        return self._chain


class RequestNames:
    """Names the requests of one engine. Those of adapters that cannot be named have none."""

    def __init__(
        self, plan: "SlotPlan", cache: CacheConfig, root: bytes, adapters: ServedAdapters | None = None
    ) -> None:
        """`adapters`: what the engine has loaded; without it, nothing so far."""
        self._plan = plan
        self._cache = cache
        self._root = root
        self._kept = HashCache()  # of our own chains
        self.adapters = adapters or ServedAdapters()
        self.name_instead: NameInstead | None = None  # without it no part of a block that vLLM named is reused

    def of(self, request: Any) -> VllmChain | AheadChain | OwnChain | None:
        """How the request's blocks are named; None if they cannot be."""
        lora = request.lora_request
        digest = None if lora is None else self.adapters.digest(lora)
        if lora is not None and digest is None:
            return None
        if not self._plan.canonical:
            sizes = self._plan.block_size, self._plan.hash_size
            return self._ahead(VllmChain(request, self._root, sizes, digest, self.name_instead), request)
        if request.mm_features or request.prompt_embeds is not None:
            return None
        salt = request.cache_salt if request.cache_salt is not None else self._cache.cache_salt
        named = self._root, salt, None, digest  # an adapter's weights, whatever it is called
        return OwnChain(request, named, self._plan.block_size, self._cache.hash, self._kept)

    def _ahead(self, chain: VllmChain, request: Any) -> VllmChain | AheadChain | None:
        """The chain, with the tokens that follow a block in its name if a drafter's KV depends on them."""
        if not self._plan.lookahead:
            return chain
        if request.mm_features or request.prompt_embeds is not None:
            return None  # what follows a block may be part of an image, which its tokens do not tell
        return AheadChain(chain, request, self._plan.lookahead)
