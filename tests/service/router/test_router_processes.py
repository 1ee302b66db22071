"""A router of several processes behind one port: one for clients, whatever happens to one of its processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgpack
import pytest
import zmq
from command_rig import kvtier_process as kvtier
from extent import brief
from node_rig import free_port
from router_rig import MODEL, PATIENCE, ToldReplica, replicas, until
from service_rig import end_child, environment

from kvtier.service.events.wire import MAX_PAYLOAD, topic_of
from kvtier.service.router.processes import Board

Pair = tuple[ToldReplica, ToldReplica]


class SeveralProcesses:
    """`kvtier route --processes N`, and what is read of it over new connections, which may reach any of them."""

    def __init__(self, *replicas: ToldReplica, number: int = 2, hung: float = 30.0, **options: str) -> None:
        """`hung`: seconds after which a silent process is killed."""
        specs = [argument for replica in replicas for argument in ("--replica", replica.url)]
        program = f"import kvtier.service.router.processes as p; p._HUNG = {hung}; from kvtier.cli import main; main()"
        command = ["-c", program, "route", "--processes", str(number), *specs]
        options = {"router__http": "127.0.0.1:0", **options}
        patient = {"router__probe_interval": "50ms", "router__probe_timeout": "20s", "router__connect_timeout": "20s"}
        self.process = subprocess.Popen(
            [sys.executable, *command], env=environment(**patient, **options), stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        until(lambda: any(" ready on " in line for line in self.log) or self.process.poll() is not None)
        ready = next(line for line in self.log if " ready on " in line)
        assert f"ready on {len(replicas)} replicas, {number} processes, http on 127.0.0.1:" in ready
        self.url = f"http://{ready.rpartition(' ')[2].strip()}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=PATIENCE, trust_env=False)

    def complete(self, **fields: object) -> httpx2.Response:
        body = {"model": "m", "prompt": "a prompt", **fields}
        return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)

    def stream(self) -> AbstractContextManager[httpx2.Response]:
        body = {"model": "m", "prompt": "x", "stream": True}
        return httpx2.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)

    def metrics(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines}

    def told(self, name: str) -> float:
        """The sum of a metric, whatever its labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    @property
    def pids(self) -> list[int]:
        """Of its processes, the parent apart."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._reading.join(PATIENCE)  # until its processes have ended, too
        end_child(self.process)


@contextmanager
def several(*replicas: ToldReplica, number: int = 2, hung: float = 30.0, **options: str) -> Iterator[SeveralProcesses]:
    router = SeveralProcesses(*replicas, number=number, hung=hung, **options)
    try:
        yield router
    finally:
        router.close()


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_each_process_answers_and_every_page_is_of_all(pair: Pair) -> None:
    with several(*pair) as router:
        assert len(router.pids) == 2
        before = sum(len(each.seen) for each in pair)
        for _ in range(40):
            assert router.complete().status_code == 200
        assert sum(len(each.seen) for each in pair) == before + 40
        for _ in range(8):  # whichever process is reached
            until(lambda: router.told("kvtier_route_requests_total") == 40)
            until(lambda: sum(router.get("/status").json()["requests"].values()) == 40)
        status: Any = router.get("/status").json()
        assert sum(each["requests"] for each in status["replicas"]) == 40
        assert router.told("kvtier_route_answers_total") == 40
        assert router.get("/readyz").json() == {"ready": True, "replicas_up": 2}
        # one process alone did not have them all: its own ledger is what the others lack
        assert all(cpu_of(pid) > 0 for pid in router.pids)


def test_one_that_dies_is_replaced_and_what_it_counted_stays(pair: Pair) -> None:
    with several(*pair) as router:
        for _ in range(20):
            router.complete()
        until(lambda: router.told("kvtier_route_requests_total") == 20)
        time.sleep(0.6)  # each has told the others
        killed, stays = router.pids
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(router.pids) == 2 and killed not in router.pids)
        assert stays in router.pids
        for _ in range(4):
            until(lambda: router.metrics().get('kvtier_route_replaced_processes_total{reason="SIGKILL"}') == 1)
            assert router.told("kvtier_route_requests_total") == 20
        for _ in range(20):
            assert router.complete().status_code == 200
        until(lambda: router.told("kvtier_route_requests_total") == 40)
        assert any("process 0 of the router ended (SIGKILL)" in line for line in router.log)


def test_one_that_hangs_is_replaced(pair: Pair) -> None:
    with several(*pair, hung=8.0) as router:
        hanging, stays = router.pids
        os.kill(hanging, signal.SIGSTOP)
        until(lambda: len(router.pids) == 2 and hanging not in router.pids)
        assert stays in router.pids
        until(lambda: any("process 0 of the router ended (hung)" in line for line in router.log))
        for _ in range(4):
            until(lambda: router.told("kvtier_route_replaced_processes_total") == 1)
            assert 'kvtier_route_replaced_processes_total{reason="hung"}' in router.metrics()


def test_one_that_hangs_does_not_hold_up_the_end(pair: Pair) -> None:
    with several(*pair, hung=3.0) as router:  # far less than `drain`
        os.kill(router.pids[0], signal.SIGSTOP)
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(PATIENCE) == 0


def test_what_is_half_written_is_not_read() -> None:
    board = Board(1)
    assert (board.read(0), board.age(0)) == ({}, float("inf"))
    board.write(0, {"counts": {"requests": 1}})
    assert board.read(0)["counts"] == {"requests": 1}
    os.pwrite(board._files[0], b"9", 40)  # a byte of another value
    assert board.read(0)["counts"] == {"requests": 1}
    os.ftruncate(board._files[0], 20)
    assert board.read(0)["counts"] == {"requests": 1}
    assert board.age(0) < PATIENCE


def test_requests_of_all_processes_count_against_a_replicas_limit() -> None:
    with replicas(1) as (one,), several(one, router__max_requests="2") as router:
        one.behave(wait=PATIENCE)
        asking = [threading.Thread(target=router.complete) for _ in range(2)]
        for each in asking:
            each.start()
        until(lambda: len(one.seen) == 2)
        for _ in range(6):  # in whichever process
            until(lambda: router.told("kvtier_route_in_flight") == 2)
        time.sleep(0.6)
        told = [router.complete() for _ in range(6)]
        assert {(each.status_code, each.json()["error"]["code"]) for each in told} == {(429, "full")}
        one.behave()
        for each in asking:
            each.join(PATIENCE)
        until(lambda: router.complete().status_code == 200)


def test_a_replica_that_leaves_the_list_gets_nothing_from_any(pair: Pair, tmp_path: Path) -> None:
    listed = tmp_path / "replicas"
    listed.write_text("".join(f"{each.url}\n" for each in pair))
    with several(router__replicas_file=str(listed)) as router:
        until(lambda: {router.complete().headers["x-kvtier-replica"] for _ in range(8)} == {each.name for each in pair})
        listed.write_text(f"{pair[0].url}\n")
        until(lambda: all(len(router.get("/status").json()["replicas"]) == 1 for _ in range(12)))
        assert {router.complete().headers["x-kvtier-replica"] for _ in range(12)} == {pair[0].name}


def test_what_was_wrong_with_the_list_is_counted_by_all_and_stays(pair: Pair, tmp_path: Path) -> None:
    listed = tmp_path / "replicas"
    listed.write_text(f"{pair[0].url}\n")
    with several(router__replicas_file=str(listed)) as router:
        listed.write_text("no url\n")
        until(lambda: router.told("kvtier_route_list_errors_total") >= 2)
        listed.write_text(f"{pair[0].url}\n")
        time.sleep(1.0)  # each has told the others
        counted = router.told("kvtier_route_list_errors_total")
        killed = router.pids[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(router.pids) == 2 and killed not in router.pids)
        for _ in range(8):  # whichever process is reached
            until(lambda: router.told("kvtier_route_list_errors_total") == counted)


def test_a_signal_stops_all_and_lets_answers_end(pair: Pair) -> None:
    with several(*pair) as router:
        for replica in pair:
            replica.behave(events=20, pause=0.1)
        with router.stream() as answer:
            children = router.pids
            for pid in (router.process.pid, *children):  # as systemd does
                os.kill(pid, signal.SIGTERM)
            assert answer.read().decode().endswith("data: [DONE]\n\n")
        assert router.process.wait(PATIENCE) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_second_signal_ends_all_at_once() -> None:
    with replicas(1) as (one,), several(one) as router:
        one.behave(events=10**6, pause=0.02)
        with router.stream() as answer:
            pieces = answer.iter_text()
            next(pieces)
            router.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            router.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.TransportError):
                for _ in pieces:
                    pass
        assert router.process.wait(PATIENCE) == 0
        one.behave()


def test_its_port_is_free_again_at_once(pair: Pair) -> None:
    port = free_port()
    for _ in range(2):
        with several(*pair, router__http=f"127.0.0.1:{port}") as router:
            with router.stream() as answer:  # closed by the router first: its end of it lingers
                router.process.send_signal(signal.SIGTERM)
                answer.read()
            assert router.process.wait(PATIENCE) == 0


def test_processes_end_with_a_parent_that_was_killed(pair: Pair) -> None:
    with several(*pair) as router:
        children = router.pids
        os.kill(router.process.pid, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_a_port_that_is_taken_and_a_wrong_setting_are_one_line(pair: Pair) -> None:
    spec = ("--replica", pair[0].url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        run = kvtier("route", "--http", http, "--processes", "2", *spec)
    why = "Address already in use; choose another address or port"
    assert (run.returncode, run.stderr) == (2, f'kvtier: [router] http "{http}": {why}\n')
    run = kvtier("route", "--http", "127.0.0.1:0", "--processes", "0", *spec)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "[router] processes 0: " in run.stderr
    run = kvtier("route", "--http", "127.0.0.1:0", "--processes", "2", *spec, *spec)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "named twice" in run.stderr


# A router that is told to stop while events flood in: it ends, whatever they are, and answers until then.


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
