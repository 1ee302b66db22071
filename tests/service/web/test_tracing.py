"""One request's spans, through router, engine, daemon and tiers, as a collector gets them; and what is off costs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from doubles import wait_until
from fork_rig import SERVICES, Forked
from node_rig import free_port
from otlp_rig import Collector, SeenSpan, collecting, drawn, tree
from server_rig import BLOCK, MODEL, ServerProcess
from service_rig import DaemonProcess, end_child, environment

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
PROMPT = "A prompt of several blocks, of which the slab has some once the daemon was started anew. " * 3


@contextmanager
def router(replica: str, **variables: str) -> Iterator[str]:
    """`kvtier route` before one replica; its URL."""
    http = f"127.0.0.1:{free_port()}"
    command = ["-m", "kvtier.cli", "route", "--replica", replica, "--http", http]
    process = Forked(command, SERVICES, env={**environment(), **variables})
    try:
        wait_until(lambda: _answers(f"http://{http}/readyz"))
        yield f"http://{http}"
    finally:
        end_child(process)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def ask(url: str, trace: str, prompt: str = PROMPT) -> httpx2.Response:
    """As a client that is traced asks."""
    headers = {"traceparent": f"00-{trace}-{CLIENT}-01", "x-request-id": "slow-one"}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def seen(collector: Collector, trace: str, *names: str) -> list[SeenSpan]:
    """The spans of a trace once these names are among them, and every one's parent."""

    def is_whole() -> bool:
        spans = collector.trace(trace)
        ids = {each.id for each in spans} | {CLIENT}
        return {*names} <= {each.name for each in spans} and all(each.parent in ids for each in spans)

    wait_until(is_whole)
    return collector.trace(trace)


def test_a_request_is_one_tree_from_the_router_to_the_slab(home: Path, model: Path) -> None:
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(*next(iter(variables.items())))
        tiers = {"file__path": str(home / "kv"), "file__size": "64MiB", "host__size": "32MiB"}
        daemon = DaemonProcess(home / "s", **tiers)
        engine = ServerProcess(model, service__socket=str(home / "s"), host__size="8MiB")
        stack.callback(lambda: engine.process.poll() is None and engine.end(15))
        url = stack.enter_context(router(engine.url, **variables))

        # Computed, and written to the slab: its first block is in no tier, and nothing of it was ever there.
        ask(url, TRACE)
        cold = seen(collector, TRACE, "POST /v1/completions", "replica", "generate", "lookup", "write file")
        assert [(depth, each.service, each.name, each.kind) for depth, each in _below_client(cold)][:6] == [
            (0, "kvtier-router", "POST /v1/completions", "server"),
            (1, "kvtier-router", "replica", "client"),
            (2, "kvtier-engine", "POST /v1/completions", "server"),
            (3, "kvtier-engine", "generate", "internal"),
            (4, "kvtier-engine", "lookup", "client"),
            (5, "kvtier-daemon", "lookup", "server"),
        ]
        by_name = {(each.service, each.name): each.attributes for each in cold}
        assert by_name["kvtier-router", "POST /v1/completions"]["kvtier.request_id"] == "slow-one"
        assert by_name["kvtier-engine", "POST /v1/completions"]["kvtier.request_id"] == "slow-one"
        assert by_name["kvtier-router", "POST /v1/completions"]["http.response.status_code"] == 200
        assert by_name["kvtier-router", "replica"]["kvtier.replica"] == engine.url.removeprefix("http://")
        generated = by_name["kvtier-engine", "generate"]
        num_blocks = (generated["gen_ai.usage.input_tokens"] - 1) // BLOCK
        assert generated["kvtier.missed.absent"] == num_blocks
        assert (generated["kvtier.hit_tokens.l2"], generated["kvtier.hit_tokens.file"]) == (0, 0)
        assert generated["gen_ai.usage.output_tokens"] == 3
        looked = by_name["kvtier-daemon", "lookup"]
        assert looked["kvtier.blocks.missed"] == looked["kvtier.blocks"] == num_blocks
        assert looked["kvtier.missed.never"] == num_blocks  # the daemon knows why
        assert by_name["kvtier-daemon", "write file"]["kvtier.blocks"] >= num_blocks

        # The daemon's memory and the engine's are gone; the slab has the blocks, and the tree says what was read of it.
        assert engine.end(15) == 0
        end_child(daemon.process)
        daemon = DaemonProcess(home / "s", **tiers)
        stack.callback(lambda: end_child(daemon.process))
        engine = ServerProcess(
            model, service__socket=str(home / "s"), host__size="8MiB", server__http=engine.url.removeprefix("http://")
        )
        wait_until(lambda: _answers(f"{url}/readyz"))
        again = TRACE[::-1]
        ask(url, again)
        warm = seen(collector, again, "generate", "lookup", "read file", "load")
        print(*drawn(warm), sep="\n")
        by_name = {(each.service, each.name): each.attributes for each in warm}
        generated = by_name["kvtier-engine", "generate"]
        assert generated["kvtier.hit_tokens.file"] == num_blocks * BLOCK
        assert "kvtier.missed.absent" not in generated
        assert by_name["kvtier-daemon", "lookup"]["kvtier.blocks.file"] == num_blocks
        reads = [each for each in warm if each.name == "read file"]
        assert sum(each.attributes["kvtier.blocks"] for each in reads) == num_blocks
        (looked_up,) = (each for each in warm if (each.service, each.name) == ("kvtier-daemon", "lookup"))
        assert {each.parent for each in reads} == {looked_up.id}
        assert all(looked_up.start <= each.start <= each.end <= looked_up.end for each in reads)
        assert by_name["kvtier-engine", "load"]["kvtier.blocks"] == num_blocks

        # No span says anything of the prompt.
        assert not any(PROMPT[:8] in str(value) for each in collector.spans for value in each.attributes.values())


def _below_client(spans: list[SeenSpan]) -> list[tuple[int, SeenSpan]]:
    (root,) = (each for each in spans if each.parent == CLIENT)
    others = [each for each in spans if each is not root]
    return tree([SeenSpan(**{**vars(root), "parent": ""}), *others])
