"""The nodes that [peers] names: what is no address, and how many of them count."""

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.peers.peer import MAX_PEERS, PeerAddresses


@pytest.mark.parametrize(
    "node", ["a:65536", "a:99999", "a:0", "a:\u0663", "a:-1", "a\0b:1", "\x1b[2J:1", "a b:1", "::1:80", ":80"]
)
def test_what_is_no_address_of_a_node_is_one_line(node: str, tmp_path: Path) -> None:
    # A resolver takes port 65536 + 80 for 80, and would ask whoever is there.
    with pytest.raises(ConfigError, match=r"\[peers\] nodes \[.*not a list of HOST:PORT; write one") as refused:
        Config.load(peers={"nodes": [node], "key_file": tmp_path / "key"})
    assert str(refused.value).isprintable()


def test_so_many_addresses_count_whatever_their_order_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [f"127.0.0.1:{port}" for port in range(1, MAX_PEERS + 41)]
    addresses = PeerAddresses(nodes)
    with caplog.at_level(logging.WARNING):
        chosen = set(addresses.look_up())
        assert len(chosen) == MAX_PEERS
        assert set(addresses.look_up()) == chosen
    assert [record.message for record in caplog.records] == ["[peers] nodes: 104 addresses, 64 of them are used"]
    assert set(PeerAddresses(nodes[::-1]).look_up()) == chosen
    # one more, or one less, changes one at most
    assert len(chosen - set(PeerAddresses([*nodes, "127.0.0.1:5000"]).look_up())) <= 1
    assert len(set(PeerAddresses(nodes[1:]).look_up()) - chosen) <= 1


def test_machines_choose_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, chosen = PeerAddresses([f"127.0.0.1:{port}" for port in range(1, MAX_PEERS * 2)]), list[set[Any]]()
    for name in ("node-a", "node-b"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        chosen.append(set(addresses.look_up()))
    assert chosen[0] != chosen[1]


def test_no_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, answers = [0.0], {"a:1": ["10.0.0.1", "10.0.0.2"], "b:1": ["10.0.0.3"]}

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        if not answers[f"{host}:{port}"]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(0, 0, 0, "", (address, port)) for address in answers[f"{host}:{port}"]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    addresses = PeerAddresses(["a:1", "b:1"], clock=lambda: now[0])
    known = [("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1)]
    assert addresses.look_up() == known
    answers["a:1"] = []
    for now[0] in (10.0, 20.0, 3590.0):
        assert addresses.look_up() == known
    assert len(caplog.messages) == 1
    assert "its last addresses stay for now" in caplog.text
    answers["a:1"] = ["10.0.0.9"]  # an answer: the others are gone
    assert addresses.look_up() == [("10.0.0.9", 1), ("10.0.0.3", 1)]
    answers["a:1"] = []
    now[0] += 3601.0
    assert addresses.look_up() == [("10.0.0.3", 1)]
