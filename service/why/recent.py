"""The requests that ended last, by their id: what is known of each, within a bound."""

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
        self._known: OrderedDict[str, T] = OrderedDict()
        self._num_items = 0

    def note(self, request_id: str, request: T) -> None:
        """It ended. One of the same id is forgotten."""
        with self._lock:
            if (before := self._known.pop(request_id, None)) is not None:
                self._num_items -= before.num_items
            self._known[request_id] = request
            self._num_items += request.num_items
            while len(self._known) > self._most_requests or self._num_items > self._most_items:
                self._num_items -= self._known.popitem(last=False)[1].num_items

    def find(self, request_id: str) -> T | None:
        with self._lock:
            return self._known.get(request_id)

    def __len__(self) -> int:
        return len(self._known)


def tenant_of(client: int, fingerprint: bytes) -> str:
    """Whose a request is, for people: the number that the tiers know its tenant by, which tells no cache_salt."""
    return UNSALTED if is_tenant(client, root_hash(fingerprint)) else f"{client:08x}"


def is_tenant(client: int, root: ChainHash) -> bool:
    """Whether the chains of this root are those of the tenant with this number, as `Answered.end_of` gives it."""
    return client == int.from_bytes(root[:4], "little")
