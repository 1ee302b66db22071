"""Stories of pins: blocks kept in host memory for a time, brought up for it, never more than a quarter of it."""

from pathlib import Path

import pytest
from doubles import SLOT_BYTES, wait_until
from event_rig import until
from http_rig import MODEL, ServedDaemon, ServePages
from service_rig import FINGERPRINT, Attach, attached, load, store

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.service.node.namespaces import Namespace
from kvtier.tiers.naming.chain import TokenChain, root_hash

SLOTS = 32


@pytest.fixture
def served(serve_pages: ServePages, disk_dir: Path) -> ServedDaemon:
    """A daemon with a slab; at the end every law holds (I3), pins or no pins."""
    file = {"path": str(disk_dir), "size": "4MiB", "mode": "buffered"}
    return serve_pages(host={"size": SLOTS * SLOT_BYTES}, file=file)


@pytest.fixture
def tiers(served: ServedDaemon, attach: Attach) -> RemoteTiers:
    return attach(size=SLOTS * SLOT_BYTES)


def prompt(num_blocks: int, first_token: int = 0, salt: str | None = None, scheme: str = "sha256") -> TokenChain:
    chain = TokenChain(root_hash(FINGERPRINT, cache_salt=salt), 4, scheme)
    chain.extend(range(first_token, first_token + 4 * num_blocks))
    return chain


def tokens(num_blocks: int, first_token: int = 0) -> list[int]:
    return list(range(first_token, first_token + 4 * num_blocks))


def in_l2(served: ServedDaemon, chain: TokenChain) -> int:
    return namespace(served).hierarchy.host.pool.lookup(chain.hashes)


def namespace(served: ServedDaemon) -> Namespace:
    (only,) = served.daemon.call(served.daemon.namespaces)
    return only


def push_out(tiers: RemoteTiers) -> None:
    """Store more than L2 has room for."""
    for number in range(1, 5):
        store(tiers, prompt(12, 10_000 * number))


def pinned(served: ServedDaemon) -> list[int]:
    return [pin["blocks"] for pin in served.client.get("/admin/pins").json()["pins"]]


def test_a_pinned_prompt_outlives_pressure_and_another_does_not(served: ServedDaemon, tiers: RemoteTiers) -> None:
    kept, other = prompt(4), prompt(4, 500)
    store(tiers, kept)
    store(tiers, other)
    answer = served.post("pin", tokens=tokens(4), ttl="1h")
    assert answer.status_code == 200, answer.text
    assert {key: answer.json()[key] for key in ("model", "blocks", "bytes")} == {
        "model": MODEL,
        "blocks": 4,
        "bytes": 4 * SLOT_BYTES,
    }
    push_out(tiers)
    assert in_l2(served, kept) == 4
    assert in_l2(served, other) == 0
    assert load(tiers, kept) == 4  # and every byte is right
    # At idle a pin is no leak, and a client's check says so too.
    tiers.check()
    served.check()
    assert served.post("unpin", pin=answer.json()["pin"]).json() == {"unpinned": answer.json()["pin"]}
    push_out(tiers)
    assert in_l2(served, kept) == 0


def test_pinning_brings_blocks_up_from_the_slab(served: ServedDaemon, tiers: RemoteTiers) -> None:
    chain = prompt(6)
    store(tiers, chain)
    assert tiers.drain(60)
    push_out(tiers)
    assert in_l2(served, chain) == 0
    assert served.post("pin", hashes=[name.hex() for name in chain.hashes], ttl=60).json()["blocks"] == 6
    assert in_l2(served, chain) == 6
    assert load(tiers, chain) == 6


@pytest.mark.parametrize("scheme", ["sha256", "xxh3"])
def test_tokens_are_a_tenants_under_either_hash(served: ServedDaemon, tiers: RemoteTiers, scheme: str) -> None:
    store(tiers, prompt(3, salt="alice", scheme=scheme))
    assert served.post("pin", tokens=tokens(3), cache_salt="alice", ttl=60).json()["blocks"] == 3
    nobodys = served.post("pin", tokens=tokens(3), cache_salt="bob", ttl=60)
    assert nobodys.status_code == 404
    assert "no tier holds the first of these blocks" in nobodys.json()["error"]


def test_a_pin_ends_by_itself(served: ServedDaemon, tiers: RemoteTiers) -> None:
    store(tiers, prompt(4))
    assert served.post("pin", tokens=tokens(4), ttl="2s").status_code == 200
    assert pinned(served) == [4]
    until(lambda: not pinned(served))
    wait_until(lambda: namespace(served).hierarchy.host.pool.counts().leased == 0)


def test_at_most_a_quarter_is_pinned_and_common_blocks_count_once(served: ServedDaemon, tiers: RemoteTiers) -> None:
    store(tiers, prompt(12))
    too_much = served.post("pin", tokens=tokens(9), ttl=60)
    assert too_much.status_code == 400
    assert too_much.json()["error"] == (
        "9 blocks: with the 0 pinned already that is more than 8, a quarter of this model's host memory; "
        "pin fewer, or unpin some"
    )
    assert served.post("pin", tokens=tokens(8), ttl=60).status_code == 200
    assert served.post("pin", tokens=tokens(4), ttl=60).status_code == 200  # of the same eight
    store(tiers, prompt(1, 900))
    assert served.post("pin", tokens=tokens(1, 900), ttl=60).status_code == 400
    assert pinned(served) == [8, 4]


def test_a_reset_and_an_evict_take_their_pins_along(served: ServedDaemon, tiers: RemoteTiers) -> None:
    first, second = prompt(2), prompt(2, 100)
    store(tiers, first)
    store(tiers, second)
    for at in (0, 100):
        assert served.post("pin", tokens=tokens(2, at), ttl=60).status_code == 200
    gone = served.post("evict", tokens=tokens(2)).json()
    assert gone["evicted"]["l2"] == 2
    assert gone["unpinned"] == 1
    assert pinned(served) == [2]
    tiers.reset()  # a client's
    wait_until(lambda: not pinned(served))
    counts = namespace(served).hierarchy.host.pool.counts()
    assert (counts.leased, counts.filling) == (0, 0)


def test_a_pinned_model_is_not_closed_for_another(served: ServedDaemon, tiers: RemoteTiers, attach: Attach) -> None:
    store(tiers, prompt(2))
    number = served.post("pin", tokens=tokens(2), ttl=60).json()["pin"]
    tiers.close()
    other = attach(fingerprint=b"t" * 32)
    assert "the daemon has 0 of 128KiB for this model" in other.wanting["daemon"]
    served.post("unpin", pin=number)
    wait_until(lambda: attached(other))
    assert other.num_slots


def test_what_is_not_pinned_cannot_be_unpinned(served: ServedDaemon, tiers: RemoteTiers) -> None:
    answer = served.post("unpin", pin=7)
    assert answer.status_code == 404
    assert answer.json()["error"] == "pin 7: there is none; `kvtier pin` without blocks lists them"
    less = served.post("pin", tokens=[1, 2, 3], ttl=60)
    assert (less.status_code, less.json()["error"]) == (
        400,
        "tokens: 3 of them, this model's blocks have 4; give one block's",
    )
