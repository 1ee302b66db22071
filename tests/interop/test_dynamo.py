"""NVIDIA Dynamo's KV indexer reads our events, and finds prompts in every tier: `make test-dynamo`."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx2
import pytest
from event_rig import until
from node_rig import ROOT, free_port

from kvtier.service.events.publisher import Publisher
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.hierarchy.hierarchy import Removed, Stored
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.tier import BlockRecord

PYTHON: Final = ROOT / ".venv-dynamo" / "bin" / "python"
MODEL: Final = b"a model".ljust(32, b".")
SIZE, BLOCKS = 16, 12
WHOLE: Final = SIZE * BLOCKS  # tokens of a prompt

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="Dynamo is not installed: make test-dynamo does it")


def chain_of(number: int, salt: str | None = None) -> TokenChain:
    chain = TokenChain(root_hash(MODEL, cache_salt=salt), SIZE)
    chain.extend(range(1000 * number, 1000 * number + WHOLE))
    return chain


def stored(chain: TokenChain, tier: str, first: int = 0, end: int = BLOCKS) -> Stored:
    blocks = range(first, end)
    return Stored(tier, tuple(BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in blocks))


class Indexer:
    """The indexer, following one publisher."""

    def __init__(self, address: str) -> None:
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        options = {"block-size": SIZE, "port": port, "workers": f"1={address}", "model-name": "model"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        program = Path(__file__).with_name("_dynamo_indexer.py")
        self._process = subprocess.Popen([PYTHON, program, *words], stdout=subprocess.DEVNULL)

    def found(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Tokens of a prompt's beginning on the GPU, there or in memory, there or below."""
        asked = {"token_ids": list(tokens), "model_name": "model", "tenant_id": "default", "block_size": SIZE}
        told = httpx2.post(f"{self._url}/query", json=asked, timeout=30).raise_for_status().json()["instances"]
        by_tier = told.get("1", {})
        return by_tier.get("gpu", 0), by_tier.get("cpu", 0), by_tier.get("disk", 0)

    def is_up(self) -> bool:
        assert self._process.poll() is None, "the indexer has ended"
        try:
            return self.found([1] * SIZE) == (0, 0, 0)
        except httpx2.TransportError:
            return False

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)


@contextmanager
def followed() -> Iterator[tuple[Publisher, Indexer]]:
    """A publisher whose events the indexer gets: a first one is told until it is known."""
    config = EventsConfig.model_validate({"publish": f"tcp://127.0.0.1:{free_port()}"})
    with Publisher(config) as publisher:
        assert publisher.endpoint is not None
        indexer = Indexer(publisher.endpoint)
        try:
            until(indexer.is_up, 120)
            first = chain_of(99)

            def is_heard() -> bool:
                publisher.announce(MODEL, [stored(first, "l1"), Removed("l1", tuple(first.hashes))])
                publisher.announce(MODEL, [stored(first, "l1")])
                return indexer.found(range(99_000, 99_000 + WHOLE))[0] == WHOLE

            until(is_heard, 120)
            yield publisher, indexer
        finally:
            indexer.close()


def test_its_indexer_finds_every_prompt_in_every_tier() -> None:
    with followed() as (publisher, indexer):
        on_device, in_memory, on_disk, in_redis = (chain_of(number) for number in range(1, 5))
        publisher.announce(MODEL, [stored(on_device, "l1")])
        publisher.announce(MODEL, [stored(in_memory, "l2")])
        publisher.announce(MODEL, [stored(on_disk, "file")])
        publisher.announce(MODEL, [stored(in_redis, "l2", 0, 6), stored(in_redis, "redis", 6)])
        publisher.announce(MODEL, [stored(chain_of(5, salt="a tenant"), "l1")])
        publisher.announce(MODEL, [stored(chain_of(6), "peers"), stored(chain_of(7), "objects")])
        assert publisher.flush(60)
        until(lambda: indexer.found(in_redis._tokens)[2] == WHOLE)
        # each counts what is in its own tier or nearer
        assert indexer.found(on_device._tokens) == (WHOLE, WHOLE, WHOLE)
        assert indexer.found(in_memory._tokens) == (0, WHOLE, WHOLE)
        assert indexer.found(on_disk._tokens) == (0, 0, WHOLE)
        assert indexer.found(in_redis._tokens) == (0, WHOLE // 2, WHOLE)
        # what differs, is a tenant's, or is gone is not found
        assert indexer.found(range(9000, 9000 + WHOLE)) == (0, 0, 0)
        assert indexer.found([*on_device._tokens[:40], 7, *on_device._tokens[41:]]) == (32, 32, 32)
        publisher.announce(MODEL, [Removed("l1", tuple(on_device.hashes[4:]))])
        assert publisher.flush(60)
        until(lambda: indexer.found(on_device._tokens) == (64, 64, 64))
        assert indexer.found(chain_of(6)._tokens) == indexer.found(chain_of(7)._tokens) == (0, 0, 0)  # media it lacks


def test_what_it_is_told_of_a_tenant_is_not_anybodys() -> None:
    with followed() as (publisher, indexer):
        publisher.announce(MODEL, [stored(chain_of(5, salt="a tenant"), "l1")])
        publisher.announce(MODEL, [stored(chain_of(6), "l1")])
        assert publisher.flush(60)
        until(lambda: indexer.found(chain_of(6)._tokens)[0] == WHOLE)
        assert indexer.found(chain_of(5)._tokens) == (0, 0, 0)
