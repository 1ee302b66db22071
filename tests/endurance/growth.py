"""How processes grew in a long run: their memory, descriptors and threads, from samples taken all along."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression, median

from node_members import Size

_WARM: float = 0.25  # of a life, at its beginning: buffers fill, code is imported
_SPARE_MEMORY = 24.0  # MiB, beside a sixth of what there was: allocators keep what they may need
_SPARE_COUNT = 24  # descriptors or threads, which come and go with connections
_FEW = 12  # samples, below which nothing can be said


@dataclass(frozen=True)
class Growth:
    """One life of one process, once warm."""

    name: str
    minutes: float  # how long it was watched once warm
    rss: float  # MiB in the first fifth of that, as a median
    rss_end: float  # and in the last
    slope: float  # MiB an hour, least squares
    descriptors: int
    descriptors_end: int
    threads: int
    threads_end: int

    @property
    def leaks(self) -> list[str]:
        """What became larger than it may; in words."""
        found = []
        if self.rss_end > self.rss * 7 / 6 + _SPARE_MEMORY:
            found.append(f"{self.name}: memory from {self.rss:.0f} to {self.rss_end:.0f} MiB in {self.minutes:.0f} min")
        for what in ("descriptors", "threads"):
            before, after = getattr(self, what), getattr(self, f"{what}_end")
            if after > before + _SPARE_COUNT:
                found.append(f"{self.name}: {what} from {before} to {after} in {self.minutes:.0f} min")
        return found

    def as_dict(self) -> dict[str, object]:
        """For JSON, rounded."""
        return {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(self).items()}


class Samples:
    """Sizes of processes by name and life."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, int], list[Size]] = defaultdict(list)

    def add(self, name: str, life: int, size: Size) -> None:
        self._sizes[name, life].append(size)

    def growths(self) -> list[Growth]:
        """The longest life of each process, where it was long enough."""
        longest: dict[str, list[Size]] = {}
        for (name, _), sizes in self._sizes.items():
            longest[name] = max(longest.get(name, []), sizes, key=len)
        return [growth_of(name, sizes) for name, sizes in sorted(longest.items()) if len(sizes) >= _FEW]


def growth_of(name: str, sizes: Sequence[Size]) -> Growth:
    """Of at least a dozen samples of one life."""
    warm = sizes[int(len(sizes) * _WARM) :]
    fifth = max(1, len(warm) // 5)
    first, last = warm[:fifth], warm[-fifth:]
    fit = linear_regression([size.seconds / 3600 for size in warm], [size.rss for size in warm])
    return Growth(
        name,
        (warm[-1].seconds - warm[0].seconds) / 60,
        median(size.rss for size in first),
        median(size.rss for size in last),
        fit.slope,
        round(median(size.descriptors for size in first)),
        round(median(size.descriptors for size in last)),
        round(median(size.threads for size in first)),
        round(median(size.threads for size in last)),
    )
