"""Clients of a daemon in processes of their own, for test_daemon.py: `_client_child.py SOCKET WHAT [COUNT]`.

`load` prints how many blocks of chain 0 it finds, all verified. `hold` stores chain 1, takes a lease on it, reserves
slots for chain 2, says so and sleeps. `join` is `hold` with a worker, a process that has joined the client and sleeps
on after it. `single` has preallocated slots, and uses one. `cycles` forks COUNT clients, each killed while it holds a
lease and filling slots. `steps` attaches with the default deadline, makes COUNT steps, and prints what came of them as
JSON. `busy` computes. `half` and `whole` reserve 64 blocks, and send half or all of the message that seals them and
reserves 64 more. Whoever sleeps or computes ends with its story, whose directory the socket is in.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

from doubles import SLOT_BYTES, chain_of  # noqa: E402
from service_rig import ask, attach, drops, fill, load, records, store, wanted  # noqa: E402

from kvtier.connector.daemon.link import join  # noqa: E402
from kvtier.connector.daemon.wire import (  # noqa: E402
    Reserve,
    Seal,
    pack_request,
)
from kvtier.tiers.config.config import Config  # noqa: E402
from kvtier.tiers.tier import Outcome  # noqa: E402


def hold(socket: Path, number: int) -> bytes:
    """Be a client with a lease and slots to fill; the client's name. What it holds lives on in a global."""
    tiers = attach(socket)
    chain, other = (chain_of(4, first_token=1000 * (2 * number + n)) for n in (1, 2))
    store(tiers, chain)
    claim, promised = ask(tiers, chain)
    assert promised == 4
    lease = tiers.lease(claim)
    reservations = tiers.reserve([wanted(other)])
    assert reservations[0] is not None
    _kept.append((tiers, lease, reservations))
    assert tiers.member is not None
    return tiers.member[1]


def steps(socket: Path, count: int) -> dict[str, int]:
    """Each step stores a block of eight sequences, and asks for those that another client may have stored."""
    tiers = attach(socket, size=1 << 20, deadline=Config().service.deadline)
    member, num_stored = tiers.member, 0
    for number in range(count):
        chains = [chain_of(1, first_token=100_000 + 64 * (8 * number + n)) for n in range(8)]
        for chain, reservation in zip(chains, tiers.reserve([wanted(each) for each in chains]), strict=True):
            if reservation is not None:
                fill(tiers, reservation)
                tiers.seal(reservation, records(reservation, chain), tiers.epoch)
                num_stored += len(reservation)
        load(tiers, chains[-1])
    told = {"lost": int(tiers.member != member), "gone": int(drops(tiers, Outcome.BREAKER_OPEN)), "stored": num_stored}
    tiers.close()
    return told


def send(socket: Path, *, whole: bool) -> None:
    """Send a step's message, or the first half of it."""
    tiers = attach(socket, size=1 << 20)
    chains = [chain_of(1, first_token=100_000 + 64 * n) for n in range(128)]
    reservations = tiers.reserve([wanted(each) for each in chains[:64]])
    numbers, tokens = [], []
    for chain, reservation in zip(chains[:64], reservations, strict=True):
        assert reservation is not None
        fill(tiers, reservation)
        numbers.append(reservation.number)  # type: ignore[attr-defined]
        tokens.append(chain.block_tokens(0))
    seal, reserve = Seal(0, numbers, [1] * 64, tokens), Reserve.of(1000, [wanted(each) for each in chains[64:]])
    frame = pack_request(7, [seal, reserve])
    link = tiers._attachment.link
    assert link is not None
    link.output += frame if whole else frame[: len(frame) // 2]
    link.send()
    _kept.append((tiers, reservations))


_kept: list[object] = []


def sleep(socket: Path) -> None:
    while socket.parent.exists():
        time.sleep(0.2)


def main() -> None:
    socket, what = Path(sys.argv[1]), sys.argv[2]
    if what == "load":
        tiers = attach(socket)
        print(load(tiers, chain_of(4)), flush=True)
        tiers.close()
    elif what == "hold":
        hold(socket, 0)
        print("ready", flush=True)
        sleep(socket)
    elif what == "join":
        client = hold(socket, 0)
        worker = os.fork()
        if not worker:
            os.closerange(3, 64)  # a worker is no copy of the scheduler: it has neither its socket nor its region
            join(socket, client)
            print(f"joined {os.getpid()}", flush=True)
        sleep(socket)
    elif what == "single":
        tiers, number = attach(socket, size=128 * SLOT_BYTES), 0
        while (link := tiers._attachment.link) is None or not link.preallocated:
            tiers.tick()
            number += 1
            _kept.append(tiers.reserve([wanted(chain_of(1, first_token=100_000 + 64 * number))]))
        _kept.append(tiers.reserve([wanted(chain_of(1, first_token=100_000))]))
        print("ready", flush=True)
        sleep(socket)
    elif what == "cycles":
        for number in range(int(sys.argv[3])):
            told, tell = os.pipe()
            child = os.fork()
            if not child:
                hold(socket, number % 4)
                os.write(tell, b"!")
                sleep(socket)
            os.close(tell)
            assert os.read(told, 1) == b"!", f"client {number} has failed"
            os.close(told)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print("done", flush=True)
    elif what == "steps":
        print(json.dumps(steps(socket, int(sys.argv[3]))), flush=True)
    elif what == "busy":
        while socket.parent.exists():
            sum(range(10_000))
    elif what in ("half", "whole"):
        send(socket, whole=what == "whole")
        print("ready", flush=True)
        sleep(socket)


main()
