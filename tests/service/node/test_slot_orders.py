"""Stories of every order in which a client and its daemon act: no slot that is copied to is another block's.

Client, link, messages, holdings and pool are the product's. Between any two actions of the client the daemon may
answer, the client may be stopped until its slots lapse, time may pass, another thread may store, or the connection may
be lost. The same steps run again with each of these at each place, then with several at places drawn by chance.
"""

import itertools
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, FakeClock, chain_of
from service_rig import FINGERPRINT, wanted

from kvtier.connector.daemon import link as links
from kvtier.connector.daemon import wire
from kvtier.connector.daemon.client import RemoteReservation, RemoteTiers
from kvtier.connector.daemon.link import Link
from kvtier.service.node.holdings import Holdings
from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.pool.pool import FILLING, Reservation, SlotPool
from kvtier.tiers.tier import Outcome

NUM_SLOTS: Final = 128  # of which a client has eight
DEADLINE: Final = 10.0
Plan = dict[int, int]  # place → what happens there; else nothing does


class Tiers:
    """What `Holdings` needs of its hierarchy: a pool whose blocks are sealed at once."""

    num_slots, is_short = NUM_SLOTS, False

    def __init__(self) -> None:
        self.metrics, self.pool = Metrics(), SlotPool(NUM_SLOTS)
        self.hierarchy = self
        self.preallocate, self.deallocate = self.pool.preallocate, self.pool.deallocate

    def reserve(self, stores: list[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        return self.pool.reserve_each([(each.hashes, each.parent) for each in stores])

    def reserve_at(self, stores: list[Wanted], slots: list[int], generations: list[int]) -> list[Reservation | None]:
        return self.pool.reserve_at(slots, generations, [(each.hashes, each.parent) for each in stores])

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        self.pool.abandon(reservation)

    def seal_each(self, stores: list[Any]) -> None:
        for reservation, _, _ in stores:
            self.pool.seal(reservation).release()


class World:
    """A client, its daemon, and what happens between its actions."""

    def __init__(self, path: Path, listener: socket.socket, plan: Plan, clock: FakeClock) -> None:
        self.plan, self.is_open = plan, False
        self.options: list[int] = []  # of each place
        self._path, self._listener, self.clock = path, listener, clock
        self.daemon = Tiers()
        self.former: list[Holdings] = []
        hello = wire.Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, NUM_SLOTS * SLOT_BYTES, reset=False)
        self.client = RemoteTiers(path.with_name("none"), hello, patience=1.0, clock=self._look, deadline=1.0)
        lock = self.client._lock
        self.client._lock = Between(lock, self)  # type: ignore[assignment]
        self.numbers = itertools.count(1)
        self.connect()
        self.is_open = True

    def connect(self) -> None:
        """The connection is there, or anew: the daemon keeps the former's slots until the client says `Ended`."""
        attachment = self.client._attachment
        if (former := attachment.link) is not None:
            self.serve()
            self.end.close()
            attachment.cut(OSError("lost"))
            attachment._former.clear()
            if former.held:
                self.former.append(self.holdings)
            else:
                self.holdings.release_all()
        link = Link(self._path, self._look)
        self.end, _ = self._listener.accept()
        self.end.setblocking(False)
        link._reader.decoder = wire.REPLIES
        link.welcome = wire.Welcome(bytes(16), bytes(16), NUM_SLOTS, SLOT_BYTES, 0, False, DEADLINE)
        link.epoch_base = 0
        link.wait = lambda timeout: self.serve() or True  # type: ignore[method-assign]
        attachment.link, attachment.region = link, None
        self.reader = wire.FrameReader[Any](wire.MAX_FRAME, wire.REQUESTS)
        self.holdings = Holdings(self.daemon, BLOCK_SIZE, DEADLINE, wire.VERSION, False)  # type: ignore[arg-type]

    def close(self) -> None:
        self.is_open = False
        self.end.close()
        if (link := self.client._attachment.link) is not None:
            link.close()

    # what may happen at a place

    def place(self, *, is_unlocked: bool = False) -> None:
        if not self.is_open:
            return
        happens: list[Callable[[], object]] = [self.serve, self.stopped, self.slow]
        if is_unlocked:
            happens += [lambda: self.step(1), self.client.tick, self.connect]
        self.options.append(len(happens))
        choice = self.plan.get(len(self.options) - 1)
        if choice is not None and choice < len(happens):  # what happened before may have moved the places
            self.is_open = False  # nothing happens meanwhile
            happens[choice]()
            self.is_open = True

    def _look(self) -> float:
        self.place()
        return self.clock.now

    def serve(self) -> None:
        """The daemon reads and answers what there is."""
        try:
            data = self.end.recv(1 << 20)
        except BlockingIOError:
            return
        for request in self.reader.feed(data):
            answers = [answer for each in request.operations if (answer := self.holdings.verbs[type(each)](each))]
            granted, self.holdings.granted = self.holdings.granted, None
            if request.number or granted is not None:
                self.end.send(wire.pack_reply(request.number, 0, answers, [], preallocated=granted))
        self.holdings.publish()

    def stopped(self) -> None:
        """The client is, for long: its slots lapse, and others have them meanwhile."""
        self.serve()
        self.clock.advance(1.5 * DEADLINE)
        self.serve()
        self.holdings.expire(self.clock.now)
        others = chain_of(self.daemon.pool.counts().free, first_token=1 << 30).hashes
        if (taken := self.daemon.pool.reserve(others)) is not None:
            self.daemon.pool.abandon(taken)

    def slow(self) -> None:
        """The daemon is, or both are."""
        self.clock.advance(0.6 * DEADLINE)

    # what the client does

    def step(self, num_stores: int) -> bool:
        """A step that stores one block each; whether it got its slots at once."""
        chains = [chain_of(1, first_token=100 * next(self.numbers)) for _ in range(num_stores)]
        link = self.client._attachment.link
        assert link is not None
        before = {slot for slot, _ in link.preallocated}
        made = [each for each in self.client.reserve([wanted(each) for each in chains]) if each is not None]
        self.place(is_unlocked=True)
        for each in made:
            assert isinstance(each, RemoteReservation)
            if each.link is self.client._attachment.link:
                self.serve()  # the copy is under way, and the daemon has read all that was sent before
            own = self.daemon.pool._core.own(each.slots, each.generations, None, FILLING)
            assert len(own) == 1, f"a copy to slot {each.slots[0]}, which may be another block's"
        self.client.seal_each([(each, [b"1234" * BLOCK_SIZE], 0) for each in made])
        return bool(made) and before >= {slot for each in made for slot in each.slots}

    def rest(self) -> None:
        """From here on nothing happens: steps get their slots at once again; and an idle client holds none."""
        self.is_open = False
        assert any([self.step(2) for _ in range(6)][3:]), "the client never gets slots at once any more"
        for _ in range(3):
            self.clock.advance(1.0)
            self.client.tick()
            self.serve()
        assert self.holdings.counts.preallocated == 0
        for each in self.former:
            each.release_all()
        assert self.daemon.pool.check().filling == 0


class Between:
    """The client's lock: where it is let go, others come first."""

    def __init__(self, lock: Any, world: World) -> None:
        self._lock, self._world = lock, world

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        self._world.place(is_unlocked=True)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Plan], World]]:
    clock = FakeClock()
    monkeypatch.setattr("kvtier.service.node.holdings.now", clock)
    monkeypatch.setattr(links._log, "disabled", True)  # each world begins without a daemon
    send, opened = Link.send, list[World]()

    def hooked(self: Link, *arguments: Any) -> bool:
        opened[-1].place()
        return send(self, *arguments)

    monkeypatch.setattr(Link, "send", hooked)
    with tempfile.TemporaryDirectory() as home, socket.socket(socket.AF_UNIX) as listener:
        path = Path(home) / "s"
        listener.bind(str(path))
        listener.listen()

        def world(plan: Plan) -> World:
            if opened:
                opened.pop().close()
            clock.now = 1000.0
            opened.append(World(path, listener, plan, clock))
            return opened[-1]

        yield world
        opened.pop().close()


STEPS: Final = (1, 2, 7, 2, 0, 2)  # stores of each; 0: an idle moment


def run(worlds: Callable[[Plan], World], plan: Plan) -> list[int]:
    """Returns how many things may happen at each place."""
    world = worlds(plan)
    try:
        for num_stores in STEPS:
            if num_stores:
                world.step(num_stores)
            else:
                world.clock.advance(1.0)
                world.client.tick()
        world.rest()
    except AssertionError as error:
        raise AssertionError(f"{error}; what happened, by place: {plan}") from error
    return world.options


def test_no_slot_is_copied_to_that_may_be_anothers(worlds: Callable[[Plan], World]) -> None:
    options = run(worlds, {})
    assert len(options) > 40
    for place, num in enumerate(options):
        for choice in range(num):
            run(worlds, {place: choice})


def test_nor_after_several_such_things(worlds: Callable[[Plan], World]) -> None:
    chance, options = random.Random(1), run(worlds, {})
    for _ in range(400):
        places = chance.sample(range(len(options)), chance.randint(2, 4))
        run(worlds, {place: chance.randrange(options[place]) for place in places})
