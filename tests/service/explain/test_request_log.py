"""The request log: a line for each request of a daemon's engines, with why the rest was missed."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_rig import kvtier
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, wait_until
from service_rig import FINGERPRINT, Attach, DaemonProcess, store, where

from kvtier.service.explain.request_log import LoggedRequest, Recent, RequestLog
from kvtier.tiers import ConfigError
from kvtier.tiers.reuse import RequestEnd


def lines(path: Path, number: int) -> list[dict[str, Any]]:
    """Once there are so many."""
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= number)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(told) == number
    return told


@pytest.fixture
def daemon(home: Path) -> Iterator[DaemonProcess]:
    log = {"service__request_log": str(home / "log")}
    process = DaemonProcess(home / "s", host__size="1MiB", **log)
    yield process
    assert process.end(signal.SIGTERM) == 0


def test_a_daemon_writes_a_line_for_each_engine_request(home: Path, daemon: DaemonProcess, attach: Attach) -> None:
    tiers = attach(size=32 * SLOT_BYTES)
    chain = chain_of(6, fingerprint=FINGERPRINT)
    store(tiers, chain, 0, 4)
    assert where(tiers, chain).miss == 2
    client = int.from_bytes(chain.root[:4], "little")
    end = RequestEnd(chain.hashes, 6, 9, None, client, seconds=1.5, request="chat-7", num_prompt_tokens=100, ttft=0.25)
    tiers.ended(end)
    tiers.tick()
    (line,) = lines(home / "log", 1)
    del line["time"]
    assert line == {
        "id": "chat-7",
        "tenant": "no salt",
        "end": "ended",
        "prompt_tokens": 100,
        "output_tokens": 9,
        "tokens": {
            "l1": 0,
            "l2": 4 * BLOCK_SIZE,
            "file": 0,
            "peers": 0,
            "redis": 0,
            "objects": 0,
            "computed": 100 - 4 * BLOCK_SIZE,
        },
        "missed": [{"cause": "never_seen", "tier": "", "blocks": 2}],
        "ttft_s": 0.25,
        "seconds": 1.5,
    }
    # Two requests with the same prompt, under way at once: each line says where its tokens came from.
    for _ in range(2):
        assert where(tiers, chain)["l2"] == 4
    for name in ("chat-8", "chat-9"):
        tiers.ended(end._replace(request=name))
    tiers.tick()
    told = lines(home / "log", 3)
    assert [each["id"] for each in told] == ["chat-7", "chat-8", "chat-9"]
    assert [each["tokens"]["l2"] for each in told] == [4 * BLOCK_SIZE] * 3


def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    ended = kvtier("serve", "--socket", str(tmp_path / "s"), "--request-log", str(tmp_path / "nowhere" / "log"))
    assert ended.returncode == 2
    assert f'[service] request_log "{tmp_path}/nowhere/log": No such file or directory; name a file' in ended.stderr
    with pytest.raises(ConfigError, match=r"request_log .*: Is a directory; name a file"):
        RequestLog(tmp_path, "request_log")


def request(number: int) -> LoggedRequest:
    return LoggedRequest(id=str(number), tenant="no salt", prompt_tokens=5, tokens={"l1": 2})


def test_lines_beyond_the_queue_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, is_writing, real = threading.Event(), threading.Event(), os.write

    def slow(file: int, data: bytes) -> int:
        is_writing.set()
        assert may_write.wait(60)
        return real(file, data)

    monkeypatch.setattr("kvtier.service.explain.request_log.os.write", slow)
    log = RequestLog(tmp_path / "log", "request_log", most_waiting=2)
    log.write(request(0))
    assert is_writing.wait(60)  # the disk is slow: two may wait, two are dropped
    for number in range(1, 5):
        log.write(request(number))
    assert log.counts["queue_full"] == 2
    may_write.set()
    log.close()
    log.close()
    assert [each["id"] for each in lines(tmp_path / "log", 3)] == ["0", "1", "2"]

    # a disk that refuses is counted, and the log goes on
    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtier.service.explain.request_log.os.write", full)
    refused = RequestLog(tmp_path / "full", "request_log")
    refused.write(request(0))
    refused.close()
    assert refused.counts == {"written": 0, "queue_full": 0, "io_error": 1}


def test_a_line_that_the_disk_took_in_part_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, has_room = os.write, [False]

    def nearly_full(file: int, data: bytes) -> int:
        if has_room[0]:
            return real(file, data)
        monkeypatch.setattr("kvtier.service.explain.request_log.os.write", full)
        return real(file, data[:20])

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtier.service.explain.request_log.os.write", nearly_full)
    log = RequestLog(tmp_path / "log", "request_log")
    log.write(request(0))
    wait_until(lambda: log.counts["io_error"] == 1)
    has_room[0] = True
    monkeypatch.setattr("kvtier.service.explain.request_log.os.write", nearly_full)
    for number in (1, 2):
        log.write(request(number))
    log.close()
    torn, *whole = (tmp_path / "log").read_text().splitlines()
    assert len(torn) == 20
    assert [json.loads(line)["id"] for line in whole] == ["1", "2"]


class _Known:
    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items


def test_the_last_requests_are_kept_within_both_bounds() -> None:
    recent: Recent[_Known] = Recent(most_requests=3, most_items=10)
    for number, size in enumerate((4, 4, 4, 1)):
        recent.record(0, str(number), _Known(size))
    assert [recent.find(0, str(number)) is not None for number in range(4)] == [False, True, True, True]
    recent.record(0, "3", _Known(2))  # anew
    recent.record(0, "4", _Known(4))
    assert [recent.find(0, str(number)) is not None for number in range(5)] == [False, False, True, True, True]
    mine, yours = recent.find(0, "4"), _Known(1)
    recent.record(7, "4", yours)  # another tenant's
    assert (recent.find(0, "4"), recent.find(7, "4")) == (mine, yours)
    recent.record(0, "5", _Known(11))  # more than all
    assert len(recent) == 0
