"""SGLang: kvtier as the storage behind HiCache, for `--hicache-storage-backend dynamic`."""

import json
import logging
import re
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.connector import open_tiers
from kvtier.connector.models import config_of, name_of, revision_of
from kvtier.connector.sglang.page_store import PageStore
from kvtier.connector.sglang.pool import is_latent, pool_blocks, pool_shape
from kvtier.tiers import ChainHash, ConfigError, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.naming import KVShape, ModelIdentity, config_digest, root_hash

OLDEST: Final = (0, 5, 23)
NOT_YET: Final = (0, 6)
TESTED: Final = "0.5.23"

try:
    from huggingface_hub import try_to_load_from_cache
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_server_args
    from sglang.version import __version__ as sglang_version
except ImportError as error:
    raise ImportError(f"kvtier.connector.sglang needs SGLang, sglang>=0.5.23,<0.6 ({error})") from error

_log = logging.getLogger(__package__)

HASH_SCHEME: Final = "sglang"  # `key_schemes.sglang_hashes`
_SGLANG_OPTIONS: Final = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path", "config"}
)
_CLOSE_WAIT: Final = 5.0  # seconds to write what is still queued
_MAX_BATCHES: Final = 1024  # measured and not yet asked for
# Options whose work SGLang does itself: set by hand they would promise something.
_WITHOUT_EFFECT: Final = {
    ("cache", "hash"): "SGLang names its pages itself",
    ("cache", "load_or_recompute"): "SGLang decides; see its prefetch_threshold",
    ("cache", "store_generated"): "SGLang decides what it backs up",
}


class KVTierStorage(HiCacheStorage):
    """HiCache's L3. SGLang makes it, registers its host pool, and calls it from its storage threads.

    Its options, in `--hicache-storage-backend-extra-config`, are sections of kvtier's configuration, or `config`, the
    path of a TOML file. ConfigError at start, in one line, for a version, a pool or an option that cannot be served.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        """What SGLang's factory calls, once in every rank's process."""
        _check_version(sglang_version)
        _check_ranks(storage_config)
        self._config = _share(_config_of(storage_config.extra_config), storage_config)
        self._storage_config = storage_config
        self._store: PageStore | None = None
        self._page_size = self._page_bytes = 0
        self._gets: deque[tuple[int, float]] = deque(maxlen=_MAX_BATCHES)  # (pages, GB/s) of each batch
        self._sets: deque[tuple[int, float]] = deque(maxlen=_MAX_BATCHES)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for the pages of SGLang's host pool. StoreLocked where another process has them open."""
        super().register_mem_pool_host(mem_pool_host)
        shape = pool_shape(mem_pool_host)
        _check_page_size(self._config, shape.block_size)
        identity = _identity(self._storage_config, mem_pool_host, shape, self._config.cache.epoch)
        fingerprint = identity.fingerprint()
        blocks = pool_blocks(mem_pool_host, shape)
        tiers = open_tiers(self._config, fingerprint, shape)
        self._page_size, self._page_bytes = shape.block_size, shape.block_bytes
        self._store = PageStore(tiers, blocks, root_hash(fingerprint), self._config.cache)
        _log.info("kvtier keeps pages of %d bytes under fingerprint %s", shape.block_bytes, fingerprint.hex()[:16])

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse what is not the KV pool: a prefix without its extra pools' state is not whole."""
        if host_pool_name != PoolName.KV:
            self.close()
            raise ConfigError(
                f"SGLang: extra host pool {str(host_pool_name)!r} of this model: kvtier cannot store that yet; "
                "take another storage backend, or none"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are held; from memory, without I/O."""
        return 0 if self._store is None else self._store.held(_names(keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill the pages at `host_indices` (int64, one a token); True for the leading ones, loaded and verified."""
        pages = self._pages(keys, host_indices)
        if self._store is None or pages is None:
            return [False] * len(keys)
        started = time.monotonic()
        num_loaded = self._store.load(_names(keys), pages, _parent(extra_info))
        self._measured(self._gets, num_loaded, started)
        return [i < num_loaded for i in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy the pages at `host_indices` (int64, one a token) into the tiers; True for those that were taken."""
        pages = self._pages(keys, host_indices)
        if self._store is None or pages is None:
            return [False] * len(keys)
        started = time.monotonic()
        taken = self._store.store(_names(keys), pages, _parent(extra_info))
        self._measured(self._sets, sum(taken), started)
        return taken

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """None: pages go between SGLang's pool and the tiers only (`batch_get_v1`)."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """False: pages go between SGLang's pool and the tiers only (`batch_set_v1`)."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """False, like `set`."""
        return False

    def clear(self) -> None:
        if self._store is not None:
            self._store.tiers.reset()

    def stats(self) -> dict[str, float]:
        """Every counter and gauge of the tiers by its exposition name."""
        return {} if self._store is None else self._store.tiers.stats()

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
        store, self._store = self._store, None
        if store is not None:
            store.tiers.drain(_CLOSE_WAIT)
            counters = {name: value for name, value in store.tiers.stats().items() if "_total" in name and value}
            store.tiers.close(_CLOSE_WAIT)
            _log.info("kvtier closed: %s", json.dumps(counters))

    def _pages(self, keys: list[str], host_indices: Any) -> NDArray[np.int64] | None:
        """The numbers of the pages at these token indices; None, counted, where they are not whole pages."""
        if self._store is None:
            return None
        tokens: NDArray[np.int64] = host_indices.cpu().numpy()
        if len(tokens) == len(keys) * self._page_size:
            rows = tokens.reshape(len(keys), self._page_size)
            pages = rows[:, 0] // self._page_size
            if (rows == pages[:, None] * self._page_size + np.arange(self._page_size)).all():
                return pages
        self._store.tiers.metrics.missed(Outcome.COPY_FAILED, len(keys))
        return None

    def _measured(self, batches: "deque[tuple[int, float]]", num_pages: int, started: float) -> None:
        if num_pages and self._storage_config.enable_storage_metrics:
            seconds = max(time.monotonic() - started, 1e-9)
            batches.append((num_pages, num_pages * self._page_bytes / seconds / 1e9))


def _names(keys: list[str]) -> list[ChainHash]:
    return [bytes.fromhex(key) for key in keys]


def _parent(extra_info: Any) -> ChainHash | None:
    """The page before the call's first, where SGLang says it (its option hicache_storage_pass_prefix_keys)."""
    prefix: list[str] | None = getattr(extra_info, "prefix_keys", None)
    return bytes.fromhex(prefix[-1]) if prefix else None


def _check_version(version: str) -> None:
    """ConfigError outside the range whose interfaces are known; a warning for a version that was not tested."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not OLDEST <= numbers < NOT_YET:
        raise ConfigError(f"sglang {version}: this kvtier serves sglang>=0.5.23,<0.6; install one of those")
    if version != TESTED:
        _log.warning("sglang %s: this kvtier was tested with sglang %s", version, TESTED)


def _check_ranks(storage: Any) -> None:
    """ConfigError for a way to split the model whose pages one slab a rank cannot hold."""
    if storage.is_mla_model and storage.tp_size > 1:
        raise ConfigError(
            f"SGLang: tensor parallel size {storage.tp_size} of an MLA model: its first rank alone stores, and "
            "a slab is open in one process; serve it with --tp-size 1, or take another storage backend"
        )
    for name in ("attn_cp_size", "dcp_size"):
        if (size := getattr(storage, name)) > 1:
            raise ConfigError(f"SGLang: {name} {size}: kvtier cannot store parts of a context; set it to 1")


def _config_of(options: dict[str, Any]) -> Config:
    """The configuration in the extra config. Tells SGLang there to use the zero-copy calls."""
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


def _share(config: Config, storage: Any) -> Config:
    """One rank's part of the memory and of the disk, in a directory of its own: ranks are processes."""
    num_ranks = storage.tp_size * storage.pp_size
    if num_ranks == 1:
        return config
    path = config.file.path and config.file.path / f"tp{storage.tp_rank}-pp{storage.pp_rank}"
    file = config.file.model_copy(update={"path": path, "size": config.file.size // num_ranks})
    host = config.host.model_copy(update={"size": config.host.size // num_ranks})
    return config.model_copy(update={"file": file, "host": host})


def _identity(storage: Any, pool: Any, shape: KVShape, epoch: int) -> ModelIdentity:
    """Everything the pages depend on: what SGLang was told, its pool, and the checkpoint itself."""
    args = get_server_args()
    if args.load_format == "dummy":
        raise ConfigError("--load-format dummy: random weights have no name to store after; save them, serve those")
    directory = _checkpoint(args)
    configuration = config_of(directory) | json.loads(args.json_model_override_args or "{}")
    dtype = str(configuration.get("dtype") or configuration.get("torch_dtype") or shape.dtype)
    return ModelIdentity(
        model=name_of(directory),
        revision=revision_of(directory),
        config_digest=config_digest(configuration),
        dtype=dtype,
        kv_dtype=shape.dtype,
        compute_dtype=dtype if args.dtype == "auto" else args.dtype,
        quantization=args.quantization,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        layers=tuple(range(pool.start_layer, pool.end_layer)),
        kind="mla" if is_latent(pool) else "full",
        tp_ranks=(storage.tp_rank, storage.tp_rank + 1),
        tp_size=storage.tp_size,
        pp_stages=(storage.pp_rank, storage.pp_rank + 1),
        pp_size=storage.pp_size,
        hash_scheme=HASH_SCHEME,
        epoch=epoch,
    )


def _checkpoint(args: Any) -> Path:
    """The directory of the served model's checkpoint, a hub's snapshot in the local cache included."""
    path = Path(args.model_path)
    if path.is_dir():
        return path
    found = try_to_load_from_cache(args.model_path, "config.json", cache_dir=args.download_dir, revision=args.revision)
    if not isinstance(found, str):
        raise ConfigError(f"--model-path {args.model_path!r}: no checkpoint of that name here; give its directory")
    return Path(found).parent
