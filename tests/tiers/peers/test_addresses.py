"""The nodes that [peers] names: what is no address, and how many of them count."""

import logging
from pathlib import Path

import pytest

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.peers.addresses import MAX_PEERS, looked_up


@pytest.mark.parametrize(
    "node", ["a:65536", "a:99999", "a:0", "a:\u0663", "a:-1", "a\0b:1", "\x1b[2J:1", "a b:1", "::1:80", ":80"]
)
def test_what_is_no_address_of_a_node_is_one_line(node: str, tmp_path: Path) -> None:
    # A resolver takes port 65536 + 80 for 80, and would ask whoever is there.
    with pytest.raises(ConfigError, match=r"\[peers\] nodes \[.*not a list of HOST:PORT; write one") as refused:
        Config.load(peers={"nodes": [node], "key_file": tmp_path / "key"})
    assert str(refused.value).isprintable()


def test_so_many_addresses_count_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = tuple(f"127.0.0.1:{port}" for port in range(1, MAX_PEERS + 9))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert looked_up(nodes) == [("127.0.0.1", port) for port in range(1, MAX_PEERS + 1)]
    assert [record.message for record in caplog.records] == ["[peers] nodes: 72 addresses, the first 64 are used"]
