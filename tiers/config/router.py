"""The section `[router]`: `kvtier route`, its replicas, and how much patience it has with them."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from kvtier.tiers.config_values import Address, Count, FileName, Time, require_guard
from kvtier.tiers.quantities import parse_time


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
    model: FileName | None = Field(
        default=None, description="directory whose tokenizer and chat template tell prompts apart; none = by load alone"
    )
    replicas: _Replicas = Field(
        default=(), description="list of http://HOST:PORT[,events=…][,replay=…][,node=…][,node_replay=…][,block_size=N]"
    )
    replica_token: SecretStr | None = Field(default=None, description="the API key replicas want; never logged")
    weight_cpu: _Share = Field(default=0.9, description="what host memory saves of computing a block, of 1")
    weight_storage: _Share = Field(default=0.8, description="what a slab saves of it")
    weight_external: _Share = Field(default=0.6, description="what Redis saves of it")
    max_requests: Count = Field(
        default=256, ge=1, le=65536, description="requests at one replica at a time; beyond them clients are told 429"
    )
    probe_interval: Time = Field(default=parse_time("250ms"), description="between two looks at a replica")
    probe_timeout: Time = Field(default=parse_time("700ms"), description="longest a look may take before it is down")
    connect_timeout: Time = Field(default=parse_time("500ms"), description="longest a connection may take to open")
    first_byte_timeout: Time = Field(default=parse_time("120s"), description="longest an answer may take to begin")
    stall_timeout: Time = Field(default=parse_time("60s"), description="longest a begun answer may pause")
    request_timeout: Time = Field(default=parse_time("600s"), description="longest a request may take in all")

    @property
    def weights(self) -> Mapping[str, float]:
        """By medium, as the routing policy takes them."""
        return {
            "GPU": 1.0,
            "CPU": self.weight_cpu,
            "STORAGE": self.weight_storage,
            "EXTERNAL": self.weight_external,
        }

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        require_guard(self.http, self.allow_remote, self.token)
        return self
