"""The requests that ended last, by tenant and id: what is known of each, within a bound."""

from collections import OrderedDict
from threading import Lock
from typing import Final, Generic, Protocol, TypeVar

from kvtier.tiers import ChainHash
from kvtier.tiers.naming import root_hash

MOST_REQUESTS: Final = 1024
MOST_ITEMS: Final = 1 << 20  # tokens, or names of blocks
UNSALTED: Final = "no salt"


class Sized(Protocol):
    """What is known of one request."""

    @property
    def num_items(self) -> int:
        """Tokens or names that it keeps."""


T = TypeVar("T", bound=Sized)


class Recent(Generic[T]):
    """What ended last, the oldest goes first. Thread-safe."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_items: int = MOST_ITEMS) -> None:
        self._lock = Lock()
        self._most_requests, self._most_items = most_requests, most_items
        self._known: OrderedDict[tuple[int, str], T] = OrderedDict()
        self._num_items = 0

    def note(self, client: int, request_id: str, request: T) -> None:
        """It ended. One of the same tenant and id is forgotten; `client` as `client_of`."""
        key = client, request_id
        with self._lock:
            if (before := self._known.pop(key, None)) is not None:
                self._num_items -= before.num_items
            self._known[key] = request
            self._num_items += request.num_items
            while len(self._known) > self._most_requests or self._num_items > self._most_items:
                self._num_items -= self._known.popitem(last=False)[1].num_items

    def find(self, client: int, request_id: str) -> T | None:
        with self._lock:
            return self._known.get((client, request_id))

    def __len__(self) -> int:
        return len(self._known)


def tenant_of(client: int, fingerprint: bytes) -> str:
    """Whose a request is, for people: the number that the tiers know its tenant by, which tells no cache_salt."""
    return UNSALTED if client == client_of(root_hash(fingerprint)) else f"{client:08x}"


def client_of(root: ChainHash) -> int:
    """The number of the tenant whose chains begin there, as `Answered.end_of` gives it."""
    return int.from_bytes(root[:4], "little")
