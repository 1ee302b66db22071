"""Publisher and consumer over real sockets: late, slow and cut-off readers end with the right index; vLLM's frames."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, cast

import msgpack
import pytest
import zmq
from doubles import chain_over, records_of
from event_rig import until
from extent import brief
from node_rig import event_ports

from kvtier.service.events.consumer import END, EventConsumer, NumberedBatch
from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.publisher import MAX_BATCH_BYTES, AnnouncedBlocks, Publisher, _parts
from kvtier.service.events.wire import (
    MAX_PAYLOAD,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    KVEvent,
    decode_batch,
    encode_batch,
    external_hash,
    topic_of,
)
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.hierarchy import Removed, Stored
from kvtier.tiers.naming.chain import TokenChain

MODEL, OTHER, THIRD = (name.ljust(32, b".") for name in (b"one model", b"and another", b"and a third"))
SIZE = 4
DEADLINE = 30.0


def chain_of(number: int, blocks: int = 4, model: bytes = MODEL) -> TokenChain:
    return chain_over(range(1000 * number, 1000 * number + blocks * SIZE), fingerprint=model)


def stored(chain: TokenChain, tier: str = "l2", first: int = 0, last: int | None = None) -> Stored:
    return Stored(tier, records_of(chain, first, last))


def addresses(**options: object) -> EventsConfig:
    return EventsConfig.model_validate({**event_ports(), **options})


def found(index: PrefixIndex, chain: TokenChain, worker: str = "w") -> dict[str, int]:
    return index.matches(prompt_hashes(chain._tokens, SIZE)).get(worker, {})


@contextmanager
def reader(config: EventsConfig, index: PrefixIndex, topic: str | None = None) -> Iterator[EventConsumer]:
    with closing(EventConsumer("w", index, str(config.publish), config.replay, topic=topic)) as consumer:
        yield consumer
        index.check()
        assert not index.counts


@contextmanager
def by_hand(config: EventsConfig) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A publisher's two sockets, unbound: what it publishes on and where it is asked for a replay."""
    with zmq.Context() as context, context.socket(zmq.PUB) as out, context.socket(zmq.ROUTER) as asked:
        out.linger = asked.linger = 0
        yield out, asked


def bind(config: EventsConfig, out: zmq.Socket[bytes], asked: zmq.Socket[bytes]) -> None:
    out.bind(str(config.publish))
    asked.bind(str(config.replay))


@contextmanager
def connected(kind: int, address: str | None, is_slow: bool = False) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber's socket by hand; a slow one takes next to nothing before it is read."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger, socket.rcvtimeo = 0, 30_000
        if is_slow:
            socket.rcvhwm, socket.rcvbuf = 1, 4096
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(str(address))
        yield socket


def request(config: EventsConfig, first: int) -> list[bytes]:
    """The first that a replay brings, by vLLM's protocol and with the socket its examples use."""
    with connected(zmq.REQ, config.replay) as socket:  # it strips the empty frame, and takes one reply
        socket.send(first.to_bytes(8, "big"))
        return socket.recv_multipart()


def replayed(config: EventsConfig, first: int) -> list[list[bytes]]:
    with connected(zmq.DEALER, config.replay) as socket:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        messages = [socket.recv_multipart()]
        while messages[-1][2] != END:
            messages.append(socket.recv_multipart())
        return messages


def test_frames_and_replay_are_vllms() -> None:
    config = addresses(buffer=100)
    with Publisher(config, dp_rank=3) as publisher:
        for number in range(3):
            publisher.announce(MODEL, [stored(chain_of(number, 1))])
        assert publisher.flush(DEADLINE)
        *told, end = replayed(config, 1)
        assert end == [b"", b"", END, b""]
        assert [int.from_bytes(seq, "big") for _, _, seq, _ in told] == [1, 2]
        assert {(empty, topic) for empty, topic, _, _ in told} == {(b"", topic_of(MODEL).encode())}
        batch = decode_batch(told[0][3])
        assert (batch.dp_rank, len(batch.events)) == (3, 1)
        assert abs(batch.ts - time.time()) < 600
        assert request(config, 2)[1] == (2).to_bytes(8, "big")
        assert replayed(config, 3) == [[b"", b"", END, b""]]
        assert publisher.counts["snapshots"] == 0


def test_of_closed_models_the_last_are_kept() -> None:
    """Weights that change at each step of a training are a model each: a replay may not grow with them."""
    config = addresses(buffer=1)
    with Publisher(config) as publisher:
        models = [number.to_bytes(2, "big") * 16 for number in range(200)]
        publisher.announce(MODEL, [stored(chain_of(1))])
        for model in models:
            publisher.announce(model, [stored(chain_of(1, model=model))])
            publisher.forget(model)
        assert publisher.flush(DEADLINE)
        topics = {topic for _, topic, _, _ in replayed(config, 0)[:-1]}
    assert topics == {topic_of(model).encode() for model in [MODEL, *models[-64:]]}


def test_readers_late_and_early_end_alike() -> None:
    config = addresses()
    early, late = PrefixIndex(SIZE), PrefixIndex(SIZE)
    chains = [chain_of(number) for number in range(20)]
    with reader(config, early) as first:  # nobody is there yet
        assert first.state.state == "stale"
        with Publisher(config) as publisher:
            for chain in chains[:10]:
                publisher.announce(MODEL, [stored(chain), stored(chain, "file", 0, 2)])
            until(lambda: early.holdings("w") == {"CPU": 40, "STORAGE": 20})
            with reader(config, late) as second:
                for chain in chains[10:]:
                    publisher.announce(MODEL, [stored(chain)])
                publisher.announce(MODEL, [Removed("l2", tuple(chains[0].hashes[2:]))])
                for index in (early, late):
                    until(lambda index=index: index.holdings("w") == {"CPU": 78, "STORAGE": 20})
                    assert found(index, chains[0]) == {"CPU": 2}
                    assert found(index, chains[19]) == {"CPU": 4}
                until(lambda: second.state.state == "live")
                state = second.state
                assert state.seq == publisher.seq - 1
                assert state.age is not None
                assert state.counts["resets"] == 1
                assert "lost" not in state.counts


def test_who_comes_too_late_for_the_buffer_is_told_the_present_state() -> None:
    config = addresses(buffer=2)
    with Publisher(config) as publisher:
        for number in range(50):
            publisher.announce(MODEL, [stored(chain_of(number))])
            publisher.announce(OTHER, [stored(chain_of(number, 2, OTHER))])
        publisher.announce(MODEL, [Removed("l2", tuple(chain_of(0).hashes))])
        assert publisher.flush(DEADLINE)
        *told, _ = replayed(config, 0)
        assert publisher.counts["snapshots"] == 1
        # plain events under the last numbers there are: for each model a clearing, and then what it has
        assert [int.from_bytes(seq, "big") for _, _, seq, _ in told] == [publisher.seq - 2, publisher.seq - 1]
        assert [decode_batch(payload).events[0] for *_, payload in told] == [AllBlocksCleared()] * 2
        # who has missed just one batch of a state that takes three: a number is made
        before = publisher.seq
        publisher.announce(THIRD, [stored(chain_of(60, model=THIRD))])
        assert publisher.flush(DEADLINE)
        *told, _ = replayed(config, before - 2)
        assert [int.from_bytes(seq, "big") for _, _, seq, _ in told] == [before - 1, before, before + 1]
        assert publisher.seq == before + 2
        publisher.announce(MODEL, [stored(chain_of(60))])
        index = PrefixIndex(SIZE)
        with reader(config, index, topic_of(MODEL)) as consumer:
            until(lambda: index.holdings("w") == {"CPU": 200})
            until(lambda: consumer.state.state == "live")
            until(lambda: consumer.state.counts.get("other_topics", 0) >= 1)
            assert found(index, chain_of(49)) == {"CPU": 4}
            assert found(index, chain_of(0)) == {}
            publisher.forget(OTHER)
            publisher.forget(MODEL)
            until(lambda: index.num_blocks == 0)


def test_models_under_one_topic_do_not_clear_each_other() -> None:
    config = addresses(buffer=1, topic="kv")
    with Publisher(config) as publisher:
        for model in (MODEL, OTHER):
            publisher.announce(model, [stored(chain_of(1, model=model))])
        publisher.announce(MODEL, [stored(chain_of(2, 1))])
        assert publisher.flush(DEADLINE)
        index = PrefixIndex(SIZE)
        with reader(config, index, "kv"):
            until(lambda: index.holdings("w") == {"CPU": 9})  # by a summary
            publisher.forget(OTHER)
            until(lambda: index.holdings("w") == {"CPU": 5})
            assert publisher.counts["snapshots"] == 1


def test_a_publisher_that_is_started_anew_is_believed_anew() -> None:
    config, index = addresses(), PrefixIndex(SIZE)
    with reader(config, index) as consumer:
        with Publisher(config) as publisher:
            publisher.announce(MODEL, [stored(chain_of(1))])
            until(lambda: found(index, chain_of(1)) == {"CPU": 4})
        until(lambda: consumer.state.state == "stale")
        assert found(index, chain_of(1)) == {"CPU": 4}  # for the router to judge
        with Publisher(config) as publisher:
            for number in range(2, 6):  # it is soon as far as the one before
                publisher.announce(MODEL, [stored(chain_of(number))])
            until(lambda: index.holdings("w") == {"CPU": 16})
            assert found(index, chain_of(1)) == {}
            until(lambda: consumer.state.state == "live")
        with Publisher(config):  # and one that has nothing to tell
            until(lambda: index.num_blocks == 0)
            until(lambda: consumer.state.state == "live")


def test_dropped_doubled_and_late_batches_of_any_publisher() -> None:
    # a publisher by hand, which sends old arrays, loses batches, doubles and reorders them, and keeps them for replay
    config, index = addresses(), PrefixIndex(SIZE)
    log = []
    for number in range(40):
        chain = chain_of(number, 1)
        event = BlockStored(
            [external_hash(chain.hashes[0])], None, [*chain._tokens], SIZE, None, "GPU" if number % 2 else None, None
        )
        log.append(encode_batch(EventBatch(time.time(), [event], 0)))
    with by_hand(config) as (out, again):
        bind(config, out, again)

        def answer(end: int) -> None:
            while again.poll(20):
                client, _, number = again.recv_multipart()
                for seq in range(int.from_bytes(number, "big"), end):
                    again.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), log[seq]])
                again.send_multipart([client, b"", b"", END, b""])

        def send(seq: int) -> None:
            out.send_multipart([b"", seq.to_bytes(8, "big"), log[seq]])

        def settled(blocks: int) -> bool:
            answer(blocks)
            return index.num_blocks == blocks

        with reader(config, index) as consumer:
            until(lambda: settled(10))  # all of it by replay
            until(lambda: consumer.state.state == "live")
            order = [10, 12, 11, 11, 16, 15, 5, 19]  # 13, 14, 17 and 18 are lost
            for seq in order[:1]:
                send(seq)
            until(lambda: settled(11))  # it came, or was asked for
            for seq in order[1:]:
                send(seq)
            until(lambda: settled(20) and not consumer._sequencer.is_replaying)  # else what comes would wait for that
            out.send_multipart([b"", b"what is this", b""])
            out.send_multipart([b"", (20).to_bytes(8, "big"), b"\xdd\xff\xff\xff\xff"])
            until(lambda: consumer.state.counts.get("malformed") == 2)
            send(39)
            until(lambda: settled(40) or index.num_blocks == 39)  # 20 came as rubbish, or again as it should be
            counts = consumer.state.counts
            assert counts["gaps"] >= 2
            assert counts["duplicates"] >= 1  # 5; one that comes while a replay is under way may be had from that
            assert "lost" not in counts


class Held(PrefixIndex):
    """An index that takes in nothing while its gate is closed."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.gate = threading.Event()
        self.is_waited_for = threading.Event()

    def apply(self, worker: str, event: KVEvent) -> None:
        self.is_waited_for.set()
        assert self.gate.wait(DEADLINE)
        super().apply(worker, event)


def test_what_a_former_publisher_said_last_is_not_taken_for_its_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.events.consumer._TURN", 1)
    config, index = addresses(), Held()
    with reader(config, index) as consumer:
        with Publisher(config) as publisher:
            until(lambda: consumer.state.state == "live")
            publisher.announce(MODEL, [stored(chain_of(0))])
            assert index.is_waited_for.wait(DEADLINE)  # the reader is busy with the first batch, and has …
            for number in range(1, 9):
                publisher.announce(MODEL, [stored(chain_of(number))])
            assert publisher.flush(DEADLINE)
            time.sleep(0.5)  # … the others in its queue, as good as surely: else this shows nothing
        with by_hand(config) as (out, again):
            with out.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as arrivals:
                bind(config, out, again)
                assert arrivals.poll(int(1000 * DEADLINE))  # the reader's socket has found the successor …
                out.disable_monitor()
            index.gate.set()  # … and now the reader does, which still has to read eight batches of the former one
            events = AnnouncedBlocks(MODEL).apply(stored(chain_of(50)))
            told = NumberedBatch(0, topic_of(MODEL).encode(), encode_batch(EventBatch(time.time(), events)))

            def is_answered() -> bool:
                while again.poll(20):
                    client, _, number = again.recv_multipart()
                    if number == bytes(8):
                        again.send_multipart([client, b"", *told.frames])
                    again.send_multipart([client, b"", b"", END, b""])
                return consumer.state.state == "live"

            until(is_answered)
            assert found(index, chain_of(50)) == {"CPU": 4}
            assert index.holdings("w") == {"CPU": 4}
            assert consumer.state.counts["dropped"] > 0


def test_no_batch_of_ours_is_more_than_a_reader_takes() -> None:
    # huge blocks, whose tokens are as long as they can be on the wire
    size, blocks = 4096, 512
    names = [2**64 - 1] * blocks
    tokens = [2**32 - 1] * (size * blocks)
    events = [BlockStored(names, None, tokens, size, None, "STORAGE", None) for _ in range(3)]
    events += [BlockStored(names[:1], None, tokens[:size], size, None, "GPU", None)] * 300
    parts = list(_parts([*events, AllBlocksCleared()]))
    assert [event for part in parts for event in part] == [*events, AllBlocksCleared()]
    sizes = [len(encode_batch(EventBatch(0.0, part))) for part in parts]
    assert max(sizes) <= MAX_PAYLOAD
    assert [len(part) for part in parts][:3] == [1, 1, 1]
    assert max(sizes[3:]) <= MAX_BATCH_BYTES
    assert sum(len(part) > 1 for part in parts) >= len(parts) - 4  # and no batch for each event


def test_no_reader_misses_its_own_handshake() -> None:
    # a publisher that is there already answers while its reader is still being made
    config = addresses()
    with Publisher(config) as publisher:
        publisher.announce(MODEL, [stored(chain_of(1))])
        for _ in range(brief(10, 40)):
            index = PrefixIndex(SIZE)
            with reader(config, index):
                until(lambda index=index: index.num_blocks == 4)


def test_a_silent_publisher_is_asked_whether_anything_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.events.consumer._SILENCE", 0.1)
    config, index = addresses(), PrefixIndex(SIZE)
    with Publisher(config) as publisher, reader(config, index) as consumer:
        until(lambda: consumer.state.state == "live")
        out, publisher._publish = publisher._publish, Deaf()  # type: ignore[assignment]
        publisher.announce(MODEL, [stored(chain_of(1))])  # the last batch for long, and it is dropped
        until(lambda: found(index, chain_of(1)) == {"CPU": 4})
        publisher.flush(DEADLINE)
        publisher._publish = out


def test_a_publisher_that_hangs_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.events.consumer._SILENCE", 0.1)
    monkeypatch.setattr("kvtier.service.events.consumer._REPLAY_DEADLINE", 0.2)
    config = addresses()
    with by_hand(config) as (out, asked):
        bind(config, out, asked)

        def answers() -> bool:
            while asked.poll(0):
                who, *_ = asked.recv_multipart()
                asked.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])  # there is no more
            return consumer.state.state == "live"

        with reader(config, PrefixIndex(SIZE)) as consumer:
            until(answers)
            until(lambda: consumer.state.state == "stale")  # connected all the time, and silent
            assert not consumer.is_live
            until(answers)
            assert consumer.state.counts["connections"] == 1


class Deaf:
    """A socket whose subscribers take nothing."""

    def send_multipart(self, frames: list[bytes]) -> None:
        pass


def test_without_a_replay_address_a_reader_learns_from_now_on() -> None:
    config = addresses(replay=None)
    index = PrefixIndex(SIZE)
    with Publisher(config) as publisher, reader(config, index) as consumer:
        publisher.announce(MODEL, [stored(chain_of(0))])
        numbers = iter(range(1, 10_000))

        def told() -> bool:
            publisher.announce(MODEL, [stored(chain_of(next(numbers), 1))])
            return index.num_blocks > 3

        until(told)
        until(lambda: consumer.state.state == "live")


def test_a_reader_that_does_not_read_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.events.publisher._QUEUE", 10)
    config = addresses()
    with Publisher(config) as publisher, connected(zmq.SUB, config.publish, is_slow=True) as slow:
        publisher.announce(MODEL, [stored(chain_of(0))])
        big = AnnouncedBlocks(MODEL).apply(stored(chain_of(1, 2000)))
        for _ in range(200):  # more than the system's own buffers take
            publisher._submit(0, lambda: publisher._send(MODEL, big))
        assert publisher.flush(DEADLINE)
        numbers = []
        while slow.poll(200):
            numbers.append(int.from_bytes(slow.recv_multipart()[1], "big"))
        assert numbers == sorted(set(numbers))
        assert len(numbers) < publisher.seq  # it sees that some are missing


FLOODED = """
import threading, time, zmq
from contextlib import closing
from kvtier.service.events.consumer import EventConsumer
from kvtier.service.events.wire import AllBlocksCleared, EventBatch, encode_batch

payload = encode_batch(EventBatch(0.0, [AllBlocksCleared()] * 100_000))

class Slow:
    applied = 0
    def apply(self, worker, event):
        self.applied += 1
        if self.applied % 100_000 == 1:
            time.sleep(4)  # longer than a publisher may be silent, while its batches fill every queue
    def drop(self, worker):
        pass

with zmq.Context() as context, context.socket(zmq.PUB) as out:
    out.setsockopt(zmq.LINGER, 0)
    port = out.bind_to_random_port("tcp://127.0.0.1")
    sink = Slow()
    with closing(EventConsumer("w", sink, f"tcp://127.0.0.1:{port}")):
        begin, number = time.monotonic(), 0
        while (took := time.monotonic() - begin) < 10 or (sink.applied <= 100_000 and took < 70):  # a busy machine
            out.send_multipart([b"", number.to_bytes(8, "big"), payload])
            number += 1
            time.sleep(0.01)
    print(sink.applied > 100_000)
"""


@pytest.mark.exhaustive  # thirteen seconds; readers of test_router_processes.py fall behind, too, by less
@pytest.mark.slow
def test_a_reader_that_falls_behind_lives() -> None:
    """libzmq aborts a process whose heartbeat is late while its queue is full."""
    done = subprocess.run([sys.executable, "-c", FLOODED], capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_who_does_not_read_its_replay_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.events.publisher._REPLAY_DEADLINE", 0.2)
    config, index = addresses(), PrefixIndex(SIZE)
    with Publisher(config) as publisher:
        for number in range(40):
            publisher.announce(MODEL, [stored(chain_of(number, 1000))])
        assert publisher.flush(DEADLINE)
        with connected(zmq.DEALER, config.replay, is_slow=True) as slow:
            for _ in range(40):  # more than are served at once, all from one subscriber
                slow.send_multipart([b"", bytes(8)])
            until(lambda: publisher.counts["replays"] > 0)
            slow.send_multipart([b"", b"rubbish"])
            until(lambda: publisher.counts["replays_refused"] > 0)
            with reader(config, index):
                until(lambda: index.num_blocks == 40 * 1000)


def test_a_publisher_tells_in_the_form_its_reader_knows() -> None:
    config = addresses(form="arrays", topic="kv@pod-1@my-model")  # both as llm-d wants them
    with Publisher(config) as publisher, reader(config, index := PrefixIndex(SIZE), topic="kv@pod-1@my-model"):
        publisher.announce(MODEL, [stored(chain_of(1))])
        assert publisher.flush(DEADLINE)
        *told, _ = replayed(config, 0)
        _, [event], _ = msgpack.unpackb(told[-1][3])
        assert event[0] == "BlockStored"
        until(lambda: found(index, chain_of(1)) == {"CPU": 4})


def removed(chain: TokenChain) -> Removed:
    return Removed("l2", tuple(chain.hashes))


def test_room_is_bounded_and_comes_back() -> None:
    config = addresses()
    with Publisher(config) as publisher:
        source = Source(400)
        feed = publisher.feed(MODEL, cast(Any, source))
        gate = threading.Event()

        def get_nothing_done() -> None:
            gate.wait(DEADLINE)

        publisher._submit(0, get_nothing_done)
        while publisher.has_room:
            assert feed.pump()
        assert feed.pump()
        assert 0 < source.left < 400
        gate.set()
        until(lambda: not feed.pump())
        assert publisher.flush(DEADLINE)
        assert publisher._announced[MODEL].num_announced == 400 * 100


class Source:
    """Tiers with many chains to tell."""

    def __init__(self, chains: int) -> None:
        self.left = chains

    @property
    def waiting(self) -> bool:
        return self.left > 0

    def take(self, limit: int) -> list[Stored | Removed]:
        taken = range(self.left)[-max(1, limit // 100) :]
        self.left -= len(taken)
        return [stored(chain_of(number, 100)) for number in taken]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"publish": "tcp://10.0.0.1:5557"}, "[events] publish"),  # not an address of this machine
        ({"replay": "tcp://10.0.0.1:5557", "publish": "ipc:///nowhere/at/all"}, "[events] publish"),
    ],
)
def test_an_address_that_cannot_be_had_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Publisher(EventsConfig.model_validate({"allow_remote": True, **options}))
    assert str(refused.value).startswith(complaint)


def test_an_address_that_is_taken_is_named() -> None:
    config = addresses()
    with Publisher(config), pytest.raises(ConfigError, match="in use"):
        Publisher(config)
    with pytest.raises(ConfigError, match='events "nonsense"'):
        EventConsumer("w", PrefixIndex(SIZE), "nonsense")


@pytest.mark.parametrize("has_replay", [False, True])
def test_waiting_for_nobody_costs_nothing(has_replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.events.consumer._SILENCE", 0.2)
    config = addresses()
    with ExitStack() as stack:
        if not has_replay:  # somebody who says nothing; else nobody is there
            silent = addresses(publish=config.publish, replay=None)
            stack.enter_context(Publisher(silent))
        replay = config.replay if has_replay else None
        consumer = stack.enter_context(closing(EventConsumer("w", PrefixIndex(SIZE), str(config.publish), replay)))
        if not has_replay:
            until(lambda: consumer.state.counts.get("connections") == 1)
        turns: list[float] = []
        monkeypatch.setattr(consumer, "_pass_time", lambda: turns.append(time.monotonic()))
        time.sleep(1.0)
        assert len(turns) < 50  # it was one each millisecond


def test_what_every_node_can_reach_need_not_be_announced() -> None:
    """For routers that take a medium they do not know for the device's; with an empty topic, as vLLM's own is."""
    config = addresses(shared=False, topic="")
    with Publisher(config) as publisher, reader(config, index := PrefixIndex(SIZE), topic="") as consumer:
        near, far, both = chain_of(1), chain_of(2), chain_of(3)
        publisher.announce(MODEL, [stored(near, "file"), stored(far, "redis")])
        publisher.announce(MODEL, [stored(both, "objects"), stored(both, "l2", last=2)])
        until(lambda: found(index, both) == {"CPU": 2})
        assert found(index, near) == {"STORAGE": 4}
        assert found(index, far) == {}
        # what goes from there is not told, either
        publisher.announce(MODEL, [Removed("redis", tuple(far.hashes)), Removed("l2", tuple(both.hashes[:2]))])
        until(lambda: found(index, both) == {})
        assert consumer.state.counts.get("other_topics", 0) == 0
