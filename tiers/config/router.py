"""The section `[router]`: `kvtier route`, its replicas, and how much patience it has with them."""

from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from kvtier.tiers import L2, TIERS
from kvtier.tiers.config.quantities import parse_time
from kvtier.tiers.config.values import Address, AllowedHosts, FileName, Time, WholeNumber, require_both, require_guard

MAX_BLOCKS: Final = 4_000_000  # 800 MB at some 200 bytes each (benchmarks/router_overhead.py), of KV some terabytes


def _listed(value: object) -> object:
    """A file lists them, a variable has spaces between them."""
    listed = value.split() if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise ValueError('not a list of replicas; write one, as in ["http://127.0.0.1:8000"]')
    return tuple(listed)


_Share = Annotated[float, Field(ge=0, le=1)]
_Replicas = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]


class RouterConfig(BaseModel):
    """`kvtier route`: where it answers, whom it asks, and when it gives up."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False)

    http: Address = Field(default="127.0.0.1:8080", description="address of the OpenAI API of `kvtier route`")
    token: SecretStr | None = Field(default=None, description="the API key clients must send; never logged")
    allow_remote: bool = Field(default=False, description="let http be an address other machines reach; needs a token")
    allowed_hosts: AllowedHosts = Field(
        default=(), description="list of names its pages may be asked for under, besides its addresses; * = every one"
    )
    model: FileName | None = Field(
        default=None, description="directory of the tokenizer and chat template for prompts; none = ask replicas"
    )
    tokenize_timeout: Time = Field(
        default=parse_time("200ms"),
        description="longest a replica may take to say a prompt's tokens, if model is none",
    )
    replicas: _Replicas = Field(
        default=(),
        description="list of http[s]://HOST:PORT[,events=…][,replay=…][,node=…][,node_replay=…][,block_size=N]"
        "[,addresses=all]",
    )
    replicas_file: FileName | None = Field(
        default=None, description="file with one more replica a line; a change is followed while running"
    )
    resolve_interval: Time = Field(
        default=parse_time("10s"), description="time between two look-ups of names with addresses=all"
    )
    replica_token: SecretStr | None = Field(default=None, description="the API key replicas want; never logged")
    replica_ca: FileName | None = Field(
        default=None, description="file of the certificates https replicas are verified by; none = the system's"
    )
    curve_key_file: FileName | None = Field(
        default=None, description="the router's own CURVE key pair, for events at tcp:// addresses; none = without"
    )
    curve_publisher_file: FileName | None = Field(
        default=None, description="the public key of all publishers of events at tcp:// addresses"
    )
    weight_cpu: _Share = Field(
        default=TIERS[L2].weight, description="what host memory saves of computing a block, of 1"
    )
    weight_storage: _Share = Field(default=TIERS["file"].weight, description="what a slab saves of it")
    weight_external: _Share = Field(default=TIERS["redis"].weight, description="what Redis saves of it")
    max_requests: WholeNumber = Field(
        default=256, ge=1, le=65536, description="requests at one replica at a time; beyond them clients are told 429"
    )
    max_blocks: WholeNumber = Field(
        default=MAX_BLOCKS,
        ge=1,
        lt=2**31,
        description="blocks of all replicas that are known, of 200 bytes; beyond them the oldest are forgotten",
    )
    probe_interval: Time = Field(default=parse_time("250ms"), description="between two looks at a replica")
    probe_timeout: Time = Field(default=parse_time("700ms"), description="longest a look may take; more is late")
    probe_failures: WholeNumber = Field(default=3, ge=1, le=100, description="late looks in a row that mean it is down")
    connect_timeout: Time = Field(default=parse_time("500ms"), description="longest a connection may take to open")
    first_byte_timeout: Time = Field(default=parse_time("120s"), description="longest an answer may take to begin")
    stall_timeout: Time = Field(default=parse_time("60s"), description="longest a begun answer may pause")
    request_timeout: Time = Field(default=parse_time("600s"), description="longest a request may take in all")

    @property
    def weights(self) -> Mapping[str, float]:
        """By medium, as the routing policy takes them: the option `weight_MEDIUM`, if there is one, or the table's."""
        return {kind.medium: getattr(self, f"weight_{kind.medium.lower()}", kind.weight) for kind in TIERS.values()}

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        require_guard(self.http, self.allow_remote, self.token)
        require_both("curve_key_file", self.curve_key_file, "curve_publisher_file", self.curve_publisher_file)
        return self
