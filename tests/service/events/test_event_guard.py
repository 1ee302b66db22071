"""Who may read KV events: with a CURVE key of the right pair, or out of a directory that nobody else enters."""

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from command_rig import kvtier
from doubles import chain_of, records_of
from event_rig import until
from node_rig import event_ports, free_port
from router_rig import MODEL, replicas, routed
from zmq.auth import create_certificates

from kvtier.service.events.consumer import CurveKeys, EventConsumer
from kvtier.service.events.prefix_index import PrefixIndex
from kvtier.service.events.publisher import Publisher
from kvtier.tiers.config.config import Config
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.hierarchy import Stored

SIZE = 4
FINGERPRINT = bytes.fromhex("ab" * 32)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with the key pairs of a publisher, of its reader, and of somebody else."""
    before = os.umask(0o077)
    for name in ("publisher", "reader", "stranger"):
        create_certificates(tmp_path, name)
    os.umask(before)
    return tmp_path


def guarded(keys: Path, reader: str = "reader", **options: object) -> EventsConfig:
    files = {"curve_key_file": keys / "publisher.key_secret", "curve_reader_file": keys / f"{reader}.key"}
    return EventsConfig.model_validate({**event_ports(), **options, **files})


def reads_as(keys: Path, own: str, publisher: str = "publisher") -> CurveKeys:
    loaded = CurveKeys.load("router", keys / f"{own}.key_secret", "curve_publisher_file", keys / f"{publisher}.key")
    assert loaded is not None
    return loaded


def tell(publisher: Publisher, tier: str = "l2") -> None:
    """Ten blocks."""
    publisher.announce(FINGERPRINT, [Stored(tier, records_of(chain_of(10, 100, fingerprint=FINGERPRINT)))])


def test_who_has_the_key_reads_and_nobody_else_does(keys: Path) -> None:
    config = guarded(keys)
    assert config.publish is not None
    assert config.replay is not None
    at = config.publish, config.replay
    indexes = [PrefixIndex(SIZE) for _ in range(4)]
    wrong = (reads_as(keys, "stranger"), reads_as(keys, "reader", "stranger"), None)
    with (
        Publisher(config) as publisher,
        closing(EventConsumer("w", indexes[0], *at, keys=reads_as(keys, "reader"))) as reader,
    ):
        tell(publisher)
        until(lambda: indexes[0].holdings("w") == {"CPU": 10})  # told, or told again
        until(lambda: reader.state.state == "live")
        # somebody else's key, somebody else's publisher, no key at all
        for index, key in zip(indexes[1:], wrong, strict=True):
            with closing(EventConsumer("w", index, *at, keys=key)) as other:
                until(lambda other=other: other.state.state == "refused")
                assert "CURVE" in str(other.state.why)
                assert other.state.counts["keys_refused"] >= 1
                tell(publisher)
                assert publisher.flush(60)
                assert not other.is_live
                assert index.num_blocks == 0
        assert publisher.counts["keys_refused"] >= 1
        # nor is anything heard, or told again, on a plain socket
        with zmq.Context() as context, context.socket(zmq.SUB) as plain, context.socket(zmq.DEALER) as again:
            for socket, address in zip((plain, again), at, strict=True):
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(address)
            plain.subscribe(b"")
            again.send_multipart([b"", bytes(8)])
            for _ in range(20):
                tell(publisher)
                time.sleep(0.05)
            assert not plain.poll(100)
            assert not again.poll(100)
        assert reader.state.state == "live"


def test_a_reader_is_heard_once_its_key_is_made_known(keys: Path) -> None:
    config, index = guarded(keys), PrefixIndex(SIZE)
    assert config.publish is not None
    with closing(EventConsumer("w", index, config.publish, config.replay, keys=reads_as(keys, "stranger"))) as reader:
        with Publisher(config):
            until(lambda: reader.state.counts.get("keys_refused", 0) >= 2)  # it goes on trying
        both = {"publish": config.publish, "replay": config.replay}
        with Publisher(guarded(keys, "stranger", **both)) as publisher:
            tell(publisher)
            until(lambda: reader.state.state == "live" and index.holdings("w") == {"CPU": 10})
            assert reader.state.why is None


def test_a_publisher_without_keys_is_not_heard_by_who_has_some(keys: Path) -> None:
    # else whoever listens there could tell the router what it likes
    publish = f"tcp://127.0.0.1:{free_port()}"
    with Publisher(EventsConfig(publish=publish)) as publisher:
        index = PrefixIndex(SIZE)
        with closing(EventConsumer("w", index, publish, keys=reads_as(keys, "reader"))) as reader:
            until(lambda: reader.state.state == "refused")
            tell(publisher)
            assert publisher.flush(60)
            assert index.num_blocks == 0


def test_a_router_with_keys_hears_engines_with_keys_and_sockets_of_this_machine(keys: Path, home: Path) -> None:
    home.chmod(0o700)
    here = EventsConfig(publish=f"ipc://{home}/events", replay=f"ipc://{home}/events-replay")
    configs = [guarded(keys), here]
    natures = []
    for config in configs:
        told = {"block_size": SIZE, "fingerprint": FINGERPRINT.hex()}
        natures.append({**MODEL, "kvtier": {**told, "events": {"publish": config.publish, "replay": config.replay}}})
    options = {"curve_key_file": keys / "reader.key_secret", "curve_publisher_file": keys / "publisher.key"}
    with ExitStack() as stack:
        publishers = [stack.enter_context(Publisher(config)) for config in configs]
        first, second = stack.enter_context(replicas(2, *natures))
        router = stack.enter_context(routed(first.url, second.url, **options))
        for publisher, tier in zip(publishers, ("l1", "file"), strict=True):
            tell(publisher, tier)
        until(lambda: [each["blocks"] for each in router.status()["replicas"]] == [{"GPU": 10}, {"STORAGE": 10}])


@pytest.mark.parametrize(
    ("own", "other", "complaint"),
    [
        ("nothing", "publisher.key", "no file with a CURVE key; make one by zmq.auth.create_certificates"),
        ("publisher.key", "publisher.key", "no secret key in it; name the file that ends with .key_secret"),
        ("open.key_secret", "publisher.key", "others can read this secret; chmod 600 it"),
        ("reader.key_secret", "torn.key", "a key in it is not 32 bytes in Z85"),
        ("mixed.key_secret", "publisher.key", "the two keys in it are no pair"),
        ("reader.key_secret", "nothing", 'curve_publisher_file "'),
    ],
)
def test_a_key_that_is_none_is_one_line(keys: Path, own: str, other: str, complaint: str) -> None:
    (keys / "open.key_secret").write_text((keys / "reader.key_secret").read_text())
    (keys / "open.key_secret").chmod(0o640)
    (keys / "torn.key").write_text('curve\n    public-key = "short"\n')
    stranger = (keys / "stranger.key").read_text().partition("public-key = ")[2]
    own_lines = (keys / "reader.key_secret").read_text().partition("public-key = ")
    (keys / "mixed.key_secret").write_text(own_lines[0] + own_lines[1] + stranger + own_lines[2].partition("\n")[2])
    (keys / "mixed.key_secret").chmod(0o600)
    variables = {"router__curve_key_file": str(keys / own), "router__curve_publisher_file": str(keys / other)}
    run = kvtier("route", "--http", "127.0.0.1:0", "--replica", "http://127.0.0.1:1", **variables)
    assert run.returncode == 2
    assert complaint in run.stderr
    assert run.stderr.startswith("kvtier: [router] curve_")
    assert run.stderr.count("\n") == 1


def test_half_a_pair_of_options_is_one_line() -> None:
    for section in ({"events": {"curve_key_file": "/k"}}, {"router": {"curve_publisher_file": "/k"}}):
        with pytest.raises(ConfigError, match=r"curve_\w+ is missing; set both"):
            Config.load(**section)  # type: ignore[arg-type]


def test_a_socket_that_others_can_reach_is_refused(home: Path) -> None:
    address = f"ipc://{home}/events"
    for mode in (0o755, 0o710, 0o770, 0o777 | 0o1000):
        home.chmod(mode)
        with pytest.raises(ConfigError, match=r'\[events\] publish "ipc:.*chmod 700 it, or set allow_remote'):
            Publisher(EventsConfig(publish=address))
    with pytest.raises(ConfigError, match="everybody reaches a name without a file"):
        Publisher(EventsConfig(publish=f"ipc://@kvtier-{os.getpid()}"))
    with pytest.raises(ConfigError, match="make that directory, of mode 0700"):
        Publisher(EventsConfig(publish=f"ipc://{home}/none/events"))
    # whoever says so gets it, and a directory of one's own is taken as it is
    Publisher(EventsConfig(publish=address, allow_remote=True)).close()
    home.chmod(0o700)
    with Publisher(EventsConfig(publish=address, replay=f"{address}-replay")) as publisher:
        index = PrefixIndex(SIZE)
        with closing(EventConsumer("w", index, address, f"{address}-replay")):
            tell(publisher)
            until(lambda: index.holdings("w") == {"CPU": 10})
        # a second one would take the address away without a word
        with pytest.raises(ConfigError, match="another process listens there; choose another path"):
            Publisher(EventsConfig(publish=address))
    # what a killed one has left is no obstacle
    (home / "events").touch()
    Publisher(EventsConfig(publish=address)).close()
