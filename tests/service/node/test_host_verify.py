"""Stories of `[host] verify = "always"`: bytes in shared memory that somebody changed are a miss, never an answer."""

import threading
from functools import partial

import pytest
from at_once import at_once
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, hierarchy_of, wait_until
from doubles import store as store_local
from service_rig import Attach, DaemonThread, Serve, ask, load, misses, store, verify

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import PENDING
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.tier import Outcome

CHECKED = Outcome.CHECKSUM


@pytest.fixture
def served(serve: Serve) -> DaemonThread:
    return serve(host={"size": 1 << 20, "verify": "always"})


def corrupted(daemon: DaemonThread) -> float:
    (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
    return namespace.hierarchy.stats().get('kvtier_corruption_total{tier="l2"}', 0)


def slots_of(tiers: RemoteTiers, chain: object) -> list[int]:
    claim, _ = ask(tiers, chain)  # type: ignore[arg-type]
    with tiers.lease(claim) as lease:
        return [int(slot) for slot in lease.slots]


def test_a_block_that_another_client_wrote_to_is_a_miss(served: DaemonThread, attach: Attach) -> None:
    tenant, other, chain = attach(), attach(), chain_of(6, salt="tenant")
    store(tenant, chain)
    slots = slots_of(tenant, chain)
    assert load(tenant, chain) == 6
    # The other one has no name of these blocks, but it maps their memory, and changes one bit of the third.
    assert other.region is not None
    other.region.slot(slots[2])[SLOT_BYTES // 2] ^= 1
    # What is before it is served, whole; from it on the tenant computes anew, and that is counted.
    claim, promised = ask(tenant, chain)
    assert promised == 2
    with tenant.lease(claim) as lease:
        verify(tenant, lease)
    assert corrupted(served) == 1
    (namespace,) = served.daemon.call(served.daemon.namespaces)
    assert namespace.hierarchy.stats()[f'kvtier_miss_total{{reason="{CHECKED}"}}'] == 4
    # It is gone at once, for everybody; stored again it is whole again.
    assert namespace.hierarchy.host.pool.holds(chain.hashes) == [True, True, False, True, True, True]
    assert store(tenant, chain) == 1
    assert load(tenant, chain) == 6
    assert corrupted(served) == 1


def test_two_blocks_that_changed_places(served: DaemonThread, attach: Attach) -> None:
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    one, other = slots_of(tiers, chain)[1:3]
    assert tiers.region is not None
    first, second = tiers.region.slot(one), tiers.region.slot(other)
    first[:], second[:] = bytes(second), bytes(first)
    assert load(tiers, chain) == 1


def test_many_clients_look_at_once_and_nothing_is_left(served: DaemonThread, attach: Attach) -> None:
    clients = [attach(size=1 << 20) for _ in range(6)]  # half of it is room for all that they claim
    chains = [chain_of(8, first_token=1000 * number) for number in range(6)]
    for client, chain in zip(clients, chains, strict=True):
        store(client, chain)
    loaded: list[int] = []

    def work(client: RemoteTiers) -> None:
        loaded.extend(load(client, chain) for _ in range(5) for chain in chains)

    at_once(*(partial(work, client) for client in clients))
    assert loaded == [8] * 180
    assert corrupted(served) == 0
    for client in clients:
        assert misses(client, Outcome.TIMEOUT) == 0


def test_what_was_not_looked_at_in_time_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate = FakeClock(), threading.Event()
    hierarchy = hierarchy_of(16, MemoryTier(), HierarchySettings(prefetch_deadline=2.0), clock, verify=True)
    chain = chain_of(6)
    store_local(hierarchy, chain)
    slot = hierarchy.host.region.slot
    looking = threading.Event()

    def slow(index: int) -> memoryview:
        looking.set()
        assert gate.wait(60)
        return slot(index)

    monkeypatch.setattr(hierarchy.host.region, "slot", slow)
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    assert looking.wait(60)
    assert hierarchy.poll(prefetch) is PENDING
    clock.advance(3.0)
    assert hierarchy.poll(prefetch) == 0  # leased they are, but nobody knows what they hold
    hierarchy.cancel(prefetch)
    gate.set()
    wait_until(lambda: hierarchy.promoter.idle)
    # Looked at again, with time, they are promised; one that is cancelled meanwhile leaves no lease.
    again = hierarchy.submit(chain.hashes, chain.root)
    wait_until(lambda: hierarchy.poll(again) is not PENDING)
    assert hierarchy.poll(again) == 6
    hierarchy.cancel(again)
    hierarchy.cancel(hierarchy.submit(chain.hashes, chain.root))
    wait_until(lambda: hierarchy.promoter.idle)
    hierarchy.check()
    hierarchy.close()


def test_the_option_and_its_default() -> None:
    assert Config().host.verify == "never"
    assert Config.load(host={"verify": "always"}).host.verify == "always"
