"""The names of prompts seen lately, a run of blocks at a time: the next turn of a conversation is not hashed again."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final

import xxhash

from kvtier.tiers import ChainHash
from kvtier.tiers.naming.compiled_names import compiled

RUN: Final = 64  # blocks in a run
_MOST: Final = 32 << 20  # bytes: at blocks of 16 the names of 3.6 million tokens, at blocks of 64 of 6.4 million
_OVERHEAD: Final = 512 + RUN * (32 + 41)  # bytes of a run besides what it is made of: its names as Python has them

NamedRun = tuple[bytes, Sequence[ChainHash]]
"""What the names are made of (kind ‖ the name before ‖ tokens), and the names."""


class KeptNames:
    """Names of runs of blocks, found by all that they are made of. Thread-safe.

    A name depends on the scheme and the block size (the run's kind), on the name before it and on its tokens. These are
    compared byte by byte, so what is found is what hashing gives. A chain begins at its root, which has the
    fingerprint and the tenant's salt in it: no other tenant's chain comes to its runs.
    At most `num_bytes` are kept, those used last; of one prompt its beginning stays longest.
    """

    def __init__(self, num_bytes: int = _MOST) -> None:
        """`num_bytes`: what everything kept may take, as Python keeps it."""
        self.num_bytes = 0
        self._most = num_bytes
        self._runs: OrderedDict[int, NamedRun] = OrderedDict()  # those used last at the end
        self._lock = Lock()

    def __len__(self) -> int:
        """How many runs are kept."""
        return len(self._runs)

    def find(self, kind: bytes, parent: ChainHash, tokens: memoryview, run_bytes: int) -> list[ChainHash]:
        """The names of the leading runs that are kept. `tokens` are bytes, of which each run has `run_bytes`."""
        twin = compiled()
        kept_runs = self._leading if twin is None or twin.kept_runs is None else twin.kept_runs
        with self._lock:
            names, used = kept_runs(self._runs, kind, parent, tokens, run_bytes)
            for key in reversed(used):  # a prompt's end goes first: without its beginning it would never be found
                self._runs.move_to_end(key)
        return names

    @staticmethod
    def _leading(
        runs: Mapping[int, NamedRun], kind: bytes, parent: ChainHash, tokens: memoryview, run_bytes: int
    ) -> tuple[list[ChainHash], list[int]]:
        """The names of the leading runs that are kept, and their keys."""
        names: list[ChainHash] = []
        used: list[int] = []
        for end in range(run_bytes, len(tokens) + 1, run_bytes):
            made_of = kind + parent + tokens[end - run_bytes : end]
            key = xxhash.xxh3_64_intdigest(made_of)
            run = runs.get(key)
            if run is None or run[0] != made_of:
                break
            names += run[1]
            parent = names[-1]
            used.append(key)
        return names, used

    def enter(
        self, kind: bytes, parent: ChainHash, tokens: memoryview, run_bytes: int, names: Sequence[ChainHash]
    ) -> None:
        """Keep whole runs: `names` are those of the tokens behind `parent`, 64 for each `run_bytes`."""
        runs: list[tuple[int, NamedRun]] = []
        before = kind + parent
        for first in range(0, len(names) - RUN + 1, RUN):
            start = first // RUN * run_bytes
            made_of = before + tokens[start : start + run_bytes]
            runs.append((xxhash.xxh3_64_intdigest(made_of), (made_of, names[first : first + RUN])))
            before = kind + names[first + RUN - 1]
        with self._lock:
            kept = self._runs
            for key, run in reversed(runs):
                if (known := kept.pop(key, None)) is not None:
                    self.num_bytes -= len(known[0]) + _OVERHEAD
                kept[key] = run
                self.num_bytes += len(run[0]) + _OVERHEAD
            while self.num_bytes > self._most:
                self.num_bytes -= len(kept.popitem(last=False)[1][0]) + _OVERHEAD
