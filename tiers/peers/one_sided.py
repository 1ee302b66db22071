"""RemoteMemory: reads blocks straight from another process's memory by NIXL: by RDMA where there is a fabric."""

import ctypes
import importlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from threading import Condition
from typing import Any, Final

import numpy as np

from kvtier.tiers import BATCH_BYTES, ConfigError, Outcome, cut_off_in_children
from kvtier.tiers.config import preset
from kvtier.tiers.peers.stream import PeerFailed

_log = logging.getLogger(__name__)

_PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")  # one interface; the last two are single wheels
_POLL: Final = 50e-6  # seconds between two looks at a transfer …
_MOST_POLL: Final = 1e-3  # … which double up to this
_MOST_LOST: Final = 8  # buffers to which a failed transfer may still write
_CLOSE_SECONDS: Final = 5.0
_MOST_ADDRESS: Final = 1 << 63
METADATA_BYTES: Final = 16 << 10  # at most: some hundreds for each network device


def load_nixl() -> Any:
    """The module of NIXL's Python interface. ConfigError if there is none."""
    preset("UCX_LOG_FILE", "stderr")  # its default is stdout, where programs write JSON
    for name in _PACKAGES:
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints each agent
        return found
    fix = "pip install nixl-cu12 (or nixl-cu13), or leave out transport"
    raise ConfigError(f'[peers] transport "nixl": needs NIXL; {fix}')


def nixl_version() -> bytes:
    """Of the package: another one's metadata can end the process that reads it."""
    name = load_nixl().__name__
    return f"{name.partition('_')[0]} {metadata.version(name.replace('_', '-'))}".encode()


@cache
def _end_without_destructors() -> None:
    """Have this process, and its children, end before C libraries' destructors: those of NIXL 1.5.1's libnl crash."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's: it passes the status on
        libc.on_exit(libc._exit, None)


class RemoteMemory:
    """This process's end: a NIXL agent, the memory that it offers, and the peers that it reads from. Thread-safe.

    Bytes land in buffers of its own and are copied from there: a transfer that failed or was late may still write to
    its buffer, which is not used again. The caller verifies the copy. NIXL itself has no keys. Who reaches its ports
    may read and write what is registered, so the network has to be closed to others. Does nothing in a forked child.
    """

    def __init__(self) -> None:
        """ConfigError without NIXL, or if its transport UCX does not start. Takes up to a second."""
        nixl = load_nixl()
        _end_without_destructors()
        self._version = nixl_version()
        kinds = [each for each in vars(nixl._bindings).values() if isinstance(each, type)]
        own = [each for each in kinds if issubclass(each, Exception)]  # they have no class in common
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *own)
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            config = nixl.nixl_agent_config(backends=["UCX"], sync_mode=sync)
            self._agent: Any = nixl.nixl_agent(f"kvtier-{secrets.token_hex(8)}", config)
        except self._errors as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ConfigError(f'[peers] transport "nixl": UCX does not start ({reason}); check UCX_TLS') from error
        self._lock = Condition()  # guards what follows; never held across a transfer
        self._registered: list[tuple[Any, Any]] = []  # memory, and NIXL's description of it
        self._free: list[memoryview] = []  # registered buffers
        self._late: list[tuple[Any, memoryview]] = []  # transfers that passed their deadline, and their buffers
        self._num_lost = 0  # buffers of failed transfers: an error does not show that writing has ended
        self._peers: Counter[Any] = Counter()  # connections to each agent, by its name
        self._num_reading = 0
        self._closed = False
        cut_off_in_children(self)

    def register(self, part: memoryview) -> None:
        """Offer the whole memory that `part` belongs to, until `close`. PeerFailed."""
        with self._lock, self._failing():
            self._register(np.frombuffer(part.obj, np.uint8))

    @property
    def metadata(self) -> bytes:
        """What another process needs to read the registered memory; none if it is too long. PeerFailed."""
        with self._lock, self._failing():
            found = self._version + b"\0" + self._agent.get_agent_metadata()
        return found if len(found) <= METADATA_BYTES else b""

    def connect(self, given: bytes) -> Any:
        """The name of the agent with that metadata. PeerFailed, also for another version's. `disconnect` follows."""
        version, _, rest = given.partition(b"\0")
        if version != self._version:
            raise PeerFailed(Outcome.UNSUPPORTED, "nixl")
        with self._lock, self._failing():
            name = self._agent.add_remote_agent(rest)
            self._peers[name] += 1
        return name

    def disconnect(self, peer: Any) -> None:
        """A connection to it ends."""
        with self._lock:
            if self._closed:
                return
            self._peers[peer] -= 1
            if self._peers[peer] <= 0:
                del self._peers[peer]
                self._remove(peer)

    def read(self, peer: Any, addresses: Sequence[int], into: Sequence[memoryview], deadline: float) -> None:
        """Fill each buffer from the peer's memory. PeerFailed; then nothing was written to them."""
        sizes = [each.nbytes for each in into]
        if max(addresses, default=0) + max(sizes, default=0) >= _MOST_ADDRESS:  # NIXL's own check overflows
            raise PeerFailed(Outcome.IO_ERROR, "garbage")
        landing = self._taken(sum(sizes))
        is_over = False
        try:
            is_over = self._transfer(peer, addresses, sizes, landing, deadline)
            at = 0
            for each in into if is_over else ():
                each[:] = landing[at : at + each.nbytes]
                at += each.nbytes
        finally:
            with self._lock:
                self._num_reading -= 1
                if is_over:
                    self._free.append(landing)
                self._lock.notify_all()
        if not is_over:
            raise PeerFailed(Outcome.TIMEOUT, "timeout")

    def close(self) -> None:
        """Forget peers and memory, after transfers under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._lock.wait_for(lambda: not self._num_reading, _CLOSE_SECONDS):
                _log.warning("[peers] NIXL still reads after %g s: its memory is kept", _CLOSE_SECONDS)
                return
            for peer in self._peers:
                self._remove(peer)
            for _, described in self._registered:
                self._agent.deregister_memory(described)
            self._late.clear()
            self._peers.clear()
            self._agent = None  # nothing writes from here on
            self._registered.clear()
            self._free.clear()

    def forked(self) -> None:
        """In a child: the agent's descriptors are the parent's. So it is never destroyed here, not even at the end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._closed, self._lock = True, Condition()  # another thread may have had it

    def _transfer(
        self, peer: Any, addresses: Sequence[int], sizes: Sequence[int], landing: memoryview, deadline: float
    ) -> bool:
        """Let NIXL fill the buffer; False: it still does. PeerFailed: it may still do."""
        start, own = np.frombuffer(landing, np.uint8).ctypes.data, []
        for size in sizes:
            own.append((start, size, 0))
            start += size
        there = [(address, size, 0) for address, size in zip(addresses, sizes, strict=True)]
        agent, state, pause = self._agent, "ERR", _POLL
        handle: Any = None
        try:
            with self._failing():
                parts = [agent.get_xfer_descs(each, mem_type="DRAM") for each in (own, there)]
                handle = agent.initialize_xfer("READ", *parts, peer)
                state = agent.transfer(handle)
                while state == "PROC" and time.monotonic() < deadline:
                    time.sleep(pause)
                    pause = min(2 * pause, _MOST_POLL)
                    state = agent.check_xfer_state(handle)
                if state == "DONE":
                    handle.release()
        finally:
            with self._lock:
                if state == "PROC":
                    self._late.append((handle, landing))
                elif state != "DONE":
                    self._num_lost += 1
        if state == "ERR":
            raise PeerFailed(Outcome.IO_ERROR, "nixl")
        return bool(state == "DONE")

    def _taken(self, num_bytes: int) -> memoryview:
        """A registered buffer of so many bytes or more; counts the read. PeerFailed if too many are not to be used."""
        with self._lock, self._failing():
            for late in list(self._late):
                if (state := self._state_of(late[0])) != "PROC":
                    self._late.remove(late)
                    if state == "DONE":
                        self._free.append(late[1])
                    else:
                        self._num_lost += 1
            if self._num_lost + len(self._late) >= _MOST_LOST:
                raise PeerFailed(Outcome.IO_ERROR, "nixl")
            at = next((i for i, each in enumerate(self._free) if each.nbytes >= num_bytes), None)
            if at is None:
                made = np.empty(max(BATCH_BYTES, num_bytes), np.uint8)
                self._register(made)
                landing = memoryview(made)
            else:
                landing = self._free.pop(at)
            self._num_reading += 1
        return landing

    def _state_of(self, handle: Any) -> str:
        """Of a late transfer, which is released once it is over."""
        try:
            state = str(self._agent.check_xfer_state(handle))
            if state != "PROC":
                handle.release()
        except self._errors:  # one bad transfer ends no later read
            return "ERR"
        return state

    def _register(self, memory: Any) -> None:
        described = self._agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], mem_type="DRAM")
        self._agent.register_memory(described)
        self._registered.append((memory, described))

    def _remove(self, peer: Any) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as error:  # its process has died
            _log.debug("NIXL: %r", error)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """NIXL's errors as PeerFailed, and the end of this object."""
        if self._closed:
            raise PeerFailed(Outcome.CLOSED, "closed")
        try:
            yield
        except self._errors as error:
            raise PeerFailed(Outcome.IO_ERROR, "nixl") from error
