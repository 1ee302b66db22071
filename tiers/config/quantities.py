"""Sizes and times as people write them: "4GiB", "4g", "50ms", "7d"."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

_PREFIXES: Final = ("", "K", "M", "G", "T", "P")
_SIZE_UNITS: Final = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate(_PREFIXES)
    if power
}
# As written, in small or large letters. A bare letter is binary, as for Docker, systemd and the JVM.
_WRITTEN_UNITS: Final = {unit.lower(): scale for unit, scale in _SIZE_UNITS.items()} | {
    prefix.lower(): 1024**power for power, prefix in enumerate(_PREFIXES) if power
}
_TIME_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MAX_SIZE: Final = 2**50  # 1 PiB: beyond it, a slip of the finger
_LEAST_ROOM: Final = 1024  # bytes: below it, a unit was left out
_DAY: Final = 24 * 3600.0
_MAX_TIME: Final = _DAY
_MAX_DURATION: Final = 365 * _DAY


def parse_size(value: object) -> int:
    """Bytes in "4GiB", "4gib", "4G" or "4g" (2**30), "4GB" or "4gb" (10**9), "4096" or 4096; else ValueError."""
    if isinstance(value, str):
        fix = 'write a number of bytes, or one with a unit, as in "4GiB"'
        value = round(_quantity(value, _WRITTEN_UNITS, "B", f"not a size; {fix}", _SIZE_UNITS))
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError('not a size; write a number of bytes, or a text such as "4GiB"')
    if not 0 < value <= _MAX_SIZE:
        raise ValueError("outside 1 byte to 1PiB; choose a size in that range")
    return value


def parse_room(value: object) -> int:
    """Bytes, as `parse_size`, of memory or disk for blocks. ValueError if they are less than any block takes."""
    size = parse_size(value)
    if size < _LEAST_ROOM:
        raise ValueError(f'{size} bytes are less than a block of any model; did you mean "{size}GiB"?')
    return size


def parse_time(value: object) -> float:
    """Seconds in "50ms", "2s", "1.5" or 1.5. ValueError with the reason and a fix."""
    if isinstance(value, str):
        fix = 'write seconds, or a number with a unit, as in "50ms"'
        value = _quantity(value, _TIME_UNITS, "s", f"not a time; {fix}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError('not a time; write seconds, or a text such as "50ms"')
    if not 0 < value <= _MAX_TIME:
        raise ValueError("outside 0 to 24h; choose a time in that range")
    return float(value)


def parse_duration(value: object) -> float:
    """Seconds, as `parse_time`, but up to a year and with the unit "d"; for how long data is kept."""
    if isinstance(value, str) and value.strip().endswith("d"):
        value = _quantity(value, {"d": _DAY}, "d", 'not a time; write it as in "7d"')
    elif isinstance(value, str):
        fix = 'write seconds, or a number with a unit, as in "50ms"'
        value = _quantity(value, _TIME_UNITS, "s", f"not a time; {fix}")
        if value < 1:
            return parse_time(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MAX_DURATION:
        raise ValueError('outside 1s to 365d; write a time such as "24h" or "7d"')
    return float(value)


def _quantity(text: str, units: Mapping[str, float], unit: str, why: str, shown: Iterable[str] = ()) -> float:
    """A number and its unit, or `unit`, multiplied. ValueError with `why`, or with the units (`shown` of them)."""
    matched = _QUANTITY.fullmatch(text)
    if matched is None or len(text) > 32:
        raise ValueError(why)
    unit = matched[2] or unit
    scale = units.get(unit.lower())
    if scale is None:
        raise ValueError(f"no unit {unit!r}; use one of {', '.join(shown or units)}")
    return float(matched[1]) * scale


def format_size(num_bytes: int) -> str:
    """The shortest exact way to write a size: "4GiB", "1536MiB", "4GB", "1000"."""
    exact = (f"{num_bytes // scale}{unit}" for unit, scale in reversed(_SIZE_UNITS.items()) if num_bytes % scale == 0)
    return min((text.removesuffix("B") if text[-2:-1].isdigit() else text for text in exact), key=len)


def show_size(num_bytes: float, base: int = 1024) -> str:
    """About how much, to three digits, for people to read: "412 GiB"; with base 1000, as for rates, "1.25 GB"."""
    power = next((power for power in range(len(_PREFIXES)) if num_bytes < 1000 * base**power), len(_PREFIXES) - 1)
    return f"{num_bytes / base**power:.3g} {_PREFIXES[power]}{'i' if power and base == 1024 else ''}B"


def format_time(seconds: float) -> str:
    """A time with the unit that reads best: "2s", "50ms", "10us"."""
    if seconds >= 1:
        return f"{seconds:g}s"
    return f"{seconds * 1e3:g}ms" if seconds >= 1e-3 else f"{seconds * 1e6:g}us"
