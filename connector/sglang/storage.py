"""SGLang: kvtier as the storage behind HiCache, for `--hicache-storage-backend dynamic`."""

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.connector import open_tiers
from kvtier.connector.sglang.identity import configuration_of, model_identity, pool_text, shares_kv
from kvtier.connector.sglang.page_store import CutPageStore, PageStore, hit_ends
from kvtier.connector.sglang.pieces import Piece, pieces_of
from kvtier.connector.sglang.pool import PoolPages, page_blocks, pool_pages
from kvtier.connector.sglang.weights import PageNames, follow
from kvtier.tiers import ChainHash, ConfigError, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.naming import root_hash, with_lossy

OLDEST: Final = (0, 5, 23)
NOT_YET: Final = (0, 6)
TESTED: Final = "0.5.23"

try:
    from sglang.srt.distributed.utils import get_pp_indices
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args
    from sglang.version import __version__ as sglang_version
except ImportError as error:
    raise ImportError(f"kvtier.connector.sglang needs SGLang, sglang>=0.5.23,<0.6 ({error})") from error

_log = logging.getLogger(__package__)

_SGLANG_OPTIONS: Final = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path", "config"}
)
_KV: Final = "kv"  # PoolName.KV
_CLOSE_WAIT: Final = 5.0  # seconds to write what is still queued
_MAX_BATCHES: Final = 1024  # measured and not yet collected
# Options that have no effect, since SGLang does their work itself.
_WITHOUT_EFFECT: Final = {
    ("cache", "hash"): "SGLang names its pages itself",
    ("cache", "load_or_recompute"): "SGLang decides; see its prefetch_threshold",
    ("cache", "store_generated"): "SGLang decides what it backs up",
}


_Store = PageStore | CutPageStore


@dataclass(frozen=True, slots=True)
class _Kept:
    """A pool in the tiers."""

    store: _Store
    page_size: int  # tokens of an index
    page_bytes: int


@dataclass(frozen=True, slots=True)
class _PageSlot:
    """The shape for opening the tiers: a page's tokens, and a slot's bytes.

    A slot has the first pool's page, or one unit of another pool if that is larger.
    """

    block_size: int
    block_bytes: int


class _OlderCalls(HiCacheStorage):
    """SGLang's older calls, with one tensor per page: answered, but not supported."""

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]) == 1)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """None: pages go between SGLang's pools and the tiers only (`batch_get_v1`)."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """False: pages go between SGLang's pools and the tiers only (`batch_set_v1`)."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """False, like `set`."""
        return False


class KVTierStorage(_OlderCalls):
    """HiCache's L3. SGLang makes it, registers its host pools, and calls it from its storage threads.

    Its options, in `--hicache-storage-backend-extra-config`, are sections of kvtier's configuration, or `config`, the
    path of a TOML file. ConfigError at start, in one line, for a version, a pool or an option that cannot be served.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        """Called by SGLang's factory, once in every rank's process."""
        _check_version(sglang_version)
        config = _config_of(storage_config.extra_config)
        _check_ranks(storage_config, config)
        self._config = config
        self._storage_config = storage_config
        self._pages: dict[str, PoolPages] = {}  # of every registered pool
        self._kept: dict[str, _Kept] = {}  # the same, once the tiers are open
        self._tiers: list[CacheTiers] = []  # of each piece of a page
        self._slot_bytes, self._root = 0, b""
        self._names = PageNames()
        follow(self._names)
        self._gets: deque[tuple[int, float]] = deque(maxlen=_MAX_BATCHES)  # (pages, GB/s) of each batch
        self._sets: deque[tuple[int, float]] = deque(maxlen=_MAX_BATCHES)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The first pool, with every token's KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._pages = {_KV: pool_pages(mem_pool_host)}
        _check_page_size(self._config, self._pages[_KV].page_size)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool: its data are stored beside the first one's pages, and a hit needs both."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if (name := str(host_pool_name)) == _KV:
            return
        try:
            self._pages[name] = pool_pages(host_pool)
            if self._tiers:  # registered late, for a draft model
                _require_exact(self._config, name)
                self._keep(name)
        except ConfigError:
            self.close()
            raise

    def on_host_pools_registered(self) -> None:
        """Open the tiers for the pages of SGLang's pools. StoreLocked if another process has them open."""
        first = self._pages[_KV]
        others = [pages for name, pages in self._pages.items() if name != _KV]
        for name in self._pages.keys() - {_KV}:
            _require_exact(self._config, name)
        self._slot_bytes = max([first.page_bytes, *(pages.least_slot for pages in others)])
        configuration = configuration_of(get_server_args())
        pool, cache = self.mem_pool_host, self._config.cache
        pieces = pieces_of(self._storage_config, pool, first, cache, configuration, get_pp_indices)
        if len(pieces) == 1:
            self._root = self._open(pieces[0], first, self._slot_bytes)
            for name in self._pages:
                self._keep(name)
            return
        self._require_one_pool(next(iter(self._pages.keys() - {_KV}), None))
        stores = []
        try:
            for piece in pieces:
                pages = piece.of(first, pool)
                root = self._open(piece, first, pages.page_bytes)
                blocks = page_blocks(pages, pages.page_bytes, whole=True)
                stores.append(PageStore(self._tiers[-1], blocks, root, cache))
        except BaseException:
            self.close()  # the tiers of the pieces before
            raise
        self._kept[_KV] = _Kept(CutPageStore(stores), first.page_size, first.page_bytes)

    def _open(self, piece: Piece, pages: PoolPages, slot_bytes: int) -> ChainHash:
        """Open the tiers of a piece of the first pool's `pages`; returns the root of its chains."""
        args, cache = get_server_args(), self._config.cache
        uncut = max(slot_bytes, pages.page_bytes)
        identity = model_identity(args, self.mem_pool_host, pages, uncut, cache.epoch, piece)
        identity = with_lossy(identity, cache.lossy, slot_bytes)
        fingerprint = identity.fingerprint()
        config = self._config if shares_kv(self._storage_config) else _share(self._config, piece)
        self._tiers.append(open_tiers(config, fingerprint, _PageSlot(pages.page_size, slot_bytes), identity))
        pools = self._pages if pages is self._pages[_KV] else {_KV: pages}
        shown = ", ".join(f"{name} of {each.page_bytes} bytes" for name, each in pools.items())
        _log.info("kvtier keeps pages of %s under fingerprint %s", shown, fingerprint.hex()[:16])
        return root_hash(fingerprint)

    def _require_one_pool(self, other: str | None) -> None:
        """ConfigError if pages in pieces have a part in another pool: those are not cut."""
        pool, num_layers = self.mem_pool_host, len(set(self._pages[_KV].layers))
        model_layers = {pool.end_layer - pool.start_layer, getattr(pool, "target_layer_num", num_layers)}
        if other is not None or model_layers != {num_layers}:
            what = f"pool {other!r}" if other is not None else "another model's layers, or layers without K and V"
            problem = "[cache] share_across_tp, share_across_pp: pages are cut"
            raise ConfigError(f"{problem}, and {what} cannot be; leave both out")

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages of the first pool are in the tiers; from memory, without I/O."""
        kept, names = self._kept.get(_KV), self._names.of(keys)
        return 0 if kept is None or names is None else kept.store.held(names)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """How many leading pages are in the tiers with everything that other pools need for them, by SGLang's rules."""
        num_found = self.batch_exists(keys)
        names = self._names.of(keys[:num_found]) or []
        needed = [
            (str(transfer.name), str(transfer.hit_policy.value), len(transfer.keys or [None]))
            for transfer in pool_transfers or []
        ]
        stores = {name: kept.store for name, kept in self._kept.items() if isinstance(kept.store, PageStore)}
        ends, by_pool = hit_ends(names, needed, stores, every=self._storage_config.tp_size > 1)
        found = {_KV: num_found, **by_pool} if num_found else by_pool
        return PoolTransferResult(ends[-1] if ends else 0, {PoolName(name): end for name, end in found.items()}, ends)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill the pages at `host_indices` (int64, one a token); True for the leading ones, loaded and verified."""
        return self._get(_KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """`batch_get_v1` of each pool named."""
        return {each.name: self._get(str(each.name), each.keys or [], each.host_indices, None) for each in transfers}

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy the pages at `host_indices` (int64, one a token) into the tiers; True for those that were stored."""
        return self._set(_KV, keys, host_indices, extra_info)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """`batch_set_v1` of each pool named."""
        return {each.name: self._set(str(each.name), each.keys or [], each.host_indices, None) for each in transfers}

    def clear(self) -> None:
        for tiers in self._tiers:
            tiers.reset()

    def stats(self) -> dict[str, float]:
        """Every counter and gauge of the tiers by its exposition name."""
        found: dict[str, float] = {}
        for tiers in self._tiers:
            found |= {name: found.get(name, 0.0) + value for name, value in tiers.stats().items()}
        return found

    def get_stats(self) -> Any:
        """SGLang's own storage metrics: pages and GB/s of each batch since the last call."""
        stats = StorageMetrics()
        for batches, pages, rates in (
            (self._gets, stats.prefetch_pgs, stats.prefetch_bandwidth),
            (self._sets, stats.backup_pgs, stats.backup_bandwidth),
        ):
            while batches:  # the storage threads only append
                num_pages, rate = batches.popleft()
                pages.append(num_pages)
                rates.append(rate)
        return stats

    def close(self) -> None:
        """Write what is queued, log the counters, close the tiers. Idempotent; later calls find nothing."""
        closing, self._kept = self._tiers, {}
        end = time.monotonic() + _CLOSE_WAIT
        for tiers in closing:
            tiers.drain(max(0.0, end - time.monotonic()))
        counters = {name: value for name, value in self.stats().items() if "_total" in name and value}
        self._tiers, end = [], time.monotonic() + _CLOSE_WAIT
        for tiers in closing:
            tiers.close(max(0.0, end - time.monotonic()))
        if closing:
            _log.info("kvtier closed: %s", json.dumps(counters))

    def _keep(self, name: str) -> None:
        if len(self._tiers) > 1:
            self._require_one_pool(name)
        pages = self._pages[name]
        if pages.least_slot > self._slot_bytes:
            raise ConfigError(
                f"SGLang: pool {name!r} came late, with {pages.least_slot} bytes for a layer where a page of the "
                f"model has {self._slot_bytes}; choose a larger --page-size, or serve without a draft model"
            )
        text = None if name == _KV else pool_text(self._storage_config, get_server_args(), name, pages)
        blocks = page_blocks(pages, self._slot_bytes, whole=name == _KV)
        store = PageStore(self._tiers[0], blocks, self._root, self._config.cache, text)
        self._kept[name] = _Kept(store, pages.page_size, pages.page_bytes)

    def _get(self, pool: str, keys: list[str], host_indices: Any, extra_info: Any) -> list[bool]:
        def load(store: _Store, names: list[ChainHash], pages: NDArray[np.int64]) -> list[bool]:
            num_loaded = store.load(names, pages, self._parent(extra_info))
            return [i < num_loaded for i in range(len(keys))]

        return self._moved(pool, keys, host_indices, load, self._gets)

    def _set(self, pool: str, keys: list[str], host_indices: Any, extra_info: Any) -> list[bool]:
        def store_pages(store: _Store, names: list[ChainHash], pages: NDArray[np.int64]) -> list[bool]:
            return store.store(names, pages, self._parent(extra_info))

        return self._moved(pool, keys, host_indices, store_pages, self._sets)

    def _parent(self, extra_info: Any) -> ChainHash | None:
        """The page before the call's first, if SGLang passes it (its option hicache_storage_pass_prefix_keys)."""
        prefix: list[str] | None = getattr(extra_info, "prefix_keys", None)
        names = self._names.of(prefix[-1:]) if prefix else None
        return names[0] if names else None

    def _moved(
        self,
        pool: str,
        keys: list[str],
        host_indices: Any,
        move: Callable[[_Store, list[ChainHash], NDArray[np.int64]], list[bool]],
        measured: "deque[tuple[int, float]]",
    ) -> list[bool]:
        """The result for each page; all False, counted, if the indices are not those of whole pages."""
        kept, names = self._kept.get(pool), self._names.of(keys)
        if kept is None or not names:
            return [False] * len(keys)
        if (pages := _page_numbers(host_indices, len(keys), kept.page_size)) is None:
            kept.store.tiers.metrics.missed(Outcome.COPY_FAILED, len(keys))
            return [False] * len(keys)
        started = time.monotonic()
        results = move(kept.store, names, pages)
        if (num_pages := sum(results)) and self._storage_config.enable_storage_metrics:
            seconds = max(time.monotonic() - started, 1e-9)
            measured.append((num_pages, num_pages * kept.page_bytes / seconds / 1e9))
        return results


def _page_numbers(host_indices: Any, num_pages: int, page_size: int) -> NDArray[np.int64] | None:
    """The numbers of the pages at these token indices; None if they are not whole pages."""
    if host_indices is None or len(host_indices) != num_pages * page_size:
        return None
    rows: NDArray[np.int64] = host_indices.cpu().numpy().reshape(num_pages, page_size)
    pages = rows[:, 0] // page_size
    return pages if (rows == pages[:, None] * page_size + np.arange(page_size)).all() else None


def _check_version(version: str) -> None:
    """ConfigError outside the range whose interfaces are known; a warning for a version that was not tested."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < NOT_YET:
        raise ConfigError(f"sglang {version}: this kvtier serves sglang>=0.5.23,<0.6; install one of those")
    if version != TESTED:
        _log.warning("sglang %s: this kvtier was tested with sglang %s", version, TESTED)


def _check_ranks(storage: Any, config: Config) -> None:
    """ConfigError for parallelism whose pages the tiers cannot store."""
    if shares_kv(storage) and config.service.socket is None:
        raise ConfigError(
            f"SGLang: tensor parallel size {storage.tp_size} of an MLA model: its first rank alone stores, and "
            "a slab is open in one process; start `kvtier serve` on this node, and add "
            '"service": {"socket": …} to the extra config, or serve with --tp-size 1'
        )
    for name in ("attn_cp_size", "dcp_size"):
        if (size := getattr(storage, name)) > 1:
            raise ConfigError(f"SGLang: {name} {size}: kvtier cannot store parts of a context; set it to 1")


def _require_exact(config: Config, pool: str) -> None:
    """ConfigError for a further pool's pages as fp8: they are not K and V."""
    if config.cache.lossy != "none":
        problem = f"pool {pool!r} keeps something else than K and V"
        raise ConfigError(f'[cache] lossy "{config.cache.lossy}": {problem}; leave it out')


def _config_of(options: dict[str, Any]) -> Config:
    """The configuration in the extra config. Also enables SGLang's zero-copy calls there."""
    if not options.setdefault("interface_v1", 1):
        raise ConfigError('extra config, interface_v1 0: kvtier has no other; leave it out, or write "interface_v1": 1')
    sections = {name: value for name, value in options.items() if name not in _SGLANG_OPTIONS}
    config = Config.load(options.get("config"), **sections)
    if config.cache.cache_salt is not None:
        salt = json.dumps(config.cache.cache_salt)
        raise ConfigError(f"[cache] cache_salt {salt}: SGLang salts each request; give it there, as cache_salt")
    for (section, option), why in _WITHOUT_EFFECT.items():
        if option in getattr(config, section).model_fields_set:
            _log.warning("[%s] %s has no effect: %s", section, option, why)
    return config


def _check_page_size(config: Config, page_size: int) -> None:
    cache = config.cache
    if "block_size" in cache.model_fields_set and cache.block_size != page_size:
        fix = f"leave it out, or start SGLang with --page-size {cache.block_size}"
        raise ConfigError(f"[cache] block_size {cache.block_size}: SGLang's pages have {page_size} tokens; {fix}")


def _share(config: Config, piece: Piece) -> Config:
    """A piece's part of the memory and of the disk, in a directory of its own: ranks are processes."""
    if piece.num_ranks == 1:
        return config
    path = config.file.path and config.file.path / f"tp{piece.tp_ranks[0]}-pp{piece.stage}"
    file = config.file.model_copy(update={"path": path, "size": config.file.size // piece.num_ranks})
    host = config.host.model_copy(update={"size": config.host.size // piece.num_ranks})
    return config.model_copy(update={"file": file, "host": host})
