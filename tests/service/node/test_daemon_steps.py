"""Stories of a daemon's steps: many clients at once beside busy processes, and processes killed in a step's midst."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles import SLOT_BYTES, chain_of, wait_until
from service_rig import (
    PATIENCE,
    DaemonProcess,
    DaemonThread,
    attach,
    attached,
    client_child,
    drops,
    end_child,
    fill,
    load,
    records,
    says,
    wanted,
    where,
)

from kvtier.tiers.tier import Outcome

NUM_CLIENTS = 16


def test_sixteen_clients_that_start_at_once_beside_busy_processes_keep_their_daemon(home: Path) -> None:
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    busy = [client_child(home / "s", "busy") for _ in range(2)]
    clients = [client_child(home / "s", "steps", "20") for _ in range(NUM_CLIENTS)]
    told = [json.loads(says(each)) for each in clients]
    # However late an answer was: nobody's connection was given up, nobody met a daemon that was gone.
    assert [(each["lost"], each["gone"]) for each in told] == [(0, 0)] * NUM_CLIENTS
    assert sum(each["stored"] for each in told) > 0
    for process in (*clients, *busy):
        end_child(process)
    witness = attach(home / "s")
    witness.check()
    witness.close()
    assert daemon.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_client_that_is_killed_within_a_step_leaves_nothing_filling(
    home: Path, serve: Callable[..., DaemonThread], whole: bool
) -> None:
    """FAULTS 41."""
    served = serve(host={"size": 256 * SLOT_BYTES})
    witness = attach(home / "s", size=1 << 20)
    client = client_child(home / "s", "whole" if whole else "half")
    assert says(client) == "ready"
    num_held = 64  # what the message reserves, or what it did not seal: it was never there as a whole
    wait_until(
        lambda: [c.reservations for c in served.daemon.call(served.daemon.clients) if c.reservations] == [num_held]
    )
    end_child(client)
    wait_until(lambda: len(served.daemon.call(served.daemon.clients)) == 1)
    served.check()
    assert served.daemon.counts["reservations_reclaimed"] == num_held
    [namespace] = served.daemon.call(served.daemon.namespaces)
    assert namespace.hierarchy.host.pool.counts().filling == 0
    found = [load(witness, chain_of(1, first_token=100_000 + 64 * n)) for n in range(128)]
    assert found == ([1] * 64 + [0] * 64 if whole else [0] * 128)
    witness.close()


def test_a_daemon_that_is_killed_within_a_step_costs_that_step(home: Path) -> None:
    """FAULTS 41: nobody waits for the deadline of one that is gone."""
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    tiers, chains = attach(home / "s"), [chain_of(1, first_token=64 * n) for n in range(64)]
    first = tiers.reserve([wanted(each) for each in chains[:8]])
    for chain, reservation in zip(chains, first, strict=False):
        assert reservation is not None
        fill(tiers, reservation)
        tiers.seal(reservation, records(reservation, chain), tiers.epoch)
    # It is stopped, so that it has read none of the message; and killed while the step waits for its answer.
    daemon.process.send_signal(signal.SIGSTOP)
    killing = threading.Timer(0.2, daemon.end, [signal.SIGKILL])
    killing.start()
    assert tiers.reserve([wanted(each) for each in chains[8:]]) == [None] * 56
    assert drops(tiers, Outcome.TIMEOUT) == 56
    killing.join(PATIENCE)
    # Another one has none of it, and is of use at once.
    other = DaemonProcess(home / "s", host__size="1MiB")
    wait_until(lambda: attached(tiers))
    assert where(tiers, chains[0]).miss == 1
    [reservation] = tiers.reserve([wanted(chains[0])])
    assert reservation is not None
    fill(tiers, reservation)
    tiers.seal(reservation, records(reservation, chains[0]), tiers.epoch)
    assert tiers.drain(PATIENCE)
    assert load(tiers, chains[0]) == 1
    tiers.check()
    tiers.close()
    assert other.end(signal.SIGTERM) == 0
