"""The one frozen configuration: TOML file ⊂ environment ⊂ arguments. Nothing else reads the environment."""

import json
import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvtier.tiers.config_router import RouterConfig
from kvtier.tiers.config_values import (
    Address,
    Count,
    Directory,
    Duration,
    Endpoint,
    FileName,
    KeyPrefix,
    Salt,
    Size,
    SocketPath,
    Time,
    Topic,
    require_guard,
    require_local,
)
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.quantities import format_size, parse_duration, parse_size, parse_time

ENV_PREFIX: Final = "KVTIER_"
_DELIMITER: Final = "__"
_DYNAMO_STRICT: Final = "DYN_KV_ENFORCE_ENGINE_HASH_STABILITY"  # Dynamo's own switch for [events] strict


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False)


class HostConfig(_Section):
    """L2: the host memory region."""

    size: Size = Field(default=parse_size("1GiB"), description="memory for L2")
    shared: bool = Field(default=False, description="memfd other processes can map, instead of anonymous memory")
    huge_pages: bool = Field(default=True, description="ask the kernel for huge pages")
    pin: bool = Field(default=True, description="register the memory with CUDA where there is one")


class FileConfig(_Section):
    """L3 file: the slabs in one directory."""

    path: Directory | None = Field(default=None, description="directory of the slabs; none = tier off")
    size: Size = Field(default=parse_size("4GiB"), description="hard bound on the directory's slabs together")
    mode: Literal["auto", "direct", "buffered", "mmap"] = Field(
        default="auto", description="how payloads are read and written"
    )
    durable: bool = Field(default=False, description="fdatasync, so that blocks outlive a power cut as well")
    deadline: Time = Field(
        default=parse_time("2s"), description="longest one operation may take before it counts as a miss"
    )


class CacheConfig(_Section):
    """What is cached, and under which names."""

    block_size: Count = Field(default=16, ge=1, le=4096, description="tokens in a block")
    hash: Literal["sha256", "xxh3"] = Field(
        default="sha256", description="chain hash; xxh3 only for a single trusted tenant"
    )
    write_policy: Literal["write_through", "write_back"] = Field(
        default="write_through", description="copy a block down when it is sealed, or when it is about to be evicted"
    )
    admit_after: Count = Field(default=1, ge=1, le=1000, description="sightings before a block is stored")
    policy: Literal["lru", "s3fifo"] = Field(default="lru", description="what is evicted first")
    store_queue: Size = Field(
        default=parse_size("256MiB"), description="bytes waiting for L3; beyond it stores are dropped"
    )
    prefetch_deadline: Time = Field(
        default=parse_time("2s"), description="longest a request waits for L3; then it takes what is there"
    )
    load_or_recompute: Literal["auto", "load", "recompute"] = Field(
        default="auto", description="load a held block, compute it again, or whichever measures faster"
    )
    store_generated: bool = Field(default=True, description="store answers too, for the next turn of a conversation")
    cache_salt: Salt | None = Field(default=None, description="isolates a tenant: other salt, no hit")
    epoch: Count = Field(default=0, ge=0, lt=2**63, description="raise it to invalidate everything stored before")


class L1Config(_Section):
    """L1: the engine's own pool of blocks on its device."""

    size: Size = Field(default=parse_size("256MiB"), description="memory for L1; give this or num_blocks")
    num_blocks: Annotated[Count, Field(ge=1, lt=2**31)] | None = Field(
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
    mode: Literal["standalone", "cluster", "sentinel"] = Field(default="standalone", description="what url names")
    sentinel_name: str = Field(default="mymaster", description="the name Sentinels know the master by")
    username: str | None = Field(default=None, description="ACL user")
    password: SecretStr | None = Field(default=None, description="its password; never logged")
    ca: FileName | None = Field(
        default=None, description="certificate authority of rediss:// servers; none = the system's"
    )
    prefix: KeyPrefix = Field(default="kvtier", description="what every key begins with")
    ttl: Duration = Field(default=parse_duration("24h"), description="how long a block nobody reads is kept")
    connect_timeout: Time = Field(default=parse_time("100ms"), description="longest a connection may take to open")
    deadline: Time = Field(
        default=parse_time("250ms"), description="longest a batch may take, besides its size over bandwidth"
    )
    bandwidth: Size = Field(default=parse_size("50MB"), description="bytes per second a batch is given time for")
    in_flight: Size = Field(default=parse_size("64MiB"), description="bytes of requests and replies under way at once")


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

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        require_guard(self.http, self.allow_remote, self.token)
        return self


class ServerConfig(_Section):
    """`kvtier engine`: where it answers, and how much at once."""

    http: Address = Field(default="127.0.0.1:8000", description="address of the OpenAI API of `kvtier engine`")
    token: SecretStr | None = Field(default=None, description="the API key requests must carry; never logged")
    allow_remote: bool = Field(default=False, description="let http be an address other machines reach; needs a token")
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="the model's name for clients; none = its directory's"
    )
    max_waiting: Count = Field(
        default=64, ge=0, le=65536, description="requests that may wait for a seat; the next is told to come again, 429"
    )
    request_timeout: Time = Field(default=parse_time("120s"), description="longest a request may take, then it ends")
    max_num_seqs: Count = Field(default=16, ge=1, le=4096, description="requests computed at once")
    max_num_batched_tokens: Count = Field(
        default=512, ge=1, le=2**20, description="tokens of a step; longer prompts are computed in pieces of this"
    )
    max_model_len: Annotated[Count, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="tokens of prompt and answer together; none = the model's"
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        require_guard(self.http, self.allow_remote, self.token)
        return self


class EventsConfig(_Section):
    """KV events: where they are published, and how strictly they are read."""

    publish: Endpoint | None = Field(
        default=None, description="ZMQ address where KV events are published, as tcp://127.0.0.1:5557; none = off"
    )
    replay: Endpoint | None = Field(
        default=None, description="ZMQ address that tells again what a subscriber has missed, as tcp://127.0.0.1:5558"
    )
    allow_remote: bool = Field(
        default=False, description="let these be addresses other machines reach: events hold the prompts' tokens"
    )
    buffer: Count = Field(default=10_000, ge=1, le=1_000_000, description="batches kept to be told again")
    topic: Topic | None = Field(
        default=None, description="topic of every event; none = one for each model, kv@ and its fingerprint"
    )
    strict: bool = Field(
        default=False, description="log events that contradict what was told before as errors, not as warnings"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.replay is not None and self.publish is None:
            raise ValueError(f'replay "{self.replay}": nothing is published; set publish too')
        for name, value in (("publish", self.publish), ("replay", self.replay)):
            if value is not None and value.startswith("tcp://") and not self.allow_remote:
                require_local(name, value)
        return self


class BreakerConfig(_Section):
    """When a failing tier is left alone, and for how long."""

    failures: Count = Field(default=5, ge=1, le=1000, description="failures in a row that detach a tier")
    retry_after: Time = Field(default=parse_time("1s"), description="first wait before a detached tier is probed")


class Config(BaseSettings):
    """Everything a user can set, frozen.

    `Config()` is the defaults and `Config(...)` exactly what it is given. `load` is the edge: it reads a file and the
    environment too, and turns every mistake into a ConfigError.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter=_DELIMITER, hide_input_in_errors=False
    )

    host: HostConfig = HostConfig()
    file: FileConfig = FileConfig()
    cache: CacheConfig = CacheConfig()
    l1: L1Config = L1Config()
    redis: RedisConfig = RedisConfig()
    service: ServiceConfig = ServiceConfig()
    server: ServerConfig = ServerConfig()
    events: EventsConfig = EventsConfig()
    router: RouterConfig = RouterConfig()
    breaker: BreakerConfig = BreakerConfig()

    @classmethod
    def load(cls, path: Path | str | None = None, **overrides: Mapping[str, object]) -> "Config":
        """Defaults ⊂ the TOML file `path` ⊂ `KVTIER_SECTION__OPTION` variables ⊂ `section={option: value}` arguments.

        ConfigError, in one line, names the section, the option, the value, why it can't be used, and the mend.
        """
        merged: dict[str, Any] = {}
        for values in (_file_values(path), _env_values(), overrides):
            for section, options in values.items():
                _check_names(section, options)
                merged[section] = merged.get(section, {}) | dict(options)
        try:
            return cls(**merged)
        except ValidationError as error:
            raise ConfigError(_one_line(error.errors(include_url=False)[0])) from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the constructor is given: `load` reads the rest, so that it can say where a mistake stands."""
        return (init_settings,)


def child_environment(values: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started from this one: its own, and `values` over it."""
    return {**os.environ, **values}


def options() -> list[tuple[str, str, FieldInfo]]:
    """Every (section, option, field) in order: what `kvtier config` shows and the README's table lists."""
    return [(section, name, field) for section in Config.model_fields for name, field in _fields(section).items()]


def _fields(section: str) -> dict[str, FieldInfo]:
    model = Config.model_fields[section].annotation
    return model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}


def _file_values(path: Path | str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {_shown(str(path))}: {error.strerror}; name a TOML file that can be read"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {_shown(str(path))}: not TOML, {_flat(str(error))}; mend that line") from None


def _env_values() -> Mapping[str, Any]:
    known = {f"{ENV_PREFIX}{section}{_DELIMITER}{name}".upper() for section, name, _ in options()}
    for name, value in os.environ.items():
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise ConfigError(f"{name} {_shown(value)}: unknown variable{_nearest(name.upper(), known)}")
    values: dict[str, Any] = EnvSettingsSource(Config)()
    if os.environ.get(_DYNAMO_STRICT) == "1":
        values["events"] = {"strict": True, **values.get("events", {})}
    return values


def _check_names(section: str, options_given: object) -> None:
    """Refuse an unknown section or option before anything else is looked at: it may be the cause of the rest."""
    if section not in Config.model_fields:
        if isinstance(options_given, Mapping):
            raise ConfigError(f"[{section}]: unknown section{_nearest(section, Config.model_fields, '[{}]')}")
        homes = [f"[{home}] {name}" for home, name, _ in options() if name == section]
        mend = f"write it as {homes[0]}" if homes else f"the sections are {', '.join(Config.model_fields)}"
        raise ConfigError(f"{section} {_shown(options_given)}: belongs in a section; {mend}")
    if not isinstance(options_given, Mapping):
        raise ConfigError(
            f"[{section}] {_shown(options_given)}: not a section; write [{section}] with options under it"
        )
    for name, value in options_given.items():
        if name not in _fields(section):
            homes = [f"[{home}] {option}" for home, option, _ in options() if option == name]
            mend = f"; did you mean {homes[0]}?" if homes else _nearest(str(name), _fields(section))
            raise ConfigError(f"[{section}] {name} {_shown(value)}: unknown option{mend}")


def _nearest(name: str, known: "Mapping[str, object] | set[str]", form: str = "{}") -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {form.format(close[0])}?" if close else f"; known are {', '.join(sorted(known))}"


def _one_line(error: ErrorDetails) -> str:
    """`[section] option "value": why; mend`, from the first thing pydantic found."""
    section, *rest = (str(part) for part in error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        why = str(context["error"])
    else:
        why = _flat(_WHY.get(error["type"], "{msg}").format(msg=error["msg"], **context))
    if not rest:  # the section as a whole: two options that clash
        return f"[{section}] {why}"
    return f"[{section}] {rest[0]} {_shown(error['input'])}: {why}"


_BOOL: Final = "not a yes or no; write true or false"
_INT: Final = "not a whole number; write one, as in 16"
_FLOAT: Final = "not a number; write one, as in 0.5"
_WHY: Final = {
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
    "float_type": _FLOAT,
    "float_parsing": _FLOAT,
    "int_type": _INT,
    "int_parsing": _INT,
    "int_parsing_size": "too large; choose a smaller number",
    "int_from_float": _INT,
    "finite_number": _INT,
    "literal_error": "not one of its values; write {expected}",
    "greater_than_equal": "too small; write {ge} or more",
    "less_than_equal": "too large; write {le} or less",
    "less_than": "too large; write less than {lt}",
}


def _shown(value: object) -> str:
    """A value as the user would write it, on one line and no longer than 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _flat(text: str) -> str:
    return " ".join(text.split())
