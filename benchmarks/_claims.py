"""What docs/performance.md says of which targets: a row for each claim, and the cause of a row that is missed."""

from typing import Final, NamedTuple


class PageRow(NamedTuple):
    """A row of the table: all targets of one benchmark whose names match a pattern; they have one limit."""

    label: str
    benchmark: str
    pattern: str  # of the targets' names; a target belongs to one claim
    cause: str = ""  # heading under "What was missed, and why": of a row that is missed, or above its limit
    goal: float | None = None  # today's, where the saved result has a laxer one
    limit: bool = False  # measured against what the machine can do: beaten by more than a tenth, that was no limit


CLAIMS: Final = (
    # the core
    PageRow("hash and look up 131,072 tokens ÷ (list conversion + a SHA-256 loop)", "lookup_latency", "hashing"),
    PageRow(
        "131,072 tokens to leases, compiled, new prompt: CPU ms",
        "lookup_latency",
        "^whole way, compiled.*from nothing",
        "A long prompt",
    ),
    PageRow(
        "same, prompt named before, next turn",
        "lookup_latency",
        "^whole way, compiled.*(named before|next turn)",
        "A long prompt",
    ),
    PageRow("same, interpreted, new prompt", "lookup_latency", "^whole way, Python.*from nothing", "A long prompt"),
    PageRow(
        "same, named before, next turn",
        "lookup_latency",
        "^whole way, Python.*(named before|next turn)",
        "A long prompt",
    ),
    PageRow("a request of 1 block of 16 tokens, a hit: CPU µs", "lookup_latency", "^request of 1 ", "A short request"),
    PageRow("same, 8 blocks", "lookup_latency", "^request of 8 ", "A short request"),
    PageRow("same, 64 blocks", "lookup_latency", "^request of 64 ", "A short request"),
    PageRow("same, 512 blocks", "lookup_latency", "^request of 512 "),
    PageRow("blocks hashed when a sequence grows by one", "lookup_latency", "^blocks hashed"),
    PageRow("pool, batches of 2,048, LRU and S3-FIFO: lookup, µs a block", "pool_throughput", "^lookup.*, us"),
    PageRow("same, lease + release", "pool_throughput", "^lease.*, us"),
    PageRow("same, store with eviction", "pool_throughput", "^store.*, us"),
    PageRow("same, unkeyed allocate + free", "pool_throughput", "^allocate.*, us"),
    PageRow(
        "these verbs, batches of 1 to 2,048 ÷ vLLM's BlockPool", "pool_throughput", "BlockPool", "Batches of one block"
    ),
    PageRow(
        "interpreted core, batches of 1 to 64 ÷ the former Python way",
        "pool_throughput",
        "batches of (1|4|16|64): of the former",
        "The interpreted core",
    ),
    PageRow("same, batches of 2,048", "pool_throughput", "batches of 2048: of the former", "The interpreted core"),
    PageRow("a step that stores for 1 sequence, 8 settings: CPU ms", "step_stores", " 1 stores$", "Steps of stores"),
    PageRow("same, 4 sequences", "step_stores", " 4 stores$", "Steps of stores"),
    PageRow("same, 16 sequences", "step_stores", " 16 stores$", "Steps of stores"),
    PageRow("same, 64 sequences", "step_stores", " 64 stores$", "Steps of stores"),
    PageRow("plan of a cold prompt of 1,024 blocks: CPU ms", "step_stores", "^CPU ms to plan", "The interpreted core"),
    PageRow("a block's way in our engine: calls, moves, files ÷ before", "block_way", "", "A block's way"),
    PageRow("`import kvtier`: CPU s", "start", "^import"),
    PageRow("`kvtier --help` and helps of verbs: CPU s", "start", "--help"),
    # memory
    PageRow("L2's books of a block besides its tokens: bytes", "memory", "tokens apart"),
    PageRow("same, with its tokens", "memory", "with its tokens", "Memory of books"),
    PageRow("a full L2 adds to a pass of Python's garbage collector: ms", "memory", "gc pass"),
    PageRow("record of what left L2: bytes a slot", "order_memory", "departures.*bytes", "Memory of books"),
    PageRow("`tail` index, more than LRU: bytes a slot", "order_memory", "^tail.*bytes", "Memory of books"),
    PageRow("same, whatever the slots: MiB", "order_memory", "MiB"),
    # eviction
    PageRow("production trace, L2 of 4,096 blocks of 512: % found with `tail`", "eviction", "without hints, %$"),
    PageRow("same, with hints of which nine of ten are right", "eviction", "9 of 10 right, %$"),
    PageRow("all traces and sizes saved: `tail` less LRU, points", "eviction", "less LRU, points$"),
    PageRow("`tail` less LRU in a replay: CPU µs a block", "eviction", "^.*: CPU of tail", "The cost of tail"),
    PageRow("same, requests of 8 to 512 blocks in a full pool", "tail_cost", "^tail over LRU", "The cost of tail"),
    PageRow("chats through a whole hierarchy, live less simulated: points", "eviction", "^hierarchy"),
    PageRow("`kvtier simulate`, 100,000 requests: CPU s", "simulate_speed", "^simulate"),
    # copies and tiers
    PageRow(
        "L1 ↔ L2 on a CPU, 64 KiB – 8 MiB, compiled ÷ numpy's best: GB/s, CPU",
        "copy_bandwidth",
        "^compiled.*(copy|block|CPU)$",
        "Copies on a CPU",
        limit=True,
    ),
    PageRow("same, interpreted", "copy_bandwidth", "^Python alone: .*(copy|block|CPU)$", "Copies on a CPU", limit=True),
    PageRow("L2 → L1 beside a busy Python thread: GB/s", "copy_bandwidth", "busy"),
    PageRow("slab writes, new and aged ÷ fio", "file_bandwidth", "^write, .*ratio", "Slab and fio", limit=True),
    PageRow(
        "slab cold reads, new and aged, verified ÷ fio",
        "file_bandwidth",
        "^cold read.*ratio",
        "Slab and fio",
        limit=True,
    ),
    PageRow(
        "single blocks at random, verified ÷ fio",
        "file_bandwidth",
        "^scattered.*ratio",
        "Scattered blocks",
        goal=0.9,
        limit=True,
    ),
    PageRow(
        "scattered blocks of 1 and 16 requests ÷ fio's best depth",
        "scattered_blocks",
        "best depth",
        "Scattered blocks",
        limit=True,
    ),
    PageRow("same, CPU s/GB with the checksum", "scattered_blocks", "CPU", "Scattered blocks"),
    PageRow("one cold block: p99 ÷ fio's", "scattered_blocks", "p99", "One cold block"),
    PageRow(
        "slab writes, cold and warm reads: CPU s/GB besides the checksum",
        "file_bandwidth",
        "^(write|cold|warm).*CPU",
        "Slab and fio",
    ),
    PageRow("same, single blocks at random", "file_bandwidth", "^scattered.*CPU", "Scattered blocks"),
    PageRow(
        "slab beside a busy Python thread, reads and writes: GB/s",
        "file_bandwidth",
        "^(read|write) beside",
        "A busy thread",
    ),
    PageRow(
        "encrypted slab, writes and cold reads ÷ the lesser of clear and AES",
        "encryption",
        "^(write|cold read)",
        "An encrypted slab",
        limit=True,
    ),
    PageRow("same, reads beside a busy thread ÷ clear", "encryption", "^read beside", "An encrypted slab", limit=True),
    PageRow("reopen a slab of 1,000,000 blocks: CPU s", "recovery", "CPU", goal=0.5),
    PageRow("its index in memory: bytes a block", "recovery", "bytes"),
    PageRow("Redis, GET into L2, verified × the best of redis-py's ways", "redis_bandwidth", "^GET.*redis-py", "Redis"),
    PageRow("same, SET", "redis_bandwidth", "^SET.*redis-py", "Redis"),
    PageRow("same, GET and SET × LMCache's C++ client", "redis_bandwidth", "LMCache", "Redis"),
    PageRow("same, client CPU s/GB", "redis_bandwidth", "CPU", "Redis"),
    PageRow("a dead Redis adds to a lookup of 128 blocks, CPU and wall: µs", "dead_redis", "dead Redis"),
    PageRow("object store, PUT from L2 × the bare client", "object_bandwidth", "^PUT"),
    PageRow(
        "same, GET into L2, verified, a server that costs little",
        "object_bandwidth",
        "^GET.*in memory",
        "An object store's reads",
    ),
    PageRow("same, moto's server", "object_bandwidth", "^GET.*moto"),
    PageRow("node to node, 32 KiB – 8 MiB, 1 and 2 threads × a bare socket", "peers_bandwidth", "", "Node to node"),
    # engines
    PageRow("our engine, time to first token, 1,024 – 8,192 tokens: cold ÷ L2", "ttft", "L2"),
    PageRow("same, cold ÷ slab, page cache dropped", "ttft", "L3"),
    PageRow("CPU of our engine that never hits: with ÷ without kvtier, mean", "ttft", "^never-hit.*mean"),
    PageRow("vLLM, time to first token, 1,024 – 4,096 tokens: no offload ÷ a hit", "engine_ttft", "no offload"),
    PageRow("same, a hit ÷ native offloading's, mean", "engine_ttft", "over native.*mean"),
    PageRow(
        "same, a hit ÷ the example connector's, mean", "engine_ttft", "over example.*mean", "vLLM's example connector"
    ),
    PageRow(
        "CPU of a vLLM that never hits: with ÷ without, mean", "engine_ttft", "^never-hit.*mean", "Work beside vLLM"
    ),
    PageRow("vLLM, unrelated decoding beside loads ÷ without", "engine_ttft", "unrelated", "Work beside vLLM"),
    PageRow(
        "conversations on vLLM, first run and restart ÷ the best other, mean",
        "engine_conversations",
        ": kvtier over.*mean",
        "Many conversations",
    ),
    PageRow(
        "same, below vLLM's offloading: kvtier's files ÷ vLLM's, mean",
        "engine_conversations",
        "kvtier below native over.*mean",
    ),
    PageRow("SGLang after a restart, first token: no storage ÷ kvtier", "sglang_files", "no storage"),
    PageRow("same, kvtier ÷ SGLang's file backend", "sglang_files", "^time.*file backend", "SGLang's file backend"),
    PageRow("same, bytes on disk", "sglang_files", "^bytes on disk"),
    PageRow("right answers of 5 after it, and after changed bytes on disk", "sglang_files", "^answers after"),
    PageRow("same, wrong ones of SGLang's file backend", "sglang_files", "^answers that a changed byte"),
    PageRow("architectures tried with each engine", "models", "^architectures"),
    PageRow("same, wrong answers, or errors that are no refusal", "models", "^rows with wrong"),
    PageRow("tokens cached at blocks of 16 – 256, all partial blocks ÷ 16 without", "partial_blocks", "^(chat|trace)"),
    PageRow("first token, prompt parts inside a block: partial blocks on ÷ off", "partial_blocks", "^TTFT"),
    PageRow("15 % of reused documents' tokens repaired: right answers ÷ prefill's", "segments", "^recall with "),
    PageRow("same, without repair", "segments", "^recall without"),
    PageRow("same, with repair: CPU ÷ a full prefill's", "segments", "^blend"),
    PageRow("longest step beside such a repair ÷ beside a prefill", "segments", "^longest step"),
    PageRow("first token, check under the load ÷ without", "segments", "^TTFT with the check"),
    PageRow("slow tier, load ÷ compute 0.5 – 2: both ends ÷ the best single way", "both_ends", "^bal"),
    PageRow("same, elsewhere", "both_ends", "^elsewhere"),
    # the daemon
    PageRow(
        "the daemon adds to a round trip and a step of 1 store: median µs",
        "service_overhead",
        "adds to a (round trip|step, 1 )",
        "The daemon",
    ),
    PageRow("same, 8 and 64 stores", "service_overhead", "adds to a step, (8|64) ", "The daemon"),
    PageRow("same at p99, 0 and 1", "service_overhead", "adds at p99 to a (round trip|step, 1 )", "The daemon"),
    PageRow("same at p99, 8 and 64", "service_overhead", "adds at p99 to a step, (8|64) ", "The daemon"),
    PageRow("lookups of 128 blocks, a second of the daemon's core", "service_overhead", "^lookups", "The daemon"),
    PageRow("a lookup of 8 blocks ÷ of 128, the daemon's CPU", "service_overhead", "^a lookup of 8", "The daemon"),
    PageRow("copy rate of the daemon's memory ÷ our own", "service_overhead", "copy rate", limit=True),
    PageRow('a load with `[host] verify = "always"` ÷ without', "service_overhead", "verify", "Verified loads"),
    PageRow("of 16 clients that start at once: those that keep their daemon", "service_overhead", "clients at once"),
    PageRow("the daemon's memory besides its region, under load: MB", "daemon_memory", "memory besides"),
    PageRow("its growth in an hour: MB a minute", "daemon_memory", "growth"),
    # several replicas
    PageRow("4 replicas, simulated, cached share: prefix-aware ÷ round robin", "routing", "^cached.*round robin"),
    PageRow("same, ÷ the best other policy", "routing", "^cached.*best other", "Routing, cached share"),
    PageRow("same, ÷ one replica with all the memory", "routing", "^cached.*oracle", limit=True),
    PageRow("same, first token, p50 – p99 and mean: every other ÷ prefix-aware", "routing", "^TTFT"),
    PageRow(
        "3 replicas on Ray, cached share: power of two, KV-aware ÷ kvtier's", "ray_routing", "(power of two|KV-aware)"
    ),
    PageRow("same, Ray's prefix affinity ÷ kvtier's", "ray_routing", "prefix affinity", "Ray's prefix affinity"),
    PageRow("router, 1,024 tokens, besides tokenising: CPU ms", "router_overhead", "^router's CPU ms of a request, "),
    PageRow(
        "same, 32,768 tokens", "router_overhead", "^router's CPU ms of a request of", "A long prompt in the router"
    ),
    PageRow("same, a stream's lone piece ÷ a bare asyncio relay", "router_overhead", "bare relay", limit=True),
    PageRow("prefix scoring of 32,768 tokens: CPU ms", "router_overhead", "^prefix scoring"),
    PageRow("1,000,000 indexed blocks, in one tier and in two: MB", "router_overhead", "indexed"),
    PageRow("`kvtier engine`, L2, L3, a cluster: requests/s, first token, p99 ÷ off", "serving", ""),
    # a GPU
    PageRow("GPU ↔ L2, pieces ≥ 512 KiB, one way ÷ one big copy", "gpu_bandwidth", "^one way.*big copy", limit=True),
    PageRow("same, GB/s", "gpu_bandwidth", "^one way.*GB/s"),
    PageRow("same, both ways at once ÷ big copies", "gpu_bandwidth", "^both ways.*big copies", limit=True),
    PageRow("same, GB/s", "gpu_bandwidth", "^both ways.*GB/s"),
    PageRow("GPU ↔ L2, pieces of 4 – 256 KiB: GB/s", "gpu_bandwidth", "^pieces", "Small pieces of a GPU"),
    PageRow("a worker's step with 64 stores: CPU ms to enqueue", "gpu_bandwidth", "^a step"),
    PageRow("first use of L2: longest step of the GPU beside it, ms", "gpu_bandwidth", "^first use"),
    PageRow(
        "a decode step beside stores, loads, both ÷ alone", "gpu_decode", "^a decode step", "Decoding beside loads"
    ),
    PageRow(
        "Llama-8B's geometry, 8,192 and 32,768 tokens, first token: cold ÷ L2", "gpu_ttft", "L2$", "Our engine on a GPU"
    ),
    PageRow("same, cold ÷ slab", "gpu_ttft", "slab$", "Our engine on a GPU"),
)

# The six that the README shows, in its own words.
SIX: Final = (
    ("vLLM, time to first token of 1,024 to 4,096 tokens: without offloading ÷ a hit", "engine_ttft", "no offload"),
    ("the same: a hit ÷ a hit of vLLM's native offloading (mean)", "engine_ttft", "over native.*mean"),
    ("CPU time of a vLLM that never hits: with ÷ without kvtier (mean)", "engine_ttft", "^never-hit.*mean"),
    ("verified cold reads from disk: bandwidth ÷ that of fio", "file_bandwidth", "^cold read.*ratio"),
    ("time that a dead Redis adds to a lookup of 128 blocks, µs", "dead_redis", "dead Redis"),
    ("four simulated replicas, share of prompts cached: prefix-aware ÷ round robin", "routing", "^cached.*round robin"),
)
