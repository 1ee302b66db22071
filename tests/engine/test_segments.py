"""Stories of reused segments: what is copied, computed anew and named; who waits for what; what is refused."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from document_prompts import DOCUMENTS, PROMPT, QUESTION, REUSED, SEGMENTS, asked
from extent import brief
from small_engines import GREEDY, KEEP, Make, end, names_of, off_full_prefill, over_slab, settled
from tiny_models import plain, plain_logits

from kvtier.connector.segments import REPAIR_RULES, Repair, Segment
from kvtier.connector.segments.blend import Blender
from kvtier.connector.segments.progress import Blend
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import FinishReason, SamplingParams
from kvtier.engine.sequence import Completion
from kvtier.tiers import RequestError
from kvtier.tiers.errors import ConfigError

ON: dict[str, Any] = {"segments": "on", "segment_min_tokens": 16, "num_blocks": 128}


ONE = SamplingParams(max_tokens=1, keep_logits=True)
UNBOUND = Repair(max_deviation=9)  # K and V of random weights depend much on what stands before


def answer(engine: Engine, repair: Repair | None = None, params: SamplingParams = KEEP) -> Completion:
    return engine.generate([PROMPT], params, segments=[SEGMENTS], repair=repair or UNBOUND)[0]


# what is computed


@pytest.mark.parametrize("family", brief(["qwen2-mixed"], ["llama", "qwen2-mixed", "qwen3", "mistral-window"]))
@pytest.mark.parametrize("rule", ["deviation", "question"])
def test_repairing_everything_is_a_full_prefill(make: Make, family: str, rule: str) -> None:
    engine = make(family, **ON)
    found = answer(engine, Repair(rule, share=1.0))
    assert (found.num_segment_tokens, found.num_repaired_tokens) == (REUSED, REUSED)
    assert off_full_prefill(found.logits, PROMPT + found.token_ids, len(PROMPT), family) <= 1e-5


def test_above_its_bound_a_deviation_means_a_full_prefill(make: Make) -> None:
    engine = make(**ON)
    found = answer(engine, Repair(share=0.1, max_deviation=0.0))
    assert off_full_prefill(found.logits, PROMPT + found.token_ids, len(PROMPT)) <= 1e-5
    assert engine.stats["blends_in_full"] == 1
    assert found.num_repaired_tokens == found.num_segment_tokens == REUSED


def test_copied_keys_are_those_of_the_segment_moved(make: Make) -> None:
    """Unrepaired: layer 0 depends on token and place alone, so there the copy is what a full prefill computes."""
    kv = []
    for engine, segments in ((make(**ON), SEGMENTS), (make(num_blocks=128), [])):
        name = engine.add_request(
            PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), segments=segments, repair=Repair(share=0.0)
        )
        while not engine.request(name).num_generated:
            engine.step()
        kv.append(engine.pool.tensor[engine.request(name).block_table])
        while engine.has_unfinished:
            engine.step()
    places = torch.tensor([place for segment in SEGMENTS for place in range(segment.start, segment.end)])
    copied, computed = (blocks[places // 16, :, :, places % 16] for blocks in kv)
    assert torch.allclose(copied[:, 0], computed[:, 0], atol=1e-4)
    assert not torch.allclose(copied[:, 1], computed[:, 1], atol=1e-1)  # which is why it is repaired


def test_several_requests_are_blended_in_one_batch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:]]
    prompts, segments = zip(*[asked(each, lead) for each, lead in zip(orders, (5, 21, 3), strict=True)], strict=True)
    alone = make(**ON)
    apart = [
        alone.generate([one], KEEP, segments=[own], repair=UNBOUND)[0]
        for one, own in zip(prompts, segments, strict=True)
    ]
    batches = []
    advance = Blender.advance

    def noted(self: Blender, pieces: Sequence[tuple[Blend, int]]) -> list[int]:
        batches.append(len(pieces))
        return advance(self, pieces)

    monkeypatch.setattr(Blender, "advance", noted)
    engine = make(**ON, max_num_batched_tokens=512)
    engine.precompute(DOCUMENTS)
    together = engine.generate(prompts, KEEP, segments=segments, repair=UNBOUND)
    assert batches == [3]
    for one, other in zip(together, apart, strict=True):
        assert one.token_ids == other.token_ids
        assert np.allclose(one.logits, other.logits, atol=1e-4)


@pytest.mark.parametrize("rule", ["deviation", "question"])
def test_a_blend_takes_no_more_rows_at_once_than_a_step(make: Make, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    repair = Repair(rule, max_deviation=9)
    expected = answer(make(**ON, max_num_batched_tokens=512), repair)
    taken = []
    run_layer = Blender._run_layer

    def noted(self: Blender, number: int, pack: list[Any]) -> None:
        taken.append(sum(len(rows.positions) for rows in pack))
        run_layer(self, number, pack)

    monkeypatch.setattr(Blender, "_run_layer", noted)
    found = answer(make(**ON, max_num_batched_tokens=24), repair)
    assert 0 < max(taken) <= 24
    assert found.num_repaired_tokens == expected.num_repaired_tokens
    assert np.allclose(found.logits[0], expected.logits[0], atol=1e-3)


def test_rules_and_check_layers_mix_in_one_batch(make: Make) -> None:
    repairs = [replace(UNBOUND, check_layer=2), Repair("question"), Repair("first"), Repair(share=0.0), UNBOUND]
    expected = [answer(make(**ON), repair, ONE).logits for repair in repairs]
    engine = make(**ON)
    engine.precompute(DOCUMENTS)
    names = [engine.add_request(PROMPT, ONE, segments=SEGMENTS, repair=repair) for repair in repairs]
    told: dict[str, Any] = {}
    while engine.has_unfinished:
        told |= {output.request_id: output.logits for output in engine.step()}
    for name, logits in zip(names, expected, strict=True):
        assert np.allclose(told[name], logits[0], atol=1e-4)


# what is named


def test_nothing_behind_the_exact_prefix_is_named_or_stored(make: Make) -> None:
    engine = make(tiers=True, **ON)
    tokens, segments = asked(DOCUMENTS, lead=40)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    [found] = engine.generate([tokens], params, segments=[segments])
    settled(engine)
    named = names_of(engine, tokens + found.token_ids)
    held = engine.connector.hierarchy.host.pool  # type: ignore[attr-defined]
    assert engine.pool.lookup(named) == 2  # of 40 tokens in front of the first segment
    assert [engine.pool.lookup([name]) for name in named[2:]] == [0] * (len(named) - 2)
    assert held.holds(named) == [True] * 2 + [False] * (len(named) - 2)
    for document in DOCUMENTS:  # ordinary blocks under the ordinary root
        own = names_of(engine, document)
        assert engine.pool.lookup(own) == len(own)
        assert all(held.holds(own))
    [again] = engine.generate([tokens], KEEP)
    assert (again.num_l1_tokens, again.num_segment_tokens) == (32, 0)
    assert off_full_prefill(again.logits, tokens + again.token_ids, len(tokens)) <= 1e-4


def test_preemption_by_offload_puts_nothing_approximate_away(make: Make) -> None:
    # Six answers of 200 tokens do not fit: some are preempted, and go on.
    engine = make(tiers=True, preemption="offload", **{**ON, "num_blocks": 40})
    tokens, segments = asked(DOCUMENTS[:1], lead=16)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    found = engine.generate([[*tokens, seed] for seed in range(6)], params, segments=[segments] * 6)
    assert engine.stats["preempted"] > 0
    settled(engine)
    # Whoever was preempted may have been computed in full since. What can be found is exact, whoever stored it.
    engine.pool.reset()
    for seed, each in enumerate(found):
        assert len(each.token_ids) == 100
        whole = [*tokens, seed, *each.token_ids]
        [again] = engine.generate([whole], ONE)
        assert np.allclose(again.logits[0], plain_logits(plain("llama"), whole)[-1].numpy(), atol=1e-3)


def test_a_segment_at_the_start_is_an_ordinary_prefix(make: Make) -> None:
    engine = make(**ON)
    tokens, segments = DOCUMENTS[0] + DOCUMENTS[2] + QUESTION, [Segment(0, 48), Segment(48, 112)]
    engine.precompute(DOCUMENTS)
    [found] = engine.generate([tokens], GREEDY, segments=[segments])
    assert (found.num_l1_tokens, found.num_segment_tokens) == (48, 64)
    assert engine.stats["segments_prefix"] == 1


def test_others_do_not_wait_for_blocks_a_blend_will_never_name(make: Make) -> None:
    engine = make(**ON)
    engine.precompute(DOCUMENTS)
    engine.add_request(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True), segments=SEGMENTS)
    engine.step()
    [exact] = engine.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))
    assert engine.stats["running"] == 1  # the blended one still answers
    assert exact.num_segment_tokens == 0
    while engine.has_unfinished:
        engine.step()


# where segments come from


def test_an_absent_segment_is_computed_alone_and_held_from_then_on(make: Make) -> None:
    engine = make(**ON)
    first = answer(engine)
    assert engine.stats["segments_computed"] == 3
    second = answer(engine)
    assert engine.stats["segments_held"] == 3
    assert first.token_ids == second.token_ids
    assert np.allclose(first.logits, second.logits, atol=1e-4)
    # Children are nobody's requests.
    assert (engine.stats["finished"], engine.stats["aborted"]) == (2, 0)
    assert engine.stats["prompt_tokens"] == 2 * len(PROMPT)
    assert engine.stats["generated_tokens"] == 16
    assert engine.stats["segment_tokens"] == 2 * REUSED
    assert engine.stats["repaired_tokens"] == 2 * round(0.15 * REUSED)


def test_segments_come_back_from_the_slab_after_a_restart(disk_dir: Path) -> None:
    engine = over_slab(disk_dir, **ON)
    first = answer(engine)
    settled(engine)
    end(engine)
    engine = over_slab(disk_dir, **ON)
    second = answer(engine)
    assert engine.stats["segments_loaded"] == 3
    assert first.token_ids == second.token_ids
    end(engine)


def test_a_corrupt_segment_is_computed(disk_dir: Path) -> None:
    engine = over_slab(disk_dir, **ON)
    first = answer(engine)
    settled(engine)
    end(engine)
    [slab] = disk_dir.glob("*.slab")
    data = bytearray(slab.read_bytes())
    data[len(data) // 8 :: 64] = bytes(byte ^ 1 for byte in data[len(data) // 8 :: 64])
    slab.write_bytes(data)
    engine = over_slab(disk_dir, **ON)
    second = answer(engine)
    assert engine.stats["segments_loaded"] + engine.stats["segments_computed"] == 3
    assert engine.stats["segments_computed"] > 0
    assert first.token_ids == second.token_ids
    end(engine)


def test_a_late_segment_is_computed(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = over_slab(disk_dir, **ON)
    first = answer(engine)
    settled(engine)
    end(engine)
    engine = over_slab(disk_dir, {"prefetch_deadline": "0.2s"}, **ON)
    (port,) = engine.connector.hierarchy.ports  # type: ignore[attr-defined]
    goes_on = threading.Event()
    read = port.tier.read
    monkeypatch.setattr(port.tier, "read", lambda *args: (goes_on.wait(60), read(*args))[1])
    second = answer(engine)
    goes_on.set()
    assert engine.stats["segments_computed"] == 3
    assert first.token_ids == second.token_ids
    end(engine)


def test_salts_separate_segments(make: Make) -> None:
    engine = make(**ON)
    engine.precompute(DOCUMENTS, cache_salt="a")
    engine.generate([PROMPT], GREEDY, segments=[SEGMENTS], cache_salt="b")
    assert engine.stats["segments_computed"] == 3
    engine.generate([PROMPT], GREEDY, segments=[SEGMENTS], cache_salt="a")
    assert engine.stats["segments_held"] == 3


def test_without_room_for_segments_their_tokens_are_computed(make: Make) -> None:
    # 11 blocks for 165 tokens and a few of an answer: nothing else fits beside them.
    engine = make(**{**ON, "num_blocks": 12})
    found = answer(engine, Repair("first"))
    assert engine.stats["segments_lost"] > 0
    if not found.num_segment_tokens:
        assert off_full_prefill(found.logits, PROMPT + found.token_ids, len(PROMPT)) <= 1e-4
    assert found.num_segment_tokens < REUSED


def test_short_segments_are_computed(make: Make) -> None:
    engine = make(**{**ON, "segment_min_tokens": 40})
    found = answer(engine)
    assert found.num_segment_tokens == 48 + 64
    assert engine.stats["segments_short"] == 1


# what goes wrong


def test_an_abort_ends_what_its_request_waits_for(make: Make) -> None:
    engine = make(tiers=True, **ON)
    answer(engine)
    settled(engine)
    engine.pool.reset()
    for num_steps in range(4):  # waiting, loading, blended
        name = engine.add_request(PROMPT, GREEDY, segments=SEGMENTS)
        told = [output for _ in range(num_steps) for output in engine.step()]
        assert engine.abort(name)
        while engine.has_unfinished:
            told += engine.step()
        assert told[-1].finish_reason is FinishReason.ABORT
        assert {output.request_id for output in told} == {name}
        engine.drain(60)
        assert engine.pool.num_free_blocks == engine.pool.num_blocks
        engine.pool.reset()
    assert engine.stats["aborted"] == 4
    assert engine.stats["segments_computed"] == 3  # by the first answer alone


def _raise(*_: object) -> None:
    raise MemoryError


def test_a_blend_counts_once_however_often_it_is_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(**ON)
    engine.precompute(DOCUMENTS)
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=UNBOUND)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", _raise)  # behind the blend
        with pytest.raises(MemoryError):
            engine.step()
    request = engine.request(name)
    request.num_preempted = 1  # before its first token, too, a request may have to give way
    while not request.num_generated:
        engine.step()
    repaired = round(UNBOUND.most * REUSED)
    assert request.reuse is not None
    assert (request.reuse.num_reused, request.reuse.num_repaired) == (REUSED, repaired)
    assert (engine.stats["segment_tokens"], engine.stats["repaired_tokens"]) == (REUSED, repaired)
    engine.abort(name)


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "overlap": (lambda: {"segments": [Segment(10, 50), Segment(49, 90)]}, "segments 10 to 50 and 49 to 90 overlap"),
    "empty": (lambda: {"segments": [Segment(20, 20)]}, "segment 20 to 20: it is empty"),
    "backward": (lambda: {"segments": [Segment(20, 10)]}, "segment 20 to 10: it is empty"),
    "beyond": (lambda: {"segments": [Segment(20, 500)]}, "segment 20 to 500: not within the 165 tokens"),
    "before": (lambda: {"segments": [Segment(-1, 20)]}, "segment -1 to 20: not within"),
    "no segment": (lambda: {"segments": [(3, 20)]}, r"segment \(3, 20\): use Segment"),
    "no number": (lambda: {"segments": [Segment(3.0, 20)]}, "use Segment"),  # type: ignore[arg-type]
    "share": (
        lambda: {"segments": SEGMENTS, "repair": Repair(share=1.5)},
        "repair share 1.5: use a number from 0 to 1",
    ),
    "negative share": (lambda: {"segments": SEGMENTS, "repair": Repair(share=-0.1)}, "repair share -0.1"),
    "no share": (lambda: {"segments": SEGMENTS, "repair": Repair(share=float("nan"))}, "repair share nan"),
    "rule": (lambda: {"segments": SEGMENTS, "repair": Repair("best")}, "repair rule 'best': use one of deviation,"),
    "layer": (lambda: {"segments": SEGMENTS, "repair": Repair(check_layer=3)}, "check_layer 3: this model's layers"),
    "layer 0": (lambda: {"segments": SEGMENTS, "repair": Repair(check_layer=0)}, "check_layer 0: use a whole number"),
    "repair": (lambda: {"segments": SEGMENTS, "repair": 0.15}, r"repair 0\.15: use Repair"),
    "bound": (lambda: {"segments": SEGMENTS, "repair": Repair(max_deviation=-1)}, "max_deviation -1"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_error_and_nothing_is_admitted(make: Make, what: str) -> None:
    engine = make(**ON)
    given, message = BAD[what]
    with pytest.raises(RequestError, match=message):
        engine.add_request(PROMPT, GREEDY, request_id="mine", **given())
    assert not engine.has_unfinished
    assert "mine" not in engine.scheduler.live
    assert answer(engine).num_segment_tokens == REUSED


def test_segments_are_refused_where_they_are_off_or_the_engine_is_exact(make: Make) -> None:
    with pytest.raises(RequestError, match=r'this engine reuses none; set \[cache\] segments = "on"'):
        (off := make()).add_request(PROMPT, GREEDY, segments=SEGMENTS)
    assert off.segments is None
    assert not [name for name in off.stats if "segment" in name]  # nothing is paid
    exact = make(exact=True, exact_rows=64, **ON)
    with pytest.raises(RequestError, match='their reuse is approximate, and this engine is "exact"'):
        exact.generate([PROMPT], GREEDY, segments=[SEGMENTS])
    with pytest.raises(RequestError, match="segments of 1 prompts for 2: give one list each"):
        make(**ON).generate([PROMPT, PROMPT], GREEDY, segments=[SEGMENTS])
    assert not exact.has_unfinished


def test_settings_that_do_not_fit_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="they are found by name, and enable_prefix_caching is off"):
        make(segments="on", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="repair_rule 'best': use one of deviation"):
        EngineConfig(repair_rule="best")
    with pytest.raises(ConfigError, match="segments 'yes': use one of off, on, auto"):
        EngineConfig(segments="yes")  # type: ignore[arg-type]


def test_the_deviation_left_is_counted(make: Make) -> None:
    engine = make(**ON)
    answer(engine)
    answer(engine, Repair("first"))  # does not measure it
    assert engine.segments is not None
    assert sum(engine.segments.counts.deviations.counts.values()) == 1


LAYERWISE, IN_PIECES = {"preemption": "offload", "loading": "layerwise"}, {"max_num_batched_tokens": 12}


@pytest.mark.parametrize("seed", range(brief(1, 3)))
@pytest.mark.parametrize("options", [LAYERWISE, IN_PIECES, *brief([], [{}, {"preemption": "offload"}])], ids=str)
def test_a_random_crowd_ends_and_leaks_nothing(make: Make, seed: int, options: dict[str, Any]) -> None:
    """Requests with and without segments come, are aborted and preempted, while L1 forgets: all end, all laws hold."""
    rng = np.random.default_rng(seed)
    engine = make(tiers=True, **{**ON, "num_blocks": 24, "max_num_seqs": 4, **options})
    live: set[str] = set()
    exact: dict[str, list[int]] = {}  # requests whose answers must be those of a full prefill, with their texts so far
    lengths: dict[str, int] = {}

    def turn() -> None:
        told = engine.step()
        assert {output.request_id for output in told} <= live
        for output in told:
            if output.token_id is not None and output.request_id in exact:
                exact[output.request_id].append(output.token_id)
        live.difference_update(output.request_id for output in told if output.finish_reason is not None)

    for _ in range(brief(40, 60)):
        if rng.random() < 0.4:
            chosen = [DOCUMENTS[index] for index in rng.permutation(3)[: rng.integers(1, 4)]]
            tokens, segments = asked(chosen, lead=int(rng.integers(0, 20)))
            kept = [segment for segment in segments if rng.random() < 0.8]
            repair = Repair(str(rng.choice(REPAIR_RULES)), float(rng.choice([0.0, 0.3, 1.0])), max_deviation=9)
            params = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True)
            live.add(name := engine.add_request(tokens, params, segments=kept, repair=repair))
            if not kept or repair.share == 1:
                exact[name], lengths[name] = tokens, len(tokens)
        if live and rng.random() < 0.1:
            engine.abort(str(rng.choice(sorted(live))))
        if rng.random() < 0.1:
            engine.pool.reset()
        turn()
    num_steps = 0
    while engine.has_unfinished:
        turn()
        num_steps += 1
        assert num_steps < 20_000, "no progress"
    assert not live
    assert exact
    for name, text in exact.items():
        expected = plain_logits(plain("llama"), text[:-1]).argmax(-1).tolist()
        assert text[lengths[name] :] == expected[lengths[name] - 1 :]
    assert engine.segments is not None
    assert not engine.segments._children
    assert not engine.scheduler._admission.computing
    assert engine.stats["blends"] > 0
