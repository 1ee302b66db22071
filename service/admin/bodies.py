"""What admin requests may say: every field typed and bounded, every mistake one line with field, value and mend."""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtier.service.chosen import Chosen
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.quantities import parse_duration, parse_size

MAX_BODY: Final = 1 << 20  # bytes
B = TypeVar("B", bound=BaseModel)

_MAX_NUMBER: Final = 2**32 - 1


def _model(value: object) -> object:
    digits = set("0123456789abcdef")
    if not isinstance(value, str) or not 4 <= len(value) <= 64 or not digits.issuperset(value):
        raise ValueError("not the first 4 to 64 hexadecimal digits of a fingerprint; `kvtier status` shows them")
    return value


def _chain_hash(value: object) -> object:
    try:
        name = bytes.fromhex(value) if isinstance(value, str) and len(value) == 64 else b""
    except ValueError:
        name = b""
    if len(name) != 32:
        raise ValueError("not a block's name; write 64 hexadecimal digits")
    return name


def _salt(value: object) -> object:
    if not isinstance(value, str) or not 1 <= len(value) <= 1024:
        raise ValueError("not a text of 1 to 1024 characters")
    return writable(value)


def _file(value: object) -> object:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or len(value) > 4096:
        raise ValueError("not a file on the daemon's machine; write its whole path, from / on")
    return Path(writable(value))


def writable(text: str) -> str:
    """The text; ValueError where UTF-8 cannot write it, as a lone surrogate from JSON's escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not a text that UTF-8 can write") from None
    return text


Model = Annotated[str, BeforeValidator(_model)]
Name = Annotated[bytes, BeforeValidator(_chain_hash)]
Token = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
Salt = Annotated[str, BeforeValidator(_salt)]
File = Annotated[Path, BeforeValidator(_file)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]


class Body(BaseModel):
    """A request about the model whose fingerprint begins with `model`, or the only one there is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=False)

    model: Model | None = None


class ResetBody(Body):
    """Forget all blocks of one model, or of `all`."""

    all: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.all == (self.model is not None):
            raise ValueError("model, all: name a model, or say that all are meant")
        return self


class BlocksBody(Body):
    """Consecutive blocks: by name, or by a prompt's tokens and its tenant's salt."""

    hashes: Annotated[list[Name], Field(min_length=1)] | None = None
    tokens: Annotated[list[Token], Field(min_length=1)] | None = None
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.hashes is not None and self.tokens is not None:
            raise ValueError("hashes, tokens: give one of the two")
        if self.tokens is None and self.cache_salt is not None:
            raise ValueError("cache_salt: belongs to tokens; the names of blocks have it in them")
        if self.hashes is not None and len(set(self.hashes)) < len(self.hashes):
            raise ValueError("hashes: a name is given twice; give each once")
        return self

    @property
    def chosen(self) -> Chosen | None:
        """The blocks meant; None where neither names nor tokens were given."""
        if self.hashes is None and self.tokens is None:
            return None
        return Chosen(self.hashes or (), self.tokens or (), self.cache_salt)

    @property
    def blocks(self) -> Chosen:
        """The blocks meant. ConfigError where none were given."""
        if (chosen := self.chosen) is None:
            raise ConfigError("hashes, tokens: neither is given; say which blocks are meant by one of them")
        return chosen


class PinBody(BlocksBody):
    """Keep blocks in host memory for `ttl`."""

    ttl: Duration


class UnpinBody(BaseModel):
    """Let go of one pin."""

    model_config = Body.model_config

    pin: Annotated[int, Field(ge=1, le=_MAX_NUMBER)]


class QuotaBody(BaseModel):
    """Let a tenant have up to `size` bytes of each model's host memory; without `size`, what it can get."""

    model_config = Body.model_config

    cache_salt: Salt
    size: Size | None = None


class ExportBody(BlocksBody):
    """Write all blocks, or the chosen ones, to a new file; `force`: or over an old one."""

    file: File
    force: bool = False


class ImportBody(Body):
    """Store the blocks of an archive."""

    file: File


class TraceBody(Body):
    """Record lookups into a new file for `duration`, or until the client goes."""

    file: File
    duration: Duration | None = None


def parse(body_type: type[B], data: bytes) -> B:
    """A request's body. ConfigError says what is wrong with it, in one line."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"body: not JSON ({flat(str(error))[:100]}); send an object") from None
    if not isinstance(values, dict):
        raise ConfigError(f"body {shown(values)}: not a JSON object; send one")
    try:
        return body_type.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(_one_line(first, list(body_type.model_fields))) from None


def _one_line(error: Any, known: list[str]) -> str:
    field = json.dumps(".".join(str(part) for part in error["loc"]))[1:-1]  # whatever it is, one line of ASCII
    why = str(error["ctx"]["error"]) if error["type"] == "value_error" else flat(error["msg"])
    if not field:
        return why
    if error["type"] == "missing":
        return f"{field}: missing; the fields are {', '.join(known)}"
    if error["type"] == "extra_forbidden":
        return f"{field[:60]} {shown(error['input'])}: unknown field; known are {', '.join(known)}"
    return f"{field} {shown(error['input'])}: {why}"


def shown(value: object) -> str:
    """A value as JSON, whatever it is: one line of ASCII, 60 characters at most."""
    pieces = json.JSONEncoder(default=str).iterencode(value)  # of a long list, no more than is shown
    text = "".join(itertools.islice(pieces, 61))
    return text if len(text) <= 60 else f"{text[:57]}..."


def flat(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())
