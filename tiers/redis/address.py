"""Reads the servers' URLs in [redis] url, and says what is wrong with one without showing its password."""

import re
from typing import Any, Final
from urllib.parse import urlsplit

from redis.connection import parse_url

from kvtier.tiers import ConfigError

_SCHEMES: Final = ("redis", "rediss", "unix")
_IN_URL: Final = frozenset({"host", "port", "path", "db", "username", "password", "connection_class"})
# What is surely no password where no "@" says where one ends: a host, a port of few digits, a database.
_PLACE: Final = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]*)(:\d{1,5})?(/\w*)?", re.ASCII)
_SCHEME: Final = re.compile(r"[A-Za-z][\w+.-]{0,19}", re.ASCII)
_NOT_SHOWN: Final = "(not shown, it may hold a password)"
_FORM: Final = "write it as in redis://HOST:6379/0"


def parse_address(url: str, default_port: int) -> dict[str, Any]:
    """What redis-py reads in one URL, its port filled in. ConfigError says what is wrong with it."""
    try:
        if why := _problem(url):
            raise ConfigError(f"[redis] url {_shown(url)}: {why}")
        part: dict[str, Any] = parse_url(url)
    except ValueError:  # its text may show the URL, and with it a password
        raise ConfigError(f"[redis] url {_shown(url)}: not an address; {_FORM}") from None
    if unknown := sorted(part.keys() - _IN_URL):
        raise ConfigError(f"[redis] url: {unknown[0]} behind the ?: not read there; use the options of [redis]")
    part.setdefault("port", default_port)
    return part


def _problem(url: str) -> str:
    """Why it cannot be used, with the fix; empty if it can. ValueError if it is nothing like a URL."""
    scheme, mark, _ = url.partition("://")
    if not mark:
        return f"no scheme; write redis://{url}" if _is_place(url) else f"not an address; {_FORM}"
    if scheme not in _SCHEMES:
        named = f'scheme "{scheme}"' if _SCHEME.fullmatch(scheme) else "its scheme"
        return f"{named} is none of redis, rediss and unix; {_FORM}"
    parts = urlsplit(url)
    if scheme == "unix":
        return "" if parts.path.strip("/") else "no path; write it as in unix:///run/redis.sock"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        return f"its port is no number from 1 to 65535; {_FORM}, and / and # of a password as %2F and %23"
    if not parts.hostname:
        return f"no host; {_FORM}"
    number = parts.path.strip("/")
    if number and not (number.isascii() and number.isdecimal()):
        return f"the database behind the address is no number; {_FORM}"
    return ""


def _shown(url: str) -> str:
    """The URL in quotes, without what may be a login or part of one."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return f'"{url}"' if not url or _is_place(url) else _NOT_SHOWN  # a word alone may be the password
    login, at, place = rest.rpartition("@")
    place = place.partition("?")[0]
    if at and not _PLACE.fullmatch(place):  # login and place may be the wrong way round
        place = re.sub(":.*", ":…", place, flags=re.DOTALL)
    is_known = "?" not in login if at else bool(_PLACE.fullmatch(place)) or (scheme == "unix" and ":" not in place)
    if not is_known or not _SCHEME.fullmatch(scheme) or len(url) > 1000:
        return _NOT_SHOWN
    return f'"{scheme}{mark}{"…@" if at else ""}{place:.100}"'


def _is_place(url: str) -> bool:
    """Whether it is a server's place without a scheme, and no other word."""
    return len(url) <= 1000 and ("." in url or ":" in url or url == "localhost") and bool(_PLACE.fullmatch(url))
