"""What admin requests may say: every field typed and bounded, every mistake one line with field, value and fix."""

from pathlib import Path
from typing import Annotated, Final, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtier.service import first_error, object_in, shown, writable
from kvtier.service.node import BlockSelection
from kvtier.tiers import ConfigError
from kvtier.tiers.config import ByteSize, Lifetime

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
    if not isinstance(value, str) or not value or "\0" in value or len(value) > 4096:
        raise ValueError("not a file on the daemon's machine; write its name below [service] archives")
    return Path(writable(value))


FingerprintDigits = Annotated[str, BeforeValidator(_model)]
BlockName = Annotated[bytes, BeforeValidator(_chain_hash)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
TenantSalt = Annotated[str, BeforeValidator(_salt)]
DaemonFile = Annotated[Path, BeforeValidator(_file)]


class Body(BaseModel):
    """A request about the model whose fingerprint begins with `model`, or the only one there is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=False)

    model: FingerprintDigits | None = None


class ResetBody(Body):
    all: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.all == (self.model is not None):
            raise ValueError("model, all: name a model, or say that all are meant")
        return self


class BlocksBody(Body):
    """Consecutive blocks: by name, or by a prompt's tokens and its tenant's salt."""

    hashes: Annotated[list[BlockName], Field(min_length=1)] | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)] | None = None
    cache_salt: TenantSalt | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        self._check_way()
        return self

    def _check_way(self) -> None:
        if self.hashes is not None and self.tokens is not None:
            raise ValueError("hashes, tokens: give one of the two")
        if self.tokens is None and self.cache_salt is not None:
            raise ValueError("cache_salt: belongs to tokens; the names of blocks have it in them")
        if self.hashes is not None and len(set(self.hashes)) < len(self.hashes):
            raise ValueError("hashes: a name is given twice; give each once")

    @property
    def selection(self) -> BlockSelection | None:
        """The blocks meant; None if neither names nor tokens were given."""
        if self.hashes is None and self.tokens is None:
            return None
        return BlockSelection(self.hashes or (), self.tokens or (), self.cache_salt)

    @property
    def blocks(self) -> BlockSelection:
        """The blocks meant. ConfigError if none were given."""
        if (selection := self.selection) is None:
            raise ConfigError("hashes, tokens: neither is given; say which blocks are meant by one of them")
        return selection


class ExplainedBody(BlocksBody):
    """The blocks of a prompt, or those of a request that ended lately."""

    request: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    def _check_way(self) -> None:
        if sum(each is not None for each in (self.hashes, self.tokens, self.request)) > 1:
            raise ValueError("hashes, tokens, request: give one of the three")
        if self.request is None:
            super()._check_way()


class PinBody(BlocksBody):
    ttl: Lifetime


class UnpinBody(BaseModel):
    model_config = Body.model_config

    pin: Annotated[int, Field(ge=1, le=_MAX_NUMBER)]


class QuotaBody(BaseModel):
    """Let a tenant have up to `size` bytes of each model's host memory; without `size`, what it can get."""

    model_config = Body.model_config

    cache_salt: TenantSalt
    size: ByteSize | None = None


class ExportBody(BlocksBody):
    """Write all blocks, or the chosen ones, to a new file; `force`: or over an old one."""

    file: DaemonFile
    force: bool = False


class ImportBody(Body):
    """Read a file; `unsealed`: also one in the clear, where the daemon has a key."""

    file: DaemonFile
    unsealed: bool = False


class TraceBody(Body):
    """Record lookups into a new file for `duration`, or until the client goes."""

    file: DaemonFile
    duration: Lifetime | None = None


def parse(body_type: type[B], data: bytes) -> B:
    """A request's body. ConfigError says what is wrong with it, in one line."""
    try:
        return body_type.model_validate(object_in(data))
    except ValidationError as error:
        raise ConfigError(_one_line(error, ", ".join(body_type.model_fields))) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _one_line(error: ValidationError, known: str) -> str:
    field, why, kind, value = first_error(error)
    if not field:
        return why
    if kind == "missing":
        return f"{field}: missing; the fields are {known}"
    if kind == "extra_forbidden":
        return f"{field[:60]} {shown(value)}: unknown field; known are {known}"
    return f"{field} {shown(value)}: {why}"
