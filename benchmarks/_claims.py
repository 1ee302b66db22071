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
    PageRow(
        "hash and look up 131,072 tokens, all hits, Python alone: × (list conversion + bare SHA-256 loop)",
        "lookup_latency",
        "hashing(?!.*compiled)",
        limit=True,
    ),
    PageRow("the same, compiled", "lookup_latency", "hashing.*compiled"),
    PageRow(
        "131,072 tokens in, all hits, whole way, compiled: CPU ms, blocks of 16, 64, a new prompt",
        "lookup_latency",
        "^whole way, compiled.*from nothing",
        "A long prompt",
    ),
    PageRow("the same, named before", "lookup_latency", "^whole way, compiled.*named before", "A long prompt"),
    PageRow(
        "the same, the next turn of 2,048 tokens more",
        "lookup_latency",
        "^whole way, compiled.*next turn",
        "A long prompt",
    ),
    PageRow(
        "the whole way, Python alone: a new prompt",
        "lookup_latency",
        "^whole way, Python.*from nothing",
        "A long prompt",
    ),
    PageRow("the same, named before", "lookup_latency", "^whole way, Python.*named before", "A long prompt"),
    PageRow("the same, the next turn", "lookup_latency", "^whole way, Python.*next turn", "A long prompt"),
    PageRow("a request of 1 block of 16 tokens, a hit: CPU µs", "lookup_latency", "^request of 1 ", "A short request"),
    PageRow("the same, of 8 blocks", "lookup_latency", "^request of 8 ", "A short request"),
    PageRow("the same, of 64 blocks", "lookup_latency", "^request of 64 ", "A short request"),
    PageRow("the same, of 512 blocks", "lookup_latency", "^request of 512 "),
    PageRow("blocks hashed when a sequence grows by one", "lookup_latency", "^blocks hashed"),
    PageRow("pool, batches of 2,048, LRU and S3-FIFO: lookup, µs a block", "pool_throughput", "^lookup.*, us"),
    PageRow("the same: lease + release", "pool_throughput", "^lease.*, us"),
    PageRow("the same: store with eviction", "pool_throughput", "^store.*, us"),
    PageRow("the same: unkeyed allocate + free", "pool_throughput", "^allocate.*, us"),
    PageRow(
        "pool, batches of 1 to 2,048, LRU and S3-FIFO: lookup ÷ vLLM's BlockPool",
        "pool_throughput",
        "^lookup.*BlockPool",
        "Batches of one block",
    ),
    PageRow(
        "the same: lease + release ÷ its touch + free", "pool_throughput", "^lease.*BlockPool", "Batches of one block"
    ),
    PageRow("the same: store with eviction", "pool_throughput", "^store.*BlockPool", "Batches of one block"),
    PageRow("the same: unkeyed allocate + free", "pool_throughput", "^allocate.*BlockPool", "Batches of one block"),
    PageRow(
        "the interpreted core, batches of 1 to 64 ÷ the former Python way",
        "pool_throughput",
        "batches of (1|4|16|64): of the former",
        "The interpreted core",
    ),
    PageRow("the same, batches of 2,048", "pool_throughput", "batches of 2048: of the former", "The interpreted core"),
    PageRow(
        "production trace, L2 of 4,096 blocks of 512 tokens: % of blocks found with `tail`, no hints",
        "eviction",
        "without hints, %$",
    ),
    PageRow("the same with hints, nine of ten right", "eviction", "9 of 10 right, %$"),
    PageRow("the traces and sizes that were saved: `tail` less LRU, points", "eviction", "less LRU, points$"),
    PageRow("CPU of `tail` over LRU in a replay, µs a block", "eviction", "^.*: CPU of tail", "The cost of tail"),
    PageRow(
        "the same of whole requests of 8, 32, 128 and 512 blocks in a full pool",
        "tail_cost",
        "^tail over LRU",
        "The cost of tail",
    ),
    PageRow(
        "chats through a whole hierarchy, live and simulated: points apart",
        "eviction",
        "^hierarchy",
    ),
    PageRow(
        "`kvtier simulate`, 100,000 requests, LRU and `tail`, with a slab and without: CPU s",
        "simulate_speed",
        "^simulate",
    ),
    PageRow(
        "a step that stores a block of one sequence, L2 and slab, ways to admit and write: CPU ms",
        "step_stores",
        " 1 stores$",
        "Steps of many stores",
    ),
    PageRow("the same, of 4 sequences", "step_stores", " 4 stores$", "Steps of many stores"),
    PageRow("the same, of 16 sequences", "step_stores", " 16 stores$", "Steps of many stores"),
    PageRow("the same, of 64 sequences", "step_stores", " 64 stores$", "Steps of many stores"),
    PageRow(
        "the scheduler's plan for the stores of a cold prompt of 1,024 blocks: CPU ms",
        "step_stores",
        "^CPU ms to plan",
        "The interpreted core",
    ),
    PageRow("CPU seconds of `import kvtier`", "start", "^import"),
    PageRow("CPU seconds of `kvtier --help`, and of verbs' helps", "start", "--help"),
    PageRow(
        "L1 ↔ L2 on a CPU, 64 KiB–8 MiB, slots scattered: of the best numpy copy",
        "copy_bandwidth",
        "^compiled.*scattered slots.*copy$",
        "Copies on a CPU",
        limit=True,
    ),
    PageRow(
        "the same, blocks and slots scattered (numpy's job is easier)",
        "copy_bandwidth",
        "^compiled.*scattered both.*copy$",
        "Copies on a CPU",
        limit=True,
    ),
    PageRow(
        "the same, L1 an ordinary tensor: of np.copyto, block by block",
        "copy_bandwidth",
        "^compiled.*ordinary tensor: of",
        "Copies on a CPU",
        limit=True,
    ),
    PageRow("the same three, CPU time", "copy_bandwidth", "^compiled.*CPU$", "Copies on a CPU", limit=True),
    PageRow(
        "the same three, Python alone",
        "copy_bandwidth",
        "^Python alone: .*(copy|block)$",
        "Copies on a CPU",
        limit=True,
    ),
    PageRow("their CPU time", "copy_bandwidth", "^Python alone: .*CPU$", "Copies on a CPU", limit=True),
    PageRow("L2 → L1 beside a busy Python thread, compiled and Python alone, GB/s", "copy_bandwidth", "busy"),
    PageRow("slab writes, new and aged: of fio", "file_bandwidth", "^write, .*ratio", "fio at one depth", limit=True),
    PageRow(
        "slab cold reads, new and aged, verified: of fio",
        "file_bandwidth",
        "^cold read.*ratio",
        "fio at one depth",
        limit=True,
    ),
    PageRow(
        "single blocks at random, verified: of fio at the block size",
        "file_bandwidth",
        "^scattered.*ratio",
        "Single blocks at random",
        goal=0.9,
        limit=True,
    ),
    PageRow(
        "scattered blocks, of 1 and 16 requests, compiled: of fio's best depth",
        "scattered_blocks",
        "compiled, .*best depth",
        "Scattered blocks",
        limit=True,
    ),
    PageRow("the same: CPU s/GB, checksum included", "scattered_blocks", "compiled, .*CPU", "Scattered blocks"),
    PageRow("one cold block, compiled: p99 ÷ fio's", "scattered_blocks", "compiled, .*p99", "One cold block"),
    PageRow(
        "the same three, Python alone: of fio's best depth",
        "scattered_blocks",
        "Python, .*best depth",
        "Scattered blocks",
        limit=True,
    ),
    PageRow("CPU s/GB, checksum included", "scattered_blocks", "Python, .*CPU", "Scattered blocks"),
    PageRow("p99 ÷ fio's", "scattered_blocks", "Python, .*p99", "One cold block"),
    PageRow(
        "slab writes and cold reads: CPU s/GB besides the checksum",
        "file_bandwidth",
        "^(write|cold).*CPU",
        "A slower machine",
    ),
    PageRow("the same: single blocks at random", "file_bandwidth", "^scattered.*CPU", "Single blocks at random"),
    PageRow("the same: reads from the page cache, buffered and mapped", "file_bandwidth", "^warm.*CPU", "Warm reads"),
    PageRow("slab reads beside a busy Python thread, GB/s", "file_bandwidth", "^read beside", "A slower machine"),
    PageRow(
        "slab writes beside a busy Python thread, GB/s",
        "file_bandwidth",
        "^write beside",
        "Writes beside a busy thread",
    ),
    PageRow(
        "encrypted slab, writes: of the lesser of a slab in the clear and AES alone",
        "encryption",
        "^write",
        "An encrypted slab",
        limit=True,
    ),
    PageRow("the same, cold reads", "encryption", "^cold read", limit=True),
    PageRow(
        "the same, reads beside a busy Python thread: of a slab in the clear",
        "encryption",
        "^read beside",
        "An encrypted slab",
        limit=True,
    ),
    PageRow("reopen a slab of 1,000,000 blocks, CPU s", "recovery", "CPU", goal=0.5),
    PageRow("its index in memory, bytes a block", "recovery", "bytes"),
    PageRow(
        "Redis, GET into L2 slots, verified: × the best of redis-py's ways",
        "redis_bandwidth",
        "^GET.*redis-py",
        "Redis",
    ),
    PageRow("Redis, SET from L2 slots: × the best of redis-py's ways", "redis_bandwidth", "^SET.*redis-py", "Redis"),
    PageRow("Redis, GET and SET: × LMCache's C++ client", "redis_bandwidth", "LMCache", "Redis"),
    PageRow("Redis: client CPU s/GB", "redis_bandwidth", "CPU", "Redis"),
    PageRow("object store, PUT from L2 slots: × the bare client", "object_bandwidth", "^PUT"),
    PageRow(
        "object store, GET into L2 slots, verified: × the bare client, a server that costs little",
        "object_bandwidth",
        "^GET.*in memory",
        "An object store's reads",
    ),
    PageRow("the same, moto's S3 server", "object_bandwidth", "^GET.*moto"),
    PageRow(
        "node to node, blocks of 32 KiB to 8 MiB, one thread: × a bare socket",
        "peers_bandwidth",
        "1 thread:",
        "Node to node",
    ),
    PageRow("the same, two threads", "peers_bandwidth", "2 threads:", "Node to node"),
    PageRow("SGLang after a restart, time to first token: no storage ÷ kvtier", "sglang_files", "no storage"),
    PageRow("the same: kvtier ÷ SGLang's file backend", "sglang_files", "^time.*file backend", "SGLang's file backend"),
    PageRow("the same: bytes on disk", "sglang_files", "^bytes on disk"),
    PageRow("SGLang, 5 prompts after a restart: answers right with kvtier", "sglang_files", "^answers after a restart"),
    PageRow("the same after one changed byte each on the disk", "sglang_files", "^answers after a changed byte"),
    PageRow("the same: wrong answers with SGLang's file backend", "sglang_files", "^answers that a changed byte"),
    PageRow("time to first token, 1,024 to 8,192 tokens: cold ÷ L2", "ttft", "L2"),
    PageRow("cold ÷ L3 (page cache dropped)", "ttft", "L3"),
    PageRow(
        "CPU time of an engine that never hits, with ÷ without kvtier (lower end of 95 %)", "ttft", "^never-hit.*end"
    ),
    PageRow("the same: mean", "ttft", "^never-hit.*mean"),
    PageRow(
        "a real vLLM, time to first token of 1,024 to 4,096 tokens: no offload ÷ a hit", "engine_ttft", "no offload"
    ),
    PageRow("the same: a hit ÷ of vLLM's native offloading (lower end of 95 %)", "engine_ttft", "over native.*end"),
    PageRow("the same: mean", "engine_ttft", "over native.*mean"),
    PageRow("the same: a hit ÷ of vLLM's example connector (lower end of 95 %)", "engine_ttft", "over example.*end"),
    PageRow("the same: mean", "engine_ttft", "over example.*mean", "vLLM's example connector"),
    PageRow(
        "conversations on a real vLLM, seven columns: kvtier ÷ the best other way (lower end of 95 %)",
        "engine_conversations",
        "^first run.*: kvtier over.*end",
    ),
    PageRow("the same: mean", "engine_conversations", "^first run.*: kvtier over.*mean", "Many conversations"),
    PageRow("the same after a restart (lower end of 95 %)", "engine_conversations", "^restart.*: kvtier over.*end"),
    PageRow("the same: mean", "engine_conversations", "^restart.*: kvtier over.*mean", "Many conversations"),
    PageRow(
        "the same, below vLLM's offloading: kvtier's files ÷ vLLM's (lower end of 95 %)",
        "engine_conversations",
        "kvtier below native over.*end",
    ),
    PageRow("the same: mean", "engine_conversations", "kvtier below native over.*mean"),
    PageRow(
        "CPU time of a vLLM that never hits, with ÷ without kvtier (lower end of 95 %)",
        "engine_ttft",
        "^never-hit.*end",
    ),
    PageRow("the same: mean", "engine_ttft", "^never-hit.*mean", "A vLLM that never hits"),
    PageRow(
        "vLLM: unrelated decoding beside loads ÷ without", "engine_ttft", "unrelated", "vLLM decoding beside loads"
    ),
    PageRow(
        "a block's way in our engine: calls, now ÷ before the folders had faces", "block_way", "calls", "A block's way"
    ),
    PageRow("the same: moves between files", "block_way", "moves", "A block's way"),
    PageRow("the same: files", "block_way", "files", "A block's way"),
    PageRow(
        "the daemon adds to a bare round trip, engine busy and idle: median, µs",
        "service_overhead",
        "adds to a round trip",
        "The daemon's round trip",
    ),
    PageRow(
        "the same, a step that stores a block",
        "service_overhead",
        "adds to a step, 1 stores",
        "The daemon's round trip",
    ),
    PageRow("the same, 8 blocks", "service_overhead", "adds to a step, 8 stores", "Many stores through the daemon"),
    PageRow("the same, 64 blocks", "service_overhead", "adds to a step, 64 stores", "Many stores through the daemon"),
    PageRow(
        "the same at p99, no block and 1",
        "service_overhead",
        "adds at p99 to a (round trip|step, 1 )",
        "The daemon at p99",
    ),
    PageRow(
        "the same at p99, 8 and 64 blocks", "service_overhead", "adds at p99 to a step, (8|64) ", "The daemon at p99"
    ),
    PageRow(
        "lookups of 128 blocks, a second of the daemon's core: hits, misses",
        "service_overhead",
        "^lookups",
        "Lookups of the daemon",
    ),
    PageRow("copy rate of the daemon's memory: of our own", "service_overhead", "copy rate", limit=True),
    PageRow('a load with `[host] verify = "always"` ÷ one without', "service_overhead", "verify", "Verified loads"),
    PageRow("the daemon's memory besides its region, under load, MB", "daemon_memory", "memory besides"),
    PageRow("its growth in an hour, MB a minute", "daemon_memory", "growth"),
    PageRow(
        "a lookup of 8 blocks ÷ of one of 128, the daemon's CPU",
        "service_overhead",
        "^a lookup of 8",
        "Lookups of the daemon",
    ),
    PageRow("of 16 clients that start at once: those that keep their daemon", "service_overhead", "clients at once"),
    PageRow("L2's books of a block: bytes besides its tokens", "memory", "tokens apart"),
    PageRow("the same with its tokens", "memory", "with its tokens", "Tokens in memory"),
    PageRow("what a full L2 adds to a pass of Python's garbage collector, ms", "memory", "gc pass"),
    PageRow("what left L2 is remembered: bytes for each slot", "order_memory", "departures.*bytes", "Memory of orders"),
    PageRow("the tail index, more than LRU: bytes for each slot", "order_memory", "^tail.*bytes", "Memory of orders"),
    PageRow("the same: MiB whatever the slots", "order_memory", "MiB"),
    PageRow("a dead Redis adds to a lookup of 128 blocks, CPU and wall µs", "dead_redis", "dead Redis"),
    PageRow(
        "4 replicas, simulated: cached share, prefix-aware routing ÷ round robin", "routing", "^cached.*round robin"
    ),
    PageRow("the same, ÷ the best other policy", "routing", "^cached.*best other", "Routing, cached share"),
    PageRow("the same, of one replica with all the memory", "routing", "^cached.*oracle", limit=True),
    PageRow("time to first token, p50, p90, p99 and mean: round robin ÷ prefix-aware", "routing", "^TTFT.*round robin"),
    PageRow("the same: the best other policy ÷ prefix-aware", "routing", "^TTFT.*best other"),
    PageRow(
        "3 replicas on Ray Serve: cached share, Ray's power of two choices and KV-aware router ÷ kvtier's",
        "ray_routing",
        "(power of two|KV-aware)",
    ),
    PageRow("the same, Ray's prefix affinity ÷ kvtier's", "ray_routing", "prefix affinity", "Ray's prefix affinity"),
    PageRow(
        "share of tokens cached at blocks of 16 to 256, partial blocks and tails ÷ at 16 without",
        "partial_blocks",
        "^(chat|trace)",
    ),
    PageRow(
        "the engine's time to first token, prompt parts inside a block: partial blocks on ÷ off",
        "partial_blocks",
        "^TTFT",
    ),
    PageRow(
        "router: CPU ms of a request of 1,024 tokens, whole and streamed, besides tokenising",
        "router_overhead",
        "^router's CPU ms of a request, ",
    ),
    PageRow(
        "the same, 32,768 tokens", "router_overhead", "^router's CPU ms of a request of", "A long prompt in the router"
    ),
    PageRow(
        "router: CPU of a stream's piece that comes alone ÷ of a bare asyncio relay",
        "router_overhead",
        "bare relay",
        limit=True,
    ),
    PageRow("prefix scoring of 32,768 tokens, CPU ms", "router_overhead", "^prefix scoring"),
    PageRow("1,000,000 indexed blocks, in one tier and in two, MB", "router_overhead", "indexed"),
    PageRow("load on `kvtier engine`: requests/s, L2, L3 and a cluster ÷ cache off", "serving", "requests/s"),
    PageRow("the same: time to first token, cache off ÷ each", "serving", "TTFT of"),
    PageRow("the same at p99", "serving", "TTFT p99"),
    PageRow(
        "documents reused elsewhere, 15 % of their tokens repaired: right answers ÷ a full prefill's",
        "segments",
        "^recall with ",
    ),
    PageRow("the same without repair: the measure tells right KV from wrong", "segments", "^recall without"),
    PageRow("the same with repair: CPU time ÷ a full prefill's", "segments", "^blend"),
    PageRow("longest step beside such a repair ÷ beside a prefill", "segments", "^longest step"),
    PageRow("time to first token with the check under the load ÷ without", "segments", "^TTFT with the check"),
    PageRow(
        "a prompt held in a slow tier, load ÷ compute 0.5 – 2: from both ends ÷ the best single way",
        "both_ends",
        "^bal",
    ),
    PageRow("the same, elsewhere", "both_ends", "^elsewhere"),
    PageRow("architectures tried with each engine", "models", "^architectures"),
    PageRow("of these: wrong answers, or errors that are no refusal", "models", "^rows with wrong"),
    PageRow(
        "GPU ↔ L2, pieces of 512 KiB and more, one way: of one big copy",
        "gpu_bandwidth",
        "^one way.*big copy",
        limit=True,
    ),
    PageRow("the same, GB/s", "gpu_bandwidth", "^one way.*GB/s"),
    PageRow(
        "the same both ways at once: of big copies both ways", "gpu_bandwidth", "^both ways.*big copies", limit=True
    ),
    PageRow("the same, GB/s", "gpu_bandwidth", "^both ways.*GB/s"),
    PageRow("GPU ↔ L2, pieces of 4 to 256 KiB, GB/s", "gpu_bandwidth", "^pieces", "Small pieces of a GPU"),
    PageRow("a worker's step with 64 stores, CPU ms to enqueue them", "gpu_bandwidth", "^a step"),
    PageRow("first use of L2: longest step of the GPU beside it, ms", "gpu_bandwidth", "^first use"),
    PageRow(
        "a decode step beside stores, loads, and both: ÷ alone",
        "gpu_decode",
        "^a decode step",
        "Decoding beside a GPU's loads",
    ),
    PageRow(
        "a Llama-8B's geometry on a GPU, to 32,768 tokens: time to first token, cold ÷ L2",
        "gpu_ttft",
        "L2$",
        "The engine's own step on a GPU",
    ),
    PageRow("the same: cold ÷ slab", "gpu_ttft", "slab$", "A virtual disk below a GPU"),
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
