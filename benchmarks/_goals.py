"""Goals on whole columns: what each row that was measured is held to, whatever its size, percentile or tier.

A program names goals of its own. A row of the same column that it did not name gets its target here, from what was
saved: a figure is never left out because it misses. `make lint` says what has no goal yet.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SavedRow = Mapping[str, object]

_DIGITS: Final = 8  # a figure with more is that of one row: a program that measures it has named the row
_END: Final = r"(lower|upper) end of (the )?95 %( interval)?"  # of a target's name


@dataclass(frozen=True, slots=True)
class Target:
    """One claim: `measured` has to be at most (or, with `at_most=False`, at least) `limit`, in the same unit."""

    name: str
    limit: float
    measured: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def as_dict(self) -> dict[str, object]:
        sign = "<=" if self.at_most else ">="
        return {"name": self.name, "target": f"{sign} {self.limit:g}", "measured": self.measured, "met": self.met}

    @classmethod
    def saved(cls, told: Mapping[str, object]) -> "Target":
        sign, limit = str(told["target"]).split()
        return cls(str(told["name"]), float(limit), float(str(told["measured"])), sign == "<=")


@dataclass(frozen=True, slots=True)
class ColumnGoal:
    """Every row that has a number in `column` and whose words match `where` is held to `limit`."""

    column: str
    limit: float
    name: str  # of each target: {what} stands for what the row has in the column `what`
    at_most: bool = True
    where: str = ""

    def __call__(self, rows: Sequence[SavedRow]) -> Iterator[Target]:
        for row in rows:
            if (value := number(row, self.column)) is not None and re.search(self.where, words(row)):
                yield Target(self.name.format_map(_Named(row)), self.limit, value, self.at_most)


class Unheld(NamedTuple):
    """Rows that are held to nothing in a column that is a goal for others, and why."""

    column: str  # "" is every one
    where: str
    why: str


class _Named(dict[str, object]):
    """A row for a target's name: a column that it lacks is a question mark, in a result from before the column."""

    def __missing__(self, column: str) -> object:
        return _QuestionMark()


class _QuestionMark:
    def __format__(self, how: str) -> str:
        return "?"


def number(row: SavedRow, column: str) -> float | None:
    value = row.get(column)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def words(row: SavedRow) -> str:
    """What tells a row from others: all that it has but fractions, as `column=value; …`."""
    return "; ".join(f"{name}={value}" for name, value in row.items() if not isinstance(value, float))


def _every_percentile(rows: Sequence[SavedRow]) -> Iterator[Target]:
    """That prefix-aware routing is best, and by how much, over the best other policy in each figure."""
    for what in ("cached", *(f"TTFT {each} s" for each in ("p50", "p90", "p99", "mean"))):
        found = {str(row.get("policy")): number(row, what) for row in rows}
        ours, robin, oracle = (found.pop(each, None) for each in ("prefix-aware", "round robin", "oracle: one replica"))
        others = [each for each in (robin, *found.values()) if each is not None]
        if ours is None or robin is None or oracle is None:
            continue
        if what == "cached":
            yield Target("cached share: prefix-aware over the best other", 1, ours / max(others), False)
            yield Target("cached share: prefix-aware over round robin", 1, ours / robin, False)
            yield Target("cached share: prefix-aware, of the oracle's", 0.95, ours / oracle, False)
        else:
            yield Target(f"{what[:-2]}: the best other over prefix-aware", 1, min(others) / ours, False)
            yield Target(f"{what[:-2]}: round robin over prefix-aware", 1, robin / ours, False)


def _slowest_answers(rows: Sequence[SavedRow]) -> Iterator[Target]:
    """Of the OpenAI server: p99 of the time to first token."""
    slowest = {str(row.get("arm")): number(row, "TTFT p99 ms") for row in rows}
    off = slowest.pop("cache off", None)
    for arm, each in slowest.items():
        if off is not None and each is not None:
            yield Target(f"{arm}: TTFT p99 of cache off over it", 1, off / each, at_most=False)


def _every_block_size(rows: Sequence[SavedRow]) -> Iterator[Target]:
    """Share cached with partial blocks and tails at each block size, over whole blocks of 16."""
    cached = {(row.get("workload"), row.get("block"), row.get("partial")): number(row, "cached %") for row in rows}
    for (workload, size, partial), share in cached.items():
        least = cached.get((workload, 16, "off"))
        if partial == "on, and tails" and share is not None and least:
            yield Target(f"{workload}: cached at {size} with partial blocks over 16 without", 1, share / least, False)


Goal = Callable[[Sequence[SavedRow]], Iterable[Target]]


def _columns(text: str) -> Iterator[tuple[str, Goal]]:
    """Below a benchmark's name: column and limit | a target's name | where."""
    benchmark = ""
    for line in text.splitlines():
        if line.endswith(":"):
            benchmark = line[:-1]
        elif line:
            held_to, name, where, *_ = [*line.strip().split(" | "), ""]
            column, sign, limit = held_to.rsplit(" ", 2)
            yield benchmark, ColumnGoal(column, float(limit), name, sign == "<=", where)


GOALS: Final[dict[str, list[Goal]]] = {}
for _name, _goal in (
    *_columns(r"""
copy_bandwidth:
  ratio >= 0.9 | {way}: {direction} {block_kib} KiB, scattered {scattered}: of the best plain copy | ^(?!.*ordinary)
  ratio >= 0.9 | {way}: {direction} {block_kib} KiB, L1 an ordinary tensor: of np.copyto, block by block | ordinary
  cpu_ratio >= 0.9 | {way}: {direction} {block_kib} KiB, scattered {scattered}, {l1}: CPU
  kvtier_gbps >= 0.8 | {way}: GB/s beside a busy Python thread | busy thread
daemon_memory:
  most MB <= 100 | memory besides the region, index included, MB
  growth, MB a minute <= 0.05 | growth behind the first minutes, MB a minute
dead_redis:
  added us <= 20 | a dead Redis adds to a lookup of 128 blocks, {lookup}, us | =CPU
  added us <= 20 | a dead Redis adds to a lookup of 128 blocks, {lookup}, wall us | =wall
encryption:
  of the limit >= 0.8 | {what} of {block KiB} KiB: of the limit
  ratio >= 0.8 | read beside a busy thread of {block KiB} KiB: of the clear | busy
engine_ttft:
  kvtier / this <= 1 | TTFT {prompt tokens} tokens: kvtier over native, mean | =\(b\)
  kvtier / this <= 1 | TTFT {prompt tokens} tokens: kvtier over example, mean | =\(c\)
  kvtier / this <= 1.02 | never-hit: CPU with over without, mean | never hitting
eviction:
  predicted less lru >= -0.5 | {trace}, {blocks} blocks, {through}: predicted less LRU, points
  predicted less the best >= -2 | {trace}, {blocks} blocks, {through}: predicted less the best of others, points
  predicted % >= 15 | {trace}, {blocks} blocks, {through}: found without hints, % | production.*=4096; through=pool$
  predicted, hints % >= 21 | {trace}, {blocks} blocks: with hints, 9 of 10 right, % | production.*=4096; through=pool$
  apart <= 1 | hierarchy, {policy}: points between live and simulated
  predicted over lru, us/block <= 0.3 | {trace}, {blocks} blocks: CPU of predicted over LRU, us a block
file_bandwidth:
  ratio >= 0.9 | {what}, {block KiB} KiB: ratio to fio
  GB/s >= 0.8 | {what}, {block KiB} KiB: GB/s | busy
  CPU s/GB besides checksum <= 0.2 | {what}, {block KiB} KiB: CPU s/GB besides checksum | scattered
  CPU s/GB besides checksum <= 0.1 | {what}, {block KiB} KiB: CPU s/GB besides checksum
gpu_bandwidth:
  GB/s >= 40 | pieces of {KiB} KiB, {pieces}, {direction}: GB/s | KiB=(32|64|128|256); way=chosen; direction=\w+$
gpu_ttft:
  cold ÷ L2 >= 20 | {tokens:,} tokens, {loading}: cold ÷ L2
  cold ÷ slab >= 5 | {tokens:,} tokens, {loading}: cold ÷ slab
lookup_latency:
  CPU ms <= 1 | whole way, {way}, {whole way}, blocks of {blocks}: CPU ms | whole way=named before
  CPU ms <= 1.5 | whole way, {way}, {whole way}, blocks of {blocks}: CPU ms | whole way=from nothing
  CPU ms <= 1 | whole way, {way}, {whole way}, blocks of {blocks}: CPU ms | whole way=next turn
  p90 <= 1 | whole way, {way}, {whole way}, blocks of {blocks}: p90 | whole way=named before
  p90 <= 1.5 | whole way, {way}, {whole way}, blocks of {blocks}: p90 | whole way=from nothing
  p90 <= 1 | whole way, {way}, {whole way}, blocks of {blocks}: p90 | whole way=next turn
  CPU us behind names <= 8 | {whole way} blocks, all hits: CPU us behind its names | whole way=request of 1;
  CPU us behind names <= 9 | {whole way} blocks, all hits: CPU us behind its names | whole way=request of 8;
  CPU us behind names <= 16 | {whole way} blocks, all hits: CPU us behind its names | whole way=request of 64;
  CPU us behind names <= 90 | {whole way} blocks, all hits: CPU us behind its names | whole way=request of 512;
  of_limit <= 1.6 | {step}, all hits, × limit | step=sha256 hashing \+ lookup
memory:
  besides <= 200 | {blocks:,} blocks of {block_tokens} tokens in L2: bytes a block, tokens apart
  bytes_a_block <= 200 | {blocks:,} blocks of {block_tokens} tokens in L2: bytes a block with its tokens
object_bandwidth:
  of bare >= 0.8 | {verb}, {block KiB} KiB, {server}: of the bare client
peers_bandwidth:
  × bare >= 0.8 | blocks of {block KiB} KiB, 1 thread: × a bare socket | threads=1
  × bare >= 0.8 | blocks of {block KiB} KiB, 2 threads: × a bare socket | threads=2
  NIXL × bare >= 0.8 | blocks of {block KiB} KiB, {threads} thread(s), by NIXL: × a bare socket
pool_throughput:
  us/block <= 0.1 | {verb}, {way}, {policy}, us per block | verb=lookup; way=compiled.*batch=2048
  us/block <= 0.2 | {verb}, {way}, {policy}, us per block | verb=lease.*way=compiled.*batch=2048
  us/block <= 0.45 | {verb}, {way}, {policy}, us per block | verb=store.*way=compiled.*batch=2048
  us/block <= 0.03 | {verb}, {way}, {policy}, us per block | verb=allocate.*way=compiled.*batch=2048
  of vLLM <= 0.5 | {verb}, {way}, {policy}, batches of {batch}: of vLLM's BlockPool | way=compiled
  of the former <= 1 | {verb}, {way}, {policy}, batches of {batch}: of the former way | batch=(1|4|16|64);
  of the former <= 3 | {verb}, {way}, {policy}, batches of {batch}: of the former way | batch=2048
recovery:
  cpu s <= 0.5 | recovery of {entries:,} entries, CPU s | FileStore
  bytes/entry <= 120 | Python memory, bytes per entry
redis_bandwidth:
  × redis-py >= 1.3 | {verb}, {block KiB} KiB, nodes {nodes}, {way}: × redis-py's best way | verb=GET
  × redis-py >= 2 | {verb}, {block KiB} KiB, nodes {nodes}, {way}: × redis-py's best way | verb=SET
  × LMCache >= 1 | {verb}, {block KiB} KiB, nodes {nodes}, {way}: × LMCache's C++ client
  CPU s/GB <= 0.4 | {verb}, {block KiB} KiB, nodes {nodes}, {way}: CPU s/GB | records=clear
router_overhead:
  bytes a block <= 300 | indexed: {what}, MB
  ms <= 2 | prefix {what}, CPU ms | scoring
  ms <= 2 | router's CPU ms of a request, {what} | request of 1024
  ms <= 2 | router's CPU ms of a {what} | request of 32768
  times a bare relay <= 1.5 | CPU of a piece that comes alone, times a bare relay's
scattered_blocks:
  ratio >= 0.9 | {what}, {block KiB} KiB: ratio to fio's best depth
  CPU s/GB <= 0.2 | {what}, {block KiB} KiB: CPU s/GB, checksum included
  p99 ratio <= 1.5 | {what}, {block KiB} KiB: p99 ratio to fio's
service_overhead:
  median <= 80 | through a daemon: {what}, us | step, 1 stores, (busy|idle); tiers=daemon
  median <= 100 | through a daemon: {what}, us | step, 16 stores, (busy|idle); tiers=daemon
  median <= 150 | through a daemon: {what}, us | step, 64 stores, (busy|idle); tiers=daemon
  median <= 90 | through a daemon: {what}, us | lookup of 128, (busy|idle); tiers=daemon
  p99 over median <= 5 | through a daemon: {what}, p99 over median | (busy|idle); tiers=daemon
  p99 <= 1000 | through a daemon: {what}, p99, us | beside load; tiers=daemon
  by daemon's CPU >= 20000 | {what}, a core's second | lookups of 128
serving:
  requests/s of a round >= 1 | {arm}: requests/s over cache off | arm=(L|cluster)
  off / TTFT of a round >= 1 | {arm}: TTFT of cache off over it | arm=(L|cluster)
simulate_speed:
  seconds_100k <= 60 | simulate, {policy}, {through}, blocks of {block MiB} MiB: CPU s of 100,000 requests
start:
  CPU s <= 0.1 | {start} | =import
  CPU s <= 0.25 | {start} | --help
step_stores:
  plan, CPU ms <= 3 | CPU ms to plan stores: {setting}
  CPU ms a step <= 0.05 | {setting}: CPU ms of a step of {sequences} stores | sequences=1\b
  CPU ms a step <= 0.07 | {setting}: CPU ms of a step of {sequences} stores | sequences=4\b
  CPU ms a step <= 0.15 | {setting}: CPU ms of a step of {sequences} stores | sequences=16\b
  CPU ms a step <= 0.4 | {setting}: CPU ms of a step of {sequences} stores | sequences=64\b
order_cost:
  more us <= 0.3 | predicted over LRU, requests of {blocks} blocks, us per block
ttft:
  cold / l2 >= 10 | cold / L2 at {prompt tokens} tokens
  cold / file >= 6 | cold / L3 at {prompt tokens} tokens
  never-hit CPU with / without <= 1.02 | never-hit overhead: mean
"""),
    ("partial_blocks", _every_block_size),
    ("routing", _every_percentile),
    ("serving", _slowest_answers),
):
    GOALS.setdefault(_name, []).append(_goal)

UNHELD: Final[Mapping[str, Sequence[Unheld]]] = {
    "copy_bandwidth": (Unheld("kvtier_gbps", "", "held in `ratio`, beside numpy's copies"),),
    "encryption": (Unheld("ratio", "what=(write|cold)", "held in `of the limit`"),),
    "engine_ttft": (Unheld("(a) / this", r"engine=\([bc]\)", "other engines' figures"),),
    "eviction": (
        Unheld("predicted %", "", "of other traces and sizes: held as `predicted less lru`"),
        Unheld("predicted, hints %", "", "of other traces and sizes: no goal was set for these"),
    ),
    "file_bandwidth": (Unheld("GB/s", "", "held in `ratio`, beside fio; a warm read has no disk below it"),),
    "gpu_bandwidth": (Unheld("", "", "the least of each kind is held"),),
    "gpu_decode": (Unheld("", "", "the slowest place for blocks is held"),),
    "gpu_ttft": (Unheld("cold ÷ L1", "", "what is on the GPU is no offload's merit"),),
    "lookup_latency": (Unheld("of_limit", "", "steps of the whole way, and hashes that are not the limit's"),),
    "pool_throughput": (
        Unheld("us/block", r"batch=(1|4|16|64|128)\b|way=interpreted", "held in `of vLLM`, or to the former way"),
        Unheld("of vLLM", "way=interpreted", "held to the former way"),
    ),
    "recovery": (Unheld("cpu s", "plainly", "the reference"),),
    "redis_bandwidth": (
        Unheld("CPU s/GB", "client=(redis-py|LMCache)", "other clients' figures"),
        Unheld("CPU s/GB", "records=", "what a secret and encryption cost: no goal was set for these"),
    ),
    "routing": (Unheld("of oracle", "", "other policies' figures"),),
    "segments": (
        Unheld("right, of full", "", "rules and shares that are not the default's"),
        Unheld("CPU, of full", "", "the same"),
    ),
    "task_accuracy": (Unheld("", "", "held by the family that loses most; other rules and shares"),),
    "service_overhead": (
        Unheld("p99", "", "held over the median"),
        Unheld("p99 over median", "beside load", "held as the p99"),
        Unheld("by daemon's CPU", "lookups of 8,", "held as a share of a lookup of 128"),
        Unheld("median", "", "of other things than the daemon, or beside load, where the p99 is held"),
    ),
    "serving": (
        Unheld("requests/s of a round", "arm=cache off", "the reference"),
        Unheld("off / TTFT of a round", "arm=cache off", "the same"),
    ),
    "start": (Unheld("CPU s", "pass", "the interpreter alone"),),
}


def held(benchmark: str, rows: Sequence[SavedRow], targets: Sequence[Target]) -> list[Target]:
    """A benchmark's own targets, then those that the goals of this file make of what these left out."""
    found = list(targets)
    measured = {each.measured for each in targets if len(repr(each.measured)) > _DIGITS}
    for goal in GOALS.get(benchmark, ()):
        known = {target.name for target in found}
        found += [each for each in goal(rows) if each.name not in known and each.measured not in measured]
    return found


def left_out(benchmark: str, rows: Sequence[SavedRow], targets: Sequence[Target]) -> list[str]:
    """What has no target though others of its column have: a column is a goal if a target measures a fraction in it."""
    measured = {target.measured for target in targets}
    goals = {
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float) and value in measured and not value.is_integer()
    }
    return [
        f"{benchmark}: {words(row)}: {name} {value:.4g} has no goal; name one in benchmarks/_goals.py"
        for row in rows
        for name in sorted(goals & row.keys())
        if (value := number(row, name)) is not None and value not in measured and not _is_unheld(benchmark, name, row)
    ]


def without_mean(targets: Iterable[Target]) -> list[str]:
    """Names of targets that measure an interval's end, and whose mean is no target."""
    names = {target.name for target in targets}
    return [name for name in names if re.search(_END, name) and re.sub(_END, "mean", name) not in names]


def is_end(target: Target) -> bool:
    return re.search(_END, target.name) is not None


def _is_unheld(benchmark: str, column: str, row: SavedRow) -> bool:
    return any(each.column in ("", column) and re.search(each.where, words(row)) for each in UNHELD.get(benchmark, ()))
