"""Two engines and one daemon: what one has computed the other loads, and neither notices when the daemon goes."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doubles import wait_until
from service_rig import DaemonProcess, attached, patient
from small_engines import KEEP
from tiny_models import config_of

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.tiers.config.config import Config

PROMPT = [(7 * n) % 120 for n in range(150)]


@pytest.fixture
def socket() -> Iterator[Path]:
    """A short path."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        yield Path(name) / "s"


def engine_at(socket: Path | None) -> Engine:
    """An engine over the daemon's tiers; without a socket, over none."""
    settings = EngineConfig(block_size=16, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8, exact=True)
    section = {"block_size": settings.block_size, "load_or_recompute": "load"}
    service = {"socket": socket, "deadline": "60s"}
    config = Config.model_validate(patient({"host": {"size": "4MiB"}, "cache": section, "service": service}))
    connect = LocalConnector.connect(config) if socket is not None else None
    return Engine.from_config(config_of("llama"), settings, connect)


def tiers_of(engine: Engine) -> RemoteTiers:
    assert isinstance(engine.connector, LocalConnector)
    assert isinstance(engine.connector.tiers, RemoteTiers)
    return engine.connector.tiers


def test_what_one_engine_computed_another_loads(socket: Path) -> None:
    daemon = DaemonProcess(socket, host__size="16MiB")
    alone, first, second = engine_at(None), engine_at(socket), engine_at(socket)
    (truth,) = alone.generate([PROMPT], KEEP)
    (computed,) = first.generate([PROMPT], KEEP)
    assert first.drain(60)
    assert tiers_of(first).drain(60)
    (loaded,) = second.generate([PROMPT], KEEP)
    assert computed.num_external_tokens == 0
    assert loaded.num_external_tokens == 149  # nine blocks of sixteen and a part of the tenth; one token is computed
    assert loaded.token_ids == computed.token_ids == truth.token_ids
    assert np.array_equal(loaded.logits, truth.logits)  # to the last bit
    # The daemon is killed under them, and comes back empty: they compute, then share again.
    daemon.end(signal.SIGKILL)
    assert second.generate([[5, *PROMPT]], KEEP)[0].num_external_tokens == 0
    daemon = DaemonProcess(socket, host__size="16MiB")
    wait_until(lambda: attached(tiers_of(first)) and attached(tiers_of(second)))
    other = [9, *PROMPT]
    (computed,) = first.generate([other], KEEP)
    assert first.drain(60)
    assert tiers_of(first).drain(60)
    (loaded,) = second.generate([other], KEEP)
    assert loaded.num_external_tokens == 150
    assert loaded.token_ids == computed.token_ids
    assert second.drain(60)
    tiers_of(second).check()
    for engine in (alone, first, second):
        engine.close()
    assert daemon.end(signal.SIGTERM) == 0
