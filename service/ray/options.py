"""RayOptions: the options of the application for Ray Serve, and the engine's command line made from them."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtier.tiers import ConfigError
from kvtier.tiers.config import MAX_BLOCKS

NotEmpty = Annotated[str, Field(min_length=1)]
TimeLimit = Annotated[float, Field(gt=0, le=86400)]

ROUTER: Final = "kvtier.service.ray.request_router.KVTierRequestRouter"
VLLM_BLOCK: Final = 16  # tokens, of vLLM's cache on most devices
_CHOSEN: Final = {"kvtier": ("--http", "--model"), "vllm": ("--block-size", "--host", "--port")}  # set by `command`
_MAX_WAITING: Final = 65_536  # that `[server] max_waiting` may be
ENDPOINTS: Final = ("tcp://{node}:{events}", "tcp://{node}:{replay}")


class RayOptions(BaseModel):
    """Arguments of `build`, which Ray Serve checks before anything starts. All replicas are of one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: NotEmpty  # the checkpoint's folder, at the same path on every node; for vLLM also a name of the hub
    engine: Literal["kvtier", "vllm"] = "kvtier"
    program: tuple[str, ...] = ()  # the engine's command; default: the one beside this Python
    options: tuple[str, ...] = ()  # more arguments; {node}, {http}, {events}, {replay} are filled in
    env: Mapping[str, str] = {}  # of the engine, likewise filled in: `KVTIER_REDIS__URL` and others
    block_size: Annotated[int, Field(ge=1, le=4096)] | None = None  # tokens, if the engine does not report them
    max_batched_tokens: Annotated[int, Field(ge=1)] = 2048  # of one step: for Ray's own router
    router: NotEmpty = ROUTER  # or another class of Ray Serve's
    router_options: Mapping[str, Any] | None = None  # of its `initialize_state`; ours needs none
    replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    autoscaling: Mapping[str, Any] | None = None  # Ray Serve's `AutoscalingConfig`, in place of `replicas`
    resources: Mapping[str, Any] = {"num_cpus": 1}  # of a replica: Ray's `ray_actor_options`
    max_requests: Annotated[int, Field(ge=1, le=100_000)] = 256  # at one replica at a time
    max_queued: Annotated[int, Field(ge=-1)] = 1024  # that wait for a replica, at each ingress; -1: no bound
    ingresses: Annotated[int, Field(ge=1, le=1000)] = 1
    max_blocks: Annotated[int, Field(ge=1)] = MAX_BLOCKS  # that each ingress knows of
    start_timeout: TimeLimit = 900.0  # for an engine to be ready
    connect_timeout: TimeLimit = 5.0
    first_byte_timeout: TimeLimit = 600.0
    stall_timeout: TimeLimit = 120.0
    request_timeout: TimeLimit = 1800.0
    stop_timeout: TimeLimit = 40.0  # for an engine to finish its answers, before it is killed

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling: both set the number of replicas; leave one out")
        for word in self.options:
            name = word.partition("=")[0]
            if name in _CHOSEN[self.engine]:
                instead = "set block_size" if name == "--block-size" else "leave it out: the application chooses it"
                raise ValueError(f"options {word}: {instead}")
        return self

    def command(self, ports: Mapping[str, str]) -> list[str]:
        """How a replica's engine is started. `ports` fills in {node}, {http}, {events} and {replay}."""
        words = [*self._program, *self._words, *self.options]
        return [_filled(word, ports) for word in words]

    def environment(self, ports: Mapping[str, str]) -> dict[str, str]:
        publish, replay = ENDPOINTS
        own = {
            "KVTIER_SERVER__MAX_WAITING": str(
                min(self.max_requests, _MAX_WAITING)
            ),  # what Ray Serve sends, waits there
            "KVTIER_EVENTS__PUBLISH": publish,
            "KVTIER_EVENTS__REPLAY": replay,
            "KVTIER_EVENTS__ALLOW_REMOTE": "true",
        }
        given = self.env if self.engine == "vllm" else {**own, **self.env}
        return {name: _filled(value, ports) for name, value in given.items()}

    def endpoints(self, ports: Mapping[str, str]) -> tuple[str, str] | None:
        """Where an engine publishes and replays KV events, if it does not report that itself; None: it does."""
        publish, replay = (_filled(each, ports) for each in ENDPOINTS)
        return None if self.engine == "kvtier" else (publish, replay)

    @property
    def fallback_block_size(self) -> int | None:
        """Tokens in a block of an engine that does not report them; None: it does."""
        return self.block_size or (VLLM_BLOCK if self.engine == "vllm" else None)

    @property
    def _program(self) -> Sequence[str]:
        if self.program:
            return self.program
        if self.engine == "kvtier":
            return [sys.executable, "-m", "kvtier.cli"]
        beside = Path(sys.executable).with_name(self.engine)  # a Ray worker may have another PATH
        found = str(beside) if beside.exists() else shutil.which(self.engine)
        if found is None:
            raise ConfigError(f'engine "{self.engine}": no such program beside {sys.executable}; set program')
        return [found, "serve"]

    @property
    def _words(self) -> Sequence[str]:
        if self.engine == "kvtier":
            first = [] if self.program else ["engine"]
            return [*first, "--model", self.model, "--http", "127.0.0.1:{http}"]
        events = (
            '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:{events}", '
            '"replay_endpoint": "tcp://*:{replay}"}'
        )
        address = ["--host", "127.0.0.1", "--port", "{http}"]
        return [self.model, *address, "--block-size", str(self.fallback_block_size), "--kv-events-config", events]


def _filled(text: str, ports: Mapping[str, str]) -> str:
    """The text with its {names} filled in. Other braces stay as they are: JSON has them."""
    for name, value in ports.items():
        text = text.replace("{" + name + "}", value)
    return text
