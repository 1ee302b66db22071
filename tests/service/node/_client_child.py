"""Clients of a daemon in processes of their own, for test_daemon.py: `_client_child.py SOCKET WHAT [COUNT]`.

`load` prints how many blocks of chain 0 it finds, all verified. `hold` stores chain 1, takes a lease on it, reserves
slots for chain 2, says so and sleeps. `join` is `hold` with a worker, a process that has joined the client and sleeps
on after it. `cycles` forks COUNT clients, each killed while it holds a lease and filling slots.
"""

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rigs")]

from doubles import chain_of  # noqa: E402
from service_rig import ask, attach, load, store, wanted  # noqa: E402

from kvtier.connector.daemon.attachment import join  # noqa: E402


def hold(socket: Path, number: int) -> bytes:
    """Be a client with a lease and slots to fill; the client's name. What it holds lives on in a global."""
    tiers = attach(socket)
    chain, other = (chain_of(4, first_token=1000 * (2 * number + n)) for n in (1, 2))
    store(tiers, chain)
    claim, promised = ask(tiers, chain)
    assert promised == 4
    lease = tiers.take(claim)
    reservations = tiers.reserve([wanted(other)])
    assert reservations[0] is not None
    _kept.append((tiers, lease, reservations))
    assert tiers.member is not None
    return tiers.member[1]


_kept: list[object] = []


def main() -> None:
    socket, what = Path(sys.argv[1]), sys.argv[2]
    if what == "load":
        tiers = attach(socket)
        print(load(tiers, chain_of(4)), flush=True)
        tiers.close()
    elif what == "hold":
        hold(socket, 0)
        print("ready", flush=True)
        time.sleep(600)
    elif what == "join":
        client = hold(socket, 0)
        worker = os.fork()
        if not worker:
            os.closerange(3, 64)  # a worker is no copy of the scheduler: it has neither its socket nor its region
            join(socket, client)
            print(f"joined {os.getpid()}", flush=True)
        time.sleep(600)
    elif what == "cycles":
        for number in range(int(sys.argv[3])):
            told, tell = os.pipe()
            child = os.fork()
            if not child:
                hold(socket, number % 4)
                os.write(tell, b"!")
                time.sleep(600)
            os.close(tell)
            assert os.read(told, 1) == b"!", f"client {number} has failed"
            os.close(told)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print("done", flush=True)


main()
