"""The kinds of values a configuration has: how each is written, and the error for a wrong one."""

import json
import logging
import os
import re
from collections.abc import Callable
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_settings import NoDecode

from kvtier.tiers.config.quantities import format_size, format_time, parse_duration, parse_room, parse_size, parse_time

_log = logging.getLogger(__name__)

_ADDRESS: Final = re.compile(r"(?:[^\[\]]+|\[[^\[\]]+\]):(\d+)", re.ASCII)


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a whole number; write one, as in 16")
    return value


def _sightings(value: object) -> object:
    text = str(value).strip()
    if text == "auto":
        return text
    if isinstance(value, bool | float) or not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise ValueError('not a number of sightings; write 1 to 1000, or "auto"')
    return int(text)


def _repair_share(value: object) -> object:
    text = str(value).strip()
    if text == "auto":
        return text
    try:
        share = -1.0 if isinstance(value, bool) else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError('not a share; write a number from 0 to 1, or "auto"')
    return share


def _stored_answers(value: object) -> object:
    text = str(value).strip().lower()
    if text == "answers":
        return text
    if text not in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        raise ValueError("not true, false or answers; write one of the three")
    return text in ("true", "yes", "on", "1")


def _policy(value: object) -> object:
    if value == "tail":
        _warn_of_tail()
        return "predicted"
    return value


@cache
def _warn_of_tail() -> None:
    _log.warning('[cache] policy "tail" is called "predicted" now; write that: the old name goes with release 0.3')


def _path(value: object, what: str, fix: str) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"not a {what}'s name; write one, or {fix}")
    return Path(value).expanduser()


def _directory(value: object) -> Path:
    return _path(value, "directory", "leave the option out to switch the tier off")


def _file(value: object) -> Path:
    return _path(value, "file", "leave the option out")


def _socket(value: object) -> object:
    path = _file(value)
    longest = 107  # bytes of sockaddr_un.sun_path, with its terminating zero 108
    if len(os.fsencode(str(path))) > longest:
        raise ValueError(f"a socket's path has {longest} bytes at most; choose a shorter one, as in /run/kvtier.sock")
    return path


def _text(fits: Callable[[str], object], why: str) -> BeforeValidator:
    """Takes a text that `fits`; the error for any other value is `why`."""

    def checked(value: object) -> str:
        if not isinstance(value, str) or not fits(value):
            raise ValueError(why)
        return value

    return BeforeValidator(checked)


def _matching(pattern: str, why: str) -> BeforeValidator:
    """Takes a text of this pattern, whose classes are those of ASCII."""
    return _text(re.compile(pattern, re.ASCII).fullmatch, why)


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and _is_port(found[1])


def _is_port(digits: str) -> bool:
    return len(digits.lstrip("0")) <= 5 and int(digits) <= 65535


def _is_node(text: str) -> bool:
    """An address to connect to; a resolver would take a port modulo 65536."""
    host, _, port = text.rpartition(":")
    names = re.fullmatch(r"[\w.-]{1,253}|\[[\da-fA-F:.]{2,64}\]", host, re.ASCII)
    return names is not None and _is_address(text) and int(port) > 0


def is_endpoint(text: str) -> bool:
    """Whether ZMQ could bind or connect there."""
    scheme, _, rest = text.partition("://")
    return _is_address(rest) if scheme == "tcp" else scheme == "ipc" and bool(rest) and "\0" not in rest


def _is_http(text: str) -> bool:
    found = re.fullmatch(r"https?://([\w.-]+|\[[\da-f:]+\])(?::(\d{1,5}))?", text, re.ASCII)
    if found is None or int(found[2] or 80) > 65535:
        return False
    host = found[1].strip("[]")
    return not re.search(r"(^|[.:])(\d+|0x[\da-f]*)$|:", host) or _is_ip(host)  # else a name


def is_numeric(endpoint: str) -> bool:
    """Whether the host of an `HttpEndpoint` is an address, which has no names below it."""
    return _is_ip(re.sub(r"^https?://|:\d+$", "", endpoint).strip("[]"))


def _is_ip(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def listed(fits: Callable[[str], object], why: str, between: str = r"[,\s]+") -> BeforeValidator:
    """Takes texts that fit: a list, or a variable's JSON or texts with `between` (a regular expression) between."""

    def checked(value: object) -> tuple[str, ...]:
        texts = _texts(value, between) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and fits(text) for text in texts):
            raise ValueError(why)
        return tuple(texts)

    return BeforeValidator(checked)


def _texts(value: str, between: str) -> object:
    """The items of a variable's list; None if it begins like JSON, and is not."""
    if not value.lstrip().startswith("["):
        return [text for text in re.split(between, value.strip()) if text]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def require_local(name: str, address: str) -> None:
    """ValueError if other machines reach the address that option `name` holds."""
    if not _is_local(address.rpartition("://")[2]):
        raise ValueError(f'{name} "{address}": other machines reach it; use 127.0.0.1 or set allow_remote')


def require_both(name: str, value: Path | None, other_name: str, other: Path | None) -> None:
    """ValueError if one of two options that only make sense together is missing."""
    for given, path, missing, beside in ((name, value, other_name, other), (other_name, other, name, value)):
        if path is not None and beside is None:
            raise ValueError(f'{given} "{path}": {missing} is missing; set both')


def _is_local(address: str) -> bool:
    return address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost")


ByteSize = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, when_used="json")]
StorageSize = Annotated[int, BeforeValidator(parse_room), PlainSerializer(format_size, when_used="json")]
Time = Annotated[float, BeforeValidator(parse_time), PlainSerializer(format_time, when_used="json")]
WholeNumber = Annotated[int, BeforeValidator(_not_a_bool)]
Sightings = Annotated[int | Literal["auto"], BeforeValidator(_sightings)]
RepairShare = Annotated[float | Literal["auto"], BeforeValidator(_repair_share)]
Policy = Annotated[Literal["predicted", "lru", "s3fifo"], BeforeValidator(_policy)]
StoredAnswers = Annotated[bool | Literal["answers"], BeforeValidator(_stored_answers)]
Lifetime = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_time, when_used="json")]
Directory = Annotated[Path, BeforeValidator(_directory)]
FileName = Annotated[Path, BeforeValidator(_file)]
SocketPath = Annotated[Path, BeforeValidator(_socket)]
CacheSalt = Annotated[str, _text(bool, "not a text of one character or more; leave the option out for none")]
KeyPrefix = Annotated[
    str, _matching(r"[\w.:-]{1,64}", "not 1 to 64 letters, digits or any of ._:-; choose such a prefix")
]
ObjectPrefix = Annotated[
    str,
    _matching(
        r"(?!.*//)(?!(.*/)?\.\.?(/|$))[\w.-][\w./-]{0,63}(?<!/)",
        "not 1 to 64 letters, digits or any of ._-/, with a name but . and .. between slashes; choose such a prefix",
    ),
]
BucketName = Annotated[
    str,
    _matching(
        r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
        "not 3 to 63 small letters, digits or any of .-; write the bucket's name alone, without s3://",
    ),
]
HttpEndpoint = Annotated[
    str, _text(_is_http, "not an address of HTTP's; write it as in https://s3.example:9000, without a path")
]
RegionName = Annotated[
    str, _matching(r"[\w.-]{1,64}", "not 1 to 64 letters, digits or any of ._-; write it as in us-east-1")
]
AccessKeyId = Annotated[
    str, _matching(r"(?! )[ -~]{1,256}(?<! )", "not 1 to 256 printable characters of ASCII; write the id alone")
]
Address = Annotated[
    str,
    _text(_is_address, "its port is out of range; write one up to 65535"),
    _text(_ADDRESS.fullmatch, "not HOST:PORT; write it as in 127.0.0.1:9400"),  # checked first
]
ZmqEndpoint = Annotated[
    str, _text(is_endpoint, "not an address of ZMQ's; write it as in ipc:///run/kvtier/events or tcp://127.0.0.1:5557")
]
AllowedHosts = Annotated[
    tuple[str, ...],
    NoDecode,
    listed(
        re.compile(r"\*|[\w.-]{1,253}", re.ASCII).fullmatch,
        'not a list of names without a port; write one, as in ["node-a"]',
    ),
]
Origins = Annotated[
    tuple[str, ...],
    NoDecode,
    listed(
        re.compile(r"\*|https?://[\w.-]{1,253}(:\d{1,5})?", re.ASCII).fullmatch,
        'not a list of origins; write one, as in ["https://chat.example"]',
    ),
]
NodeAddresses = Annotated[
    tuple[str, ...], NoDecode, listed(_is_node, 'not a list of HOST:PORT; write one, as in ["node-b:9402"]')
]
LineStarts = Annotated[
    tuple[str, ...],
    NoDecode,
    listed(lambda text: text.strip(), 'not a list of how lines begin; write one, as in ["billing", "Session id:"]'),
]
Topic = Annotated[
    str,
    _text(
        lambda text: len(text.encode()) <= 255,
        "not a text of at most 255 bytes; leave the option out for the models' own",
    ),
]


def is_one_line(secret: SecretStr) -> bool:
    """False for text with a line's end, as read from a file, and for an empty one."""
    text = secret.get_secret_value()
    return bool(text) and text == text.strip() and text.isprintable()


def _require_one_line(secret: SecretStr) -> SecretStr:
    if not is_one_line(secret):
        raise ValueError("empty, or with white space around it; write it alone, or leave the option out")
    return secret


Secret = Annotated[SecretStr, AfterValidator(_require_one_line)]
"""A token or a password, used in a header or a login as it is."""


RELOADS: Final[JsonDict] = {"reloads": True}  # the mark of an option that a running process takes from its file again


def option(default: Any, description: str, *, reloads: bool = False, **bounds: Any) -> Any:
    """A field of a section: its default, what it means to a user, whether SIGHUP changes it, and its values' bounds."""
    return Field(default=default, description=description, json_schema_extra=RELOADS if reloads else None, **bounds)


class Section(BaseModel):
    """Options that belong together. Defaults are written as a user would write them."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False, validate_default=True)


class ApiSection(Section):
    """An API that pages in a browser may call."""

    cors_origins: Origins = option((), "origins whose pages may call the API from a browser; * = any")


class HttpSection(Section):
    """The options of an HTTP server: its address, and which requests it accepts."""

    http: Address
    token: Secret | None = None
    allow_remote: bool = option(False, "let other machines reach http; needs a token")
    allowed_hosts: AllowedHosts = option((), "list of further host names that its pages accept; * = any", reloads=True)

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not _is_local(self.http):
            if not self.allow_remote:
                require_local("http", self.http)
            if self.token is None:
                raise ValueError(f'http "{self.http}": other machines reach it; set a token')
        return self
