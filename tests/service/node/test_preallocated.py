"""Stories of preallocated slots: a step that stores one block a request does not wait for the daemon."""

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest
from doubles import SLOT_BYTES, chain_of, wait_until
from service_rig import (
    PATIENCE,
    Attach,
    DaemonThread,
    Serve,
    ask,
    client_child,
    drops,
    end_child,
    fill,
    load,
    records,
    says,
    store,
    wanted,
    where,
)

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.link import Link
from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.pool import PoolCounts, Reservation
from kvtier.tiers.tier import Outcome

SIZE: Final = 128 * SLOT_BYTES  # an eighth of it is two clients' share
SHARE: Final = 8  # slots


def chains(num: int, first_token: int = 0) -> list[TokenChain]:
    return [chain_of(1, first_token=first_token + 1000 * n) for n in range(num)]


def reserve(tiers: RemoteTiers, stored: Sequence[TokenChain]) -> list[Reservation]:
    made = tiers.reserve([wanted(chain) for chain in stored])
    assert None not in made
    return [each for each in made if each is not None]


def seal(tiers: RemoteTiers, stored: Sequence[TokenChain], made: Sequence[Reservation]) -> None:
    for chain, reservation in zip(stored, made, strict=True):
        fill(tiers, reservation)
        tiers.seal(reservation, records(reservation, chain), tiers.epoch)


def link_of(tiers: RemoteTiers) -> Link:
    link = tiers._attachment.link
    assert link is not None
    return link


def pool_of(served: DaemonThread) -> PoolCounts:
    [namespace] = served.daemon.call(served.daemon.namespaces)
    return namespace.hierarchy.host.pool.counts()


def ready(tiers: RemoteTiers, num_slots: int) -> None:
    """One store, whose message requests slots; returns once they are there."""
    store(tiers, chain_of(1, first_token=900_000 + num_slots))
    link_of(tiers).num_wanted = num_slots
    tiers.reserve([wanted(chain_of(1, first_token=900_000 + num_slots))])  # a duplicate takes no slot

    def are_there() -> bool:
        tiers.tick()
        return len(link_of(tiers).preallocated) >= num_slots

    wait_until(are_there)


def idle(served: DaemonThread, *clients: RemoteTiers) -> None:
    """A second without a store: every slot is given back."""

    def is_idle() -> bool:
        for tiers in clients:
            link_of(tiers).preallocated_at -= 1.0
            tiers.tick()
        return pool_of(served).filling == 0

    wait_until(is_idle)


class Held:
    """The daemon's loop, held up from `with` to its end."""

    def __init__(self, served: DaemonThread) -> None:
        self._served, self._gate = served, threading.Event()

    def __enter__(self) -> None:
        is_held = threading.Event()

        def hold() -> bool:
            is_held.set()
            return self._gate.wait(PATIENCE)

        self._served.daemon.submit(hold)
        assert is_held.wait(PATIENCE)

    def __exit__(self, *exception: object) -> None:
        self._gate.set()


def test_a_step_stores_while_the_daemon_does_something_else(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers, witness, stored = attach(size=SIZE, deadline=0.2), attach(size=SIZE), chains(4)
    ready(tiers, 4)
    with Held(served):
        start = time.monotonic()
        made = reserve(tiers, stored)
        seal(tiers, stored, made)
        assert time.monotonic() - start < 0.2  # else it has waited
        assert not tiers.is_late
    tiers.tick()
    assert tiers.drain(PATIENCE)
    assert [load(witness, chain) for chain in stored] == [1] * 4  # `load` compares their bytes
    assert drops(tiers, Outcome.TIMEOUT) == 0


def test_a_step_of_more_stores_than_slots_are_there_waits_for_an_answer(serve: Serve, attach: Attach) -> None:
    serve(host={"size": SIZE})
    tiers, stored = attach(size=SIZE), chains(12)
    ready(tiers, 4)
    made = reserve(tiers, stored)
    seal(tiers, stored, made)
    assert tiers.drain(PATIENCE)
    assert [load(tiers, chain) for chain in stored] == [1] * 12


def test_a_client_has_at_most_its_share_of_l2(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers = attach(size=SIZE)
    [namespace] = served.daemon.call(served.daemon.namespaces)
    assert namespace.hierarchy.num_slots // wire.CLIENT_SHARE == SHARE
    for n in range(10):
        stored = chains(2, first_token=100_000 * n)
        seal(tiers, stored, reserve(tiers, stored))
        tiers.tick()
        assert pool_of(served).filling <= SHARE + 2
    wait_until(lambda: (tiers.tick(), pool_of(served).filling)[1] <= SHARE)


def test_all_clients_have_at_most_a_quarter_of_l2(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    clients = [attach(size=SIZE) for _ in range(6)]
    for n, tiers in enumerate(clients):
        link_of(tiers).num_wanted = SHARE
        seal(tiers, chains(1, 50_000 * n), reserve(tiers, chains(1, 50_000 * n)))
    for tiers in clients:
        assert tiers.drain(PATIENCE)
    num_slots = sum(len(link_of(tiers).preallocated) for tiers in clients)
    assert 3 * SHARE < num_slots == pool_of(served).filling <= 4 * SHARE


def test_a_step_that_could_never_use_its_slots_has_none(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers, stored = attach(size=SIZE), chains(SHARE + 1)
    seal(tiers, stored, reserve(tiers, stored))
    assert tiers.drain(PATIENCE)
    assert pool_of(served).filling == 0


def test_a_store_of_no_block_goes_with_those_of_one(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers, chain = attach(size=SIZE), chain_of(1)
    ready(tiers, 4)
    made = tiers.reserve([wanted(chain), Wanted([], chain.root, chain.tenant)])
    assert [each is not None and len(each) for each in made] == [1, 0]
    assert tiers.drain(PATIENCE)
    assert served.daemon.counts["malformed"] + served.daemon.counts["malformed_holding"] == 0


def test_slots_that_are_not_used_are_given_back_soon(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers = attach(size=SIZE)
    ready(tiers, 4)
    assert pool_of(served).filling >= 4
    idle(served, tiers)
    assert link_of(tiers).preallocated == []
    served.check()


def test_slots_on_their_way_to_a_client_that_gave_them_up_are_ignored(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers = attach(size=SIZE)
    ready(tiers, 2)
    link = link_of(tiers)
    with Held(served):  # the answer to the first message comes after the second was sent
        link.send([wire.Preallocate(link.preallocation_round, time.monotonic(), 8)])
        link.give_up_preallocated(time.monotonic())
        link.send()
    wait_until(lambda: (tiers.tick(), pool_of(served).filling)[1] == 0)
    assert tiers.drain(PATIENCE)  # a round trip: all answers were read
    assert link.preallocated == []
    stored = chains(2)
    seal(tiers, stored, reserve(tiers, stored))
    assert tiers.drain(PATIENCE)
    assert [load(tiers, chain) for chain in stored] == [1, 1]


def test_slots_not_renewed_are_freed_and_never_used_again(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": 2 * SIZE}, lease_deadline=0.4)
    tiers, other = attach(size=2 * SIZE), attach(size=2 * SIZE)
    ready(tiers, 4)
    stale = list(link_of(tiers).preallocated)
    wait_until(lambda: pool_of(served).filling == 0)  # the daemon has freed them; this client has not read that
    big = [chain_of(120, first_token=first) for first in (500_000, 600_000)]
    assert [store(other, each) for each in big] == [120, 120]  # in the very slots
    stored = chains(2)
    made = reserve(tiers, stored)
    assert not {(each.slots[0], each.generations[0]) for each in made} & set(stale)
    seal(tiers, stored, made)
    assert tiers.drain(PATIENCE)
    assert [load(other, each) for each in big] == [120, 120]  # `load` compares the bytes


def test_slots_that_lapsed_are_not_renewed(serve: Serve, attach: Attach) -> None:
    """The client reads its clock only after they have lapsed: what it holds must not look fresh to it."""
    served = serve(host={"size": SIZE}, lease_deadline=0.4)
    tiers = attach(size=SIZE)
    ready(tiers, 4)
    link = link_of(tiers)
    wait_until(lambda: pool_of(served).filling == 0)
    last = link.preallocated_at
    link.send([wire.Preallocate(link.preallocation_round, time.monotonic(), SHARE)])
    assert tiers.drain(PATIENCE)  # a round trip: an answer would have been read
    assert (link.preallocated_at, pool_of(served).filling) == (last, 0)


def test_a_client_stopped_between_its_message_and_its_copy_keeps_the_slots(
    serve: Serve, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(host={"size": 2 * SIZE}, lease_deadline=0.4)
    tiers, other = attach(size=2 * SIZE), attach(size=2 * SIZE)
    ready(tiers, 4)
    made = reserve(tiers, chains(2))
    monkeypatch.setattr(tiers, "tick", lambda: None)
    time.sleep(1.0)  # two deadlines
    big = chain_of(256, first_token=500_000)
    [all_that_fits] = other.reserve([wanted(big)])
    assert all_that_fits is not None
    assert not {slot for each in made for slot in each.slots} & set(all_that_fits.slots)
    other.abandon(all_that_fits, Outcome.ABORTED)
    seal(tiers, chains(2), made)
    assert tiers.drain(PATIENCE)
    assert [load(other, chain) for chain in chains(2)] == [1, 1]
    assert served.daemon.counts["malformed"] == 0


def test_a_message_that_is_late_stores_nothing(serve: Serve, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is stopped before it sends: it sees by its clock that the daemon may have freed the slots."""
    served = serve(host={"size": SIZE}, lease_deadline=0.4)
    tiers = attach(size=SIZE)
    ready(tiers, 4)
    link, send = link_of(tiers), Link.send
    stale = {slot for slot, _ in link.preallocated}

    def late(self: Link, operations: Sequence[wire.Operation] = (), request: int = 0) -> bool:
        if any(type(each) is wire.ReserveAt for each in operations):
            wait_until(lambda: pool_of(served).filling == 0)
        return send(self, operations, request)

    monkeypatch.setattr(Link, "send", late)
    stored = chains(2)
    made = reserve(tiers, stored)  # by a round trip
    assert all(each.number > 0 for each in made if hasattr(each, "number"))
    monkeypatch.setattr(Link, "send", send)
    assert stale  # they were there
    seal(tiers, stored, made)
    assert tiers.drain(PATIENCE)
    assert [load(tiers, chain) for chain in stored] == [1, 1]
    assert served.daemon.counts["malformed"] == served.daemon.counts["error"] == 0


def test_a_block_that_two_clients_store_is_kept_once(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    first, second, stored = attach(size=SIZE), attach(size=SIZE), chains(2)
    ready(first, 2)
    ready(second, 2)
    made, again = reserve(first, stored), reserve(second, stored)
    seal(second, stored, again)  # filled, and not needed
    seal(first, stored, made)
    assert first.drain(PATIENCE)
    assert second.drain(PATIENCE)
    assert [load(second, chain) for chain in stored] == [1, 1]
    idle(served, first, second)
    served.check()


def test_a_store_in_a_preallocated_slot_that_fails_frees_it(serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    tiers, other, stored = attach(size=SIZE), attach(size=SIZE), chains(2)
    store(other, stored[1])
    idle(served, other)
    ready(tiers, 2)
    for each in reserve(tiers, stored):  # the second is a duplicate
        tiers.abandon(each, Outcome.COPY_FAILED)
    idle(served, tiers)
    assert where(tiers, stored[0]).miss == 1
    assert load(tiers, stored[1]) == 1


def test_a_killed_client_frees_its_preallocated_slots(home: Path, serve: Serve, attach: Attach) -> None:
    served = serve(host={"size": SIZE})
    attach(size=SIZE)
    child = client_child(home / "s", "single")
    assert says(child) == "ready"
    assert pool_of(served).filling > 0
    end_child(child)
    wait_until(lambda: pool_of(served).filling == 0)


def test_a_reset_leaves_preallocated_slots_usable(serve: Serve, attach: Attach) -> None:
    serve(host={"size": SIZE})
    tiers, stored = attach(size=SIZE), chains(2)
    ready(tiers, 4)
    old = reserve(tiers, stored)
    tiers.reset()
    new = reserve(tiers, stored)
    seal(tiers, stored, new)
    for each, chain in zip(old, stored, strict=True):
        fill(tiers, each)
        tiers.seal(each, records(each, chain), tiers.epoch - 1)  # computed before the reset
    assert tiers.drain(PATIENCE)
    assert drops(tiers, Outcome.EPOCH) + drops(tiers, Outcome.CLOSED) <= 2
    assert [load(tiers, chain) for chain in stored] == [1, 1]


@pytest.mark.parametrize("sections", [{"service": {"default_quota": 32 * SLOT_BYTES}}, {"cache": {"admit_after": 2}}])
def test_no_slot_is_preallocated_where_a_name_decides(
    serve: Serve, attach: Attach, sections: dict[str, object]
) -> None:
    served = serve(**{"host": {"size": SIZE}, **sections})
    tiers = attach(size=SIZE)
    for _ in range(3):
        tiers.reserve([wanted(chain_of(1))])
        tiers.tick()
    assert tiers.drain(PATIENCE)
    assert link_of(tiers).preallocated == []
    assert pool_of(served).filling <= 1


def column(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


Frame = Callable[[int, int], wire.Operation]


@pytest.mark.parametrize(
    ("make", "is_cut"),
    [
        (lambda slot, other: wire.ReserveAt(column(other), wire.Reserve.of(9, [wanted(chain_of(1))])), False),
        (lambda slot, other: wire.ReserveAt(column(1 << 40), wire.Reserve.of(9, [wanted(chain_of(1))])), False),
        (lambda slot, other: wire.ReserveAt(column(slot), wire.Reserve.of(9, [wanted(chain_of(2))])), True),
        (lambda slot, other: wire.ReserveAt(column(slot, slot), wire.Reserve.of(9, [wanted(chain_of(1))] * 2)), True),
        (lambda slot, other: wire.ReserveAt(column(slot), wire.Reserve.of(9, [])), True),
        (lambda slot, other: wire.ReserveAt(b"123", wire.Reserve.of(9, [wanted(chain_of(1))])), True),
    ],
)
def test_what_a_client_may_not_say_of_slots(serve: Serve, attach: Attach, make: Frame, is_cut: bool) -> None:
    served = serve(host={"size": SIZE})
    tiers, other, big = attach(size=SIZE), attach(size=SIZE), chain_of(40, first_token=7_000_000)
    store(other, big)
    claim, _ = ask(other, big)
    with other.lease(claim) as lease:
        ready(tiers, 2)
        link = link_of(tiers)
        link.send([make(link.preallocated[0][0], lease.slots[0])])
        if is_cut:
            wait_until(lambda: served.daemon.counts["malformed"] + served.daemon.counts["malformed_holding"] == 1)
        else:
            assert tiers.drain(PATIENCE)
    assert load(other, big) == 40
    served.daemon.call(served.daemon.check)


def test_a_partial_block_goes_the_same_way(serve: Serve, attach: Attach) -> None:
    serve(host={"size": SIZE})
    tiers, chain = attach(size=SIZE), chain_of(1)
    ready(tiers, 2)
    before = list(link_of(tiers).preallocated)
    name = b"partial".ljust(32, b".")
    [reservation] = tiers.reserve([Wanted([name], chain.hashes[0], chain.tenant, is_partial=True)])
    assert reservation is not None
    assert (reservation.slots[0], reservation.generations[0]) == before[0]
    tiers.abandon(reservation, Outcome.ABORTED)
