"""Stories in which something gives way under the engine: copies, steps, streams, weights. No wrong token, no leak."""

from typing import Any

import numpy as np
import pytest
import torch
from small_engines import GREEDY, KEEP, Make, settled
from tiny_models import prompt

from kvtier.connector.local import LocalConnector
from kvtier.connector.models.hf_model import weights_digest
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sampler import sample
from kvtier.tiers import RequestError
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.transfer import BlockCopies, HostCopyStream, HostEvent

EXACT = {"exact": True, "exact_rows": 128, "max_num_batched_tokens": 128}
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def stream_of(engine: Engine) -> HostCopyStream:
    assert isinstance(engine.connector, LocalConnector)
    stream = engine.connector.worker._stream
    assert isinstance(stream, HostCopyStream)
    return stream


def rubbish(engine: Engine, copies: BlockCopies) -> HostEvent:
    """What a failed copy leaves in its blocks."""
    engine.pool.tensor[torch.from_numpy(copies.device_blocks)] = 1.0
    return HostEvent()


def run(engine: Engine, tokens: list[int], interrupt: type[BaseException] = KeyboardInterrupt) -> Any:
    """Answer one prompt step by step, going on after every interrupt."""
    engine.add_request(tokens, KEEP)
    outputs = []
    while engine.has_unfinished:
        try:
            outputs += engine.step()
        except interrupt:
            continue
    return np.array([output.logits for output in outputs])


def test_a_layerwise_load_that_fails_after_its_fence_is_computed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's fence returns at once; that the copy failed shows when the compute has ended."""
    engine = make(tiers=True, loading="layerwise", **EXACT)
    cold = engine.generate([prompt(1, 90)], KEEP)[0]
    settled(engine)
    engine.pool.reset()
    events: list[HostEvent] = []
    stream, run_batch = stream_of(engine), engine.runner.run

    def run_then_fail(batch: Any) -> torch.Tensor:
        logits = run_batch(batch)
        for event in events:
            event.end("the driver reports a failed copy")
        return logits

    def load(copies: BlockCopies, after: object | None = None) -> HostEvent:
        events.append(rubbish(engine, copies))
        return events[-1]

    with monkeypatch.context() as device:
        device.setattr(stream, "load", load)
        device.setattr(stream, "fence", lambda event, timeout: True)
        device.setattr(engine.runner, "run", run_then_fail)
        assert np.array_equal(run(engine, prompt(1, 90)), cold.logits)
    assert engine.stats["failed_loads"] == 1
    again = engine.generate([prompt(1, 90)], KEEP)[0]
    assert again.num_l1_tokens == 80
    assert np.array_equal(again.logits, cold.logits)


def test_what_l1_holds_is_offered_below_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed copy must not keep a shared prefix out of L2 for ever."""
    engine = make(tiers=True)
    stream, calls = stream_of(engine), iter(range(100))
    store = stream.store

    def flaky(copies: BlockCopies, after: object | None = None) -> Any:
        event = HostEvent()
        event.end("the driver reports a failed copy")
        return event if next(calls) == 0 else store(copies, after)

    monkeypatch.setattr(stream, "store", flaky)
    for turn in range(3):
        engine.generate([[*prompt(1, 64), *prompt(10 + turn, 20)]], ONE)
    settled(engine)
    engine.pool.reset()
    assert engine.generate([[*prompt(1, 64), *prompt(10, 20)]], ONE)[0].num_external_tokens == 80


def test_a_step_that_raises_still_delivers_other_outputs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    other = engine.add_request(prompt(9, 12), SamplingParams(max_tokens=3, ignore_eos=True))
    engine.generate([prompt(1, 30)], GREEDY)  # meets the outputs of the other one
    engine.add_request(prompt(3, 12), GREEDY)
    run_batch, calls = engine.runner.run, iter(range(100))

    def failing(batch: Any) -> torch.Tensor:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("no memory")
        return run_batch(batch)

    monkeypatch.setattr(engine.runner, "run", failing)
    outputs = []
    while engine.has_unfinished:
        try:
            outputs += engine.step()
        except torch.OutOfMemoryError:
            continue
    assert sum(output.request_id == other for output in outputs) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt 5: use a string"),
        ({"request_id": 7}, "request_id 7: use a string"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(make: Make, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make().add_request([1, 2], ONE, **options)


def test_a_temperature_next_to_zero_is_greedy() -> None:
    logits = np.array([0.0, 9.0, 8.0, 1.0], np.float32)
    for temperature in (1e-3, 1e-300, 1e-308, 5e-324):
        assert sample(logits, SamplingParams(temperature=temperature), 1, 0) == 1
        assert sample(logits, SamplingParams(temperature=temperature, top_k=2), 1, 0) == 1


def test_weights_that_share_an_address_are_all_read() -> None:
    def digest(value: float) -> str:
        base = torch.arange(10.0)
        base[5] = value
        return weights_digest([("a", base[:2]), ("b", base)])

    assert digest(5.0) != digest(77.0)


@pytest.mark.parametrize("enqueued", [0, 2])  # groups of layers that the stream took before it raised
@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_a_load_that_cannot_be_started_is_computed_once_what_was_enqueued_has_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch, loading: str, enqueued: int
) -> None:
    engine = make(tiers=True, loading=loading, **EXACT)
    cold = engine.generate([prompt(1, 90)], KEEP)[0]
    settled(engine)
    engine.pool.reset()
    monkeypatch.setattr("kvtier.connector.worker._GROUP_BYTES", 1)  # each layer by itself
    events: list[HostEvent] = []

    def load(copies: BlockCopies, after: object | None = None) -> HostEvent:
        if len(events) == enqueued or loading == "async":
            raise torch.OutOfMemoryError("no memory for staging")
        events.append(rubbish(engine, copies))
        return events[-1]

    name = engine.add_request(prompt(1, 90), KEEP)
    with monkeypatch.context() as device:
        device.setattr(stream_of(engine), "load", load)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    if events:
        assert not engine.step()
        assert engine.request(name).state.name == "LOADING"  # a copy may still write to its blocks
        assert not engine.drain(0.05)
    for event in events:
        event.end()
    outputs = []
    while engine.has_unfinished and engine.stats["steps"] < 100:
        outputs += engine.step()
    assert np.array_equal(np.array([output.logits for output in outputs]), cold.logits)
    assert engine.stats["failed_loads"] == 1
    assert engine.drain(60)


def test_a_load_that_hangs_in_no_step_ends_with_its_request(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started for an aborted request, and it raised: nothing waits for its report."""
    engine = make(tiers=True)
    engine.generate([prompt(1, 90)], KEEP)
    settled(engine)
    engine.pool.reset()
    name = engine.add_request(prompt(1, 90), KEEP)
    with monkeypatch.context() as device:
        device.setattr(stream_of(engine), "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.abort(name)
    assert engine.drain(60)


def interrupted(copies: BlockCopies, after: object | None = None) -> HostEvent:
    raise KeyboardInterrupt


@pytest.mark.parametrize("closes", [False, True])
def test_copies_that_cannot_be_started_keep_no_engine_from_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, closes: bool
) -> None:
    """The last request's tail goes with `drain` or `close`, beside any step."""
    engine = make(tiers=True, partial_blocks=True)
    worker = stream_of(engine)

    def store(copies: BlockCopies) -> HostEvent:
        raise torch.OutOfMemoryError("no memory for staging")

    with monkeypatch.context() as device:
        engine.generate([prompt(1, 40)], KEEP)
        device.setattr(worker, "store", store)
        if closes:
            engine.close()
        else:
            assert engine.drain(60)
    assert "1 copies could not be started" in caplog.text
    assert isinstance(engine.connector, LocalConnector)
    assert engine.connector.hierarchy.host.pool.check().filling == 0


def test_stores_that_cannot_be_started_leave_their_slots_and_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's stores are one copy for the device, so they are refused together."""
    engine = make(tiers=True, **EXACT)
    stream = stream_of(engine)

    def refuses(copies: BlockCopies) -> Any:
        raise torch.OutOfMemoryError("no memory for staging")

    for seed in (1, 2):
        engine.add_request(prompt(seed, 40), ONE)
    with monkeypatch.context() as device:
        device.setattr(stream, "store", refuses)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    settled(engine)
    assert isinstance(engine.connector, LocalConnector)
    assert engine.connector.hierarchy.host.pool.check().filling == 0
    assert engine.stats["finished"] == 2


def test_a_connector_that_cannot_start_releases_the_slab(make: Make, tmp_path: Any) -> None:
    config = Config(host={"size": "4MiB"}, file={"path": tmp_path, "size": "16MiB"})
    model = make().model
    pool = make().pool
    with pytest.raises(ValueError, match="contiguous"):
        LocalConnector(config, b"f" * 32, pool.shape, pool.tensor.transpose(0, 1))
    engine = Engine(model, EngineConfig(block_size=16, num_blocks=8), LocalConnector.connect(config))
    connector = LocalConnector(config, b"f" * 32, pool.shape, pool.tensor)  # the slab of the first attempt is free
    connector.close()
    engine.close()
