"""The one frozen configuration: TOML file ⊂ environment ⊂ arguments. Only `environment.py` reads other variables."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvtier.tiers import ConfigError
from kvtier.tiers.config.environment import COMPILED
from kvtier.tiers.config.sections import (
    BreakerConfig,
    CacheConfig,
    ChatConfig,
    EventsConfig,
    FileConfig,
    HostConfig,
    L1Config,
    LogConfig,
    ObjectsConfig,
    PeersConfig,
    RedisConfig,
    RouterConfig,
    ServerConfig,
    ServiceConfig,
    TracingConfig,
)
from kvtier.tiers.config.values import RELOADS

ENV_PREFIX: Final = "KVTIER_"
_BUILD: Final = "KVTIER_EXTENSIONS"  # which extension modules an installation builds (`hatch_build.py`)
_FILE: Final = "KVTIER_CONFIG"  # the TOML file, if none is named
_DELIMITER: Final = "__"
_PATIENCE: Final = ("deadline", "connect_timeout")  # some users set these for all tiers, on or off
_SWITCHES: Final = {"file": ("path",), "redis": ("url",), "objects": ("bucket",), "peers": ("nodes", "listen")}
_IN_URLS: Final = re.compile(
    r"(?<=://)[^/\s\"]*(?=@)|(?<=\?)[^\s\"]*=[^\s\"]*"
)  # a login; a query, which may be signed
_LONE: Final = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs, from bytes that were no UTF-8
_DYNAMO_STRICT: Final = "DYN_KV_ENFORCE_ENGINE_HASH_STABILITY"  # Dynamo's own switch for [events] strict


class Config(BaseSettings):
    """Everything a user can set, frozen.

    `Config()` is the defaults; `load` reads a file and the environment too, and turns every mistake into a ConfigError.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter=_DELIMITER, hide_input_in_errors=False
    )

    host: HostConfig = HostConfig()
    file: FileConfig = FileConfig()
    cache: CacheConfig = CacheConfig()
    chat: ChatConfig = ChatConfig()
    l1: L1Config = L1Config()
    peers: PeersConfig = PeersConfig()
    redis: RedisConfig = RedisConfig()
    objects: ObjectsConfig = ObjectsConfig()
    service: ServiceConfig = ServiceConfig()
    server: ServerConfig = ServerConfig()
    events: EventsConfig = EventsConfig()
    router: RouterConfig = RouterConfig()
    breaker: BreakerConfig = BreakerConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()

    @classmethod
    def load(cls, path: Path | str | None = None, **overrides: Mapping[str, object]) -> "Config":
        """Defaults ⊂ the TOML file `path` ⊂ `KVTIER_SECTION__OPTION` variables ⊂ `section={option: value}` arguments.

        Without `path`, the variable `KVTIER_CONFIG` may name the file. ConfigError, in one line,
        names the section, the option, the value, why it can't be used, and the fix.
        """
        merged: dict[str, Any] = {}
        for values in (_file_values(path), _env_values(), overrides):
            for section, options in values.items():
                _check_names(section, options)
                merged[section] = merged.get(section, {}) | dict(options)
        for section, name, value in ((section, *each) for section, given in merged.items() for each in given.items()):
            if not is_text(value) and not takes_path(section, name):
                raise ConfigError(f"[{section}] {name} {_guarded(name, value)}: not UTF-8; write it anew")
        return cls._made(merged)

    @classmethod
    def _made(cls, values: Mapping[str, Any]) -> Self:
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_one_line(error.errors(include_url=False)[0])) from None

    @classmethod
    def of(cls, config: "ConfigSource | None") -> "Config":
        """A Config as it is, `{section: {option: value}}`, or a file as `load` takes it; else ConfigError."""
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            return cls.load(None, **{str(section): options for section, options in config.items()})
        if config is not None and not isinstance(config, Path | str):
            fix = 'give a Config, the name of a TOML file, or a mapping as in {"host": {"size": "2GiB"}}'
            raise ConfigError(f"config {_shown(config)}: not a configuration; {fix}")
        return cls.load(config)

    def changes(self, given: "Config") -> list[tuple[str, str, bool]]:
        """The (section, option) whose values differ in `given`, in order, and whether a running process takes them."""
        found = ((getattr(getattr(each, section), name) for each in (self, given)) for section, name, _ in options())
        differs = [before != after for before, after in found]
        return [
            (s, n, is_reloadable(field)) for (s, n, field), is_new in zip(options(), differs, strict=True) if is_new
        ]

    def reloaded(self, given: "Config") -> "Config":
        """This configuration with what a running process takes of `given`. ConfigError if the two do not fit."""
        values, new = (each.model_dump(exclude_unset=True) for each in (self, given))
        for section, name, field in options():
            if is_reloadable(field):
                values.setdefault(section, {}).pop(name, None)
                if name in new.get(section, {}):
                    values[section][name] = new[section][name]
        return self._made(values)

    def idle_options(self) -> list[str]:
        """Options that are given without effect, since the tier's switch is not set: a line each, with its fix."""
        lines = []
        for section, switches in _SWITCHES.items():
            chosen = getattr(self, section)
            names = sorted(chosen.model_fields_set.difference(switches, _PATIENCE))
            if names and not any(getattr(chosen, each) for each in switches):
                named = f"[{section}] {', '.join(names)}"
                lines.append(f"{named}: without {' or '.join(switches)} the tier is off; set it, or leave these out")
        return lines

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the constructor's arguments: `load` reads the rest, so that it can name a mistake's place."""
        return (init_settings,)


ConfigSource = Config | Mapping[str, Mapping[str, object]] | Path | str
"""The forms in which a library's user may give a configuration: see `Config.of`."""


def child_environment(values: Mapping[str, str], under: Mapping[str, str] | None = None) -> dict[str, str]:
    """A child process's environment: this process's own, `values` over it, and others `under` it."""
    return {**(under or {}), **os.environ, **values}


def options() -> list[tuple[str, str, FieldInfo]]:
    """Every (section, option, field) in order, for `kvtier config` and docs/configuration.md."""
    return [(section, name, field) for section in Config.model_fields for name, field in _fields(section).items()]


def is_reloadable(field: FieldInfo) -> bool:
    """Whether SIGHUP changes the option in a running process."""
    return field.json_schema_extra == RELOADS


def _fields(section: str) -> dict[str, FieldInfo]:
    model = Config.model_fields[section].annotation
    return model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}


def takes_path(section: str, name: str) -> bool:
    """Whether an option's value is the name of a file or directory, which may be any bytes."""
    return "Path" in str(_fields(section)[name].annotation)


def is_text(value: object) -> bool:
    """Whether a value, with all items of a list, can be written as UTF-8: a variable's bytes may be any."""
    if isinstance(value, list | tuple):
        return all(map(is_text, value))
    return not isinstance(value, str) or _LONE.search(value) is None


def _file_values(path: Path | str | None) -> Mapping[str, Any]:
    origin = "--config"
    if path is None:
        origin, path = _FILE, os.environ.get(_FILE)
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{origin} {_shown(str(path))}: {error.strerror}; name a TOML file that can be read"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin} {_shown(str(path))}: not TOML, {_flat(str(error))}; fix that line") from None


def _env_values() -> Mapping[str, Any]:
    known = {f"{ENV_PREFIX}{section}{_DELIMITER}{name}".upper() for section, name, _ in options()}
    known |= {COMPILED, _BUILD, _FILE}  # of this process, and of the options' file
    for name, value in os.environ.items():
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise ConfigError(f"{name} {_guarded(name, value)}: unknown variable{nearest(name.upper(), known)}")
    values: dict[str, Any] = EnvSettingsSource(Config)()
    if os.environ.get(_DYNAMO_STRICT) == "1":
        values["events"] = {"strict": True, **values.get("events", {})}
    return values


def _check_names(section: str, options_given: object) -> None:
    """Refuse an unknown section or option before any other check: it may be the cause of the rest."""
    if section not in Config.model_fields:
        if isinstance(options_given, Mapping):
            raise ConfigError(f"[{section}]: unknown section{nearest(section, Config.model_fields, '[{}]')}")
        homes = [f"[{home}] {name}" for home, name, _ in options() if name == section]
        fix = f"write it as {homes[0]}" if homes else f"the sections are {', '.join(Config.model_fields)}"
        raise ConfigError(f"{section} {_guarded(section, options_given)}: belongs in a section; {fix}")
    if not isinstance(options_given, Mapping):
        raise ConfigError(
            f"[{section}] {_shown(options_given)}: not a section; write [{section}] with options under it"
        )
    for name, value in options_given.items():
        if name not in _fields(section):
            homes = [f"[{home}] {option}" for home, option, _ in options() if option == name]
            fix = f"; did you mean {homes[0]}?" if homes else nearest(str(name), _fields(section))
            raise ConfigError(f"[{section}] {name} {_guarded(name, value)}: unknown option{fix}")


def nearest(name: str, known: "Mapping[str, object] | set[str]", form: str = "{}") -> str:
    """The end of a message about an unknown name: the likely known one, else all there are."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {form.format(close[0])}?" if close else f"; known are {', '.join(sorted(known))}"


def _one_line(error: ErrorDetails) -> str:
    """`[section] option "value": why; fix`, for the first error of pydantic."""
    section, *rest = (str(part) for part in error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        why = str(context["error"])
    else:
        why = _flat(_WHY.get(error["type"], "{msg}").format(msg=error["msg"], **context))
    if not rest:  # the section as a whole: two options that clash
        return f"[{section}] {why}"
    return f"[{section}] {rest[0]} {_guarded(rest[0], error['input'])}: {why}"


_BOOL: Final = "not a yes or no; write true or false"
_INT: Final = "not a whole number; write one, as in 16"
_FLOAT: Final = "not a number; write one, as in 0.5"
_WHY: Final = {
    "string_type": "not a text; write one, in quotes",
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


def _guarded(name: str, value: object) -> str:
    """A value as `_shown`, or "(not shown)" for an option that holds a secret, or is named like one."""
    secret = {option: "SecretStr" in str(field.annotation) for _, option, field in options()}
    option = name.lower().rpartition(_DELIMITER)[2]
    near = [known for known in secret if known in option] + get_close_matches(option, list(secret), n=3, cutoff=0.6)
    return "(not shown)" if secret.get(option, any(secret[known] for known in near)) else _shown(value)


def _shown(value: object) -> str:
    """A value as the user would write it, on one line and no longer than 60 characters, without passwords in URLs."""
    dumped = json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace").decode()
    text = _IN_URLS.sub("(not shown)", dumped)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _flat(text: str) -> str:
    return " ".join(text.split())
