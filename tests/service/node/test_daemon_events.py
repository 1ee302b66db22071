"""The daemon's KV events: a reader knows what host memory and slab hold, through resets, restarts and kill -9."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM

import httpx2
import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES
from event_rig import until
from node_rig import free_port
from redis_rig import NO_REDIS, standalone
from service_rig import FINGERPRINT, DaemonProcess, attach, load, store

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.service.events.consumer import EventConsumer
from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.wire import namespace_of, topic_of
from kvtier.tiers.naming.chain import TokenChain, root_hash

OTHER = b"another model of the daemon".ljust(32, b".")


def chain_of(number: int, blocks: int = 6, salt: str | None = None, model: bytes = FINGERPRINT) -> TokenChain:
    chain = TokenChain(root_hash(model, cache_salt=salt), BLOCK_SIZE)
    chain.extend(range(1000 * number, 1000 * number + blocks * BLOCK_SIZE))
    return chain


class Told:
    """A daemon on a directory, and what one reader knows of a model of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.index = PrefixIndex(BLOCK_SIZE)
        self.consumer = EventConsumer("node", self.index, *self.addresses, topic=topic_of(FINGERPRINT))

    @contextmanager
    def daemon(self, **options: str) -> Iterator[DaemonProcess]:
        running = DaemonProcess(
            self.directory / "s",
            events__publish=self.addresses[0],
            events__replay=self.addresses[1],
            host__size=f"{64 * SLOT_BYTES}",
            file__path=str(self.directory / "slabs"),
            file__size="1MiB",
            **options,
        )
        try:
            assert "ready" in running.first_line, running.first_line
            yield running
        finally:
            if running.process.poll() is None:
                assert running.end(SIGTERM) == 0, running.lines

    @contextmanager
    def client(self, model: bytes = FINGERPRINT) -> Iterator[RemoteTiers]:
        tiers = attach(self.directory / "s", fingerprint=model, size=32 * SLOT_BYTES)
        try:
            yield tiers
        finally:
            tiers.close()

    def knows(self, chain: TokenChain, namespace: str | None = None) -> dict[str, int]:
        hashes = prompt_hashes(chain._tokens, BLOCK_SIZE, namespace=namespace)
        return self.index.matches(hashes).get("node", {})


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.consumer.close()
    made.index.check()
    assert not made.index.counts, "a daemon's own events are never doubtful"


def test_a_reader_knows_what_the_tiers_hold(told: Told) -> None:
    salted = chain_of(1, salt="alice")
    namespace = namespace_of(salted.root)
    with told.daemon(), told.client() as tiers, told.client(OTHER) as others:
        assert store(tiers, chain_of(1)) == 6
        assert store(tiers, salted, 0, 4) == 4
        assert store(others, chain_of(2, model=OTHER)) == 6
        until(lambda: told.index.holdings("node") == {"CPU": 10, "STORAGE": 10})
        assert told.knows(chain_of(1)) == {"CPU": 6}
        assert told.knows(chain_of(1), namespace) == {"CPU": 4}  # a tenant's are never taken for everybody's
        assert told.knows(chain_of(2, model=OTHER)) == {}
        # what memory loses the slab still has; what comes up again is told again
        for number in range(10, 22):
            assert store(tiers, chain_of(number)) == 6
        until(lambda: told.knows(chain_of(1)) == {"STORAGE": 6})
        assert load(tiers, chain_of(1)) == 6
        until(lambda: told.knows(chain_of(1)) == {"CPU": 6})
        tiers.reset()
        until(lambda: told.index.num_blocks == 0)
        assert store(tiers, chain_of(3)) == 6
        until(lambda: told.knows(chain_of(3)) == {"CPU": 6})


def test_a_daemon_that_comes_back_tells_what_its_slab_holds(told: Told) -> None:
    with told.daemon() as running:
        with told.client() as tiers:
            assert store(tiers, chain_of(1)) == 6
            until(lambda: told.index.holdings("node") == {"CPU": 6, "STORAGE": 6})
        assert running.end(SIGKILL) == -SIGKILL
        until(lambda: told.consumer.state.state == "stale")
    with told.daemon():
        until(lambda: told.consumer.state.state == "live")
        until(lambda: told.index.num_blocks == 0)  # no model is open yet
        with told.client() as tiers:
            until(lambda: told.knows(chain_of(1)) == {"STORAGE": 6})
        # a model that has to make room for another is told to be gone
        other = attach(told.directory / "s", fingerprint=OTHER, size=64 * SLOT_BYTES)
        until(lambda: told.index.num_blocks == 0)
        other.close()


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
def test_what_nodes_share_is_told_by_who_wrote_or_read_it(told: Told, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Told(tmp_path / "other")
    with standalone() as redis:
        shared = {"redis__url": redis.url, "redis__deadline": "5s", "redis__connect_timeout": "5s"}
        with told.daemon(**shared) as one, other.daemon(**shared), told.client() as here, other.client() as there:
            assert store(here, chain_of(1)) == 6
            until(lambda: told.index.holdings("node") == {"CPU": 6, "STORAGE": 6, "EXTERNAL": 6})
            assert load(there, chain_of(1)) == 6
            until(lambda: other.index.holdings("node") == {"CPU": 6, "EXTERNAL": 6})
            # what its pages say of the events
            told_by_one = httpx2.get(f"http://{one.http}/status").json()["kv_events"]
            assert told_by_one["publish"] == told.addresses[0]
            assert told_by_one["seq"] == told_by_one["batches"] > 0
            assert 'kvtier_kv_events_total{event="batches"}' in httpx2.get(f"http://{one.http}/metrics").text
            # a reset on one node is everybody's, once they ask
            here.reset()
            until(lambda: told.index.num_blocks == 0)
    other.consumer.close()


def test_addresses_are_checked_at_start(tmp_path: Path) -> None:
    taken = Told(tmp_path)
    with taken.daemon():
        second = DaemonProcess(tmp_path / "t", events__publish=taken.addresses[0])
        assert second.process.wait(60) == 2
        assert "[events] publish" in second.first_line
        # and a daemon that is there already, by one that has an address of its own for events
        third = DaemonProcess(tmp_path / "s", events__publish=f"tcp://127.0.0.1:{free_port()}")
        assert third.process.wait(60) == 2
        assert third.first_line.startswith("kvtier: ")
        assert "serves it" in third.first_line, third.first_line
        for ended in (second, third):
            assert ended.process.stderr is not None
            ended._reader.join()
            ended.process.stderr.close()
    taken.consumer.close()
