"""Naming the blocks of a long prompt and looking them all up, beside the least that any Python program must do.

The prompt is a Python list of 131,072 token ids in blocks of 16, every block held by a full `SlotPool` of 65,536.
The limit, timed in the same round: the list into an array of u32 (`array('I', list)`) and a bare `hashlib.sha256`
loop over parent ‖ tokens, in its fastest spelling known to us. Medians over interleaved rounds, per-round ratios.
"whole way" is what the scheduler's thread does for such a request, from the list to `finished`: names, lookup, blocks
given and their load planned, end (CPU ms; the limit is the same bare loop). L2 holds every block, and each list has
integers of its own. "named before": the process has named this prompt before. "next turn": it has 2,048 tokens more,
which nobody has seen. It and the steps above are measured with extension modules, where all were built,
and "Python alone". "request of" so many blocks, all hits, is what follows its names.
"keys kvtier" is what naming blocks by our own chain adds to vLLM's scheduler for such a prompt, once a request, in
blocks of 32; under vLLM's own hashes nothing is added.
"""

import gc
import hashlib
import random
import struct
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

from _report import Target, parser, progress, report
from _whole_way import PYTHON, STEPS, WAYS, LongPrompts, Took, going

from kvtier.connector.vllm import OwnChain
from kvtier.tiers import ChainHash
from kvtier.tiers.naming import TokenChain, chain_hashes, root_hash
from kvtier.tiers.pool import SlotPool

BLOCK_SIZE = 16
ROOT = root_hash(b"f" * 32)
MAX_RATIO = 1.6


BLOCK_SIZES = (16, 64)
MOST = {"named before": 1.0, "from nothing": 1.5, "next turn": 1.0}  # CPU ms, with sha256
SHORT = {1: 8.0, 8: 9.0, 64: 16.0, 512: 90.0}  # blocks of a request: CPU µs behind its names, with sha256


def convert(tokens: list[int]) -> "array[int]":
    return array("I", tokens)


def bare_loop(tokens: list[int], block_size: int = BLOCK_SIZE) -> list[ChainHash]:
    """The limit: nothing but the hash calls a SHA-256 chain cannot do without."""
    sha256, parent = hashlib.sha256, ROOT
    pieces = struct.iter_unpack(f"{4 * block_size}s", array("I", tokens))
    return [parent := sha256(parent + piece).digest() for (piece,) in pieces]


def filled_pool(hashes: list[list[ChainHash]], num_slots: int) -> SlotPool:
    """A full pool that holds the given chains among blocks nobody asks for."""
    pool = SlotPool(num_slots)
    strangers = [random.Random(i).randbytes(32) for i in range(num_slots - sum(map(len, hashes)))]
    for chain in (strangers, *hashes):
        reservation = pool.reserve(chain)
        assert reservation is not None
        pool.seal(reservation).release()
    return pool


def count_hashed(chain: TokenChain, token: int) -> int:
    """Blocks hashed while the chain grows by one block, as decoding grows it: token by token."""
    with going(PYTHON), mock.patch.object(hashlib, "sha256", wraps=hashlib.sha256) as counted:
        for _ in range(BLOCK_SIZE):
            chain.extend((token,))
    return counted.call_count


def grow(chain: TokenChain, tokens: list[int]) -> None:
    """One block more, at once."""
    chain.extend(tokens)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def whole_ways(tokens: list[int], rounds: int) -> tuple[list[dict[str, object]], list[Target]]:
    """The whole way at each block size and scheme, and what of it has a goal."""
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    for block_size, scheme in product(BLOCK_SIZES, ("sha256", "xxh3")):
        took: dict[tuple[str, str], list[Took]] = {}
        limits: list[float] = []
        with ExitStack() as opened:
            turns: dict[str, dict[str, Callable[[], Took]]] = {}
            for way in WAYS:
                folder = Path(opened.enter_context(TemporaryDirectory()))
                with going(way):
                    turns[way] = opened.enter_context(LongPrompts(folder, tokens, block_size, scheme)).turns
            for _ in range(rounds):
                began = time.thread_time()
                bare_loop(tokens, block_size)
                limits.append(time.thread_time() - began)
                for way in WAYS:
                    with going(way):
                        for turn, ask in turns[way].items():
                            took.setdefault((turn, way), []).append(ask())
        for (turn, way), steps in took.items():
            whole = sorted(map(sum, steps))
            rows.append({"whole way": turn, "blocks": f"{block_size}, {scheme}", "way": way})
            rows[-1] |= {name: median(each[n] for each in steps) * 1e3 for n, name in enumerate(STEPS)}
            rows[-1] |= {"CPU ms": median(whole) * 1e3, "best": whole[0] * 1e3, "p90": whole[rounds * 9 // 10] * 1e3}
            rows[-1]["limit"] = median(limits) * 1e3
            rows[-1]["of limit"] = median(sum(each) / limit for each, limit in zip(steps, limits, strict=True))
            if scheme == "sha256" and turn in MOST:
                name = f"whole way, {way}, blocks of {block_size}, {turn}: CPU ms"
                targets.append(Target(name, MOST[turn], median(whole) * 1e3))
    return rows, targets


def short_requests(tokens: list[int], rounds: int) -> tuple[list[dict[str, object]], list[Target]]:
    """The way of requests of a few blocks, each in the form that is in use, and what of it has a goal."""
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    for num_blocks, most in SHORT.items():
        with TemporaryDirectory() as folder:
            prompt = tokens[: num_blocks * BLOCK_SIZE]
            with LongPrompts(Path(folder), prompt, BLOCK_SIZE, "sha256") as prompts:
                steps = [prompts.turns["from nothing"]() for _ in range(20 * rounds)]
        parts = {name: median(each[n] for each in steps) * 1e3 for n, name in enumerate(STEPS)}
        behind = median(sum(each[1:]) for each in steps) * 1e6
        rows.append(
            {"whole way": f"request of {num_blocks}", "blocks": f"{BLOCK_SIZE}, sha256", "way": WAYS[0], **parts}
        )
        rows[-1]["CPU us behind names"] = behind
        targets.append(Target(f"request of {num_blocks} blocks, all hits: CPU us behind its names", most, behind))
    return rows, targets


def main() -> int:
    options = parser(__doc__).parse_args()
    num_tokens, rounds = (16_384, 15) if options.quick else (131_072, 101)
    draw = random.Random(0)
    tokens = [draw.randrange(150_000) for _ in range(num_tokens)]
    one_block = tokens[:BLOCK_SIZE]
    chain = TokenChain(ROOT, BLOCK_SIZE)
    chain.extend(tokens)
    hashes = {"sha256": list(chain.hashes), "xxh3": chain_hashes(ROOT, tokens, BLOCK_SIZE, "xxh3")}
    num_blocks = len(chain.hashes)
    progress(f"{num_tokens} tokens, {rounds} rounds")
    pools: dict[str, SlotPool] = {}
    for way in WAYS:
        with going(way):
            pools[way] = filled_pool([*hashes.values()], 8 * num_blocks)

    def whole(scheme: str, way: str = WAYS[0]) -> None:
        assert pools[way].lookup(chain_hashes(ROOT, tokens, BLOCK_SIZE, scheme)) == num_blocks

    request = SimpleNamespace(all_token_ids=tokens, num_tokens=num_tokens)
    steps: dict[str, Callable[[], object]] = {
        "limit: list conversion + bare sha256 loop": lambda: bare_loop(tokens),
        "list conversion alone": lambda: convert(tokens),
        "sha256 hashing": lambda: chain_hashes(ROOT, tokens, BLOCK_SIZE),
        "lookup of known hashes": lambda: pools[WAYS[0]].lookup(hashes["sha256"]),
        "sha256 hashing + lookup": lambda: whole("sha256"),
        "xxh3 hashing + lookup": lambda: whole("xxh3"),
        "grow by one block (list of 16 ids)": lambda: grow(chain, one_block),
        "vLLM adapter, keys kvtier": lambda: OwnChain(request, (b"f" * 32, None, None, None), 32, "sha256").current(),
        "one block, from nothing": lambda: chain_hashes(ROOT, one_block, BLOCK_SIZE),
    }
    ways = dict.fromkeys(steps, WAYS[0])
    if WAYS[0] != PYTHON:
        steps[f"sha256 hashing, {PYTHON}"] = steps["sha256 hashing"]
        steps[f"lookup of known hashes, {PYTHON}"] = lambda: pools[PYTHON].lookup(hashes["sha256"])
        steps[f"sha256 hashing + lookup, {PYTHON}"] = lambda: whole("sha256", PYTHON)
        steps[f"xxh3 hashing + lookup, {PYTHON}"] = lambda: whole("xxh3", PYTHON)
        ways |= dict.fromkeys(steps.keys() - ways.keys(), PYTHON)
    num_hashed = count_hashed(chain, 7)
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()  # its pauses belong to whoever made the garbage
    for _ in range(rounds):
        for name, run in steps.items():
            with going(ways[name]):
                times[name].append(timed(run))
    whole_way, whole_way_targets = whole_ways(tokens, rounds // 3)
    short, short_targets = short_requests(tokens, rounds)
    gc.enable()

    limit = times["limit: list conversion + bare sha256 loop"]
    ratios = {name: median(a / b for a, b in zip(taken, limit, strict=True)) for name, taken in times.items()}
    rows: list[dict[str, object]] = [
        {
            "step": name,
            "tokens": BLOCK_SIZE if "one block" in name else num_tokens,
            "median_ms": median(taken) * 1e3,
            "best_ms": min(taken) * 1e3,
            "of_limit": ratios[name],
        }
        for name, taken in times.items()
    ]
    targets = [
        *(
            Target(f"sha256 hashing + lookup, {way}, all hits, × limit", MAX_RATIO, ratios[name])
            for name, way in ways.items()
            if name.startswith("sha256 hashing + lookup")
        ),
        Target("blocks hashed when a sequence grows by one", 1, num_hashed),
        *whole_way_targets,
        *short_targets,
    ]
    return report("lookup_latency", [*rows, *whole_way, *short], targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
