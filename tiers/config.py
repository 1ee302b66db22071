"""The one frozen configuration: TOML file ⊂ environment ⊂ arguments. Nothing else reads the environment."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
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

from kvtier.tiers.errors import ConfigError
from kvtier.tiers.quantities import format_size, format_time, parse_duration, parse_size, parse_time

ENV_PREFIX: Final = "KVTIER_"
_DELIMITER: Final = "__"


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a whole number; write one, as in 16")
    return value


def _path(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("not a directory's name; write one, or leave the option out to switch the tier off")
    return Path(value).expanduser()


def _salt(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text of one character or more; leave the option out for none")
    return value


def _file(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("not a file's name; write one, or leave the option out")
    return Path(value).expanduser()


def _socket(value: object) -> object:
    path = _file(value)
    longest = 107  # bytes of sockaddr_un.sun_path, with its terminating zero 108
    if len(os.fsencode(str(path))) > longest:
        raise ValueError(f"a socket's path has {longest} bytes at most; choose a shorter one, as in /run/kvtier.sock")
    return path


def _key_prefix(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.:-]{1,64}", value, re.ASCII):
        raise ValueError("not 1 to 64 letters, digits or any of ._:-; choose such a prefix")
    return value


def _address(value: object) -> object:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdecimal() or not int(port) <= 65535:
        raise ValueError("not HOST:PORT; write it as in 127.0.0.1:9400")
    return value


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, when_used="json")]
Time = Annotated[float, BeforeValidator(parse_time), PlainSerializer(format_time, when_used="json")]
Count = Annotated[int, BeforeValidator(_not_a_bool)]


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

    path: Annotated[Path, BeforeValidator(_path)] | None = Field(
        default=None, description="directory of the slabs; none = tier off"
    )
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
    cache_salt: Annotated[str, BeforeValidator(_salt)] | None = Field(
        default=None, description="isolates a tenant: other salt, no hit"
    )
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
    ca: Annotated[Path, BeforeValidator(_file)] | None = Field(
        default=None, description="certificate authority of rediss:// servers; none = the system's"
    )
    prefix: Annotated[str, BeforeValidator(_key_prefix)] = Field(
        default="kvtier", description="what every key begins with"
    )
    ttl: Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_time, when_used="json")] = Field(
        default=parse_duration("24h"), description="how long a block nobody reads is kept"
    )
    connect_timeout: Time = Field(default=parse_time("100ms"), description="longest a connection may take to open")
    deadline: Time = Field(
        default=parse_time("250ms"), description="longest a batch may take, besides its size over bandwidth"
    )
    bandwidth: Size = Field(default=parse_size("50MB"), description="bytes per second a batch is given time for")
    in_flight: Size = Field(default=parse_size("64MiB"), description="bytes of requests and replies under way at once")


class ServiceConfig(_Section):
    """The node's daemon: where it listens, and where engines find it."""

    socket: Annotated[Path, BeforeValidator(_socket)] | None = Field(
        default=None, description="Unix socket of `kvtier serve`; an engine given it uses that daemon's tiers"
    )
    deadline: Time = Field(
        default=parse_time("250ms"), description="longest an engine's step waits for the daemon; then it stores nothing"
    )
    http: Annotated[str, BeforeValidator(_address)] = Field(
        default="127.0.0.1:9400", description="address of the daemon's metrics, health and admin pages"
    )
    token: SecretStr | None = Field(default=None, description="what admin requests must carry; never logged")
    allow_remote: bool = Field(default=False, description="let http be an address other machines reach; needs a token")

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        host = self.http.rpartition(":")[0].strip("[]")
        if host not in ("127.0.0.1", "::1", "localhost"):
            if not self.allow_remote:
                raise ValueError(f'http "{self.http}": other machines reach it; use 127.0.0.1 or set allow_remote')
            if self.token is None:
                raise ValueError(f'http "{self.http}": other machines reach it; set a token')
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
    return EnvSettingsSource(Config)()


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
_WHY: Final = {
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
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
