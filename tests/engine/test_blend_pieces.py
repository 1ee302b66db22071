"""Stories of blends that take several steps: who computes beside them, what comes between, what waits for segments."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from document_prompts import DOCUMENTS, PROMPT, QUESTION, REUSED, SEGMENTS, asked
from extent import brief
from small_engines import KEEP, Make, end, off_full_prefill, over_slab, settled
from tiny_models import plain, plain_logits, prompt

from kvtier.connector.segments import REPAIR_RULES, BlendRequest, Repair, ReusedPart
from kvtier.connector.segments.blend import Blender
from kvtier.connector.segments.progress import Blend, Work
from kvtier.engine.llm import Engine
from kvtier.engine.requests import FinishReason, Output, SamplingParams
from kvtier.engine.segments import SegmentReuse
from kvtier.engine.sequence import ALL, Batch, Completion
from kvtier.tiers.hierarchy.cache_tiers import PENDING

ON: dict[str, Any] = {"segments": "on", "segment_min_tokens": 16, "num_blocks": 128, "block_size": 16}
OTHERS = [prompt(seed, length) for seed, length in ((4, 48), (5, 37), (6, 64))]
NUM_LAYERS = 3  # of the small models
UNBOUND = Repair(max_deviation=9)


def answer(engine: Engine, repair: Repair = UNBOUND) -> Completion:
    return engine.generate([PROMPT], KEEP, segments=[SEGMENTS], repair=repair)[0]


def blend_of(engine: Engine, name: str) -> Blend | None:
    reuse = engine.request(name).reuse
    assert isinstance(reuse, SegmentReuse)
    return reuse.blend


def half_blended(engine: Engine, repair: Repair = UNBOUND) -> str:
    """A request whose blend has begun and takes more steps."""
    engine.precompute(DOCUMENTS)
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=repair)
    while (blend := blend_of(engine, name)) is None or blend.work is not Work.REPAIR:
        engine.step()
    return name


def finish(engine: Engine, name: str) -> list[int]:
    tokens = []
    while engine.has_unfinished:
        told = [output for output in engine.step() if output.request_id == name]
        tokens += [output.token_id for output in told if output.token_id is not None]
    return tokens


# in pieces


@pytest.mark.parametrize("rule", REPAIR_RULES)
@pytest.mark.parametrize("family", ["qwen2-mixed", *brief([], ["mistral-window"])])
def test_pieces_of_one_token_come_to_what_one_pass_does(make: Make, family: str, rule: str) -> None:
    engine = make(family, **ON)
    engine.precompute(DOCUMENTS)
    assert engine.segments is not None
    blender, pool = engine.segments._blender, engine.pool
    repair = Repair(rule, 0.3, max_deviation=9)
    tables = [pool.allocate(11), pool.allocate(11)]
    parts, held = [], []
    for document, segment in zip(DOCUMENTS, SEGMENTS, strict=True):
        blocks = pool.match(engine.prompt(document).chain.hashes)  # type: ignore[union-attr]
        held.append(blocks)
        parts.append(ReusedPart(segment.start, segment.start + 16 * len(blocks), segment.start, tuple(blocks)))
    found = []
    for table, max_rows in zip(tables, (10_000, 1), strict=True):
        assert table is not None
        pool.tensor[table] = 0
        request = BlendRequest(PROMPT, table, 0, parts, repair)
        if max_rows > 1:
            [result] = blender.blend([request])
        else:
            blend = blender.begin(request)
            most = blend.num_tokens_left
            num_pieces = 0
            while blend.result is None:
                blender.advance([(blend, 1)])
                num_pieces += 1
            assert num_pieces <= 2 * most
            result = blend.result
        places = np.arange(len(PROMPT) - 1)
        found.append((pool.tensor[table][places // 16, :, :, places % 16].clone(), result))
    (whole, expected), (pieces, result) = found
    assert torch.allclose(whole, pieces, atol=1e-4)
    assert (result.num_reused, result.num_repaired, result.num_computed) == (
        expected.num_reused,
        expected.num_repaired,
        expected.num_computed,
    )
    for given in (*tables, *held):
        pool.free(given or [])


@pytest.mark.parametrize("rule", ["deviation", "question", "first"])
def test_an_answer_gets_a_token_in_every_step_beside_a_blend(
    make: Make, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    repair = Repair(rule, 0.3, max_deviation=9)
    expected = answer(make(**ON), repair)
    engine = make(**ON, max_num_batched_tokens=16)
    engine.precompute(DOCUMENTS)
    other = engine.add_request(QUESTION, SamplingParams(max_tokens=60, ignore_eos=True))
    while not engine.request(other).num_generated:
        engine.step()
    passed = 0  # rows times layers of a step
    run_layer = Blender._run_layer

    def noted(self: Blender, number: int, pack: list[Any]) -> None:
        nonlocal passed
        passed += sum(len(rows.positions) for rows in pack)
        run_layer(self, number, pack)

    monkeypatch.setattr(Blender, "_run_layer", noted)
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: _add(beside, batch, run))
    beside: list[int] = []
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=repair)
    num_blending = 0
    tokens: list[int] = []
    while len(tokens) < 8:
        passed = 0
        beside.clear()
        told = {output.request_id: output.token_id for output in engine.step()}
        assert other in told
        assert passed + sum(beside) * NUM_LAYERS <= 16 * NUM_LAYERS
        num_blending += passed > 0
        tokens += [token for token in [told.get(name)] if token is not None]
    assert num_blending >= 4
    assert tokens == expected.token_ids
    finish(engine, other)


def _add(beside: list[int], batch: Batch, run: Any) -> torch.Tensor:
    beside.append(batch.num_tokens)
    logits: torch.Tensor = run(batch)
    return logits


def test_tokens_before_the_segments_are_computed_and_named_first(make: Make) -> None:
    engine = make(**ON, max_num_batched_tokens=16)
    engine.precompute(DOCUMENTS)
    tokens, segments = asked(DOCUMENTS, lead=40)
    name = engine.add_request(tokens, KEEP, segments=segments, repair=UNBOUND)
    for _ in range(3):
        engine.step()
    assert engine.request(name).num_computed == 40
    assert engine.request(name).num_named == 2
    assert blend_of(engine, name) is None
    engine.step()
    assert blend_of(engine, name) is not None
    finish(engine, name)


# what comes between the pieces


@pytest.mark.parametrize("keeps", [True, False], ids=["its segments are held", "they are gone"])
def test_a_request_preempted_in_its_blend_starts_over(make: Make, keeps: bool) -> None:
    expected = answer(make(**ON)).token_ids
    engine = make(**ON, max_num_batched_tokens=16)
    name = half_blended(engine)
    request = engine.request(name)
    engine.scheduler._preempt(request)
    assert blend_of(engine, name) is None
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    if not keeps:
        engine.pool.reset()
        expected = plain_logits(plain("llama"), PROMPT).argmax(-1).tolist()[-1:]
    tokens = finish(engine, name)
    assert tokens[: len(expected)] == expected
    assert request.reuse is not None
    assert request.reuse.num_reused == (REUSED if keeps else 0)  # so nobody takes the answer for an exact one


def test_an_abort_in_a_blend_frees_what_it_holds(make: Make) -> None:
    engine = make(**ON, max_num_batched_tokens=16)
    name = half_blended(engine)
    assert engine.abort(name)
    assert [output.finish_reason for output in engine.step()] == [FinishReason.ABORT]
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert len(answer(engine).token_ids) == 8


def test_a_piece_that_raises_has_its_blend_made_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(make(**ON)).token_ids
    engine = make(**ON, max_num_batched_tokens=16)
    name = half_blended(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Blender, "_run_layer", _raise)
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert finish(engine, name) == expected


def _raise(*_: object) -> None:
    raise MemoryError


def test_segments_that_l1_forgets_in_a_blend_are_held_until_they_are_copied(make: Make) -> None:
    expected = answer(make(**ON))
    engine = make(**ON, max_num_batched_tokens=8)
    engine.precompute(DOCUMENTS)
    num_free = engine.pool.num_free_blocks
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=UNBOUND)
    while (blend := blend_of(engine, name)) is None:
        engine.step()
    assert blend.work is Work.COPY
    assert engine.pool.num_free_blocks == num_free - 11 - 3 - 2 - 4  # its own, and its segments'
    engine.pool.reset()
    taken = engine.pool.allocate(engine.pool.num_free_blocks)  # whatever is free is written by somebody else
    assert taken is not None
    engine.pool.tensor[taken] = float("nan")
    while engine.pool.num_free_blocks == 0:
        engine.step()
    assert blend.has_copied
    assert engine.pool.num_free_blocks == 3 + 2 + 4  # as soon as they are copied, not when all is done
    assert blend.result is None
    engine.pool.free(taken)
    assert finish(engine, name) == expected.token_ids


def test_a_blend_keeps_one_row_of_states_for_each_token_at_most(make: Make) -> None:
    engine = make(**ON, max_num_batched_tokens=16)
    engine.precompute(DOCUMENTS)
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=UNBOUND)
    rows = set()
    while not engine.request(name).num_generated:
        blend = blend_of(engine, name)
        if blend is not None and blend.states is not None:
            rows.add(blend.states.untyped_storage().nbytes() // blend.states.element_size() // blend.states.shape[1])
        engine.step()
    assert max(rows) == len(PROMPT) - 1 - 5  # what is checked
    assert min(rows) == len(PROMPT) - 1 - 5 - REUSED + round(0.15 * REUSED)  # what goes on
    finish(engine, name)


# while segments are loading


class GatedSlab:
    """An engine over a slab that holds the documents; before `opened` it reads only what is in `readable`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, documents: list[list[int]], **options: Any):
        writer = over_slab(directory, **ON | options)
        writer.precompute(documents)
        settled(writer)
        end(writer)
        self.engine = over_slab(directory, **ON | options)
        self.opened = threading.Event()
        self.readable: set[bytes] = set()
        (port,) = self.engine.connector.hierarchy.ports  # type: ignore[attr-defined]
        read = port.tier.read

        def gated(hashes: Sequence[bytes], into: Sequence[memoryview]) -> Any:
            if not self.readable.issuperset(hashes):
                self.opened.wait(60)
            return read(hashes, into)

        monkeypatch.setattr(port.tier, "read", gated)

    def wait(self, *names: str) -> list[Blend]:
        """Until these requests have done all that needs no segment."""
        while True:
            blends = [blend_of(self.engine, name) for name in names]
            if all(blend is not None and blend.work is Work.WAIT for blend in blends):
                return [blend for blend in blends if blend is not None]
            self.engine.step()


def test_the_check_runs_while_segments_are_loading(make: Make, disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(make(**ON))
    slab = GatedSlab(disk_dir, monkeypatch, DOCUMENTS)
    engine, events = slab.engine, []
    rows_of, copy = Blender._rows, Blender._copy

    def noted_rows(self: Blender, blend: Blend, work: Work, places: Any) -> Any:
        events.append((work, len(places)))
        return rows_of(self, blend, work, places)

    def noted_copy(self: Blender, blend: Blend, part: ReusedPart) -> None:
        events.append((Work.COPY, part.end - part.start))
        copy(self, blend, part)

    monkeypatch.setattr(Blender, "_rows", noted_rows)
    monkeypatch.setattr(Blender, "_copy", noted_copy)
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=UNBOUND)
    slab.wait(name)
    assert {work for work, _ in events} == {Work.CHECK}
    assert sum(number for _, number in events) == len(PROMPT) - 1 - 5
    assert engine.stats["segments_loaded"] == 0
    del events[:]
    slab.opened.set()
    assert finish(engine, name) == expected.token_ids
    assert engine.stats["segments_loaded"] == 3
    assert {work for work, _ in events} == {Work.COPY, Work.REPAIR}
    assert sum(number for work, number in events if work is Work.COPY) == REUSED
    assert engine.stats["repaired_tokens"] == round(0.15 * REUSED)
    end(engine)


@pytest.mark.parametrize(
    ("repair", "seats"),
    [(Repair("question"), {}), (Repair("first"), {}), (Repair(share=0.0), {}), (UNBOUND, {"max_num_seqs": 3})],
    ids=str,
)
def test_without_a_check_or_seats_for_them_a_request_waits_for_its_segments_without_blocks(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch, repair: Repair, seats: dict[str, int]
) -> None:
    slab = GatedSlab(disk_dir, monkeypatch, DOCUMENTS, **seats)
    name = slab.engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=repair)
    for _ in range(10):
        slab.engine.step()
    assert not slab.engine.request(name).block_table
    slab.opened.set()
    assert len(finish(slab.engine, name)) == 8
    end(slab.engine)


def test_an_abort_while_segments_load_ends_everything(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = GatedSlab(disk_dir, monkeypatch, DOCUMENTS)
    name = slab.engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=UNBOUND)
    slab.wait(name)
    assert slab.engine.abort(name)
    assert finish(slab.engine, name) == []
    slab.opened.set()
    end(slab.engine)


def test_a_segment_that_comes_and_goes_before_the_others_is_computed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1 forgets each one as soon as it is there: nothing is reused, and the answer is that of a full prefill."""
    engine = make(**ON, max_num_batched_tokens=24)
    name = engine.add_request(PROMPT, KEEP, segments=SEGMENTS, repair=UNBOUND)
    request = engine.request(name)
    logits: list[Any] = []
    while engine.has_unfinished:
        logits += [output.logits for output in engine.step() if output.request_id == name]
        engine.pool.reset()
    assert request.reuse is None or request.reuse.num_reused == 0
    assert engine.stats["segments_lost"] == 3
    assert request.num_exact == ALL
    assert off_full_prefill(logits, request.token_ids, len(PROMPT)) <= 1e-5


@pytest.mark.parametrize("first", [0, 1], ids=["the earlier one's come first", "the later one's come first"])
def test_requests_that_hold_each_others_room_give_way(
    make: Make, disk_dir: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Both check, and the segment that each of them has leaves no room for those that are missing.

    The later one starts over. If its segments come first, the other still holds its blocks, and 17 are left. Eleven
    are for its own, so six of its nine are reused: its first segment is lost. Then its answer is the one without that
    segment. How fast a disk reads would decide it, so the story decides whose segments are found first.
    """
    both = [asked(DOCUMENTS), asked(OTHERS)]
    reused = [both[0][1], both[1][1][first:]]
    expected = make(**ON).generate([tokens for tokens, _ in both], KEEP, segments=reused, repair=UNBOUND)
    slab = GatedSlab(disk_dir, monkeypatch, DOCUMENTS + OTHERS, num_blocks=38)
    engine = slab.engine
    for document in (DOCUMENTS[2], OTHERS[2]):
        slab.readable.update(engine.prompt(document).chain.hashes)  # type: ignore[union-attr]
    engine.precompute([DOCUMENTS[2], OTHERS[2]])
    names = [engine.add_request(tokens, KEEP, segments=segments, repair=UNBOUND) for tokens, segments in both]
    slab.wait(*names)
    assert engine.pool.num_free_blocks == 38 - 2 * (11 + 4)
    taken = engine.pool.allocate(engine.pool.num_free_blocks - 2)
    assert taken is not None
    told: dict[str, list[Output]] = {name: [] for name in names}
    scheduler: Any = engine.connector.scheduler
    lookup = scheduler.lookup

    def found(request: Any, *arguments: Any) -> Any:
        """What the tiers have, of the second one's segments only after the first one's answer."""
        is_late = request.request_id.startswith(f"{names[1 - first]} segment")
        return PENDING if is_late and len(told[names[first]]) < 8 else lookup(request, *arguments)

    monkeypatch.setattr(scheduler, "lookup", found)
    slab.opened.set()
    while engine.has_unfinished:
        for output in engine.step():
            told[output.request_id].append(output)
    assert engine.stats["preempted"] == 1
    assert engine.stats["segments_lost"] == first
    assert engine.stats["segment_tokens"] == 2 * REUSED - 48 * first
    for name, completion in zip(names, expected, strict=True):
        assert [output.token_id for output in told[name]] == completion.token_ids
        logits: list[Any] = [output.logits for output in told[name]]
        assert np.abs(np.stack(logits) - np.stack(completion.logits)).max() <= 1e-4  # so it read the right KV
    engine.pool.free(taken)
    end(engine)
