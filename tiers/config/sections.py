"""The sections of the configuration: every option, its default and what it means; `config.py` reads them."""

from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from kvtier.tiers.config.quantities import format_size, parse_duration, parse_size, parse_time
from kvtier.tiers.config.values import (
    Address,
    AllowedHosts,
    ByteSize,
    CacheSalt,
    Directory,
    FileName,
    KeyPrefix,
    Lifetime,
    SocketPath,
    Time,
    Topic,
    WholeNumber,
    ZmqEndpoint,
    require_both,
    require_guard,
    require_local,
)

_SHORTEST_SECRET: Final = 16  # characters: who reads Redis may try shorter ones until one fits


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False)


class HostConfig(_Section):
    """L2: the host memory region."""

    size: ByteSize = Field(default=parse_size("1GiB"), description="memory for L2")
    shared: bool = Field(default=False, description="memfd other processes can map, instead of anonymous memory")
    huge_pages: bool = Field(default=True, description="ask the kernel for huge pages")
    pin: bool = Field(default=True, description="register the memory with CUDA, if there is a GPU")
    verify: Literal["always", "never"] = Field(
        default="never",
        description="always: hash every block in L2 again before it is promised; never: trust all who share it",
    )


class FileConfig(_Section):
    """L3 file: the slabs in one directory."""

    path: Directory | None = Field(default=None, description="directory of the slabs; none = tier off")
    size: ByteSize = Field(default=parse_size("4GiB"), description="hard bound on the directory's slabs together")
    mode: Literal["auto", "direct", "buffered", "mmap"] = Field(
        default="auto", description="how payloads are read and written: direct, buffered, mmap, or auto"
    )
    durable: bool = Field(default=False, description="fdatasync, so that blocks survive a power cut as well")
    key_file: FileName | None = Field(
        default=None,
        description="key that encrypts slabs and archives; none = a reader of a slab can reconstruct prompts",
    )
    deadline: Time = Field(
        default=parse_time("2s"), description="longest one operation may take before it counts as a miss"
    )


class CacheConfig(_Section):
    """What is cached, and under which names."""

    block_size: WholeNumber = Field(default=16, ge=1, le=4096, description="tokens in a block")
    hash: Literal["sha256", "xxh3"] = Field(
        default="sha256", description="chain hash: sha256, or xxh3 for a single trusted tenant"
    )
    write_policy: Literal["write_through", "write_back"] = Field(
        default="write_through",
        description="write_through: copy a block down when it is sealed; write_back: when it is about to be evicted",
    )
    admit_after: WholeNumber = Field(default=1, ge=1, le=1000, description="sightings before a block is stored")
    policy: Literal["lru", "s3fifo"] = Field(default="lru", description="what is evicted first")
    store_queue: ByteSize = Field(
        default=parse_size("256MiB"), description="bytes waiting for L3; beyond it stores are dropped"
    )
    prefetch_deadline: Time = Field(
        default=parse_time("2s"), description="longest a request waits for L3; then it takes what is there"
    )
    load_or_recompute: Literal["auto", "load", "recompute"] = Field(
        default="auto", description="load a held block, recompute it, or auto: whichever measures faster"
    )
    store_generated: bool = Field(default=True, description="store answers too, for the next turn of a conversation")
    cache_salt: CacheSalt | None = Field(default=None, description="isolates a tenant: other salt, no hit")
    epoch: WholeNumber = Field(default=0, ge=0, lt=2**63, description="raise it to invalidate everything stored before")


class L1Config(_Section):
    """L1: the engine's own pool of blocks on its device."""

    size: ByteSize = Field(default=parse_size("256MiB"), description="memory for L1; give this or num_blocks")
    num_blocks: Annotated[WholeNumber, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="blocks in L1; give this or size"
    )
    enable_prefix_caching: bool = Field(default=True, description="off: nothing is hashed, looked up or stored")

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.num_blocks is not None and "size" in self.model_fields_set:
            raise ValueError(
                f"num_blocks {self.num_blocks}: size {format_size(self.size)} is given too; remove one of them"
            )
        return self


class RedisConfig(_Section):
    """L3 in Redis or Valkey: blocks that nodes share."""

    url: SecretStr | None = Field(
        default=None,
        description="redis://, rediss:// or unix://; several, separated by commas, for a cluster's nodes or Sentinels; "
        "none = tier off",
    )
    mode: Literal["standalone", "cluster", "sentinel"] = Field(
        default="standalone", description="what url names: standalone, sentinel or cluster"
    )
    sentinel_name: str = Field(default="mymaster", description="the name Sentinels know the master by")
    username: str | None = Field(default=None, description="ACL user")
    password: SecretStr | None = Field(default=None, description="its password; never logged")
    ca: FileName | None = Field(
        default=None, description="certificate authority of rediss:// servers; none = the system's"
    )
    secret: SecretStr | None = Field(
        default=None, description="seals what is stored: without it nobody writes what is served; never logged"
    )
    key_file: FileName | None = Field(
        default=None, description="file with the key that encrypts what is stored, AES-256-GCM; instead of secret"
    )
    prefix: KeyPrefix = Field(default="kvtier", description="what every key begins with")
    ttl: Lifetime = Field(default=parse_duration("24h"), description="how long a block nobody reads is kept")
    connect_timeout: Time = Field(default=parse_time("100ms"), description="longest a connection may take to open")
    deadline: Time = Field(
        default=parse_time("250ms"), description="longest a batch may take, besides its size over bandwidth"
    )
    bandwidth: ByteSize = Field(default=parse_size("50MB"), description="bytes per second a batch is given time for")
    in_flight: ByteSize = Field(
        default=parse_size("64MiB"), description="bytes of requests and replies under way at once"
    )

    @model_validator(mode="after")
    def _one_seal(self) -> Self:
        if self.secret is None:
            return self
        if self.key_file is not None:
            raise ValueError("secret (not shown): key_file is given too, and authenticates as well; remove secret")
        if len(self.secret.get_secret_value()) < _SHORTEST_SECRET:
            raise ValueError(
                f"secret (not shown): shorter than {_SHORTEST_SECRET} characters; make one with: openssl rand -hex 32"
            )
        return self


class ServiceConfig(_Section):
    """The node's daemon: where it listens, and where engines find it."""

    socket: SocketPath | None = Field(
        default=None, description="Unix socket of `kvtier serve`; an engine given it uses that daemon's tiers"
    )
    deadline: Time = Field(
        default=parse_time("250ms"), description="longest an engine's step waits for the daemon; then it stores nothing"
    )
    http: Address = Field(
        default="127.0.0.1:9400", description="address of the daemon's metrics, health and admin pages"
    )
    token: SecretStr | None = Field(default=None, description="what admin requests must carry; never logged")
    allow_remote: bool = Field(default=False, description="let http be an address other machines reach; needs a token")
    allowed_hosts: AllowedHosts = Field(
        default=(), description="list of names its pages may be asked for under, besides its addresses; * = every one"
    )
    default_quota: ByteSize | None = Field(
        default=None,
        description="host memory of each model for a cache_salt without a quota of its own; none = no bound",
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        require_guard(self.http, self.allow_remote, self.token)
        return self


class ServerConfig(_Section):
    """`kvtier engine`: where it answers, and how much at once."""

    http: Address = Field(default="127.0.0.1:8000", description="address of the OpenAI API of `kvtier engine`")
    token: SecretStr | None = Field(default=None, description="the API key requests must carry; never logged")
    allow_remote: bool = Field(default=False, description="let http be an address other machines reach; needs a token")
    allowed_hosts: AllowedHosts = Field(
        default=(), description="list of names its pages may be asked for under, besides its addresses; * = every one"
    )
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="the model's name for clients; none = its directory's"
    )
    max_waiting: WholeNumber = Field(
        default=64, ge=0, le=65536, description="requests that may wait for a seat; the next is told to come again, 429"
    )
    request_timeout: Time = Field(default=parse_time("120s"), description="longest a request may take, then it ends")
    max_num_seqs: WholeNumber = Field(default=16, ge=1, le=4096, description="requests computed at once")
    max_num_batched_tokens: WholeNumber = Field(
        default=512, ge=1, le=2**20, description="tokens of a step; longer prompts are computed in pieces of this"
    )
    max_model_len: Annotated[WholeNumber, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="tokens of prompt and answer together; none = the model's"
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        require_guard(self.http, self.allow_remote, self.token)
        return self


class EventsConfig(_Section):
    """KV events: where they are published, and how strictly they are read."""

    publish: ZmqEndpoint | None = Field(
        default=None,
        description="ZMQ address for KV events, as ipc:///run/kvtier/events in a directory of mode 0700: "
        "they hold prompts' tokens; none = off",
    )
    replay: ZmqEndpoint | None = Field(
        default=None,
        description="ZMQ address that repeats what a subscriber has missed, as ipc:///run/kvtier/events-replay",
    )
    allow_remote: bool = Field(
        default=False,
        description="let these be addresses other machines reach, or a socket other users do: they read prompts",
    )
    curve_key_file: FileName | None = Field(
        default=None, description="the publisher's CURVE key pair, for tcp:// addresses; none = subscribers need no key"
    )
    curve_reader_file: FileName | None = Field(default=None, description="the public key of those who may subscribe")
    buffer: WholeNumber = Field(default=10_000, ge=1, le=1_000_000, description="batches kept to be told again")
    topic: Topic | None = Field(
        default=None, description="topic of every event; none = one for each model, kv@ and its fingerprint"
    )
    strict: bool = Field(
        default=False, description="log events that contradict earlier ones as errors, not as warnings"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.replay is not None and self.publish is None:
            raise ValueError(f'replay "{self.replay}": nothing is published; set publish too')
        for name, value in (("publish", self.publish), ("replay", self.replay)):
            if value is not None and value.startswith("tcp://") and not self.allow_remote:
                require_local(name, value)
        require_both("curve_key_file", self.curve_key_file, "curve_reader_file", self.curve_reader_file)
        return self


class BreakerConfig(_Section):
    """When a failing tier is left alone, and for how long."""

    failures: WholeNumber = Field(default=5, ge=1, le=1000, description="failures in a row that detach a tier")
    retry_after: Time = Field(default=parse_time("1s"), description="first wait before a detached tier is probed")
