"""EngineReplica: a deployment of Ray Serve of which each replica has one engine, and passes requests on to it."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import ray
from ray import serve

from kvtier.service.openai import OpenAIError
from kvtier.service.ray.options import RayOptions
from kvtier.service.ray.ranking import METADATA, AnswerHead, EngineRequest
from kvtier.service.router import Deadlines, Failure, ReplicaClient, ReplicaFailed, ReplicaProfile
from kvtier.tiers import KVTierError
from kvtier.tiers.config import child_environment

# --- the engine's process --------------------------------------------------------------------------------------------

_LOOK: Final = 0.2  # seconds between two looks whether it is ready
_ANSWER: Final = 5.0  # seconds for a page
_PAGES: Final = ("/readyz", "/health")  # kvtier's; vLLM's and many others'
_MAX_PAGE: Final = 1 << 20  # bytes
_LOOPBACK: Final = "127.0.0.1"


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports of this machine that nobody uses, and that the kernel gives to nobody else until the end of the block.

    An engine may load for minutes before it listens. It can meanwhile, as servers set SO_REUSEADDR: the sockets that
    hold the ports do so, too, and do not listen (socket(7), ip(7)).
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))  # without the option: two of them never get one port
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [each.getsockname()[1] for each in sockets]


def _its_lines() -> str:
    return f"read why in Ray's log worker-*-{os.getpid()}.err of this node"


class EngineChild:
    """Starts the engine at once. If the replica dies in whatever way, the kernel kills the engine.

    Otherwise an engine that nobody reaches would keep its GPU, and its replica's successor would have no room.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int) -> None:
        """`port`: of loopback, where it answers. KVTierError if the program cannot be started."""
        self._port = port
        tied = [sys.executable, "-m", "kvtier.service.ray.die_with_parent", str(os.getpid())]
        try:
            self._process = subprocess.Popen([*tied, *command], env=child_environment(env), stdin=subprocess.DEVNULL)
        except OSError as error:
            raise KVTierError(f"{command[0]}: {error.strerror}") from error

    def wait_ready(self, timeout: float) -> Any:
        """Wait until it answers requests; returns its page `/v1/models`. KVTierError if it does not come to that."""
        until = time.monotonic() + timeout
        while not self.is_healthy():
            if (status := self._process.poll()) is not None:
                raise KVTierError(f"the engine ended with status {status} before it was ready; {_its_lines()}")
            if time.monotonic() > until:
                self.stop(0.0)
                raise KVTierError(
                    f"the engine was not ready after {timeout:g} s; raise start_timeout, or {_its_lines()}"
                )
            time.sleep(_LOOK)
        status, body = self._page("/v1/models")
        if status != http.client.OK:
            raise KVTierError(f"the engine's /v1/models answers {status}; it has to answer without a key")
        return json.loads(body)

    def is_healthy(self) -> bool:
        """Whether it runs and says that it can take requests."""
        if self._process.poll() is not None:
            return False
        try:
            statuses = (self._page(path)[0] for path in _PAGES)
            return next((each for each in statuses if each != http.client.NOT_FOUND), 0) == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def stop(self, grace: float) -> None:
        """Have it end what it answers, and kill it after `grace` seconds. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if grace > 0 else signal.SIGKILL)
            try:
                self._process.wait(grace if grace > 0 else None)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _page(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_LOOPBACK, self._port, timeout=_ANSWER)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read(_MAX_PAGE)
        finally:
            connection.close()


# --- the replica -----------------------------------------------------------------------------------------------------

_PORTS: Final = ("http", "events", "replay")


class EngineReplica:
    """Deployed by `build`; Ray Serve calls every method. The engine is ready once the constructor has ended."""

    def __init__(self, options: RayOptions) -> None:
        self._options, self._node = options, ray.util.get_node_ip_address()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._client: ReplicaClient | None = None
        with held_ports(len(_PORTS)) as numbers:
            self._port = numbers[0]
            ports = {name: str(number) for name, number in zip(_PORTS, numbers, strict=True)} | {"node": self._node}
            self._endpoints = options.endpoints(ports)
            self._engine = EngineChild(options.command(ports), options.environment(ports), self._port)
            self._models = self._engine.wait_ready(options.start_timeout)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What request routers read of it, once."""
        told = {"models": self._models, "node": self._node, "block_size": self._options.told_block_size}
        return {METADATA: {**told, "endpoints": self._endpoints}}

    def record_routing_stats(self) -> dict[str, Any]:
        """The same in the words of Ray Serve's own `KVAwareRouter`, where the engine publishes KV events."""
        profile = ReplicaProfile.of(self._models)
        events = profile.publishers.reached_at(self._node)
        publish, replay = self._endpoints or (events.events, events.replay)
        if publish is None:
            return {}
        size = profile.block_size or self._options.told_block_size
        told = {"endpoint": publish, "replay_endpoint": replay, "block_size": size, "dp_rank": 0}
        return {"kv_event_metadata": {**told, "max_num_batched_tokens": self._options.max_batched_tokens}}

    async def check_health(self) -> None:
        """Raise if the engine does not answer: Ray Serve then starts another replica."""
        if not await asyncio.to_thread(self._engine.is_healthy):
            raise KVTierError("the engine does not answer, or has ended")

    async def answer(self, request: EngineRequest) -> AsyncIterator[AnswerHead | bytes]:
        """Ask the engine: the head of its answer first, then its bytes as they come.

        An engine that cannot answer is a head with status 502, so that the ingress knows whom not to ask again. Raises
        ReplicaFailed if it ends in the middle.
        """
        options = self._options
        deadlines = Deadlines(options.connect_timeout, options.first_byte_timeout, options.stall_timeout)
        if self._client is None:  # it belongs to the event loop that answers
            self._client = ReplicaClient("127.0.0.1", self._port, lambda: None)
        asked = request.method, request.path, request.headers, request.body
        try:
            answer = await self._client.ask(*asked, deadlines)
        except ReplicaFailed as error:
            is_broken = error.failure is Failure.BROKEN
            yield AnswerHead(http.client.BAD_GATEWAY, [(b"content-type", b"application/json")], self._name, is_broken)
            why = f"the engine of replica {self._name} could not answer; try again"
            yield json.dumps(OpenAIError(http.client.BAD_GATEWAY, why, code=error.failure).content).encode()
            return
        try:
            here = f"http://127.0.0.1:{self._port}".encode()  # nobody else's: a redirect becomes one of this server
            headers = [
                (bytes(name), bytes(value).removeprefix(here) if name == b"location" else bytes(value))
                for name, value in answer.headers
            ]
            yield AnswerHead(answer.status, headers, self._name)
            piece = await answer.first()
            while piece:
                yield piece
                piece = await answer.piece()
        finally:
            answer.close()

    def __del__(self) -> None:
        """Ray Serve's last call, after requests under way have ended."""
        with contextlib.suppress(AttributeError):  # a constructor that failed
            self._engine.stop(self._options.stop_timeout)
