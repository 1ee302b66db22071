"""What docs/performance.md says of which targets: a row for each claim, and the cause of a row that is missed."""

from collections.abc import Iterator
from typing import Final, NamedTuple


class PageRow(NamedTuple):
    """A row of the table: all targets of one benchmark whose names match a pattern; they have one limit."""

    label: str
    benchmark: str
    pattern: str = ""  # of the targets' names; a target belongs to one claim
    cause: str = ""  # heading under "What was missed, and why": of a row that is missed, or above its limit
    goal: float | None = None  # today's, where the saved result has a laxer one
    limit: bool = False  # measured against what the machine can do: beaten by more than a tenth, that was no limit


def _rows(text: str) -> Iterator[PageRow]:
    """Below a benchmark's name: label | pattern | cause | `limit` and `goal` with a number."""
    benchmark = ""
    for line in text.splitlines():
        if line.endswith(":"):
            benchmark = line[:-1]
        elif line and not line.startswith("#"):
            label, pattern, cause, marks, *_ = [*line.strip().split(" | "), "", "", ""]
            goal = marks.partition("goal ")[2]
            yield PageRow(label, benchmark, pattern, cause, float(goal) if goal else None, "limit" in marks)


CLAIMS: Final = tuple(
    _rows(r"""
# the core
lookup_latency:
  hash and look up 131,072 tokens ÷ (list conversion + a SHA-256 loop) | hashing
  131,072 tokens to leases, compiled, new prompt: CPU ms | ^whole way, compiled.*from nothing | A long prompt
  same, prompt named before, next turn | ^whole way, compiled.*(named before|next turn) | A long prompt
  same, interpreted, new prompt | ^whole way, Python.*from nothing | A long prompt
  same, named before, next turn | ^whole way, Python.*(named before|next turn) | A long prompt
  a request of 1 block of 16 tokens, a hit: CPU µs | ^request of 1  | A short request
  same, 8 blocks | ^request of 8  | A short request
  same, 64 blocks | ^request of 64\b
  same, 512 blocks | ^request of 512\b
  blocks hashed when a sequence grows by one | ^blocks hashed
pool_throughput:
  pool, batches of 2,048, LRU and S3-FIFO: lookup, µs a block | ^lookup.*, us
  same, lease + release | ^lease.*, us
  same, store with eviction | ^store.*, us | A slower machine
  same, unkeyed allocate + free | ^allocate.*, us | A slower machine
  these verbs, batches of 1 to 2,048 ÷ vLLM's BlockPool | BlockPool | Batches of one block
  interpreted core, batches of 1 to 64 ÷ the former Python way | of (1|4|16|64): of the former | The interpreted core
  same, batches of 2,048 | batches of 2048: of the former | The interpreted core
step_stores:
  a step that stores for 1 sequence, 8 settings: CPU ms |  1 stores$ | Steps of stores
  same, 4 sequences |  4 stores$ | Steps of stores
  same, 16 sequences |  16 stores$ | Steps of stores
  same, 64 sequences |  64 stores$ | Steps of stores
  plan of a cold prompt of 1,024 blocks: CPU ms | ^CPU ms to plan | The interpreted core
block_way:
  a block's way in our engine: calls, moves, files ÷ before |  | A block's way
start:
  `import kvtier`: CPU s | ^import
  `kvtier --help` and helps of verbs: CPU s | --help
# memory
memory:
  L2's books of a block besides its tokens: bytes | tokens apart
  same, with its tokens | with its tokens | Memory of books
  a full L2 adds to a pass of Python's garbage collector: ms | gc pass
order_memory:
  record of what left L2: bytes a slot | departures.*bytes
  `predicted` index, more than LRU: bytes a slot | ^predicted.*bytes | Memory of books
  same, whatever the slots: MiB | MiB
# eviction
eviction:
  production trace, L2 of 4,096 blocks of 512: % found with `predicted` | without hints, %$
  same, with hints of which nine of ten are right | 9 of 10 right, %$
  all traces and sizes saved: `predicted` less LRU, points | less LRU, points$
  same, less the best of LRU, S3-FIFO, 2Q, ARC and LHD | best of others, points$
  recorded agents, L2 of 2,720 blocks: % of the way from LRU to the optimum | way from LRU | Agents and the optimum
  `predicted` less LRU in a replay: CPU µs a block | ^.*: CPU of predicted | The cost of predicted
hints:
  hints of which nine of ten are right, six traces, by who says what: points more than none | 9 of 10 right
  same, five of ten | 5 of 10 right | Hints at random
  same, none | 0 of 10 right
agent_reuse:
  generated agents: tokens found in exact prefixes ÷ in runs at any offset | at any offset | Agents that edit
order_cost:
  same, requests of 8 to 512 blocks in a full pool | ^predicted over LRU | The cost of predicted
eviction:
  chats through a whole hierarchy, live less simulated: points | ^hierarchy
simulate_speed:
  `kvtier simulate`, 100,000 requests: CPU s | ^simulate
# copies and tiers
copy_bandwidth:
  L1 ↔ L2 on a CPU, 64 KiB – 8 MiB, compiled ÷ numpy's best: GB/s, CPU | ^compiled: .* KiB | Copies on a CPU | limit
  same, interpreted | ^Python alone: .* KiB | Copies on a CPU | limit
  L2 → L1 beside a busy Python thread: GB/s | busy
file_bandwidth:
  slab writes, new and aged ÷ fio | ^write, .*ratio | Slab and fio | limit
  slab cold reads, new and aged, verified ÷ fio | ^cold read.*ratio | Slab and fio | limit
  single blocks at random, verified ÷ fio | ^scattered.*ratio | Scattered blocks | limit goal 0.9
scattered_blocks:
  scattered blocks of 1 and 16 requests ÷ fio's best depth | best depth | Scattered blocks | limit
  same, CPU s/GB with the checksum | CPU | Scattered blocks
  one cold block: p99 ÷ fio's | p99 | One cold block
file_bandwidth:
  slab writes, cold and warm reads: CPU s/GB besides the checksum | ^(write|cold|warm).*CPU | Slab and fio
  same, single blocks at random | ^scattered.*CPU | Scattered blocks
  slab beside a busy Python thread, reads and writes: GB/s | ^(read|write) beside | A busy thread
encryption:
  encrypted slab, writes and cold reads ÷ the lesser of clear and AES | ^(write|cold read) | An encrypted slab | limit
  same, reads beside a busy thread ÷ clear | ^read beside | An encrypted slab | limit
recovery:
  reopen a slab of 1,000,000 blocks: CPU s | CPU |  | goal 0.5
  its index in memory: bytes a block | bytes
redis_bandwidth:
  Redis, GET into L2, verified × the best of redis-py's ways | ^GET.*redis-py | Redis
  same, SET | ^SET.*redis-py | Redis
  same, GET and SET × LMCache's C++ client | LMCache | Redis
  same, client CPU s/GB | CPU | Redis
dead_redis:
  a dead Redis adds to a lookup of 128 blocks, CPU and wall: µs | dead Redis
object_bandwidth:
  object store, PUT from L2 × the bare client | ^PUT
  same, GET into L2, verified, a server that costs little | ^GET.*in memory | An object store's reads
  same, moto's server | ^GET.*moto | An object store's reads
peers_bandwidth:
  node to node, 32 KiB – 8 MiB, 1 and 2 threads × a bare socket | threads?: × | Node to node
  same, by NIXL over shared memory | by NIXL | Node to node
# engines
ttft:
  our engine, time to first token, 1,024 – 8,192 tokens: cold ÷ L2 | L2
  same, cold ÷ slab, page cache dropped | L3
  CPU of our engine that never hits: with ÷ without kvtier, mean | ^never-hit.*mean
engine_ttft:
  vLLM, time to first token, 1,024 – 4,096 tokens: no offload ÷ a hit | no offload
  same, a hit ÷ native offloading's, mean | over native.*mean
  same, a hit ÷ the example connector's, mean | over example.*mean | vLLM's example connector
  CPU of a vLLM that never hits: with ÷ without, mean | ^never-hit.*mean | Work beside vLLM
  vLLM, unrelated decoding beside loads ÷ without | unrelated | Work beside vLLM
engine_conversations:
  conversations on vLLM, first run and restart ÷ the best other, mean | : kvtier over.*mean | Many conversations
  same, below vLLM's offloading: kvtier's files ÷ vLLM's, mean | kvtier below native over.*mean
prefill_decode:
  prefill and decode vLLM on one CPU, kvtier by a daemon, peers or Redis ÷ NIXL's connector: first token | TTFT
  same, p99 between tokens of another request | inter-token
encoder_outputs:
  vLLM, first token about an image seen before, also after a restart: no connector ÷ kvtier | none ÷ kvtier
  same, a hit ÷ the example connector's | ^again.*example
  same, after a restart | ^restart.*example | Encoder outputs after a restart
  same, images never seen: with ÷ without kvtier | ^first
sglang_files:
  SGLang after a restart, first token: no storage ÷ kvtier | no storage
  same, kvtier ÷ SGLang's file backend | ^time.*file backend | SGLang's file backend
  same, bytes on disk | ^bytes on disk
  right answers of 5 after it, and after changed bytes on disk | ^answers after
  same, wrong ones of SGLang's file backend | ^answers that a changed byte
models:
  architectures tried with each engine | ^architectures
  same, wrong answers, or errors that are no refusal | ^rows with wrong
partial_blocks:
  tokens cached at blocks of 16 – 256, all partial blocks ÷ 16 without | ^(chat|trace)
  first token, prompt parts inside a block: partial blocks on ÷ off | ^TTFT
segments:
  15 % of reused documents' tokens repaired: right answers ÷ prefill's | ^recall with\b
  same, without repair | ^recall without
  same, with repair: CPU ÷ a full prefill's | ^blend with
  share chosen by the check, 5 forms of documents: right answers ÷ prefill's | ^recall of 5
  documents found without marks: right answers, points below marked ones | ^recall of doc | Pieces without context
  same: CPU ÷ a full prefill's | ^blend of | Pieces without context
  prompts that never return, segments found ÷ off: CPU | ^prompts
  longest step beside such a repair ÷ beside a prefill | ^longest step
  first token, check under the load ÷ without | ^TTFT with the check
task_accuracy:
  worst of four families, share by the check: right answers ÷ prefill's | ^tasks repaired | Running counts
  same, 20 % repaired by `question` | ^tasks, 20 | Running counts
  same, without repair | ^tasks without
both_ends:
  slow tier, load ÷ compute 0.5 – 2: both ends ÷ the best single way | ^bal
  same, elsewhere | ^elsewhere
# the daemon
service_overhead:
  through a daemon, a step of 1 store: median µs | daemon: step, 1 stores, \w+, us | The daemon
  same, 16 stores | daemon: step, 16 stores, \w+, us | The daemon
  same, 64 stores | daemon: step, 64 stores, \w+, us | The daemon
  same, a lookup of 128 blocks | daemon: lookup of 128, \w+, us | The daemon
  all four: p99 ÷ median | p99 over median | The daemon
  same, beside a process that computes on each core: p99, µs | beside load, p99 | The daemon
  lookups of 128 blocks, a second of the daemon's core | ^lookups | The daemon
  a lookup of 8 blocks ÷ of 128, the daemon's CPU | ^a lookup of 8 | The daemon
  copy rate of the daemon's memory ÷ our own | copy rate |  | limit
  a load with `[host] verify = "always"` ÷ without | verify | Verified loads
  of 16 clients that start at once: those that keep their daemon | clients at once
daemon_memory:
  the daemon's memory besides its region, under load: MB | memory besides
  its growth in an hour: MB a minute | growth
# several replicas
routing:
  4 replicas, simulated, cached share: prefix-aware ÷ round robin | ^cached.*round robin
  same, ÷ the best other policy | ^cached.*best other | Routing, cached share
  same, ÷ one replica with all the memory | ^cached.*oracle |  | limit
  same, first token, p50 – p99 and mean: every other ÷ prefix-aware | ^TTFT
ray_routing:
  3 replicas on Ray, cached share: power of two, KV-aware ÷ kvtier's | (power of two|KV-aware)
  same, Ray's prefix affinity ÷ kvtier's | prefix affinity | Ray's prefix affinity
router_overhead:
  router, 1,024 tokens, besides tokenising: CPU ms | ^router's CPU ms of a request,
  same, 32,768 tokens | ^router's CPU ms of a request of | A long prompt in the router
  same, a stream's lone piece ÷ a bare asyncio relay | bare relay |  | limit
  prefix scoring of 32,768 tokens: CPU ms | ^prefix scoring
  1,000,000 indexed blocks, in one tier and in two: MB | indexed
router_race:
  beside three other routers, five loads: cached share ÷ the best other's | cached share | Routers side by side
  same, first token, p50, p90, p99 | TTFT | Routers side by side
  same, CPU of a chat of 3,000 tokens | CPU | Routers side by side
  a replica dies: answers that just end, later chats unanswered | a replica dies
serving:
  `kvtier engine`, L2, L3, a cluster: requests/s, first token, p99 ÷ off
tracing_cost:
  a request whose trace is recorded: time ÷ one whose trace is not | ^time of a request | A recorded trace
  its spans: CPU ÷ the request's | ^CPU time
# a GPU
gpu_bandwidth:
  GPU ↔ L2, pieces ≥ 512 KiB, one way ÷ one big copy | ^one way.*big copy |  | limit
  same, GB/s | ^one way.*GB/s
  same, both ways at once ÷ big copies | ^both ways.*big copies |  | limit
  same, GB/s | ^both ways.*GB/s
  GPU ↔ L2, pieces of 4 – 256 KiB: GB/s | ^pieces | Small pieces of a GPU
  a worker's step with 64 stores: CPU ms to enqueue | ^a step
  first use of L2: longest step of the GPU beside it, ms | ^first use
gpu_decode:
  a decode step beside stores, loads, both ÷ alone | ^a decode step | Decoding beside loads
gpu_ttft:
  Llama-8B's geometry, 8,192 and 32,768 tokens, first token: cold ÷ L2 | L2$ | Our engine on a GPU
  same, cold ÷ slab | slab$ | Our engine on a GPU
""")
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
