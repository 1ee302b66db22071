"""Stories of quotas: a tenant stays within its own, loses its own oldest tails, and nobody else notices (FAULTS 36)."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_rig import kvtier
from doubles import SLOT_BYTES, MemoryTier, chain_of, hierarchy_of
from hypothesis import given, settings
from hypothesis import strategies as st
from service_rig import DaemonProcess, attach, drops, fill, load, records, store, store_partial, wanted, where

from kvtier.service.node.served_tiers import ServedTiers, TenantLimits
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import Outcome

FINGERPRINT = b"f" * 32  # of `chain_of`


class Served:
    """The tiers as a client of the daemon uses them: `ServedTiers`' verbs, and the hierarchy's where it has none."""

    def __init__(self, tiers: ServedTiers) -> None:
        self._tiers = tiers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tiers if hasattr(self._tiers, name) else self._tiers.hierarchy, name)


class Bench:
    """Tiers of `slots` slots, as the daemon serves them."""

    def __init__(self, slots: int = 32, lower: MemoryTier | None = None, default: int | None = None) -> None:
        self.hierarchy = hierarchy_of(slots, lower)
        limit = None if default is None else default * SLOT_BYTES
        self.tiers: Any = Served(ServedTiers(self.hierarchy, FINGERPRINT, TenantLimits(limit)))

    def allow(self, salt: str, num_blocks: int) -> None:
        self.tiers.quotas.set(salt, TenantLimits(num_blocks * SLOT_BYTES))

    def has(self, chain: TokenChain) -> int:
        """Leading blocks in L2."""
        return self.hierarchy.host.pool.lookup(chain.hashes)

    def used(self, salt: str) -> int:
        """Blocks."""
        used: int = next(quota.used for quota in self.tiers.quotas.listing() if quota.cache_salt == salt)
        return used // SLOT_BYTES

    def close(self) -> None:
        self.tiers.drain(60)
        self.hierarchy.check()
        self.hierarchy.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def of(salt: str, number: int, num_blocks: int = 4) -> TokenChain:
    return chain_of(num_blocks, first_token=1000 * number, salt=salt)


def test_an_unfinished_block_counts_and_goes_like_a_whole_one(bench: Bench) -> None:
    first = of("alice", 1)
    store(bench.tiers, first)
    first.extend([1, 2, 3])
    tail = store_partial(bench.tiers, first)
    bench.allow("alice", 5)  # what was there before the quota counts, too
    assert bench.used("alice") == 5
    assert store(bench.tiers, of("alice", 2, 2)) == 2
    assert bench.hierarchy.holds([tail.chain_hash]) == [False]
    assert (bench.has(first), bench.used("alice")) == (3, 5)
    second = of("alice", 2, 2)
    second.extend([1, 2, 3])
    tail = store_partial(bench.tiers, second)
    assert bench.hierarchy.holds([tail.chain_hash]) == [True]
    assert (bench.has(first), bench.used("alice")) == (2, 5)


def test_a_tenant_loses_its_own_least_recent_tails_first(bench: Bench) -> None:
    bench.allow("alice", 10)
    first, second, third, bob = of("alice", 1), of("alice", 2), of("alice", 3), of("bob", 1, 12)
    assert store(bench.tiers, bob) == 12
    assert store(bench.tiers, first) == 4
    assert store(bench.tiers, second) == 4
    assert bench.used("alice") == 8
    # Two more would fit; four come: the first chain's last two make room.
    assert store(bench.tiers, third) == 4
    assert [bench.has(each) for each in (first, second, third)] == [2, 4, 4]
    assert bench.used("alice") == 10
    # What is left of the first goes before the second, and nobody but alice has lost anything.
    assert store(bench.tiers, of("alice", 4)) == 4
    assert [bench.has(each) for each in (first, second, third)] == [0, 2, 4]
    assert bench.has(bob) == 12
    assert drops(bench.tiers, Outcome.QUOTA) == 0


def test_a_tenant_at_its_slab_quota_evicts_its_own(home: Path, disk_dir: Path) -> None:
    """As the daemon serves it, from the options and the verb to the file; what others have stays there."""
    options = {"file__path": str(disk_dir), "file__size": "4MiB", "service__default_slab_quota": "64KiB"}
    daemon = DaemonProcess(home / "s", **options)
    url = f"http://{daemon.http}/admin"
    with closing(attach(home / "s", fingerprint=FINGERPRINT)) as tiers:
        others = chain_of(40, first_token=1)
        assert store(tiers, others) == 40
        for number in range(24):
            assert store(tiers, of("alice", number, 24)) == 24  # she is never refused
        found = where(tiers, others)
        assert (found.blocks, found.miss) == (40, 0)
        assert where(tiers, of("alice", 23, 24)).miss == 0  # her newest
        assert where(tiers, of("alice", 0, 24)).miss == 24
        limits = {"cache_salt": "alice", "slab": 1 << 20}  # of her own, and no bound of host memory
        told = httpx2.post(f"{url}/quota", json=limits, headers=daemon.operator, trust_env=False).json()
        assert (told["size"], told["slab"], len(told["models"])) == (None, 1 << 20, 1)
        [quota] = httpx2.get(f"{url}/quotas", headers=daemon.operator, trust_env=False).json()["quotas"]
        [used] = quota["slab_used"].values()
        assert 24 * 6 * SLOT_BYTES <= used <= 2 << 20  # four of its eight extents at most
        listed = kvtier("quota", "--http", daemon.http, service__socket=str(home / "s"))
        assert "1 MiB" in listed.stdout
        assert store(tiers, of("alice", 99, 24)) == 24
    assert daemon.end(signal.SIGTERM) == 0


def test_tenants_with_equal_prompts_are_two(bench: Bench) -> None:
    bench.allow("alice", 2)
    alice, bob = of("alice", 1, 8), of("bob", 1, 8)
    assert store(bench.tiers, bob) == 8
    assert store(bench.tiers, alice) == 2  # the head, and the rest is refused, by name
    assert drops(bench.tiers, Outcome.QUOTA) == 6
    assert (bench.has(alice), bench.has(bob)) == (2, 8)
    assert load(bench.tiers, bob) == 8


def test_what_is_in_use_stays_and_what_cannot_be_had_is_refused(bench: Bench) -> None:
    bench.allow("alice", 4)
    first, second = of("alice", 1), of("alice", 2)
    assert store(bench.tiers, first) == 4
    with bench.hierarchy.host.pool.lease(first.hashes):
        assert store(bench.tiers, second) == 0
        assert drops(bench.tiers, Outcome.QUOTA) == 4
        assert bench.has(first) == 4
    assert store(bench.tiers, second) == 4
    assert (bench.has(first), bench.has(second)) == (0, 4)


def test_slots_being_filled_count(bench: Bench) -> None:
    bench.allow("alice", 4)
    first, second = of("alice", 1), of("alice", 2)
    (filling,) = bench.tiers.reserve([wanted(first)])
    assert filling is not None
    assert bench.tiers.reserve([wanted(second)]) == [None]
    fill(bench.tiers, filling)
    bench.tiers.seal(filling, records(filling, first), bench.tiers.epoch)
    assert bench.tiers.drain(60)
    # Reserved and abandoned is not had.
    (called_off,) = bench.tiers.reserve([wanted(second)])
    assert called_off is not None
    bench.tiers.abandon(called_off, Outcome.ABORTED)
    assert bench.used("alice") == 0
    assert store(bench.tiers, of("alice", 3)) == 4


def test_what_was_there_before_the_quota_counts(bench: Bench) -> None:
    old, bob = of("alice", 1, 8), of("bob", 2, 8)
    store(bench.tiers, old)
    store(bench.tiers, bob)
    bench.allow("alice", 6)
    assert (bench.has(old), bench.has(bob)) == (6, 8)  # its tail went at once
    assert store(bench.tiers, of("alice", 3)) == 4
    assert bench.has(old) == 2
    assert bench.used("alice") == 6
    # Without a quota it has what it can get.
    assert bench.tiers.quotas.remove("alice")
    assert not bench.tiers.quotas.remove("alice")
    assert store(bench.tiers, of("alice", 4, 8)) == 8


def test_what_comes_up_from_below_counts() -> None:
    lower = MemoryTier()
    bench = Bench(lower=lower)
    try:
        old, new = of("alice", 1), of("alice", 2)
        lower.fill(old)
        bench.allow("alice", 6)
        assert store(bench.tiers, new) == 4
        assert load(bench.tiers, old) == 4
        assert (bench.has(old), bench.has(new)) == (4, 2)
        assert bench.used("alice") == 6
    finally:
        bench.close()


def test_after_a_reset_a_tenant_begins_anew(bench: Bench) -> None:
    bench.allow("alice", 4)
    store(bench.tiers, of("alice", 1))
    bench.tiers.reset()
    assert bench.used("alice") == 0
    assert store(bench.tiers, of("alice", 2)) == 4


def test_tenants_without_a_quota_have_the_default() -> None:
    bench = Bench(slots=32, default=6)
    bench.allow("alice", 10)
    # Whoever has a quota has it; of the others each has six blocks, and loses its own oldest; no salt, no bound.
    assert store(bench.tiers, of("alice", 1, 12)) == 10
    assert store(bench.tiers, of("bob", 1, 4)) == store(bench.tiers, of("carol", 1, 4)) == 4
    assert store(bench.tiers, of("bob", 2, 4)) == 4
    assert [bench.has(of("bob", number)) for number in (1, 2)] == [2, 4]
    assert store(bench.tiers, of("carol", 2, 8)) == 6
    assert [bench.has(of("carol", number, 8)) for number in (1, 2)] == [0, 6]
    assert drops(bench.tiers, Outcome.QUOTA) == 2 + 2
    assert store(bench.tiers, chain_of(8, first_token=9000)) == 8
    # One that gets a quota has that, and once it is taken away the default, from then on.
    bench.allow("bob", 2)
    assert sum(bench.has(of("bob", number)) for number in (1, 2)) == 2
    assert bench.tiers.quotas.remove("bob")
    assert store(bench.tiers, of("bob", 3, 8)) == 6
    bench.close()


def test_of_thousands_of_tenants_only_those_are_remembered_that_have_blocks() -> None:
    bench = Bench(slots=16, default=4)
    for number in range(300):
        assert store(bench.tiers, of(f"tenant {number}", 1, 4)) == 4
    others = bench.tiers.quotas._others
    assert len(others) <= 12
    assert sum(map(len, others.values())) <= 3 * 16
    bench.close()


def test_a_tenant_is_not_remembered_for_what_it_could_not_store() -> None:
    bench = Bench(slots=4, default=4)
    others = bench.tiers.quotas._others
    # Another tenant's copy holds all of L2; strangers come, each once, and find no room.
    assert store(bench.tiers, of("alice", 1, 4)) == 4
    with bench.hierarchy.host.pool.lease(of("alice", 1, 4).hashes):
        for number in range(100):
            assert store(bench.tiers, of(f"stranger {number}", 1, 1)) == 0
    assert len(others) == 1
    bench.close()


def test_a_new_tenant_is_bound_also_where_its_first_store_is_the_one_that_forgets_others() -> None:
    bench = Bench(slots=16, default=4)
    # The fifth store is more than L2 could take anew: those who have nothing any more are forgotten.
    for number in range(5):
        assert store(bench.tiers, of(f"tenant {number}", 1, 4)) == 4
    assert store(bench.tiers, of("tenant 4", 2, 4)) == 4
    assert [bench.has(of("tenant 4", number)) for number in (1, 2)] == [0, 4]
    bench.close()


def test_less_than_a_block_is_no_quota(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r'^size "4095": a block of this model takes 4KiB; give more$'):
        bench.tiers.quotas.set("alice", TenantLimits(SLOT_BYTES - 1))
    assert not bench.tiers.quotas.listing()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["alice", "bob", "carol"]), st.integers(0, 4), st.integers(1, 7), st.booleans()),
        max_size=30,
    )
)
def test_nobody_passes_its_quota_and_chains_shrink_from_their_tails(steps: list[tuple[str, int, int, bool]]) -> None:
    bench, limits = Bench(slots=16), {"alice": 5, "bob": 3}
    try:
        for salt, limit in limits.items():
            bench.allow(salt, limit)
        chains = {(salt, number): of(salt, number, 8) for salt, number, _, _ in steps}
        for salt, number, last, is_leased in steps:
            chain = chains[salt, number]
            if is_leased:
                assert load(bench.tiers, chain) <= 8  # every byte verified
            else:
                store(bench.tiers, chain, min(bench.has(chain), last), last)
            held = bench.hierarchy.host.pool.holds
            for each in chains.values():
                assert sum(held(each.hashes)) == bench.has(each), "a hole in a chain"
            for name, limit in limits.items():
                has = sum(sum(held(each.hashes)) for (owner, _), each in chains.items() if owner == name)
                assert has <= limit
                assert has == bench.used(name)
    finally:
        bench.close()
