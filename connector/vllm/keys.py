"""Names the blocks of a vLLM request: by vLLM's hashes or kvtier's chain, with drafters and served adapters."""

import functools
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.connector import BlockChain
from kvtier.connector.models import FileStamp, file_stamps, revision_of
from kvtier.tiers import ChainHash, ChildBlock, ConfigError
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.naming import HashCache, TokenChain, pack_tokens, root_hash

if TYPE_CHECKING:
    from kvtier.connector.vllm.slots import SlotPlan


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
    """How many tokens after a position its draft KV depends on.

    A drafter that reads the model's hidden states (EAGLE, MTP) computes a position from the hidden state there and the
    embedding of the next token. So the draft KV at a block's last token depends on the next block's first token.
    """
    speculative = vllm_config.speculative_config
    if not has_kv(speculative) or speculative.method == "draft_model":
        return 0
    return max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 1)))


class AheadChain:
    """A request's blocks, named by their name in vLLM and the tokens that follow them. A `BlockChain`.

    A block has a name once those tokens are known. vLLM does without such names: it drops the last block that matches,
    and uses the draft KV before it as it is. Draft KV of another continuation costs accepted tokens, never the text.
    No part of such a block is reused: its own tokens do not determine its name.
    """

    __slots__ = ("_chain", "_hashes", "_lookahead", "_request", "block_size", "root", "tenant")

    def __init__(self, chain: BlockChain, request: Any, lookahead: int) -> None:
        """`lookahead` tokens follow a block. At most a block's size: vLLM requires that, too."""
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
        """The names of its full blocks whose next tokens are known."""
        theirs = self._chain.hashes
        named = min(len(theirs), (int(self._request.num_tokens) - self._lookahead) // self.block_size)
        del self._hashes[max(0, named) :]  # vLLM removed tokens,
        if self._hashes and self._hashes[-1] != self._name(theirs, len(self._hashes) - 1):
            self._hashes = []  # and may have added others: the last name covers all tokens before it
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


_log = logging.getLogger(__name__)

_MOST: Final = 65_536  # adapters, and names of adapters, remembered at most


@dataclass(slots=True)
class _Adapter:
    """The files of an adapter when it was named, which the server was about to load."""

    path: str
    stamps: tuple[FileStamp, ...]
    digest: bytes | None  # None: its files changed while they were loaded, or are not here
    is_loaded: bool = False  # by the server, which has computed with it
    is_awaited: bool = False  # a request will replace other weights by it, which the server has until then


class ServedAdapters:
    """Names adapters by what the server has loaded. Called from the scheduler's thread; its workers load.

    vLLM loads an adapter when a client requests it, or when a request first needs it. It identifies adapters by number,
    and reloads one only on request, or if other adapters have displaced it.
    """

    def __init__(self, capacity: int = _MOST, settings: str = "") -> None:
        """`capacity`: adapters that vLLM keeps loaded, `max_cpu_loras`. `settings`: what else changes their effect."""
        self._capacity = capacity
        self._settings = settings
        self._adapters: dict[int, _Adapter] = {}  # by vLLM's number
        self._doubtful: set[int] = set()  # perhaps not loaded yet, or reloaded: their files must not change
        self._has_changed = False  # since the last `look`
        self._named: dict[tuple[str, str], bytes | None] = {}  # vLLM's names of L1 blocks: the last digest under each
        self._mixed: set[tuple[str, str]] = set()  # names with several digests
        self._warned: set[str] = set()

    def digest(self, lora: Any) -> bytes | None:
        """The digest of the weights that a request with this adapter is computed with; None if unknown."""
        known, name = self._adapters.get(lora.lora_int_id), (lora.lora_name, lora.lora_path)
        reloads = getattr(lora, "load_inplace", False)  # reloaded at every step that computes such a request
        if known is None or reloads:
            adapter = self._follow(lora)
            adapter.is_awaited |= known is not None and known.digest != adapter.digest
        elif self._may_be_another(known, lora.lora_path):
            self._mixed.add(name)
            self._warn(known.path, "its files changed, and vLLM may have loaded it again: raise max_cpu_loras")
            return None
        else:
            adapter = known
        if self._named.setdefault(name, adapter.digest) != adapter.digest:
            self._mixed.add(name)
        self._named[name] = adapter.digest
        if (adapter.is_awaited and not reloads) or max(len(self._adapters), len(self._named)) > _MOST:
            return None
        return adapter.digest

    def loading(self, lora: Any) -> None:
        """The server is about to load the adapter, unless it has one of this number and does not reload it."""
        if lora.lora_int_id not in self._adapters or getattr(lora, "load_inplace", False):
            self._follow(lora).is_awaited = False

    def loaded(self, lora_id: int) -> None:
        """The server has loaded it, or had it: the name is confirmed if the files have not changed."""
        if lora_id in self._doubtful and not self._changes(lora_id):
            self._adapters[lora_id].is_loaded = True
            self._doubtful.discard(lora_id)

    def removed(self, lora_id: int) -> None:
        """The server drops the adapter: it loads the next one of this number from its files."""
        self._has_changed |= self._adapters.pop(lora_id, None) is not None
        self._doubtful.discard(lora_id)

    @property
    def is_unsettled(self) -> bool:
        """Whether `look` has anything to check."""
        return self._has_changed or bool(self._doubtful)

    def look(self) -> bool:
        """Whether any adapter's weights, since the last call, differ from those it was named by, or may differ."""
        for lora_id in list(self._doubtful):
            self._changes(lora_id)
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def current(self, lora_id: int) -> bytes | None:
        """The digest of the weights that the server has or is about to load under this number."""
        adapter = self._adapters.get(lora_id)
        return None if adapter is None else adapter.digest

    def computed(self, lora: Any) -> None:
        """A request with the adapter has an output, so the server has loaded it. Called after `look`."""
        adapter = self._adapters[lora.lora_int_id]
        adapter.is_awaited &= not getattr(lora, "load_inplace", False)
        adapter.is_loaded |= not adapter.is_awaited

    def confirm(self, reloading: Collection[int]) -> None:
        """After `computed`: loaded adapters count as stable, except those that live requests reload at every step."""
        self._doubtful -= {each for each in self._doubtful if self._adapters[each].is_loaded and each not in reloading}

    def is_mixed(self, lora: Any) -> bool:
        """Whether vLLM's own prefix cache may have KV of other weights under this adapter's name."""
        return (lora.lora_name, lora.lora_path) in self._mixed

    def _follow(self, lora: Any) -> _Adapter:
        """Name an adapter by its files as they are now."""
        known, stamps = self._adapters.get(lora.lora_int_id), _stamps(lora.lora_path)
        if known is None or known.digest is None or (known.path, known.stamps) != (lora.lora_path, stamps):
            adapter = _Adapter(lora.lora_path, stamps, self._read(lora.lora_path, stamps))
            self._has_changed |= known is not None and known.digest != adapter.digest
            self._adapters[lora.lora_int_id] = known = adapter
        self._doubtful.add(lora.lora_int_id)
        return known

    def _may_be_another(self, adapter: _Adapter, path: str) -> bool:
        """Whether vLLM may have reloaded this adapter with other weights, because it has no room for all adapters."""
        if len(self._adapters) <= self._capacity:
            return False
        return path != adapter.path or _stamps(path) != adapter.stamps

    def _read(self, path: str, stamps: tuple[FileStamp, ...]) -> bytes | None:
        try:
            digest = f"{revision_of(Path(path))}{self._settings}".encode()
        except (ConfigError, OSError) as error:
            self._warn(path, str(error))
            return None
        return digest if _stamps(path) == stamps else None

    def _changes(self, lora_id: int) -> bool:
        """Whether its files have changed since it was named: then it has no digest."""
        adapter = self._adapters[lora_id]
        if adapter.digest is None or _stamps(adapter.path) == adapter.stamps:
            return False
        adapter.digest, self._has_changed = None, True
        self._warn(adapter.path, "its files changed while it was loaded; load it again, in place or under a new number")
        return True

    def _warn(self, path: str, why: str) -> None:
        if path not in self._warned and len(self._warned) < _MOST:
            self._warned.add(path)
            _log.warning("no blocks of requests with the adapter %s are kept: %s", path, why)


def _stamps(path: str) -> tuple[FileStamp, ...]:
    """Stamps of an adapter's files; empty if it has none."""
    try:
        return file_stamps(Path(path))
    except OSError:  # files may be missing
        return ()


_CHANGES: Final = re.compile("weight|param|apply_model|load_model")  # in names of calls of all workers
_READ: Final = re.compile("checksum|transfer_engine|^get_")


def watch_engine_core() -> None:
    """Have vLLM's engine core notify its connectors of adapters that it loads and removes, and of changed weights.

    Idempotent. vLLM itself does not, and a server loads adapters before any request needs them.
    """
    from vllm.v1.engine.core import EngineCore  # only needed here, and not installed for this module's tests

    if getattr(EngineCore.add_lora, "is_watched", False):
        return
    add, remove = EngineCore.add_lora, EngineCore.remove_lora
    call, reset = EngineCore.collective_rpc, EngineCore.reset_prefix_cache

    @functools.wraps(add)
    def add_lora(core: Any, lora_request: Any) -> Any:
        served = _served_by(core)
        for each in served:
            each.loading(lora_request)
        try:
            result = add(core, lora_request)
        except BaseException:
            for each in served:
                each.removed(lora_request.lora_int_id)
            raise
        for each in served:
            each.loaded(lora_request.lora_int_id)
        return result

    @functools.wraps(remove)
    def remove_lora(core: Any, lora_id: int) -> Any:
        for each in _served_by(core):
            each.removed(lora_id)
        return remove(core, lora_id)

    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(method, str) or (_CHANGES.search(method) and not _READ.search(method)):
            for connector in _connectors(core):
                getattr(connector, "weights_change", bool)()
        return call(core, method, *arguments, **named)

    @functools.wraps(reset)
    def reset_prefix_cache(core: Any, *arguments: Any, **named: Any) -> Any:
        answer = reset(core, *arguments, **named)
        for connector in _connectors(core) if answer else ():
            getattr(connector, "cache_emptied", bool)()
        return answer

    add_lora.is_watched = True  # type: ignore[attr-defined]
    EngineCore.add_lora, EngineCore.remove_lora = add_lora, remove_lora
    EngineCore.collective_rpc, EngineCore.reset_prefix_cache = collective_rpc, reset_prefix_cache


def _connectors(core: Any) -> list[Any]:
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    return list(getattr(connector, "sub_connectors", [connector]))


def _served_by(core: Any) -> list[ServedAdapters]:
    """The adapters' state in each of an engine's kvtier connectors."""
    found = [getattr(each, "served_adapters", None) for each in _connectors(core)]
    return [each for each in found if isinstance(each, ServedAdapters)]


_DIGEST: Final = 32  # bytes of a name

NameInstead = Callable[[Any, int, Sequence[int]], bytes]
"""vLLM's name of a request's block (by its number) if it had these tokens, all else being equal."""


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
        """`sizes`: the tokens of kvtier's block, and of vLLM's hash unit, which divides it.

        `lora`: the digest of the adapter's weights, as vLLM's hashes cover only its name and path. Without
        `name_instead` no block counts as named by its tokens, so only full blocks are reused.
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
            self._hashes = []  # vLLM removed tokens, and may have added others
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
        """Whether a block after `parent` has the name that its tokens give it in this request.

        All tenants and adapters share the root as first parent, and tokens do not identify an image. So the name has to
        match with this request's salt, adapter, images and embeddings.
        """
        tokens = np.frombuffer(child.tokens, "<u4").tolist()
        if self._name_instead is None or len(tokens) != self.block_size:
            return False
        block = 0 if parent == self.root else 1 + self.hashes.index(parent)
        return self._ours(self._name_instead(self._request, block, tokens)) == child.chain_hash

    def _ours(self, name: bytes) -> ChainHash:
        """The name under which vLLM's block of that name is stored."""
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
        """`named`: the inputs of the root: fingerprint, salt, and an adapter's name and digest.

        `kept`: names of earlier requests.
        """
        fingerprint, salt, lora_name, lora_digest = named
        root = root_hash(fingerprint, cache_salt=salt, lora_name=lora_name, lora_digest=lora_digest)
        self._request = request
        self._kept = kept
        self._chain = TokenChain(root, block_size, scheme, kept=kept)
        self._last: int | None = None  # the chain's last token

    def current(self) -> TokenChain:
        """The chain over all tokens that the request has now.

        Between the turns of a session vLLM removes the last sampled token: then the chain is rebuilt.
        """
        tokens, known, chain = self._request.all_token_ids, self._chain.num_tokens, self._chain
        if known > self._request.num_tokens or (known and tokens[known - 1] != self._last):
            self._chain, known = TokenChain(chain.root, chain.block_size, chain.scheme, kept=self._kept), 0
        if known < self._request.num_tokens:
            self._chain.extend(tokens[known:])
            self._last = tokens[self._chain.num_tokens - 1]
        return self._chain


_CONTENT: Final = re.compile(r"[0-9a-f]{64,128}")


def is_content(identifier: str) -> bool:
    """Whether vLLM names an image, clip or video by a digest of its content. A client's own name, or that of a request,
    may mean another one in another process."""
    return _CONTENT.fullmatch(identifier) is not None


class RequestNames:
    """Names the requests of one engine. Requests whose adapter or image has no digest have none."""

    def __init__(
        self, plan: "SlotPlan", cache: CacheConfig, root: bytes, adapters: ServedAdapters | None = None
    ) -> None:
        """`adapters`: the engine's loaded adapters; None: none so far."""
        self._plan = plan
        self._cache = cache
        self._root = root
        self._kept = HashCache()  # of our own chains
        self.adapters = adapters or ServedAdapters()
        self.name_instead: NameInstead | None = None  # without it only full blocks that vLLM named are reused
        self._changed: bytes | None = None  # random, once the model's weights have changed
        self._mixes = False  # since then vLLM has not emptied its own cache

    def weights_change(self) -> None:
        """The model's weights may be others from now on, which nothing identifies: their names are random."""
        self._changed, self._mixes = secrets.token_bytes(_DIGEST), True

    def cache_emptied(self) -> bool:
        """vLLM's own cache has no blocks of earlier weights any more: what was stored upon those is not found.

        Returns whether names are other ones now.
        """
        mixed, self._mixes = self._mixes, False
        if mixed:
            self._changed = secrets.token_bytes(_DIGEST)
        return mixed

    def of(self, request: Any) -> VllmChain | AheadChain | OwnChain | None:
        """The request's chain; None if its blocks cannot be named."""
        names = (feature.identifier.rpartition(":")[2] for feature in request.mm_features or ())
        if not all(map(is_content, names)):  # before the colon is an adapter, whose weights are in our names
            return None
        lora = request.lora_request
        digest = None if lora is None else self.adapters.digest(lora)
        if lora is not None and digest is None:
            return None
        if self._changed is not None:
            digest = hashlib.sha256(self._changed + (digest or b"")).digest()
        if not self._plan.canonical:
            sizes = self._plan.block_size, self._plan.hash_size
            return self._ahead(VllmChain(request, self._root, sizes, digest, self.name_instead), request)
        if request.mm_features or request.prompt_embeds is not None:
            return None
        salt = request.cache_salt if request.cache_salt is not None else self._cache.cache_salt
        named = self._root, salt, None, digest  # an adapter's weights, whatever its name
        return OwnChain(request, named, self._plan.block_size, self._cache.hash, self._kept)

    def _ahead(self, chain: VllmChain, request: Any) -> VllmChain | AheadChain | None:
        """The chain; if a drafter's KV depends on the tokens after a block, with those in its name."""
        if not self._plan.lookahead:
            return chain
        if request.mm_features or request.prompt_embeds is not None:
            return None  # an image may follow a block, which its tokens do not identify
        return AheadChain(chain, request, self._plan.lookahead)
