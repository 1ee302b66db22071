"""Who of too many gives way: of the address that has most, the one that has waited longest."""

from typing import Generic, TypeVar

T = TypeVar("T")


class Crowd(Generic[T]):
    """Connections that wait, by the address they come from. Each call looks at one of them. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """`most` may wait at once, so there are no more addresses."""
        self._most = most
        self._by_address: dict[str, dict[T, None]] = {}  # the longest waiting first
        self._addresses: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, one: T, address: str) -> None:
        self.discard(one)
        self._by_address.setdefault(address, {})[one] = None
        self._addresses[one] = address

    def discard(self, one: T) -> None:
        if (address := self._addresses.pop(one, None)) is not None:
            own = self._by_address[address]
            del own[one]
            if not own:
                del self._by_address[address]

    def surplus(self) -> T | None:
        """Who gives way if there are too many; it waits no more."""
        if len(self) <= self._most:
            return None
        most = max(self._by_address, key=lambda address: len(self._by_address[address]))
        victim = next(iter(self._by_address[most]))
        self.discard(victim)
        return victim
