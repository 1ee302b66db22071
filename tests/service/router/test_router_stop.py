"""A router that is told to stop while events flood in: it ends, whatever they are, and answers until then."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx2
import msgpack
import pytest
import zmq
from extent import brief
from router_rig import MODEL, PATIENCE, replicas, until
from service_rig import end_child, environment

from kvtier.service.events.wire import MAX_PAYLOAD, topic_of

SIZE = 4
LIMIT = 5.0  # seconds a router may take to stop, on an idle machine
TOPIC = topic_of(bytes.fromhex("ab" * 32)).encode()
_ROOM = MAX_PAYLOAD // brief(8, 1) - 4096  # what a batch has for its names and tokens


def batch(*events: object) -> bytes:
    payload: bytes = msgpack.packb([1.0, list(events), 0])
    assert _ROOM // 2 < len(payload) <= MAX_PAYLOAD
    return payload


def hostile_batches() -> tuple[bytes, bytes, bytes]:
    """As large as a batch may be (in short an eighth): a million blocks, sixteen million removed, the most events."""
    num_blocks = _ROOM // (9 + SIZE)
    names = [2**63 + number for number in range(num_blocks)]
    tokens = [number // SIZE % 100 for number in range(num_blocks * SIZE)]
    stored = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    many = [["BlockRemoved", [2**63 + number], "GPU"] for number in range(_ROOM // 168)]
    return batch(stored), batch(["BlockRemoved", [1] * _ROOM, "GPU"]), batch(*many, ["BlockRemoved", names, "GPU"])


@contextmanager
def flood(topic: bytes, payloads: Sequence[bytes]) -> Iterator[str]:
    """A publisher that sends more than anybody digests; its address."""
    with zmq.Context() as context, context.socket(zmq.PUB) as out:
        out.setsockopt(zmq.LINGER, 0)
        out.setsockopt(zmq.SNDHWM, 2)
        port = out.bind_to_random_port("tcp://127.0.0.1")
        is_over = threading.Event()

        def send() -> None:
            number = 0
            while not is_over.wait(0.1):
                out.send_multipart([topic, number.to_bytes(8, "big"), payloads[number % len(payloads)]])
                number += 1

        sending = threading.Thread(target=send)
        sending.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            is_over.set()
            sending.join(PATIENCE)


@pytest.mark.timeout(brief(120, 600))
def test_a_router_stops_in_time_whatever_comes_in() -> None:
    stored, removed, many = hostile_batches()
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "route", "--http", "127.0.0.1:0"]
    with replicas(1, MODEL) as (replica,), flood(b"", [stored, many]) as engine, flood(TOPIC, [removed]) as node:
        spec = f"{replica.url},events={engine},node={node},block_size={SIZE}"
        begun = time.monotonic()
        run = subprocess.Popen([*command, "--replica", spec], env=environment(), stderr=subprocess.PIPE, text=True)
        try:
            assert run.stderr is not None
            ready = next(line for line in run.stderr if " is up" not in line)
            load = time.monotonic() - begun  # what it takes to start says how busy this machine is
            url = f"http://{ready.rpartition(' ')[2].strip()}"
            reading = threading.Thread(target=run.stderr.read)  # or it would wait for who reads its log
            reading.start()
            with httpx2.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                # The engine's blocks come and go, and of the node's a million take two seconds to remove.
                # While both are being digested, it answers all the same.
                until(lambda: client.get("/status").json()["indexed_blocks"] > 10_000, 240)
                until(lambda: 'reason="unknown_removal"' in client.get("/metrics").text, 240)
                answer = client.post("/v1/completions", json={"model": "m", "prompt": list(range(40))})
                assert answer.status_code == 200
            run.send_signal(signal.SIGTERM)
            assert run.wait(LIMIT + 2 * load) == 0
            reading.join(PATIENCE)
        finally:
            end_child(run)
