"""Writes what programs measured into the README, docs/performance.md and docs/models.md; a test compares.

`python benchmarks/_readme.py`
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from _models_page import MODELS, models_table

ROOT: Final = Path(__file__).resolve().parent.parent
PERFORMANCE: Final = ROOT / "docs" / "performance.md"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- figures: written by benchmarks/_readme.py from benchmarks/results/ -->\n"
END: Final = "<!-- end of figures -->\n"

# What docs/performance.md says of which targets: label, benchmark, pattern of their names. One limit for each label.
CLAIMS: Final = (
    ("hash and look up 131,072 tokens, all hits: × (list conversion + bare SHA-256 loop)", "lookup_latency", "hashing"),
    ("pool, batches of 2,048: lookup, µs a block", "pool_throughput", "^lookup.*, us"),
    ("pool: lease + release, µs a block", "pool_throughput", "^lease.*, us"),
    ("pool: store with eviction, µs a block", "pool_throughput", "^store.*, us"),
    ("pool: unkeyed allocate + free, µs a block", "pool_throughput", "^allocate.*, us"),
    ("pool, batches of 1, 4, 16 and 64: lookup ÷ vLLM's BlockPool", "pool_throughput", "^lookup, batches"),
    ("the same: lease + release ÷ its touch + free", "pool_throughput", "^lease.*batches"),
    ("the same: store with eviction", "pool_throughput", "^store.*batches"),
    ("the same: unkeyed allocate + free", "pool_throughput", "^allocate.*batches"),
    (
        "a step that stores a block of 64 sequences, L2 and slab, ways to admit and write: CPU ms",
        "step_stores",
        "stores$",
    ),
    ("CPU seconds of `import kvtier`", "start", "^import"),
    ("CPU seconds of `kvtier --help`", "start", "--help"),
    ("L1 ↔ L2 on a CPU, 128 KiB–8 MiB, slots scattered: of the best numpy copy", "copy_bandwidth", "scattered slots"),
    ("the same, blocks and slots scattered (numpy's job is easier)", "copy_bandwidth", "scattered both"),
    ("L2 → L1 beside a busy Python thread, GB/s", "copy_bandwidth", "busy"),
    ("slab writes, new and aged: of fio", "file_bandwidth", "^write, .*ratio"),
    ("slab cold reads, new and aged, verified: of fio", "file_bandwidth", "^cold read.*ratio"),
    ("single blocks at random, verified: of fio at the block size", "file_bandwidth", "^scattered.*ratio"),
    ("slab: CPU s/GB besides the checksum", "file_bandwidth", "CPU"),
    ("slab reads beside a busy Python thread, GB/s", "file_bandwidth", "^read beside"),
    ("slab writes beside a busy Python thread, GB/s", "file_bandwidth", "^write beside"),
    ("encrypted slab, writes: of the lesser of a slab in the clear and AES alone", "encryption", "^write"),
    ("the same, cold reads", "encryption", "^cold read"),
    ("reopen a slab of 1,000,000 blocks, CPU s", "recovery", "CPU"),
    ("its index in memory, bytes a block", "recovery", "bytes"),
    ("Redis, GET into L2 slots, verified: × redis-py's pipeline with the copy", "redis_bandwidth", "^GET.*redis-py"),
    ("Redis, SET from L2 slots: × redis-py's pipeline", "redis_bandwidth", "^SET.*redis-py"),
    ("Redis: client CPU s/GB", "redis_bandwidth", "CPU"),
    ("SGLang after a restart, time to first token: no storage ÷ kvtier", "sglang_files", "no storage"),
    ("the same: kvtier ÷ SGLang's file backend", "sglang_files", "^time.*file backend"),
    (
        "SGLang, 5 prompts after one changed byte each on the disk: answers right with kvtier",
        "sglang_files",
        "byte.*kvtier",
    ),
    ("the same: wrong answers with SGLang's file backend", "sglang_files", "byte.*file backend"),
    ("time to first token, 4,096 tokens: cold ÷ L2", "ttft", "L2"),
    ("cold ÷ L3 (page cache dropped)", "ttft", "L3"),
    ("CPU time of an engine that never hits, with ÷ without kvtier (lower end of 95 %)", "ttft", "never-hit"),
    ("a real vLLM, time to first token of 1,024 to 4,096 tokens: no offload ÷ a hit", "engine_ttft", "no offload"),
    ("the same: a hit ÷ of vLLM's native offloading (lower end of 95 %)", "engine_ttft", "over native"),
    ("the same: a hit ÷ of vLLM's example connector (lower end of 95 %)", "engine_ttft", "over example"),
    ("CPU time of a vLLM that never hits, with ÷ without kvtier (lower end of 95 %)", "engine_ttft", "never-hit"),
    ("vLLM: unrelated decoding beside loads ÷ without", "engine_ttft", "unrelated"),
    ("a block's way in our engine: calls, now ÷ before the folders had faces", "block_way", "calls"),
    ("the same: moves between files", "block_way", "moves"),
    ("the same: files", "block_way", "files"),
    ("the daemon adds to a step that stores a block, µs", "service_overhead", "adds to a step"),
    ("the daemon adds to a bare round trip, µs", "service_overhead", "round trip alone"),
    ("lookups of 128 blocks, a second of the daemon's core: hits, misses", "service_overhead", "^lookups"),
    ("copy rate of the daemon's memory: of our own", "service_overhead", "copy rate"),
    ("the daemon's memory besides its region, under load, MB", "service_overhead", "memory besides"),
    ("a dead Redis adds to a lookup of 128 blocks, µs", "dead_redis", "dead Redis"),
    ("4 replicas, simulated: cached share, prefix-aware routing ÷ round robin", "routing", "^cached.*round robin"),
    ("the same, ÷ the best other policy", "routing", "^cached.*best other"),
    ("the same, of one replica with all the memory", "routing", "^cached.*oracle"),
    ("time to first token, p50 and p99: round robin ÷ prefix-aware", "routing", "^TTFT.*round robin"),
    ("the same: the best other policy ÷ prefix-aware", "routing", "^TTFT.*best other"),
    (
        "share of tokens cached at blocks of 256, partial blocks and tails ÷ at 16 without",
        "partial_blocks",
        "^(chat|trace)",
    ),
    (
        "the engine's time to first token, prompt parts inside a block: partial blocks on ÷ off",
        "partial_blocks",
        "^TTFT",
    ),
    ("router: CPU ms of a request, whole and streamed, besides tokenising", "router_overhead", "^router"),
    ("router: CPU of a stream's piece that comes alone ÷ of a bare asyncio relay", "router_overhead", "bare relay"),
    ("prefix scoring of 32,768 tokens, CPU ms", "router_overhead", "^prefix scoring"),
    ("1,000,000 indexed blocks, MB", "router_overhead", "indexed"),
    ("load on `kvtier engine`: requests/s, L2, L3 and a cluster ÷ cache off", "serving", "requests/s"),
    ("the same: time to first token, cache off ÷ each", "serving", "TTFT"),
    (
        "documents reused elsewhere, 15 % of their tokens repaired: right answers ÷ a full prefill's",
        "segments",
        "^recall with ",
    ),
    ("the same without repair: the measure tells right KV from wrong", "segments", "^recall without"),
    ("the same with repair: CPU time ÷ a full prefill's", "segments", "^blend"),
    ("a prompt held in a slow tier, load ÷ compute 0.5 – 2: from both ends ÷ the best single way", "both_ends", "^bal"),
    ("the same, elsewhere", "both_ends", "^elsewhere"),
    ("GPU ↔ L2, pieces of 512 KiB and more, one way: of one big copy", "gpu_bandwidth", "^one way.*big copy"),
    ("the same, GB/s", "gpu_bandwidth", "^one way.*GB/s"),
    ("the same both ways at once: of big copies both ways", "gpu_bandwidth", "^both ways.*big copies"),
    ("the same, GB/s", "gpu_bandwidth", "^both ways.*GB/s"),
    ("GPU ↔ L2, pieces of 4 to 24 KiB, GB/s", "gpu_bandwidth", "^pieces"),
    ("a worker's step with 64 stores, CPU ms to enqueue them", "gpu_bandwidth", "^a step"),
    ("first use of L2: longest step of the GPU beside it, ms", "gpu_bandwidth", "^first use"),
    ("a decode step beside stores, loads, and both: ÷ alone", "gpu_decode", "^a decode step"),
    ("a Llama-8B's geometry on a GPU, 32,768 tokens: time to first token, cold ÷ L2", "gpu_ttft", "L2$"),
    ("the same: cold ÷ slab", "gpu_ttft", "slab$"),
)

# The six that the README shows, in its own words.
SIX: Final = (
    ("vLLM, time to first token of 1,024 to 4,096 tokens: without offloading ÷ a hit", "engine_ttft", "no offload"),
    ("the same: a hit ÷ a hit of vLLM's native offloading (lower end of 95 %)", "engine_ttft", "over native"),
    ("CPU time of a vLLM that never hits: with ÷ without kvtier (lower end of 95 %)", "engine_ttft", "never-hit"),
    ("verified cold reads from disk: bandwidth ÷ that of fio", "file_bandwidth", "^cold read.*ratio"),
    ("time that a dead Redis adds to a lookup of 128 blocks, µs", "dead_redis", "dead Redis"),
    ("four simulated replicas, share of prompts cached: prefix-aware ÷ round robin", "routing", "^cached.*round robin"),
)


def saved() -> dict[str, Any]:
    """The results that are kept, by benchmark."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))}


def figures(claims: tuple[tuple[str, str, str], ...] = CLAIMS) -> str:
    """The table of `claims`, and machine and commit of each benchmark it comes from."""
    results = saved()
    lines = ["| what | target | measured | met |", "|---|--:|--:|---|"]
    lines += [
        _line(label, results[name]["targets"], pattern)
        for label, name, pattern in claims
        if name in results and any(re.search(pattern, target["name"]) for target in results[name]["targets"])
    ]
    origins: dict[str, dict[str, list[str]]] = {}  # machine → commit → benchmarks
    for name in sorted({name for _, name, _ in claims} & results.keys()):
        document = results[name]
        origins.setdefault(machine_line(document["machine"]), {}).setdefault(document["commit"], []).append(f"`{name}`")
    told = [
        f"Measured on {machine}, at commit "
        + "; ".join(f"`{at}`: {', '.join(names)}" for at, names in commits.items())
        + "."
        for machine, commits in sorted(origins.items())
    ]
    missing = sorted({name for _, name, _ in claims if name.startswith("gpu_")} - results.keys())
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        told.append(f"Not run on a GPU yet: {names}. [gpu.md](gpu.md) says how to run them.")
    return "\n\n".join(["\n".join(lines), *told]) + "\n"


def six() -> str:
    """The README's table, and how many of all figures reach their target."""
    results = saved()
    found = [
        [target["met"] for target in results[name]["targets"] if re.search(pattern, target["name"])]
        for _, name, pattern in CLAIMS
        if name in results
    ]
    known = [met for met in found if met]
    met = sum(map(all, known))
    told = f"{met} of all {len(known)} figures reach their target"
    return f"{figures(SIX)}\n{told}; [docs/performance.md](docs/performance.md) has every one.\n"


def _line(label: str, targets: list[dict[str, Any]], pattern: str) -> str:
    chosen = [target for target in targets if re.search(pattern, target["name"])]
    sign, limit = chosen[0]["target"].split()
    values = sorted(float(target["measured"]) for target in chosen)
    shown = f"{values[0]:.3g}" if len(values) == 1 else f"{values[0]:.3g} – {values[-1]:.3g}"
    missed = sum(not target["met"] for target in chosen)
    met = "yes" if not missed else "no" if len(chosen) == 1 else f"{len(chosen) - missed} of {len(chosen)}"
    return f"| {label} | {'≤' if sign == '<=' else '≥'} {limit} | {shown} | {met} |"


def machine_line(machine: Mapping[str, Any]) -> str:
    """What of a machine decides its figures, as people write it."""
    driver = f" with driver {machine['driver']}" if machine.get("driver") else ""
    gpu = f", {machine['gpu']}{driver}" if machine["gpu"] else ""
    versions = f"Python {machine['python']}, numpy {machine['numpy']}, torch {machine['torch']}"
    kernel = machine["kernel"].split("-")[0]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}, kernel {kernel}, {versions}"


def written(page: Path, table: str) -> str:
    """The page with `table` between its two marks."""
    text = page.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    return text[:start] + table + text[text.index(END, start) :]


def main() -> None:
    """Replace what stands between the two marks of each page."""
    PERFORMANCE.write_text(written(PERFORMANCE, figures()))
    README.write_text(written(README, six()))
    MODELS.write_text(written(MODELS, models_table()))


if __name__ == "__main__":
    main()
