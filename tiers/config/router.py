"""The section `[router]`: `kvtier route`, its replicas, and how much patience it has with them."""

from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import Field, model_validator
from pydantic_settings import NoDecode

from kvtier.tiers import L2, TIERS
from kvtier.tiers.config.values import (
    Address,
    FileName,
    HttpSection,
    Secret,
    Time,
    WholeNumber,
    listed,
    option,
    require_both,
)

MAX_BLOCKS: Final = 4_000_000  # 800 MB at some 200 bytes each (benchmarks/router_overhead.py), of KV some terabytes


_Share = Annotated[float, Field(ge=0, le=1)]
_Replicas = Annotated[
    tuple[str, ...],
    NoDecode,
    listed(lambda _: True, 'not a list of replicas; write one, as in ["http://127.0.0.1:8000"]', r"\s+"),
]


class RouterConfig(HttpSection):
    """`kvtier route`: where it answers, whom it asks, and when it gives up."""

    http: Address = option("127.0.0.1:8080", "address of the OpenAI API of `kvtier route`")
    token: Secret | None = option(None, "the API key clients must send; never logged")
    model: FileName | None = option(
        None, "directory of the tokenizer and chat template for prompts; none = ask replicas"
    )
    tokenize_timeout: Time = option("200ms", "longest a replica may take to say a prompt's tokens, if model is none")
    replicas: _Replicas = option(
        (),
        "list of `http[s]://HOST:PORT[,events=…][,replay=…][,node=…][,node_replay=…][,block_size=N][,addresses=all]`",
    )
    replicas_file: FileName | None = option(
        None, "file with one more replica a line; a change is followed while running"
    )
    resolve_interval: Time = option("10s", "time between two look-ups of names with addresses=all")
    replica_token: Secret | None = option(None, "the API key replicas want; never logged")
    replica_ca: FileName | None = option(
        None, "file of the certificates https replicas are verified by; none = the system's"
    )
    curve_key_file: FileName | None = option(
        None, "the router's own CURVE key pair, for events at tcp:// addresses; none = without"
    )
    curve_publisher_file: FileName | None = option(
        None, "the public key of all publishers of events at tcp:// addresses"
    )
    weight_cpu: _Share = option(TIERS[L2].weight, "what host memory saves of computing a block, of 1")
    weight_storage: _Share = option(TIERS["file"].weight, "what a slab saves of it")
    weight_external: _Share = option(TIERS["redis"].weight, "what Redis saves of it")
    weight_object: _Share = option(TIERS["objects"].weight, "what an object store saves of it")
    max_requests: WholeNumber = option(
        256, "requests at one replica at a time; beyond them clients are told 429", ge=1, le=65536
    )
    max_blocks: WholeNumber = option(
        MAX_BLOCKS,
        "blocks of all replicas that are known, of 200 bytes; beyond them the oldest are forgotten",
        ge=1,
        lt=2**31,
    )
    probe_interval: Time = option("250ms", "between two looks at a replica")
    probe_timeout: Time = option("700ms", "longest a look may take; more is late")
    probe_failures: WholeNumber = option(3, "late looks in a row that mean it is down", ge=1, le=100)
    connect_timeout: Time = option("500ms", "longest a connection may take to open")
    first_byte_timeout: Time = option("120s", "longest an answer may take to begin")
    stall_timeout: Time = option("60s", "longest a begun answer may pause")
    request_timeout: Time = option("600s", "longest a request may take in all")
    drain: Time | None = option(None, "longest that answers may go on after the signal to stop; none = request_timeout")

    @property
    def patience(self) -> float:
        """Seconds that answers may go on after the signal to stop."""
        return self.request_timeout if self.drain is None else self.drain

    @property
    def weights(self) -> Mapping[str, float]:
        """By medium, as the routing policy takes them: the option `weight_MEDIUM`, if there is one, or the table's."""
        return {kind.medium: getattr(self, f"weight_{kind.medium.lower()}", kind.weight) for kind in TIERS.values()}

    @model_validator(mode="after")
    def _whole(self) -> Self:
        require_both("curve_key_file", self.curve_key_file, "curve_publisher_file", self.curve_publisher_file)
        return self
