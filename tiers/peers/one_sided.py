"""RemoteMemory: reads blocks straight from another process's memory by NIXL: by RDMA where there is a fabric."""

import importlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final

import numpy as np

from kvtier.tiers import ConfigError, Outcome
from kvtier.tiers.peers.stream import PeerFailed

_log = logging.getLogger(__name__)

_PACKAGES: Final = ("nixl", "nixl_cu13", "nixl_cu12")  # one interface; the last two are single wheels
_POLL: Final = 50e-6  # seconds between two looks at a transfer …
_MOST_POLL: Final = 1e-3  # … which double up to this
METADATA_BYTES: Final = 16 << 10  # at most: some hundreds for each network device


def load_nixl() -> Any:
    """The module of NIXL's Python interface. ConfigError if there is none."""
    for name in _PACKAGES:
        try:
            found = importlib.import_module(name)
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints each agent
        return found
    fix = "pip install nixl-cu12 (or nixl-cu13), or leave out transport"
    raise ConfigError(f'[peers] transport "nixl": needs NIXL; {fix}')


class RemoteMemory:
    """This process's end: a NIXL agent with its own memory registered, and the peers that it reads from. Thread-safe.

    Read bytes are not trusted: the caller verifies each block's tag. NIXL itself has no keys. Who reaches its ports may
    read and write registered memory, so the network has to be closed to others.
    """

    def __init__(self) -> None:
        """ConfigError without NIXL, or if its transport UCX does not start. Takes up to a second."""
        nixl = load_nixl()
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
        self._lock = Lock()  # guards what follows; never held across a transfer
        self._registered: dict[int, tuple[int, Any]] = {}  # start → end, and NIXL's description
        self._peers: Counter[str] = Counter()  # connections to each agent

    def register(self, part: memoryview) -> None:
        """Let NIXL use the whole memory that `part` belongs to, until `close`. Idempotent. PeerFailed."""
        whole = np.frombuffer(part.obj, np.uint8)
        start, size = whole.ctypes.data, whole.nbytes
        with self._lock, self._failing():
            if self._registered.get(start, (0, None))[0] < start + size:
                memory = self._agent.get_reg_descs([(start, size, 0, "")], mem_type="DRAM")
                self._agent.register_memory(memory)
                self._registered[start] = start + size, memory

    @property
    def metadata(self) -> bytes:
        """What another process needs to read the registered memory. PeerFailed."""
        with self._failing():
            found: bytes = self._agent.get_agent_metadata()
        return found

    def connect(self, metadata: bytes) -> str:
        """The name of the agent with that metadata. PeerFailed. `disconnect` follows."""
        with self._lock, self._failing():
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._peers[name] += 1
        return name

    def disconnect(self, peer: str) -> None:
        """A connection to it ends."""
        with self._lock:
            self._peers[peer] -= 1
            if self._peers[peer] <= 0:
                del self._peers[peer]
                self._remove(peer)

    def read(self, peer: str, addresses: Sequence[int], into: Sequence[memoryview], deadline: float) -> None:
        """Fill each buffer from the peer's memory. PeerFailed.

        Returns or raises only when NIXL writes to the buffers no more, which may be after the deadline.
        """
        for buffer in into:
            self.register(buffer)
        own = [(np.frombuffer(each, np.uint8).ctypes.data, each.nbytes, 0) for each in into]
        there = [(address, each.nbytes, 0) for address, each in zip(addresses, into, strict=True)]
        agent = self._agent
        with self._failing():
            parts = [agent.get_xfer_descs(each, mem_type="DRAM") for each in (own, there)]
            handle = agent.initialize_xfer("READ", *parts, peer)
        state, pause = "PROC", _POLL
        try:
            with self._failing():
                state = agent.transfer(handle)
                while state == "PROC" and time.monotonic() < deadline:
                    time.sleep(pause)
                    pause = min(2 * pause, _MOST_POLL)
                    state = agent.check_xfer_state(handle)
        finally:
            self._release(handle)
        if state == "PROC":
            raise PeerFailed(Outcome.TIMEOUT, "timeout")
        if state != "DONE":
            raise PeerFailed(Outcome.IO_ERROR, "nixl")

    def close(self) -> None:
        """Forget peers and memory. No transfer is under way. Idempotent."""
        with self._lock:
            for peer in self._peers:
                self._remove(peer)
            for _, memory in self._registered.values():
                self._agent.deregister_memory(memory)
            self._peers.clear()
            self._registered.clear()
            self._agent = None

    def _remove(self, peer: str) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as error:  # its process has died
            _log.debug("NIXL: %r", error)

    def _release(self, handle: Any) -> None:
        """Wait until the transfer is over or cancelled: until then it may write. If it hangs, so do its slots."""
        while True:
            try:
                handle.release()
            except self._errors:
                time.sleep(_MOST_POLL)
            else:
                return

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """NIXL's errors as PeerFailed."""
        try:
            yield
        except self._errors as error:
            raise PeerFailed(Outcome.IO_ERROR, "nixl") from error
