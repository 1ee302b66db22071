"""What fills memory: blocks by tenant and by prefix, of L2 and the slab, to operators by name and to others not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES
from http_rig import ServedDaemon, ServePages
from service_rig import FINGERPRINT, Attach, store

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.service.node.status import MemoryUse, Tenants, use_of
from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.tier import Lineage

ROOT = root_hash(FINGERPRINT)
TEAM = root_hash(FINGERPRINT, cache_salt="team")


def chain(num_blocks: int, *, salt: str | None = None, system: int = 2, turn: int = 0) -> TokenChain:
    """A chain of `num_blocks`, the first `system` of which all turns have in common."""
    made = TokenChain(root_hash(FINGERPRINT, cache_salt=salt), BLOCK_SIZE)
    same = system * BLOCK_SIZE
    made.extend([*range(same), *(1000 * (turn + 1) + i for i in range(num_blocks * BLOCK_SIZE - same))])
    return made


def lineage(*chains: TokenChain) -> Lineage:
    """Of the blocks of these chains, each once, in an order of no meaning."""
    pairs = {name: each.parent(i) for each in chains for i, name in enumerate(each.hashes)}
    order = sorted(pairs)
    names, parents = (
        np.frombuffer(b"".join(x), np.uint64).reshape(-1, 4) for x in (order, map(pairs.__getitem__, order))
    )
    return Lineage(names, parents)


def known(*roots: bytes) -> Tenants:
    tenants = Tenants(FINGERPRINT)
    tenants.record(Wanted([root], root, root) for root in roots)
    return tenants


@pytest.fixture
def served(serve_pages: ServePages, tmp_path: Path) -> ServedDaemon:
    return serve_pages(file={"path": str(tmp_path), "size": "4MiB"})


@pytest.fixture
def tiers(served: ServedDaemon, attach: Attach) -> RemoteTiers:
    return attach()


def test_conversations_of_one_system_prompt_are_one_prefix() -> None:
    one, other, third = chain(5), chain(4, turn=1), chain(2, salt="team", system=0)
    use = use_of(lineage(one, other, third), known(TEAM))
    assert use.num_blocks == 2 + 3 + 2 + 2
    assert [(each.root, each.num_blocks) for each in use.tenants] == [(ROOT, 7), (TEAM, 2)]
    # Two blocks are the same for both; then there are two ways on.
    first, second = use.prefixes
    assert first == (one.hashes[0], ROOT, 2, 2, 7)
    assert second == (third.hashes[0], TEAM, 2, 0, 2)


def test_whose_blocks_are_is_not_known_where_nobody_said_it() -> None:
    stray = chain(6)
    # A tenant that has stored nothing since the start, and a chain whose first blocks have gone.
    held = lineage(chain(3, salt="team"), stray)
    gone = np.frombuffer(b"".join(stray.hashes[:2]), np.uint64).reshape(-1, 4)
    stays = ~(held.names[:, None] == gone).all(2).any(1)
    kept = Lineage(held.names[stays], held.parents[stays])
    use = use_of(kept, known())
    assert [(each.root, each.num_blocks) for each in use.tenants] == [(None, 3 + 4)]
    assert use.num_tenants == 0
    assert use_of(Lineage(*np.zeros((2, 0, 4), np.uint64)), known()) == (0, 0, (), ())


def test_small_tenants_are_told_together() -> None:
    salts = [f"tenant {number}" for number in range(14)]
    chains = [chain(2 + number, salt=salt) for number, salt in enumerate(salts)]
    use = use_of(lineage(*chains), known(*(each.root for each in chains)))
    assert [each.num_blocks for each in use.tenants] == [*range(15, 5, -1), 2 + 3 + 4 + 5]
    assert use.tenants[-1].root == b""
    assert use.num_tenants == 14
    assert sum(each.num_blocks for each in use.tenants) == use.num_blocks


def test_tenants_under_vllms_names_are_known_by_their_first_blocks() -> None:
    tenants = Tenants(FINGERPRINT)
    mine = chain(3)  # every tenant's chains begin at the one root there
    tenants.record([Wanted(mine.hashes, ROOT, TEAM)])
    assert use_of(lineage(mine), tenants).tenants == [(TEAM, 3)]


def test_what_the_page_shows_of_it(served: ServedDaemon, tiers: RemoteTiers) -> None:
    one, team = chain(5), chain(3, salt="team", system=1)
    assert store(tiers, one) == 5
    assert store(tiers, chain(4, turn=1)) == 2
    assert store(tiers, team) == 3
    served.post("quota", cache_salt="team", size="512KiB").raise_for_status()
    told = served.client.get("/memory").json()
    [model] = told["models"]
    assert told["named"]
    for tier in ("l2", "file"):
        memory = model["tiers"][tier]
        assert (memory["blocks"], memory["bytes"], memory["num_tenants"]) == (10, 10 * SLOT_BYTES, 2)
        unsalted, salted = memory["tenants"]
        assert unsalted == {"tenant": "no salt", "blocks": 7, "bytes": 7 * SLOT_BYTES}
        assert (salted["cache_salt"], salted["blocks"]) == ("team", 3)
        prefix, _ = memory["prefixes"]
        assert prefix == {
            "prefix": one.hashes[0].hex(), "tenant": "no salt", "tokens": 2 * BLOCK_SIZE, "branches": 2,
            "blocks": 7, "bytes": 7 * SLOT_BYTES,
        }  # fmt: skip


def test_strangers_see_neither_salts_nor_names(serve_pages: ServePages, attach: Attach) -> None:
    daemon = serve_pages(host={"size": 1 << 20}, service={"token": "of an operator"})
    tiers, team = attach(), chain(3, salt="team")
    store(tiers, team)
    daemon.client.headers["authorization"] = "Bearer of an operator"
    daemon.post("quota", cache_salt="team", size="512KiB").raise_for_status()
    assert "team" in daemon.client.get("/memory").text
    del daemon.client.headers["authorization"]
    answer = daemon.client.get("/memory")
    told: dict[str, Any] = answer.json()
    assert not told["named"]
    [tenant] = told["models"][0]["tiers"]["l2"]["tenants"]
    [prefix] = told["models"][0]["tiers"]["l2"]["prefixes"]
    assert "team" not in answer.text
    assert not any(name.hex()[:8] in answer.text for name in (*team.hashes, TEAM))
    assert (len(tenant["tenant"]), len(prefix["prefix"])) == (8, 8)
    # Prometheus has the same label, and each tenant's blocks.
    labels = f'fingerprint="{told["models"][0]["model"]}",tenant="{tenant["tenant"]}",tier="l2"'
    assert f"kvtier_tenant_blocks{{{labels}}} 3.0\n" in daemon.client.get("/metrics").text


def test_a_look_is_not_repeated_at_once(served: ServedDaemon, tiers: RemoteTiers) -> None:
    [namespace] = served.daemon.call(served.daemon.namespaces)
    models = {FINGERPRINT: (namespace.hierarchy, namespace.tiers.tenants)}
    slow, eager = MemoryUse(), MemoryUse(pause=0)
    assert slow.of(models)[FINGERPRINT]["l2"].num_blocks == eager.of(models)[FINGERPRINT]["l2"].num_blocks == 0
    store(tiers, chain(3))
    assert slow.of(models)[FINGERPRINT]["l2"].num_blocks == 0  # from before
    assert slow.of({}) == {}  # and forgotten with its model
    assert slow.of(models)[FINGERPRINT]["l2"].num_blocks == 3
