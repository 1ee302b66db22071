"""The engine of a replica on Ray Serve: how it is started, and that it never outlives its replica."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from event_rig import until
from node_rig import free_port
from pydantic import ValidationError

from kvtier.service.ray.child import EngineChild, held_ports
from kvtier.service.ray.options import RayOptions
from kvtier.tiers.errors import ConfigError, KVTierError, MissingPackages

PORTS = {"node": "10.0.0.7", "http": "8001", "events": "8002", "replay": "8003"}
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/health": b"", "/v1/models": b'{"data": []}'}
        self.send_response(200 if self.path in known else 404)
        self.send_header("content-length", str(len(known.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(known.get(self.path, b""))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
OWNER = """
import sys, time
from kvtier.service.ray.child import EngineChild
engine = EngineChild([sys.executable, "-c", sys.argv[2], sys.argv[1]], {}, int(sys.argv[1]))
engine.wait_ready(60)
print(engine._process.pid, flush=True)
time.sleep(600)
"""


def test_our_engine_is_told_model_address_and_where_to_publish() -> None:
    options = RayOptions(model="/m", options=("--exact",), env={"KVTIER_EVENTS__NODE": "tcp://{node}:5557"})
    assert options.command(PORTS) == [
        *(sys.executable, "-m", "kvtier.cli", "engine", "--model", "/m", "--http", "127.0.0.1:8001", "--exact")
    ]
    assert options.environment(PORTS) == {
        "KVTIER_SERVER__MAX_WAITING": "256",  # as `max_requests`: it refuses nothing that it is given
        "KVTIER_EVENTS__PUBLISH": "tcp://10.0.0.7:8002",
        "KVTIER_EVENTS__REPLAY": "tcp://10.0.0.7:8003",
        "KVTIER_EVENTS__ALLOW_REMOTE": "true",
        "KVTIER_EVENTS__NODE": "tcp://10.0.0.7:5557",
    }
    assert options.endpoints(PORTS) is None  # it tells them


def test_vllm_is_told_the_same_in_its_words_and_json_stays_as_it_is() -> None:
    connector = '{"kv_connector": "KVTierConnector", "kv_connector_extra_config": {"host": {"size": "1GiB"}}}'
    options = RayOptions(
        model="m", engine="vllm", program=("vllm", "serve"), options=("--kv-transfer-config", connector)
    )
    command = options.command(PORTS)
    assert command[:7] == ["vllm", "serve", "m", "--host", "127.0.0.1", "--port", "8001"]
    assert command[-1] == connector
    events = command[command.index("--kv-events-config") + 1]
    assert '"endpoint": "tcp://*:8002", "replay_endpoint": "tcp://*:8003"}' in events
    assert options.endpoints(PORTS) == ("tcp://10.0.0.7:8002", "tcp://10.0.0.7:8003")
    assert options.fallback_block_size == 16
    missing = RayOptions(model="m", engine="vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(ConfigError, match=r'engine "vllm": no such program .*; set program'):
            missing.command(PORTS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replicas", 0),
        ("engine", "other"),
        ("unknown", 1),
        ("model", ""),
        ("options", ["--http", "127.0.0.1:1"]),
        ("options", ["--model=other"]),
    ],
)
def test_an_option_that_cannot_be_meant_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        RayOptions.model_validate({"model": "m", field: value})


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        ValidationError, match="replicas and autoscaling: both set the number of replicas; leave one out"
    ):
        RayOptions(model="m", replicas=2, autoscaling={"max_replicas": 4})
    # Routers are told the size; vLLM itself tells it to nobody.
    for words in (("--block-size", "32"), ("--block-size=32",)):
        with pytest.raises(ValidationError, match=r"options --block-size.*: set block_size"):
            RayOptions(model="m", engine="vllm", options=words)
    sized = RayOptions(model="m", engine="vllm", program=("vllm",), block_size=32)
    command = sized.command(PORTS)
    assert command[command.index("--block-size") + 1] == "32"
    assert sized.fallback_block_size == 32


def test_ready_is_who_answers_and_a_stopped_one_is_gone() -> None:
    with held_ports(1) as (port,):
        engine = EngineChild([sys.executable, "-c", SERVER, str(port)], {}, port)
        assert engine.wait_ready(60) == {"data": []}
    assert engine.is_healthy()
    engine.stop(10)
    assert not engine.is_healthy()
    engine.stop(10)


def test_an_engine_that_ends_or_is_never_ready_is_one_line() -> None:
    engine = EngineChild([sys.executable, "-c", "raise SystemExit(3)"], {}, free_port())
    with pytest.raises(KVTierError, match="ended with status 3 before it was ready"):
        engine.wait_ready(60)
    engine = EngineChild([sys.executable, "-c", "import time; time.sleep(600)"], {}, free_port())
    with pytest.raises(KVTierError, match=r"not ready after 0.5 s; raise start_timeout"):
        engine.wait_ready(0.5)
    assert engine._process.poll() is not None


def test_a_port_waits_for_its_engine_however_long_that_loads() -> None:
    with held_ports(64) as numbers, held_ports(64) as others:
        assert len({*numbers, *others}) == 128
        # Nobody else gets one.
        for port in numbers[:8]:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        # Servers do: ours and vLLM's over HTTP, and ZMQ's publishers.
        http, events, replay, *_ = numbers
        context: zmq.Context[Any] = zmq.Context()
        publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        publisher.bind(f"tcp://*:{events}")
        router.bind(f"tcp://127.0.0.1:{replay}")
        with socket.create_server(("127.0.0.1", http)) as server, socket.create_connection(("127.0.0.1", http)):
            server.settimeout(30)
            server.accept()[0].close()
        context.destroy(linger=0)


def test_it_dies_with_a_replica_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(free_port()), SERVER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(owner.pid, signal.SIGKILL)
    until(lambda: _is_gone(pid), 30)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
    finally:
        time.sleep(0.05)


# The application without Ray; `make test-ray` has the rest.


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kvtier.service.ray.application", raising=False)
    with pytest.raises(MissingPackages, match=r"^kvtier.service.ray needs ray: pip install 'ray\[serve\]>=2\.60'$"):
        importlib.import_module("kvtier.service.ray").build  # noqa: B018
