"""Engines that the daemon refused: /readyz, `kvtier status` and `kvtier doctor` say which, why, how often and when."""

import os
import socket as sockets
from pathlib import Path

from command_rig import kvtier
from doubles import BLOCK_SIZE, SLOT_BYTES, wait_until
from http_rig import MODEL, ServedDaemon
from msgspec.structs import astuple
from service_rig import FINGERPRINT, attach

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.link import Peer
from kvtier.connector.daemon.wire import Hello, pack_frame
from kvtier.service.doctor.doctor import check_refused
from kvtier.service.node.health import Refusals
from kvtier.tiers.config.config import Config
from kvtier.tiers.finding import Status


def say(socket: Path, frame: bytes) -> bytes:
    """What the daemon answers to this first frame, until it hangs up."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.connect(str(socket))
        client.sendall(frame)
        told = b""
        while more := client.recv(4096):
            told += more
        return told


def test_an_engine_that_was_refused_is_seen_everywhere_until_one_of_its_model_gets_in(home: Path) -> None:
    path = home / "s"
    served = ServedDaemon(path, host={"size": 1 << 20}, service={"socket": path})
    config = Config.load(service={"socket": path, "http": served.http}).service
    try:
        assert [each.found for each in check_refused(config)] == ["none in the last hour"]
        # An engine of an older kvtier, twice, and one whose blocks are too large for this daemon's memory.
        hello = Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, 1 << 20, reset=False)
        old = pack_frame(["kvtier", wire.OLDEST - 1, "Hello", *astuple(hello)])
        for _ in range(2):
            assert b"protocol version" in say(path, old)
        without = attach(path, slot_bytes=1 << 20)
        assert "8 of its blocks take 8MiB; raise it there" in without.wanting["daemon"]

        ready = served.client.get("/readyz").json()
        assert ready["ready"]  # those that fit are served
        large, older = ready["refused"]
        assert (large["count"], large["model"], large["pid"], large["uid"]) == (1, MODEL, os.getpid(), os.geteuid())
        assert large["why"].startswith("[host] size: the daemon has 256KiB of 1MiB for this model")
        assert (older["count"], older["model"]) == (2, None)
        both = f"protocol version {wire.OLDEST - 1}, this side speaks {wire.OLDEST} to {wire.VERSION} "
        assert older["why"].startswith(both)
        assert 0 <= large["seconds_ago"] <= older["seconds_ago"] < 600
        lines = kvtier("status", "--http", served.http).stdout.splitlines()
        told = [line.split(None, 1)[1] for line in lines if line.startswith("  refused")]
        assert [line.partition(", last ")[0] for line in told] == ["once", "2 times"]
        assert [line.endswith(each["why"]) for line, each in zip(told, ready["refused"], strict=True)] == [True, True]
        findings = check_refused(config)
        assert {each.status for each in findings} == {Status.WARNING}
        assert [large["why"] in findings[0].found, older["why"] in findings[1].found] == [True, True]

        # The same model with blocks that fit gets in: what kept it out is over. The old engine is as it was.
        tiers = attach(path)
        (left,) = served.client.get("/status").json()["refused"]
        assert left["count"] == 2
        tiers.close()
        without.close()
    finally:
        served.close()
    wait_until(lambda: not path.exists())
    assert check_refused(config) == []  # that nothing answers is another line's matter


def test_reasons_are_bounded_and_short() -> None:
    refusals, peer = Refusals(), Peer(1, 2)
    for number in range(100):
        refusals.record(f"reason {number}", peer)
        refusals.record("the usual one", peer)
    refusals.record("x" * 5000, peer, b"model")
    kept = refusals.all()
    assert len(kept) == 16
    assert (len(kept[0].why), kept[0].model) == (500, b"model".hex())
    assert (kept[1].why, kept[1].count) == ("the usual one", 100)
    assert kept[2].why == "reason 99"
    refusals.welcomed(b"model")
    assert len(refusals.all()) == 15
