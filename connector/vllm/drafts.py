"""Names blocks that hold a draft model's KV, too: which drafters are kept, and which tokens their KV depends on."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from kvtier.connector import BlockChain
from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.naming import pack_tokens

_WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix", "medusa")
_WITH_KV: Final = ("draft_model", "eagle", "eagle3", "mtp")


def require_known_method(speculative: Any) -> None:
    """Raise ConfigError for a drafter whose KV kvtier cannot name. `speculative` is vLLM's configuration of it."""
    if speculative is not None and speculative.method not in (*_WITHOUT_KV, *_WITH_KV):
        kept = ", ".join((*_WITH_KV, *_WITHOUT_KV))
        raise ConfigError(f"speculative method {speculative.method!r}: its KV is not kept; use one of {kept}")


def has_kv(speculative: Any) -> bool:
    """Whether the drafter keeps KV of its own in vLLM's blocks."""
    return speculative is not None and speculative.method in _WITH_KV


def lookahead(vllm_config: Any) -> int:
    """How many tokens behind a position its draft KV depends on.

    A drafter that reads the model's hidden states (EAGLE, MTP) computes a position from the hidden state there and the
    embedding of the next token. So the draft KV at a block's last token depends on the next block's first token.
    """
    speculative = vllm_config.speculative_config
    if not has_kv(speculative) or speculative.method == "draft_model":
        return 0
    return max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1)))


class AheadChain:
    """A request's blocks, named by their own name in vLLM and the tokens that follow them. A `BlockChain`.

    A block has a name once those tokens are known. vLLM does without such names: it drops the last block that matches,
    and takes the draft KV inside as it is. Draft KV of another continuation costs accepted tokens, never the text.
    No part of such a block is reused: its own tokens do not name it.
    """

    __slots__ = ("_chain", "_hashes", "_lookahead", "_request", "block_size", "root", "tenant")

    def __init__(self, chain: BlockChain, request: Any, lookahead: int) -> None:
        """`lookahead` tokens follow a block. At most a block's size: vLLM asks for that, too."""
        self._chain = chain
        self._request = request
        self._lookahead = lookahead
        self._hashes: list[ChainHash] = []
        self.block_size = chain.block_size
        self.root = chain.root
        self.tenant = chain.tenant

    def current(self) -> "AheadChain":
        return self

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks, but one whose next tokens are not known."""
        theirs = self._chain.hashes
        named = min(len(theirs), (int(self._request.num_tokens) - self._lookahead) // self.block_size)
        del self._hashes[max(0, named) :]  # vLLM took tokens back,
        if self._hashes and self._hashes[-1] != self._name(theirs, len(self._hashes) - 1):
            self._hashes = []  # and perhaps has others since: the last name covers what all names before it do
        self._hashes += [self._name(theirs, block) for block in range(len(self._hashes), named)]
        return self._hashes

    def _name(self, theirs: Sequence[ChainHash], block: int) -> ChainHash:
        start = (block + 1) * self.block_size
        ahead = pack_tokens(self._request.all_token_ids[start : start + self._lookahead])
        return hashlib.sha256(theirs[block] + ahead).digest()

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self._chain.block_tokens(block)
