"""ServedAdapters: the weights of each adapter that a vLLM server computes with, whatever lies in their files by now."""

import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.connector.models import FileStamp, file_stamps, revision_of
from kvtier.tiers import ConfigError

_log = logging.getLogger(__name__)

_MOST: Final = 65_536  # adapters, and names of adapters, that are remembered


@dataclass(slots=True)
class _Adapter:
    """What the server was going to load when it was named."""

    path: str
    stamps: tuple[FileStamp, ...]
    digest: bytes | None  # None: its files changed while they were loaded, or are not here
    is_loaded: bool = False  # by the server, which has computed with it
    is_awaited: bool = False  # a request will have it loaded in place of other weights, which the server has until then


class ServedAdapters:
    """Names adapters by what the server has loaded. Called from the scheduler's thread; its workers load.

    vLLM loads an adapter when it is told to, or when a request first needs it. It goes by the adapter's number and
    loads it again only if that is asked for, or if other adapters have taken its place meanwhile.
    """

    def __init__(self, capacity: int = _MOST) -> None:
        """`capacity`: adapters that vLLM keeps loaded, `max_cpu_loras`."""
        self._capacity = capacity
        self._adapters: dict[int, _Adapter] = {}  # by vLLM's number
        self._doubtful: set[int] = set()  # perhaps not loaded yet, or loaded anew: their files have to stay as they are
        self._has_changed = False  # since the last `look`
        self._named: dict[tuple[str, str], bytes | None] = {}  # vLLM's names of L1 blocks: the last weights under each
        self._mixed: set[tuple[str, str]] = set()  # names that had several
        self._warned: set[str] = set()

    def digest(self, lora: Any) -> bytes | None:
        """What identifies the weights that a request with this adapter is computed with; None if nothing does."""
        known, name = self._adapters.get(lora.lora_int_id), (lora.lora_name, lora.lora_path)
        reloads = getattr(lora, "load_inplace", False)  # at every step that computes such a request
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
        """The server is about to load the adapter, unless it has one of this number and is not to load it anew."""
        if lora.lora_int_id not in self._adapters or getattr(lora, "load_inplace", False):
            self._follow(lora).is_awaited = False

    def loaded(self, lora_id: int) -> None:
        """It has loaded it, or had it: what `loading` has named is known if the files are still the same."""
        if lora_id in self._doubtful and not self._changes(lora_id):
            self._adapters[lora_id].is_loaded = True
            self._doubtful.discard(lora_id)

    def removed(self, lora_id: int) -> None:
        """The server forgets the adapter: it loads the next one of this number from its files."""
        self._has_changed |= self._adapters.pop(lora_id, None) is not None
        self._doubtful.discard(lora_id)

    @property
    def is_unsettled(self) -> bool:
        """Whether there is anything for `look` to see."""
        return self._has_changed or bool(self._doubtful)

    def look(self) -> bool:
        """Whether any adapter has other weights since the last look than those it was named by, or may have."""
        for lora_id in list(self._doubtful):
            self._changes(lora_id)
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def current(self, lora_id: int) -> bytes | None:
        """What identifies the weights that the server has or is about to load under this number."""
        adapter = self._adapters.get(lora_id)
        return None if adapter is None else adapter.digest

    def computed(self, lora: Any) -> None:
        """A request that was named by the adapter has an output, so the server has loaded it. Behind `look`."""
        adapter = self._adapters[lora.lora_int_id]
        adapter.is_awaited &= not getattr(lora, "load_inplace", False)
        adapter.is_loaded |= not adapter.is_awaited

    def settle(self, reloading: Collection[int]) -> None:
        """Behind that: what was loaded stays as it is, but for those that live requests have loaded at every step."""
        self._doubtful -= {each for each in self._doubtful if self._adapters[each].is_loaded and each not in reloading}

    def is_mixed(self, lora: Any) -> bool:
        """Whether vLLM's own prefix cache may hold KV of other weights under the name that it gives this adapter's."""
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
        """Whether vLLM, which has no place for all adapters, may have loaded this one again, and other weights."""
        if len(self._adapters) <= self._capacity:
            return False
        return path != adapter.path or _stamps(path) != adapter.stamps

    def _read(self, path: str, stamps: tuple[FileStamp, ...]) -> bytes | None:
        try:
            digest = revision_of(Path(path)).encode()
        except (ConfigError, OSError) as error:
            self._warn(path, str(error))
            return None
        return digest if _stamps(path) == stamps else None

    def _changes(self, lora_id: int) -> bool:
        """Whether its files are no longer those that it was named by: then nothing names it."""
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
    """Of the files that make up an adapter; none if there are none."""
    try:
        return file_stamps(Path(path))
    except OSError:  # they come and go
        return ()


def watch_engine_core() -> None:
    """Have vLLM's engine core tell its connectors which adapters it loads and removes beside its requests. Idempotent.

    It tells no connector of itself, and a server loads adapters before any request needs them.
    """
    from vllm.v1.engine.core import EngineCore  # not needed to name requests, nor there when this module is tested

    if getattr(EngineCore.add_lora, "is_watched", False):
        return
    add, remove = EngineCore.add_lora, EngineCore.remove_lora

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

    add_lora.is_watched = True  # type: ignore[attr-defined]
    EngineCore.add_lora, EngineCore.remove_lora = add_lora, remove_lora


def _served_by(core: Any) -> list[ServedAdapters]:
    """What kvtier's connectors of an engine know of its adapters."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    found = [getattr(each, "served_adapters", None) for each in getattr(connector, "sub_connectors", [connector])]
    return [each for each in found if isinstance(each, ServedAdapters)]
