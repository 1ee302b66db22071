"""The sections of the configuration: every option, its default and what it means; `config.py` reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from kvtier.tiers import L2, TIERS
from kvtier.tiers.config.quantities import format_size
from kvtier.tiers.config.values import (
    AccessKeyId,
    Address,
    ApiSection,
    BucketName,
    ByteSize,
    CacheSalt,
    Directory,
    FileName,
    HttpEndpoint,
    HttpSection,
    KeyPrefix,
    Lifetime,
    LineStarts,
    NodeAddresses,
    ObjectPrefix,
    Policy,
    RegionName,
    RepairShare,
    Secret,
    Section,
    Sightings,
    SocketPath,
    StorageSize,
    StoredAnswers,
    Time,
    Topic,
    WholeNumber,
    ZmqEndpoint,
    is_numeric,
    is_one_line,
    listed,
    option,
    require_both,
    require_local,
)

_SHORTEST_SECRET: Final = 16  # characters: an attacker who reads stored data can try out shorter ones


class HostConfig(Section):
    size: StorageSize = option("1GiB", "memory for L2")
    shared: bool = option(False, "memfd that other processes can map")
    huge_pages: bool = option(True, "use the kernel's huge pages")
    pin: bool = option(True, "pin the memory for the GPU, piece by piece in the background")
    batch_copies_from: ByteSize | None = option(
        None, "mean size of pieces from which the driver copies, not a kernel; none = measured"
    )
    copy_grid: Annotated[WholeNumber, Field(ge=1, le=32)] | None = option(
        None, "blocks of threads of the copy kernel, 1 to 32; none = measured"
    )
    verify: Literal["always", "never"] = option("never", "always: hash every block in L2 again before it is promised")


class FileConfig(Section):
    path: Directory | None = option(None, "directory of the slabs; none = tier off")
    size: StorageSize = option("4GiB", "hard bound on all slabs of the directory")
    mode: Literal["auto", "direct", "buffered", "mmap"] = option(
        "auto", "how payloads are read and written: direct, buffered, mmap or auto"
    )
    durable: bool = option(False, "fdatasync: blocks survive a power cut, too")
    key_file: FileName | None = option(
        None, "key that encrypts slabs and archives; none = readers of a slab can reconstruct prompts"
    )
    deadline: Time = option("2s", "longest operation; a longer one is a miss")


class CacheConfig(Section):
    block_size: WholeNumber = option(64, "tokens in a block", ge=1, le=4096)
    hash: Literal["sha256", "xxh3"] = option("sha256", "chain hash: sha256, or xxh3 for one trusted tenant")
    write_policy: Literal["write_through", "write_back"] = option(
        "write_through",
        "copy blocks down: write_through at seal, write_back before eviction",
    )
    admit_after: Sightings = option(
        1, "sightings before a block is stored; auto: two in a lower tier that falls behind, else one"
    )
    policy: Policy = option(
        "predicted",
        "what is evicted first: predicted learns it from how requests return",
    )
    store_queue: ByteSize | None = option(None, "bytes of L2 that wait leased for L3; none = a quarter, the most")
    prefetch_deadline: Time = option("2s", "longest a request waits for L3; then it takes what has arrived")
    load_or_recompute: Literal["auto", "load", "recompute"] = option(
        "auto", "load or recompute a stored block; auto: the faster one, or both at once"
    )
    partial_blocks: bool = option(True, "reuse the leading tokens that a prompt shares with a stored block")
    store_generated: StoredAnswers = option(True, "store answers, too; answers: without reasoning, by kvtier engine")
    segments: Literal["off", "on", "auto"] = option(
        "off",
        "on: reuse KV of segments elsewhere, approximate; auto: also unmarked ones, not in vLLM",
    )
    segment_min_tokens: WholeNumber = option(32, "shortest reused segment, in tokens; at least a block", ge=1, lt=2**31)
    repair_share: RepairShare = option(
        0.15, "share of reused tokens that are recomputed; auto: 5 to 20 %, by the measured deviation"
    )
    repair_rule: Literal["deviation", "question", "first", "borders", "random"] = option(
        "deviation", "which reused tokens are recomputed"
    )
    lossy: Literal["none", "fp8"] = option("none", "fp8: Redis and object store keep K and V as fp8, with loss")
    share_across_tp: Annotated[WholeNumber, Field(ge=1, le=4096)] | None = option(
        None, "tensor-parallel size that blocks are laid out for; none = the engine's own; without ranks only 1"
    )
    share_across_pp: Annotated[WholeNumber, Field(ge=1, le=4096)] | None = option(
        None, "number of stages that SGLang's pages are cut for; none = the engine's own; without ranks only 1"
    )
    cache_salt: CacheSalt | None = option(None, "isolates a tenant: other salt, no hit")
    epoch: WholeNumber = option(0, "raise it to invalidate all stored blocks", ge=0, lt=2**63)


class ChatConfig(Section):
    """Chats whose prompts should begin alike: of kvtier's engine, the router, and `KVTier.chat`."""

    sort_tools: bool = option(False, "put the keys of tools' schemas in one order, which the model reads")
    drop_lines: LineStarts = option(
        (), "list of how system messages' lines begin that are dropped; billing = Claude Code's header"
    )
    move_lines: LineStarts = option(
        (), "list of how lines begin that move to their system message's end; date = a date or time"
    )


class L1Config(Section):
    size: StorageSize = option("256MiB", "memory for L1; give this or num_blocks")
    num_blocks: Annotated[WholeNumber, Field(ge=1, lt=2**31)] | None = option(None, "blocks in L1; give this or size")
    enable_prefix_caching: bool = option(True, "off: nothing is hashed, looked up or stored")

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.num_blocks is not None and "size" in self.model_fields_set:
            raise ValueError(
                f"num_blocks {self.num_blocks}: size {format_size(self.size)} is given too; remove one of them"
            )
        return self


class PeersConfig(Section):
    """Other nodes' memory: where their daemons lend blocks, and where this one does."""

    listen: Address | None = option(None, "address where this node's daemon lends blocks; none = it lends none")
    nodes: NodeAddresses = option(
        (), "list of HOST:PORT where daemons lend blocks; a name means all its addresses; none = tier off"
    )
    key_file: FileName | None = option(None, "file with the key of all nodes; needed by listen and nodes")
    events: bool = option(
        True,
        "know other nodes' blocks by their KV events, if published and replayed at tcp://",
    )
    index: Literal["auto", "all", "ring"] = option(
        "auto",
        "ring: blocks are found by the owners of their names; auto: above 64 nodes",
    )
    max_blocks: WholeNumber = option(
        1_000_000,
        "other nodes' blocks known by events, for each model, or as an owner; the rest is queried",
        ge=1,
        le=100_000_000,
    )
    transport: Literal["tcp", "nixl"] = option(
        "tcp",
        "nixl: read other nodes' memory by NIXL (RDMA), over tcp if one has none; in a closed network",
    )
    connect_timeout: Time = option("100ms", "longest opening of a connection")
    deadline: Time = option("250ms", "longest batch, plus its size ÷ bandwidth")
    bandwidth: ByteSize = option("50MB", "slowest rate, in bytes a second")
    in_flight: ByteSize = option("64MiB", "bytes of blocks lent at once, to all nodes")

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        if self.key_file is None and (self.listen is not None or self.nodes):
            given = f'listen "{self.listen}"' if self.listen is not None else f'nodes "{" ".join(self.nodes)}"'
            raise ValueError(
                f"{given}: key_file is missing, without which no block of another node is trusted; write one with: "
                "(umask 077; openssl rand -hex 32 > FILE), and give it to all nodes"
            )
        return self


class RedisConfig(Section):
    url: SecretStr | None = option(
        None,
        "redis://, rediss:// or unix://; commas between a cluster's nodes or Sentinels; none = tier off",
    )
    mode: Literal["standalone", "cluster", "sentinel"] = option("standalone", "standalone, sentinel or cluster")
    sentinel_name: str = option("mymaster", "the master's name for Sentinels")
    username: str | None = option(None, "ACL user")
    password: Secret | None = option(None, "its password")
    ca: FileName | None = option(None, "certificate authority of rediss:// servers; none = the system's")
    secret: SecretStr | None = option(None, "authenticates records: only those written with it are read")
    key_file: FileName | None = option(None, "file with the key that encrypts records (AES-256-GCM), instead of secret")
    compression: Literal["none", "zstd"] = option(
        "none",
        "zstd: shorter values without loss, for slow servers or dear memory",
    )
    prefix: KeyPrefix = option("kvtier", "what every key begins with")
    ttl: Lifetime = option("24h", "time that a block is kept without reads")
    expiry: Literal["fixed", "learned"] = option(
        "fixed", "learned: less needed blocks expire earlier, up to half of ttl; needs volatile-ttl"
    )
    connect_timeout: Time = option("100ms", "longest opening of a connection")
    deadline: Time = option("250ms", "longest batch, plus its size ÷ bandwidth")
    bandwidth: ByteSize = option("50MB", "slowest rate, in bytes a second")
    in_flight: ByteSize = option("64MiB", "bytes of requests and replies under way")

    @model_validator(mode="after")
    def _one_seal(self) -> Self:
        _require_one_seal(self.secret, self.key_file)
        return self


class ObjectsConfig(Section):
    bucket: BucketName | None = option(None, "bucket of an S3-compatible store; none = tier off")
    endpoint: HttpEndpoint | None = option(None, "https://HOST:PORT of the store; none = AWS")
    region: RegionName = option("us-east-1", "the bucket's region; most other stores take any")
    access_key_id: AccessKeyId | None = option(None, "key id; none = from AWS's variables or the machine's role")
    secret_access_key: SecretStr | None = option(None, "its key")
    session_token: SecretStr | None = option(None, "token of temporary credentials")
    virtual_hosted: bool = option(False, "the bucket's name is in the host's, not in the path")
    ca: FileName | None = option(None, "certificate authority of https endpoints; none = the system's")
    secret: SecretStr | None = option(None, "authenticates records: only those written with it are read")
    key_file: FileName | None = option(None, "file with the key that encrypts records (AES-256-GCM), instead of secret")
    compression: Literal["none", "zstd"] = option(
        "none", "zstd: shorter objects without loss, for a slow or dear store"
    )
    prefix: ObjectPrefix = option("kvtier", "what every object's key begins with")
    ttl: Lifetime = option("7d", "age at which the bucket's lifecycle rule removes objects")
    connect_timeout: Time = option("1s", "longest opening of a connection")
    deadline: Time = option("2s", "longest batch, plus its size ÷ bandwidth")
    bandwidth: ByteSize = option("25MB", "slowest rate, in bytes a second", ge=1)
    connections: WholeNumber = option(16, "read requests under way", ge=1, le=256)
    part_size: ByteSize = option("16MiB", "size of a long read's parts, all requested at once", ge=1 << 16)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        _require_one_seal(self.secret, self.key_file)
        if (self.access_key_id is None) != (self.secret_access_key is None):
            given = f'access_key_id "{self.access_key_id}"' if self.access_key_id else "secret_access_key (not shown)"
            missing = "secret_access_key" if self.access_key_id else "access_key_id"
            raise ValueError(f"{given}: {missing} is missing; set both")
        if self.secret_access_key is not None and not is_one_line(self.secret_access_key):
            raise ValueError("secret_access_key (not shown): empty, or with white space around it; write the key alone")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token (not shown): access_key_id is missing; set all three, or none")
        if self.session_token is not None and not is_one_line(self.session_token):
            raise ValueError("session_token (not shown): empty, or with white space around it; write the token alone")
        if self.virtual_hosted and is_numeric(self.endpoint or ""):
            raise ValueError(
                f'virtual_hosted true: "{self.endpoint}" has no name to stand before; write a host\'s name'
            )
        if self.ca is not None and not (self.endpoint or "https://").startswith("https://"):
            raise ValueError(f'ca "{self.ca}": endpoint is not https://, so nothing would be verified; write https://')
        return self


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = option(
        "info", "the least that servers log: debug, info, warning or error", reloads=True
    )
    format: Literal["text", "json"] = option("text", "text: lines; json: an object a line")


_Price = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class ServiceConfig(HttpSection):
    """The node's daemon: where it listens, and where engines find it."""

    socket: SocketPath | None = option(
        None, "Unix socket of `kvtier serve`; an engine with it uses that daemon's tiers"
    )
    deadline: Time = option("250ms", "longest an engine's step waits for the daemon; then it stores nothing")
    http: Address = option("127.0.0.1:9400", "address of the daemon's pages")
    token: Secret | None = option(
        None,
        "token of admin requests; none = a new one at each start, beside the socket",
        reloads=True,
    )
    archives: Directory | None = option(
        None, "directory of exports, imports, traces; none = archives in [file] path", reloads=True
    )
    default_quota: ByteSize | None = option(
        None, "host memory of each model for a cache_salt without its own quota; none = no bound", reloads=True
    )
    default_slab_quota: ByteSize | None = option(
        None, "the same of each model's slab, in extents of 8 MiB, four at least; none = no bound", reloads=True
    )
    kept_lookups: WholeNumber = option(
        1 << 18,
        "blocks of the last hour's lookups kept to compute the best policy's hits; 0 = none",
        ge=0,
        le=1 << 24,
    )
    gpu_hour: _Price | None = option(None, "hourly price of an engine's GPUs together; none = no prices", reloads=True)
    cache_hour: _Price | None = option(
        None, "hourly price of the cache, its memory and disk; none = nothing", reloads=True
    )
    prefill_rate: Annotated[WholeNumber, Field(ge=1, le=10**9)] | None = option(
        None, "tokens a second that an engine prefills, if none reports it", reloads=True
    )
    request_log: FileName | None = option(None, "file for a JSON line about each request; none = off")


class ServerConfig(HttpSection, ApiSection):
    """`kvtier engine`: where it listens, and how many requests it takes at once."""

    http: Address = option("127.0.0.1:8000", "address of the OpenAI API of `kvtier engine`")
    token: Secret | None = option(None, "API key of requests", reloads=True)
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = option(
        None, "the model's name for clients; none = its directory's"
    )
    max_waiting: WholeNumber = option(64, "requests that may wait; further ones get 429", ge=0, le=65536)
    request_timeout: Time = option("120s", "longest a request may take", reloads=True)
    drain: Time | None = option(
        None, "longest that answers go on after the signal to stop; none = request_timeout", reloads=True
    )
    max_num_seqs: WholeNumber = option(16, "requests computed at once", ge=1, le=4096)
    max_num_batched_tokens: WholeNumber = option(
        512, "tokens of a step; longer prompts are computed in pieces", ge=1, le=2**20
    )
    max_model_len: Annotated[WholeNumber, Field(ge=1, lt=2**31)] | None = option(
        None, "tokens of prompt and answer together; none = the model's"
    )
    request_log: FileName | None = option(None, "file for a JSON line about each request; none = off")
    tool_parser: Literal["auto", "hermes", "llama", "none"] = option(
        "auto", "how answers call tools; auto = by the model's template and vocabulary"
    )

    @property
    def patience(self) -> float:
        """Seconds that answers may go on after the signal to stop."""
        return self.request_timeout if self.drain is None else self.drain


class EventsConfig(Section):
    """KV events: where they are published, and how strictly they are read."""

    publish: ZmqEndpoint | None = option(
        None,
        "ZMQ address of KV events, such as ipc:///run/kvtier/events, mode 0700: they have prompts' tokens; none = off",
    )
    replay: ZmqEndpoint | None = option(
        None, "ZMQ address that repeats missed events, such as ipc:///run/kvtier/events-replay"
    )
    allow_remote: bool = option(False, "let other machines or users reach these addresses, and so read prompts")
    curve_key_file: FileName | None = option(
        None, "the publisher's CURVE key pair, for tcp://; none = subscribers need no key"
    )
    curve_reader_file: FileName | None = option(None, "the public key of subscribers")
    node: ZmqEndpoint | None = option(None, "for an engine: where routers reach its daemon's events; it announces this")
    node_replay: ZmqEndpoint | None = option(None, "likewise, its daemon's replay")
    buffer: WholeNumber = option(10_000, "batches kept for replay", ge=1, le=1_000_000)
    topic: Topic | None = option(None, "topic of every event, may be empty; none = kv@ and the model's fingerprint")
    shared: bool = option(True, "announce blocks in peers, Redis and objects; false if a router takes them for L1's")
    form: Literal["maps", "arrays"] = option("maps", "maps, as in vLLM; or arrays, for llm-d")
    strict: bool = option(False, "log impossible events as errors, not as warnings")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.replay is not None and self.publish is None:
            raise ValueError(f'replay "{self.replay}": nothing is published; set publish too')
        if self.node_replay is not None and self.node is None:
            raise ValueError(f'node_replay "{self.node_replay}": no node is named; set node too')
        for name, value in (("publish", self.publish), ("replay", self.replay)):
            if value is not None and value.startswith("tcp://") and not self.allow_remote:
                require_local(name, value)
        require_both("curve_key_file", self.curve_key_file, "curve_reader_file", self.curve_reader_file)
        return self


class BreakerConfig(Section):
    failures: WholeNumber = option(5, "failures in a row that detach a tier", reloads=True, ge=1, le=1000)
    retry_after: Time = option("1s", "first wait before a detached tier is probed", reloads=True)


class TracingConfig(Section):
    endpoint: HttpEndpoint | None = option(
        None, "collector of spans, by OTLP over HTTP; none = as OTEL_… variables say"
    )


def _require_one_seal(secret: SecretStr | None, key_file: Path | None) -> None:
    """ValueError for a secret that is too short, or is given beside a key."""
    if secret is None:
        return
    if key_file is not None:
        raise ValueError("secret (not shown): key_file is given too, and authenticates as well; remove secret")
    if len(secret.get_secret_value()) < _SHORTEST_SECRET:
        raise ValueError(
            f"secret (not shown): shorter than {_SHORTEST_SECRET} characters; make one with: openssl rand -hex 32"
        )


MAX_BLOCKS: Final = 4_000_000  # 280 MB at some 70 bytes each (benchmarks/router_overhead.py), of KV some terabytes


_Share = Annotated[float, Field(ge=0, le=1)]
_Replicas = Annotated[
    tuple[str, ...],
    NoDecode,
    listed(lambda _: True, 'not a list of replicas; write one, as in ["http://127.0.0.1:8000"]', r"\s+"),
]


class RouterConfig(HttpSection, ApiSection):
    """`kvtier route`: where it listens, its replicas, and its time limits."""

    http: Address = option("127.0.0.1:8080", "address of the OpenAI API of `kvtier route`")
    token: Secret | None = option(None, "API key of clients", reloads=True)
    model: FileName | None = option(None, "directory of the tokenizer and chat template; none = query replicas")
    tokenize_timeout: Time = option("200ms", "longest a replica may take to tokenise, if model is none", reloads=True)
    replicas: _Replicas = option(
        (),
        "list of `http[s]://HOST:PORT[,events=…][,replay=…][,node=…][,node_replay=…][,block_size=N][,addresses=all]`",
        reloads=True,
    )
    replicas_file: FileName | None = option(
        None, "file with one more replica a line; changes are followed", reloads=True
    )
    resolve_interval: Time = option("10s", "time between lookups of names with addresses=all", reloads=True)
    replica_token: Secret | None = option(None, "API key that replicas want", reloads=True)
    replica_ca: FileName | None = option(
        None, "certificates that verify https replicas; none = the system's", reloads=True
    )
    curve_key_file: FileName | None = option(None, "the router's CURVE key pair, for events at tcp://; none = without")
    curve_publisher_file: FileName | None = option(None, "the public key of all publishers of events at tcp://")
    weight_cpu: _Share = option(TIERS[L2].weight, "what host memory saves of computing a block, of 1", reloads=True)
    weight_storage: _Share = option(TIERS["file"].weight, "what a slab saves of it", reloads=True)
    weight_external: _Share = option(TIERS["redis"].weight, "what Redis saves of it", reloads=True)
    weight_object: _Share = option(TIERS["objects"].weight, "what an object store saves of it", reloads=True)
    prompt_price: _Price | None = option(
        None, "price of a million prompt tokens that replicas compute; none = no prices", reloads=True
    )
    max_requests: WholeNumber = option(
        256, "requests at one replica at a time; further ones get 429", reloads=True, ge=1, le=65536
    )
    processes: WholeNumber = option(1, "processes behind the address, each with its own index and core", ge=1, le=64)
    max_blocks: WholeNumber = option(
        MAX_BLOCKS,
        "known blocks of all replicas, 70 bytes each; beyond them the oldest are forgotten",
        ge=1,
        lt=2**31,
    )
    probe_interval: Time = option("250ms", "time between probes of a replica", reloads=True)
    probe_timeout: Time = option("700ms", "longest a probe may take; more is late", reloads=True)
    probe_failures: WholeNumber = option(3, "late probes in a row that mean `down`", reloads=True, ge=1, le=100)
    connect_timeout: Time = option("500ms", "longest opening of a connection", reloads=True)
    first_byte_timeout: Time = option("120s", "longest until an answer begins", reloads=True)
    stall_timeout: Time = option("60s", "longest pause in an answer", reloads=True)
    request_timeout: Time = option("600s", "longest a request may take in all", reloads=True)
    drain: Time | None = option(
        None, "longest that answers go on after the signal to stop; none = request_timeout", reloads=True
    )

    @property
    def patience(self) -> float:
        """Seconds that answers may go on after the signal to stop."""
        return self.request_timeout if self.drain is None else self.drain

    @property
    def weights(self) -> Mapping[str, float]:
        """By medium, as the routing policy takes them: the option `weight_MEDIUM`, if there is one, or the table's."""
        return {kind.medium: getattr(self, f"weight_{kind.medium.lower()}", kind.weight) for kind in TIERS.values()}

    @model_validator(mode="after")
    def _whole(self) -> Self:
        require_both("curve_key_file", self.curve_key_file, "curve_publisher_file", self.curve_publisher_file)
        return self
