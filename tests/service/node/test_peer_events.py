"""What other nodes hold, known by their KV events: nobody is asked, a wrong hint is a miss, a bad stream is left."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, store, wait_until
from peers_rig import FINGERPRINT, Fleet, ScriptedPeer, TellingNode, block, following, read, record
from redis_rig import NO_REDIS, standalone
from service_rig import attach, end_child, load, where
from service_rig import store as store_at
from zmq.auth import create_certificates

from kvtier.service.events.publisher import Publisher
from kvtier.service.events.wire import AllBlocksCleared
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution
from kvtier.tiers.hierarchy.hierarchy import Hierarchy, Removed, Stored
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.peers import following as following_module
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.link import EventsAt
from kvtier.tiers.peers.store import PeersStore
from kvtier.tiers.tier import BlockRecord, Outcome

CHAIN = chain_of(8)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are asked where their events are four times a second."""
    monkeypatch.setattr(following_module, "_EVENTS_EVERY", 0.2)


@pytest.fixture
def node(key: Path, made: list[TellingNode]) -> TellingNode:
    made.append(TellingNode(key, CHAIN))
    return made[0]


def count(tier: PeersStore, name: str) -> int:
    return tier.stats().get(name, 0)


def sure(tier: PeersStore, num_peers: int = 1) -> None:
    """Wait until so many peers need not be asked."""
    wait_until(lambda: count(tier, "sure") == num_peers)


def test_what_events_tell_nobody_is_asked(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN, 0, 6)
    with following(key, node.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 6)
        sure(tier)
        asked = count(tier, "questions")
        # Held and not held: both are known without a word to the peer.
        assert tier.holds(CHAIN.hashes) == [True] * 6 + [False] * 2
        assert (tier.locate(CHAIN.hashes), tier.locate(chain_of(4, first_token=500).hashes)) == (6, 0)
        assert read(tier, CHAIN, 0, 6) == [Outcome.OK] * 6
        assert (count(tier, "questions") - asked, count(tier, "hints_right"), count(tier, "hints_wrong")) == (0, 1, 0)
        # What comes and what goes is told.
        node.tell(CHAIN, 6, 8)
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        node.hierarchy.host.pool.evict(CHAIN.hashes[2:])
        node.tell()
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 2)
        assert count(tier, "questions") == asked


def test_blocks_of_several_peers_and_of_the_one_that_has_to_be_asked(key: Path, made: list[TellingNode]) -> None:
    made += [TellingNode(key, CHAIN) for _ in range(3)]
    for node, (first, last) in zip(made, ((0, 3), (0, 5), (5, 8)), strict=True):
        store(node.hierarchy, CHAIN, first, last)
    made[0].tell()
    made[1].tell()
    made[2].model.events = EventsAt  # publishes nothing
    with following(key, *(node.address for node in made)) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 5)
        sure(tier, 2)
        assert tier.locate(CHAIN.hashes) == 8
        assert count(tier, "questions") == 1
        assert read(tier, CHAIN) == [Outcome.OK] * 8
        # The longest run is one flight.
        wait_until(lambda: [node.peer_server.counts["blocks"] for node in made] == [0, 5, 3])


def test_a_late_hint_is_a_miss_and_given_once(key: Path, node: TellingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_module, "_DOUBT", 1.0)
    node.tell(CHAIN)
    with following(key, node.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        sure(tier)
        node.hierarchy.host.pool.evict(CHAIN.hashes[5:])  # and its events are slow
        assert read(tier, CHAIN) == [Outcome.OK] * 5 + [Outcome.EVICTED] * 3
        assert (tier.lookup(CHAIN.hashes), count(tier, "hints_wrong"), count(tier, "sure")) == (5, 1, 0)
        # For a while the peer is asked, too: what it really holds is found.
        assert tier.locate(chain_of(2, first_token=900).hashes) == 0
        assert count(tier, "questions") == 1
        # Then its events are told, and count again.
        node.tell()
        sure(tier)
        assert tier.lookup(CHAIN.hashes) == 5


def test_a_peer_whose_events_lie_costs_some_misses_and_is_then_asked(key: Path, made: list[TellingNode]) -> None:
    made += [TellingNode(key, CHAIN, slots=64), TellingNode(key, CHAIN)]
    liar, honest = made
    chains = [chain_of(2, first_token=1000 * i) for i in range(following_module.MAX_DOUBTS)]
    for chain in chains:  # it has none of them
        records = [BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0) for i, name in enumerate(chain.hashes)]
        liar.publisher.announce(FINGERPRINT, [Stored("l2", tuple(records))])
    other = chain_of(4, first_token=90_000)
    honest.tell(other)
    with following(key, *(node.address for node in made)) as tier:
        wait_until(lambda: all(tier.lookup(chain.hashes) == len(chain.hashes) for chain in [*chains, other]))
        for chain in chains:
            assert read(tier, chain) == [Outcome.EVICTED] * 2
            assert tier.lookup(chain.hashes) == 0
        assert count(tier, "hints_wrong") == following_module.MAX_DOUBTS
        # Its events count no more. What it really has is found by asking it.
        fresh = chain_of(2, first_token=80_000)
        liar.tell(fresh)
        assert (tier.lookup(fresh.hashes), tier.locate(fresh.hashes), count(tier, "questions")) == (0, 2, 1)
        assert read(tier, fresh) == [Outcome.OK] * 2
        # Nobody else's blocks were touched.
        assert (tier.lookup(other.hashes), read(tier, other)) == (4, [Outcome.OK] * 4)
        assert not [name for name in tier.stats() if name.startswith("failed")]


class Losing:
    """The publisher's socket, from which batches are lost: what a subscriber that is too slow sees."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._socket = publisher._publish
        publisher._publish = self  # type: ignore[assignment]

    def send_multipart(self, frames: list[bytes]) -> None:
        """Into the void."""

    def close(self) -> None:
        self._publisher._publish = self._socket


def test_after_a_gap_the_peer_is_asked_until_the_gap_is_filled(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN, 0, 4)
    with following(key, node.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 4)
        sure(tier)
        # The replay is not answered for now, and batches are lost. The next one shows it.
        node.publisher._from = lambda first: iter([[b"", b"kv", b"no number", b""]])  # type: ignore[method-assign]
        losing = Losing(node.publisher)
        node.hierarchy.host.pool.evict(CHAIN.hashes[2:])
        node.tell()
        losing.close()
        other = chain_of(2, first_token=700)
        node.tell(other)
        wait_until(lambda: count(tier, "sure") == 0)
        # It is not believed, and asked.
        assert (tier.lookup(CHAIN.hashes), tier.locate(CHAIN.hashes), tier.locate(other.hashes)) == (0, 2, 2)
        assert count(tier, "questions") == 2
        assert read(tier, other) == [Outcome.OK] * 2
        # The replay answers again: what was missed is read, in order.
        del node.publisher._from
        sure(tier)
        assert (tier.lookup(CHAIN.hashes), tier.lookup(other.hashes)) == (2, 2)


def test_all_cleared_and_a_reset_leave_nothing_to_ask_for(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN)
    with following(key, node.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        node.publisher._submit(1, lambda: node.publisher._send(FINGERPRINT, [AllBlocksCleared()]))
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 0)
        assert count(tier, "told") == 0
        # The other node was reset: what it stores from then on is not lent, whatever its events say.
        node.hierarchy.reset()
        node.tell(CHAIN)
        wait_until(lambda: count(tier, "sure") == 0 and tier.lookup(CHAIN.hashes) == 0)
        assert tier.locate(CHAIN.hashes) == 0
        assert count(tier, "hints_wrong") == 0


def test_a_stream_that_ends_is_not_believed_and_the_peer_is_asked(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN)
    with following(key, node.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        node.publisher.close()
        wait_until(lambda: count(tier, "sure") == 0)
        assert (tier.lookup(CHAIN.hashes), tier.locate(CHAIN.hashes)) == (0, 8)
        assert read(tier, CHAIN) == [Outcome.OK] * 8


def test_a_slow_stream_delays_no_lookup(key: Path, node: TellingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    with following(key, node.address) as tier:
        sure(tier)
        send = node.publisher._publish_batch

        def slowly(fingerprint: bytes, events: Any) -> None:
            time.sleep(0.5)
            send(fingerprint, events)

        monkeypatch.setattr(node.publisher, "_publish_batch", slowly)
        chains = [chain_of(2, first_token=100 * i) for i in range(1, 5)]
        for chain in chains:
            store(node.hierarchy, chain)
            node.feed.pump()
        began = time.monotonic()
        assert tier.locate(chains[-1].hashes) == 0  # not told yet, and nobody waits for it
        assert time.monotonic() - began < 0.5
        wait_until(lambda: all(tier.lookup(chain.hashes) == 2 for chain in chains))
        assert count(tier, "questions") == 0


def test_more_blocks_than_there_is_room_for_are_asked_for(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN)
    with following(key, node.address, max_blocks=5) as tier:
        wait_until(lambda: count(tier, "told") == 5)
        wait_until(lambda: tier.locate(CHAIN.hashes) == 8)
        assert count(tier, "questions") >= 1
        assert read(tier, CHAIN) == [Outcome.OK] * 8


def test_a_node_that_does_not_announce_all_is_asked(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN, 0, 2)
    with following(key, node.address) as tier:
        sure(tier)
        # A tenant whose root its events do not know: the block is in memory, and is not announced.
        tenant = chain_of(2, salt="tenant")
        node.tell(tenant)
        assert not node.feed.tells_all
        wait_until(lambda: count(tier, "sure") == 0)
        assert (tier.lookup(tenant.hashes), tier.locate(tenant.hashes)) == (0, 2)
        assert tier.lookup(CHAIN.hashes) == 2  # what is told still counts
        # Once it is, the peer is left in peace again.
        node.feed.begin_at(tenant.root)
        node.tell()
        sure(tier)
        assert tier.lookup(tenant.hashes) == 2


def test_a_peer_that_is_gone_is_not_believed_though_its_events_were_live(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN)
    with following(key, node.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        node.peer_server.close()  # its publisher still answers
        assert read(tier, CHAIN) == [Outcome.IO_ERROR] * 8
        assert (tier.lookup(CHAIN.hashes), tier.holds(CHAIN.hashes), tier.locate(CHAIN.hashes)) == (0, [False] * 8, 0)


def guarded(keys: Path, own: str = "publisher") -> dict[str, Path]:
    return {"curve_key_file": keys / f"{own}.key_secret", "curve_reader_file": keys / "reader.key"}


def test_nodes_read_one_another_with_the_publishers_own_keys(
    key: Path, made: list[TellingNode], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0o077)
    for name in ("publisher", "reader", "stranger"):
        create_certificates(tmp_path, name)
    os.umask(before)
    made.append(TellingNode(key, CHAIN, events=guarded(tmp_path)))
    made[0].tell(CHAIN)
    with following(key, made[0].address, keys=EventsConfig.model_validate(guarded(tmp_path))) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
    # Others are turned away, and the peer is asked: over the other connection, with the other key.
    for others in (EventsConfig(), EventsConfig.model_validate(guarded(tmp_path, "stranger"))):
        caplog.clear()
        with following(key, made[0].address, keys=others) as tier:
            wait_until(lambda: "are not read: the handshake failed" in caplog.text)
            assert (tier.lookup(CHAIN.hashes), tier.locate(CHAIN.hashes)) == (0, 8)


@pytest.mark.parametrize(
    "at",
    [
        EventsAt("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", tells_all=True),  # nobody is there
        EventsAt("tcp://10.0.0.1:5567", "tcp://127.0.0.1:5568", tells_all=True),  # not of the machine that lends
        EventsAt("tcp://no such host:x", "tcp://127.0.0.1:5568", tells_all=True),  # no address
    ],
)
def test_an_address_that_is_none_is_no_reason_to_fail(key: Path, node: TellingNode, at: EventsAt) -> None:
    store(node.hierarchy, CHAIN)
    node.model.events = lambda: at
    with following(key, node.address) as tier:
        wait_until(lambda: node.peer_server.counts["welcomed"] >= 1)
        assert tier.locate(CHAIN.hashes) == 8
        assert read(tier, CHAIN) == [Outcome.OK] * 8
        assert count(tier, "sure") == 0


def test_a_block_that_was_not_what_events_named_is_not_promised_again_at_once(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN)

    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        """Its events are true, its bytes are not."""
        if verb is wire.PeerVerb.EVENTS:
            connection.sendall(session.answer(verb, 1, node.model.events().pack()))
        else:
            connection.sendall(session.answer(verb, 1) + block(session, record(CHAIN, 0), bytes(SLOT_BYTES)))

    peer = ScriptedPeer(key, script)
    with following(key, peer.address) as tier:
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        assert read(tier, CHAIN) == [Outcome.CHECKSUM] * 8
        wait_until(lambda: count(tier, "answering") == 1)
        assert (tier.lookup(CHAIN.hashes), count(tier, "hints_wrong"), count(tier, "failed_checksum")) == (0, 1, 1)
        assert tier.holds(CHAIN.hashes) == [False] + [True] * 7
    peer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\2" + bytes(256),  # no flag
        b"\1" + b"tcp://127.0.0.1:5567".ljust(128, b"\0") + bytes(128),  # one address
        b"\0" + b"ipc:///run/kvtier/events".ljust(128, b"\0") + b"ipc:///run/kvtier/replay".ljust(128, b"\0"),
        b"\1" + b"\xff" * 256,
    ],
)
def test_garbage_about_events_is_a_failure_of_the_peer(key: Path, said: bytes) -> None:
    def script(connection: socket.socket, session: wire.PeerSession, verb: wire.PeerVerb, names: list[bytes]) -> None:
        assert (verb, names) == (wire.PeerVerb.EVENTS, [FINGERPRINT])
        connection.sendall(session.answer(verb, 1, said))

    peer = ScriptedPeer(key, script)
    with following(key, peer.address, failures=2, retry_after="60s", answering=0) as tier:
        wait_until(lambda: count(tier, "failed_garbage") == 2)
        wait_until(lambda: count(tier, "answering") == 0)
        assert (tier.locate(CHAIN.hashes), tier.knows_all) == (0, True)
    peer.close()


def test_a_lookup_that_finds_nothing_does_not_wait_if_all_is_known(key: Path, node: TellingNode) -> None:
    metrics, rates = Metrics(), Rates("load")
    host = HostTier(HostRegion.allocate(8, SLOT_BYTES, huge_pages=False, prefault=False))
    with following(key, node.address) as tier:
        port = TierPort("peers", lambda: tier, PortSettings(takes_stores=False), metrics, rates)
        hierarchy = Hierarchy(host, [port], HierarchySettings(prefetch_deadline=60.0), metrics, rates)
        sure(tier)
        assert not port.locates
        claim = hierarchy.submit(CHAIN.hashes, CHAIN.root)
        assert (hierarchy.poll(claim), claim.found) == (0, Attribution(8, miss=8))
        # What a peer is known to hold is brought.
        node.tell(CHAIN)
        wait_until(lambda: tier.lookup(CHAIN.hashes) == 8)
        claim = hierarchy.submit(CHAIN.hashes[:2], CHAIN.root)
        wait_until(lambda: hierarchy.poll(claim) == 2)
        assert claim.found == Attribution(2, peers=2)
        hierarchy.cancel(claim)
        # Without its events it has to be asked.
        node.publisher.close()
        wait_until(lambda: port.locates)
        hierarchy.check()
        hierarchy.close()


def test_off_means_that_peers_are_asked(key: Path, node: TellingNode) -> None:
    node.tell(CHAIN)
    with following(key, node.address, events=False) as tier:
        assert (tier.lookup(CHAIN.hashes), tier.locate(CHAIN.hashes), count(tier, "questions")) == (0, 8, 1)
    node.publisher.announce(FINGERPRINT, [Removed("l2", ())])


# Daemons as processes


def knows(fleet: Fleet, number: int, num_told: int, num_sure: int = 1) -> None:
    """Wait until a daemon knows so many blocks of others, and need not ask so many nodes."""

    def is_so() -> bool:
        time.sleep(0.1)  # its pages cost the daemon something
        told = [line for line in fleet.metrics(number).splitlines() if line.startswith("kvtier_peers_told_blocks{")]
        return [float(line.split()[-1]) for line in told] == [num_told] and fleet.peers(number)["sure"] == num_sure

    wait_until(is_so)


def test_a_fleet_knows_what_it_holds_also_after_a_kill_and_a_restart(fleet_of: Callable[..., Fleet]) -> None:
    fleet, chain = fleet_of(2, tell=True), chain_of(8)
    other, mine = chain_of(4, first_token=900), chain_of(2, first_token=500)
    assert "knows what others hold by their KV events" in "".join(fleet.daemons[0].lines)
    first, second = (attach(path) for path in fleet.sockets)
    assert store_at(first, chain) == 8
    knows(fleet, 1, 8)
    assert where(second, chain) == Attribution(8, peers=8)
    assert load(second, chain) == 8
    # kill -9: nothing of it is promised any more, and nobody waits for it.
    assert store_at(first, other) == 4
    knows(fleet, 1, 12)
    fleet.daemons[0].process.kill()
    fleet.daemons[0].process.wait(60)
    first.close()
    began = time.monotonic()
    assert load(second, other) == 0
    assert time.monotonic() - began < 20.0
    assert load(second, chain) == 8  # its own by now
    # It starts anew, elsewhere for its events, with an empty memory. What it computes then is told again.
    end_child(fleet.daemons[0].process)
    fleet.daemons[0] = fleet.start(0)
    again = attach(fleet.sockets[0])
    knows(fleet, 1, 0)
    assert store_at(second, mine) == 2  # with the first block stored of a tenant, all of it is announced
    knows(fleet, 0, 10)
    assert store_at(again, other) == 4
    knows(fleet, 1, 4)
    assert (load(second, other), load(again, chain)) == (4, 8)
    again.close()
    second.close()


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
def test_a_node_that_does_not_answer_is_passed_over(fleet_of: Callable[..., Fleet]) -> None:
    """Its events name the blocks, and it hangs. The first request that asks it finds them in Redis, not in vain."""
    chain = chain_of(8)
    with standalone() as server:
        fleet = fleet_of(2, tell=True, redis__url=server.url, redis__secret="a secret of the fleet")
        first, second = (attach(path) for path in fleet.sockets)
        assert store_at(first, chain) == 8
        knows(fleet, 1, 8)
        wait_until(lambda: len(server.cli("KEYS", "*").split()) >= 8)
        fleet.daemons[0].process.send_signal(signal.SIGSTOP)
        claim = second.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)
        wait_until(lambda: second.poll(claim) is not PENDING)
        assert (second.poll(claim), claim.found) == (8, Attribution(8, redis=8))
        second.cancel(claim)
        fleet.daemons[0].process.send_signal(signal.SIGCONT)
        first.close()
        second.close()


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
def test_what_a_node_holds_is_not_asked_of_shared_tiers(fleet_of: Callable[..., Fleet]) -> None:
    chains = [chain_of(8, first_token=1000 * i) for i in range(1, 5)]
    others = [chain_of(8, first_token=1000 * i) for i in range(5, 9)]
    with standalone() as server:

        def asked() -> int:
            """Questions for blocks, and blocks read."""
            lines = server.cli("INFO", "commandstats").decode().splitlines()
            calls = {line.split(":")[0]: int(line.split("calls=")[1].split(",")[0]) for line in lines[1:]}
            return calls.get("cmdstat_exists", 0) + calls.get("cmdstat_get", 0)

        fleet = fleet_of(2, tell=True, redis__url=server.url, redis__secret="a secret of the fleet")
        first, second = (attach(path) for path in fleet.sockets)
        for chain in (*chains, *others):
            assert store_at(first, chain) == 8
        knows(fleet, 1, 64)
        # Both have the blocks. Nothing is asked of what all share.
        before = asked()
        for chain in chains:
            assert where(second, chain) == Attribution(8, peers=8)
            assert load(second, chain) == 8
        told = asked() - before
        # A node that has to ask its peers asks both at once.
        end_child(fleet.daemons[1].process)
        second.close()
        fleet.daemons[1] = fleet.start(1, peers__events="false")
        second = attach(fleet.sockets[1])
        wait_until(lambda: fleet.peers(1)["answering"] == 1)
        before = asked()
        for chain in others:
            assert where(second, chain).miss == 0
        questions = asked() - before
        assert questions >= len(others)
        assert told <= 1 < questions
        first.close()
        second.close()
