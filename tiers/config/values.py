"""The kinds of values a configuration has: how each is written, and what is said of one that is not."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, SecretStr
from pydantic_settings import NoDecode

from kvtier.tiers.config.quantities import format_size, format_time, parse_duration, parse_size, parse_time


def _not_a_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("not a whole number; write one, as in 16")
    return value


def _path(value: object, what: str, fix: str) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"not a {what}'s name; write one, or {fix}")
    return Path(value).expanduser()


def _directory(value: object) -> Path:
    return _path(value, "directory", "leave the option out to switch the tier off")


def _file(value: object) -> Path:
    return _path(value, "file", "leave the option out")


def _salt(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text of one character or more; leave the option out for none")
    return value


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


def _endpoint(value: object) -> object:
    scheme, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    host, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" and host and port.isdecimal() and int(port) <= 65535
    if not is_tcp and not (scheme == "ipc" and rest and "\0" not in rest):
        raise ValueError("not an address of ZMQ's; write it as in ipc:///run/kvtier/events or tcp://127.0.0.1:5557")
    return value


def _hosts(value: object) -> object:
    """A file lists them, a variable has spaces between them."""
    listed = value.split() if isinstance(value, str) else value
    good = isinstance(listed, list | tuple) and all(
        isinstance(one, str) and re.fullmatch(r"\*|[\w.-]{1,253}", one, re.ASCII) for one in listed
    )
    if not good or not isinstance(listed, list | tuple):
        raise ValueError('not a list of names without a port; write one, as in ["node-a"]')
    return tuple(listed)


def _topic(value: object) -> object:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= 255:
        raise ValueError("not a text of 1 to 255 bytes; leave the option out for the models' own")
    return value


def require_guard(http: str, allow_remote: bool, token: SecretStr | None) -> None:
    """ValueError if other machines reach an address without leave, or without a token."""
    if _is_local(http):
        return
    if not allow_remote:
        require_local("http", http)
    if token is None:
        raise ValueError(f'http "{http}": other machines reach it; set a token')


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
Time = Annotated[float, BeforeValidator(parse_time), PlainSerializer(format_time, when_used="json")]
WholeNumber = Annotated[int, BeforeValidator(_not_a_bool)]
Lifetime = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(format_time, when_used="json")]
Directory = Annotated[Path, BeforeValidator(_directory)]
FileName = Annotated[Path, BeforeValidator(_file)]
SocketPath = Annotated[Path, BeforeValidator(_socket)]
CacheSalt = Annotated[str, BeforeValidator(_salt)]
KeyPrefix = Annotated[str, BeforeValidator(_key_prefix)]
Address = Annotated[str, BeforeValidator(_address)]
ZmqEndpoint = Annotated[str, BeforeValidator(_endpoint)]
AllowedHosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_hosts)]
Topic = Annotated[str, BeforeValidator(_topic)]
