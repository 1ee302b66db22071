"""Stories of segments around transformers' generate(): what is reused, repaired, named, refused; as in our engine."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from document_prompts import DOCUMENTS, PROMPT, QUESTION, REUSED, SEGMENTS, asked
from kv_tier_rig import Open, ids, tiers_over
from service_rig import PATIENCE, DaemonThread
from small_engines import KEEP, Make, end
from tiny_models import VOCAB, plain, plain_logits, prompt
from transformers import AutoModelForCausalLM

from kvtier.connector.local import LocalConnector
from kvtier.connector.models import cache_option
from kvtier.connector.segments import PAGED_ATTENTION, REPAIR_RULES, Repair, Segment
from kvtier.connector.segments.blend import Blender
from kvtier.connector.transformers.adapter import KVTier
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.tiers import RequestError
from kvtier.tiers.config.config import Config

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ON: dict[str, Any] = {"block_size": 16, "segments": "on", "segment_min_tokens": 16}
UNBOUND = Repair(max_deviation=9)  # K and V of random weights depend much on what stands before


def logits_of(kv: KVTier, tokens: torch.Tensor, **reuse: Any) -> torch.Tensor:
    """Of each row's last token, computed upon what `load` gives."""
    cache, num_tokens = kv.load(tokens, **reuse)
    with torch.inference_mode():
        found: torch.Tensor = kv.model(tokens[:, num_tokens:], **cache_option(kv.model, cache)).logits[:, -1]
    return found


def is_full_prefill(kv: KVTier, found: torch.Tensor, tokens: list[int]) -> bool:
    full = plain_logits(kv.model, tokens)[-1]
    return bool((found - full).abs().max() <= 1e-5 * full.abs().max())


def held_names(kv: KVTier, tokens: list[int]) -> list[bool]:
    """Which blocks of these tokens have a name in host memory, as ordinary prefix blocks."""
    assert kv.drain()
    return list(kv._tiers.holds(kv._blocks.row(tokens).chain.hashes))


def outcomes(kv: KVTier) -> dict[str, float]:
    found = {name.removeprefix("segments_"): number for name, number in kv.stats().items() if "segments_" in name}
    return {name: number for name, number in found.items() if number}


@pytest.fixture
def open_tier(disk_dir: Path) -> Iterator[Open]:
    """Opens tiers over one directory, segments on; laws are checked and all is closed at the end."""
    with tiers_over(disk_dir) as opener:

        def factory(model: Any = None, host: str = "8MiB", **cache: Any) -> KVTier:
            return opener(model or plain("llama"), host, **{**ON, **cache})

        yield factory


# what is computed


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_what_is_reused_and_repaired_is_what_our_engine_reuses_and_repairs(
    open_tier: Open, make: Make, family: str
) -> None:
    kv = open_tier(plain(family))
    engine = make(family, segments="on", segment_min_tokens=16, num_blocks=128)
    repairs = [Repair(rule, 0.25, max_deviation=9) for rule in REPAIR_RULES]
    for repair in [*repairs, Repair(share=0.0), Repair(check_layer=2, max_deviation=9)]:
        [expected] = engine.generate([PROMPT], KEEP, segments=[SEGMENTS], repair=repair)
        found = logits_of(kv, ids(PROMPT), segments=[SEGMENTS], repair=repair)
        assert np.allclose(found[0], expected.logits[0], atol=1e-4)
        assert kv.num_segment_tokens == expected.num_segment_tokens == REUSED
        assert kv.num_repaired_tokens == expected.num_repaired_tokens
    text = kv.generate(ids(PROMPT), segments=SEGMENTS, repair=UNBOUND, **GREEDY)[0, len(PROMPT) :]
    assert text.tolist() == engine.generate([PROMPT], KEEP, segments=[SEGMENTS], repair=UNBOUND)[0].token_ids
    # Both count alike.
    assert kv.segments is not None
    assert engine.segments is not None
    names = ("segment_tokens", "repaired_tokens", "blends", "blends_in_full", "segments_computed")
    of_load = engine.stats
    assert [kv.stats()[name] for name in names] == [of_load[name] for name in names]
    assert kv.segments.stats.keys() == engine.segments.stats.keys()
    assert kv.segments.counts.deviations.counts == engine.segments.counts.deviations.counts


def test_the_configured_repair_counts_where_a_call_brings_none(open_tier: Open) -> None:
    kv = open_tier(repair_rule="first", repair_share=0.5)
    kv.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY)
    assert (kv.num_segment_tokens, kv.num_repaired_tokens) == (REUSED, REUSED // 2)
    # The figures are those of the last call.
    kv.generate(ids(PROMPT), **GREEDY)
    assert (kv.num_segment_tokens, kv.num_repaired_tokens) == (0, 0)


def test_rows_of_a_batch_have_segments_of_their_own(open_tier: Open) -> None:
    orders = [DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[1:] + DOCUMENTS[:1], DOCUMENTS]
    prompts, segments = zip(*map(asked, orders), strict=True)
    given = [*segments[:3], []]  # the last row has none
    kv = open_tier()
    apart = [
        logits_of(kv, ids(one), segments=[own], repair=UNBOUND)[0]
        for one, own in zip(prompts[:3], given[:3], strict=True)
    ]
    together = logits_of(kv, ids(*prompts), segments=given, repair=UNBOUND)
    for one, other in zip(together, apart, strict=False):
        assert torch.allclose(one, other, atol=1e-4)
    assert is_full_prefill(kv, together[3], prompts[3])
    assert (kv.num_segment_tokens, kv.num_repaired_tokens) == (3 * REUSED, 3 * round(0.15 * REUSED))
    assert outcomes(kv) == {"computed": 3, "loaded": 3 + 3 + 3, "held": 6}  # each once a call, however many rows
    # The row without segments is exact, and kept.
    answer = kv.generate(ids(*prompts), segments=given, repair=UNBOUND, **GREEDY)
    rows = [held_names(kv, row) for row in answer.tolist()]
    assert [any(row) for row in rows[:3]] == [True, False, False]  # the first row's tokens are the last one's
    assert all(rows[3][: len(PROMPT) // 16])


# what is named


def test_nothing_behind_the_exact_prefix_is_named_or_stored(open_tier: Open) -> None:
    kv = open_tier()
    tokens, segments = asked(DOCUMENTS, lead=40)
    answer = kv.generate(ids(tokens), segments=segments, **GREEDY | {"max_new_tokens": 40})[0].tolist()
    assert kv.num_segment_tokens == REUSED
    assert held_names(kv, answer) == [True] * 2 + [False] * (len(answer) // 16 - 2)  # 40 tokens before the first one
    for document in DOCUMENTS:  # ordinary blocks under the ordinary root
        assert all(held_names(kv, document))
    expected = kv.model.generate(ids(tokens), **GREEDY)
    assert torch.equal(kv.generate(ids(tokens), **GREEDY), expected)
    assert (kv.num_cached_tokens, kv.num_segment_tokens) == (32, 0)


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_with_segments_is_kept_as_far_as_it_is_exact(open_tier: Open, copied: bool) -> None:
    kv = open_tier()
    tokens, segments = asked(DOCUMENTS, lead=40)
    cache, num_tokens = kv.load(ids(tokens), segments=segments, repair=UNBOUND)
    assert (num_tokens, cache.get_seq_length()) == (len(tokens) - 1,) * 2
    assert kv.num_cached_tokens == 0
    if copied:
        cache = copy.deepcopy(cache)
    with torch.inference_mode():
        kv.model(ids(tokens)[:, num_tokens:], **cache_option(kv.model, cache))
    kv.store(ids(tokens), cache)
    assert held_names(kv, tokens) == [True] * 2 + [False] * (len(tokens) // 16 - 2)
    # A caller's own cache of these tokens is exact, and kept whole.
    own = kv.load(ids(tokens))[0]
    with torch.inference_mode():
        kv.model(ids(tokens)[:, own.get_seq_length() :], **cache_option(kv.model, own))
    kv.store(ids(tokens), own)
    assert all(held_names(kv, tokens))


def test_after_a_change_of_rope_segments_are_moved_by_the_new_one(open_tier: Open) -> None:
    kv = open_tier(plain("llama"))
    reuse: dict[str, Any] = {"segments": SEGMENTS, "repair": Repair(share=0.0)}
    before = logits_of(kv, ids(PROMPT), **reuse)
    rope = kv.model.model.rotary_emb
    rope.register_buffer("inv_freq", rope.inv_freq * 0.5, persistent=False)
    found = logits_of(kv, ids(PROMPT), **reuse)
    assert kv.num_segment_tokens
    assert not torch.equal(found, before)
    assert torch.equal(found, logits_of(open_tier(kv.model), ids(PROMPT), **reuse))


def test_what_the_exact_prefix_has_is_not_reused(open_tier: Open) -> None:
    kv = open_tier()
    tokens, segments = DOCUMENTS[0] + DOCUMENTS[2] + QUESTION, [Segment(0, 48), Segment(48, 112)]
    kv.generate(ids(DOCUMENTS[0] + DOCUMENTS[2][:32] + QUESTION), **GREEDY)
    # The first one is a prefix. Of the second one 32 tokens are; the rest is reused.
    kv.generate(ids(tokens), segments=segments, repair=UNBOUND, **GREEDY)
    assert (kv.num_cached_tokens, kv.num_segment_tokens) == (80, 32)
    assert outcomes(kv) == {"prefix": 1, "computed": 1}
    # And where the prefix has all of it, nothing is approximate.
    kv.generate(ids(tokens), **GREEDY)
    expected = kv.model.generate(ids(tokens), **GREEDY)
    assert torch.equal(kv.generate(ids(tokens), segments=segments, **GREEDY), expected)
    assert (kv.num_cached_tokens, kv.num_segment_tokens) == (112, 0)


# without marks


def unmarked(seed: int) -> list[int]:
    """A prompt that begins and ends like no other, around one long document."""
    return [*prompt(70 + seed, 21 + seed), *prompt(60, 240), *prompt(80 + seed, 9)]


def test_a_document_without_marks_is_reused_from_its_second_prompt_on(open_tier: Open) -> None:
    kv = open_tier(segments="auto")
    for seed in range(4):
        tokens = unmarked(seed)
        found = logits_of(kv, ids(tokens), repair=UNBOUND)
        if not seed:  # what comes for the first time is computed with its prompt
            assert is_full_prefill(kv, found[0], tokens)
            assert kv.num_segment_tokens == 0
            assert kv.repair_share is None
            continue
        assert 140 <= kv.num_segment_tokens < 240
        assert kv.num_cached_tokens == 0
        assert kv.repair_share is not None
        assert abs(kv.repair_share - 0.15) < 0.01
        assert not any(held_names(kv, tokens)[6:])  # nothing behind the first reused token
    assert outcomes(kv)["loaded"] >= outcomes(kv)["computed"] > 0
    # Marks are used instead, and an empty list means none.
    kv.load(ids(unmarked(6)), segments=[Segment(27, 27 + 240)], repair=UNBOUND)
    assert kv.num_segment_tokens == 240
    tokens = unmarked(5)
    expected = kv.model.generate(ids(tokens), **GREEDY)
    assert torch.equal(kv.generate(ids(tokens), segments=[[]], **GREEDY), expected)
    assert (kv.num_cached_tokens, kv.num_segment_tokens) == (0, 0)
    # Now it is a prefix, which comes first.
    assert torch.equal(kv.generate(ids(tokens), repair=UNBOUND, **GREEDY), expected)
    assert kv.num_cached_tokens >= 256
    assert kv.num_segment_tokens == 0


def test_precomputed_texts_are_found_without_marks_by_another_process(open_tier: Open) -> None:
    kv = open_tier(segments="auto")
    kv.precompute([prompt(60, 240)])
    assert kv.drain()
    kv.close()
    again = open_tier(segments="auto")  # from the slab, at first sight
    again.load(ids(unmarked(1)), repair=UNBOUND)
    assert again.num_segment_tokens >= 140
    assert outcomes(again)["loaded"] > 0
    assert "computed" not in outcomes(again)


# where segments come from


def test_an_absent_segment_is_computed_alone_and_loaded_from_then_on(open_tier: Open) -> None:
    kv = open_tier()
    first = logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND)
    assert outcomes(kv) == {"computed": 3}
    second = logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND)
    assert outcomes(kv) == {"computed": 3, "loaded": 3}
    assert torch.equal(first, second)
    # One that shares its beginning with a held one is computed from there.
    tokens = [*PROMPT[:101], 5, *PROMPT[102:]]
    before = kv.stats()['kvtier_lookup_blocks_total{tier="l2"}']
    kv.generate(ids(tokens), segments=SEGMENTS[2:], **GREEDY)
    assert outcomes(kv) == {"computed": 4, "loaded": 3}
    assert kv.stats()['kvtier_lookup_blocks_total{tier="l2"}'] == before


def test_precomputed_texts_are_loaded_by_their_tenant_alone(open_tier: Open) -> None:
    kv = open_tier(cache_salt="a")
    kv.precompute([*DOCUMENTS[:2], torch.tensor(DOCUMENTS[2]), [5]])
    assert kv.drain()
    kv.close()
    other = open_tier(cache_salt="b")
    other.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY)
    assert outcomes(other) == {"computed": 3}
    assert other.drain()
    other.close()
    again = open_tier(cache_salt="a")  # from the slab
    again.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY)
    assert outcomes(again) == {"loaded": 3}
    assert again.stats()['kvtier_lookup_blocks_total{tier="file"}'] == REUSED // 16


def test_a_late_segment_is_computed(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = open_tier()
    first = logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND)
    assert kv.drain()
    kv.close()
    again = open_tier(prefetch_deadline="0.2s")
    (port,) = again._tiers.ports  # type: ignore[attr-defined]
    goes_on = threading.Event()
    read = port.tier.read
    monkeypatch.setattr(port.tier, "read", lambda *args: (goes_on.wait(60), read(*args))[1])
    assert torch.allclose(logits_of(again, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND), first, atol=1e-4)
    goes_on.set()
    assert outcomes(again) == {"computed": 3}


def test_host_memory_for_less_than_one_segment_costs_its_tokens_only(open_tier: Open) -> None:
    kv = open_tier(host="24KiB")  # two blocks
    for _ in range(2):
        found = logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=Repair(share=1.0))
        assert is_full_prefill(kv, found[0], PROMPT)
    assert kv.num_segment_tokens == REUSED
    assert outcomes(kv)["computed"] >= 3  # all at first; then what found no room in time
    assert sum(outcomes(kv).values()) == 6


def test_transformers_and_our_engine_find_each_others_segments(tmp_path: Path, disk_dir: Path) -> None:
    plain("qwen3").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "model").eval()
    cache = {**ON, "load_or_recompute": "load", "prefetch_deadline": "60s"}
    file = {"path": str(disk_dir), "size": "64MiB", "deadline": "60s"}
    config = Config.load(host={"size": "8MiB"}, file=file, cache=cache)
    settings = EngineConfig(num_blocks=128, **ON)
    others = [prompt(seed, 48) for seed in (11, 12)]
    tokens, segments = asked(others)
    # transformers computes segments, our engine reads them …
    with KVTier(model, config) as kv:
        first = logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND)
        assert kv.drain()
    engine = Engine.from_pretrained(tmp_path / "model", settings, LocalConnector.connect(config))
    [answer] = engine.generate([PROMPT], KEEP, segments=[SEGMENTS], repair=UNBOUND)
    assert (engine.stats["segments_loaded"], engine.stats["segments_computed"]) == (3, 0)
    assert np.allclose(first[0], answer.logits[0], atol=1e-4)
    [answer] = engine.generate([tokens], KEEP, segments=[segments], repair=UNBOUND)
    end(engine)
    # … and back.
    with KVTier(model, config) as kv:
        second = logits_of(kv, ids(tokens), segments=segments, repair=UNBOUND)
        assert outcomes(kv) == {"loaded": 2}
        assert np.allclose(second[0], answer.logits[0], atol=1e-4)


def test_clients_of_a_daemon_share_segments(tmp_path: Path, disk_dir: Path) -> None:
    file = {"path": str(disk_dir), "size": "64MiB", "deadline": "60s"}
    cache: dict[str, Any] = {"block_size": 16, "load_or_recompute": "load", "prefetch_deadline": "60s"}
    daemon = DaemonThread(tmp_path / "s", host={"size": "8MiB"}, file=file, cache=cache)
    cache |= ON
    config = Config.load(host={"size": "8MiB"}, cache=cache, service={"socket": str(tmp_path / "s")})
    model: Any = plain("llama")
    with KVTier(model, config) as one, KVTier(model, config) as other:
        for kv in (one, other):
            kv._tiers._patience = PATIENCE  # type: ignore[attr-defined]
        first = logits_of(one, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND)
        assert outcomes(one) == {"computed": 3}
        assert one.drain(PATIENCE)
        assert torch.equal(logits_of(other, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND), first)
        assert outcomes(other) == {"loaded": 3}
    daemon.check()
    daemon.close()


# what goes wrong


def test_a_blend_that_raises_leaves_the_model_and_the_tiers_as_they_were(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_tier()
    expected = logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND)
    ways = []

    def raising(*_: object) -> None:
        ways.append(kv.model.config._attn_implementation)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Blender, "_copy", raising)
        with pytest.raises(MemoryError):
            kv.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY)
    assert ways == [PAGED_ATTENTION]
    assert kv.model.config._attn_implementation == "sdpa"
    assert not any(held_names(kv, PROMPT))
    assert torch.equal(logits_of(kv, ids(PROMPT), segments=SEGMENTS, repair=UNBOUND), expected)
    assert kv.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_beams_and_several_answers_go_on_from_one_blend(open_tier: Open, options: dict[str, Any]) -> None:
    kv = open_tier()
    settings = {**GREEDY, **options}
    torch.manual_seed(4)
    expected = kv.model.generate(ids(PROMPT), **settings)
    torch.manual_seed(4)
    in_full = Repair(share=1.0)  # then a blend is exact
    assert torch.equal(kv.generate(ids(PROMPT), segments=SEGMENTS, repair=in_full, **settings), expected)
    assert kv.num_segment_tokens == kv.num_repaired_tokens > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_cache": False}, "use_cache=False computes no KV"),
        ({"attention_mask": torch.tensor([[0] * 10 + [1] * 155])}, "no segments are reused behind padding"),
    ],
)
def test_calls_that_blocks_cannot_hold_reuse_nothing(
    open_tier: Open, caplog: pytest.LogCaptureFixture, options: dict[str, Any], said: str
) -> None:
    kv = open_tier()
    expected = kv.model.generate(ids(PROMPT), **GREEDY, **options)
    assert torch.equal(kv.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY, **options), expected)
    assert said in caplog.text
    assert kv.num_segment_tokens == 0
    # Closed, it generates without the tiers, as ever.
    kv.close()
    assert torch.equal(kv.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY), kv.model.generate(ids(PROMPT), **GREEDY))
    kv.precompute(DOCUMENTS)
    assert outcomes(kv) == {}


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "overlap": (lambda: {"segments": [Segment(10, 50), Segment(49, 90)]}, "segments 10 to 50 and 49 to 90 overlap"),
    "empty": (lambda: {"segments": [Segment(20, 20)]}, "segment 20 to 20: it is empty"),
    "beyond": (lambda: {"segments": [[Segment(20, 500)]]}, "segment 20 to 500: not within the 165 tokens"),
    "before": (lambda: {"segments": [Segment(-1, 20)]}, "segment -1 to 20: not within"),
    "no segment": (lambda: {"segments": [[(3, 20)]]}, r"segment \(3, 20\): use Segment"),
    "no number": (lambda: {"segments": [Segment(3.0, 20)]}, "use Segment"),  # type: ignore[arg-type]
    "no list": (lambda: {"segments": 5}, "segments 5: use one list of Segment"),
    "one segment": (lambda: {"segments": SEGMENTS[0]}, r"segments Segment\(.*\): use one list of Segment"),
    "no lists": (lambda: {"segments": [5]}, "segments 5 of a row: use a list of Segment"),
    "too many lists": (lambda: {"segments": [SEGMENTS, SEGMENTS]}, "segments of 2 rows for 1: use one list for each"),
    "mixed": (lambda: {"segments": [SEGMENTS[0], SEGMENTS]}, "segments in one list for 1 rows"),
    "share": (lambda: {"segments": SEGMENTS, "repair": Repair(share=1.5)}, "repair share 1.5: use a number from 0"),
    "rule": (lambda: {"segments": SEGMENTS, "repair": Repair("best")}, "repair rule 'best': use one of deviation,"),
    "layer": (lambda: {"segments": SEGMENTS, "repair": Repair(check_layer=3)}, "check_layer 3: this model's layers"),
    "repair": (lambda: {"segments": SEGMENTS, "repair": 0.15}, r"repair 0\.15: use Repair"),
}


def _never(*_: object, **__: object) -> None:
    raise AssertionError("something was computed")


def counted(kv: KVTier) -> dict[str, float]:
    """Everything but what others, too, put on the disk."""
    return {name: number for name, number in kv.stats().items() if "storage" not in name}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_error_before_anything_is_computed(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kv = open_tier()
    given, message = BAD[what]
    before = counted(kv)
    with monkeypatch.context() as patch:
        patch.setattr(kv.model, "forward", _never)
        patch.setattr(kv.model.model, "forward", _never)
        for call in (
            lambda **reuse: kv.generate(ids(PROMPT), **reuse, **GREEDY),
            lambda **r: kv.load(ids(PROMPT), **r),
        ):
            with pytest.raises(RequestError, match=message):
                call(**given())
    assert counted(kv) == before


def test_rows_and_texts_are_counted_and_checked(open_tier: Open) -> None:
    kv = open_tier()
    with pytest.raises(RequestError, match="segments in one list for 2 rows: use one list for each row"):
        kv.load(ids(PROMPT, PROMPT), segments=SEGMENTS)
    with pytest.raises(RequestError, match="segments of 1 rows for 2: use one list for each row"):
        kv.load(ids(PROMPT, PROMPT), segments=[SEGMENTS])
    bad: list[tuple[Any, str]] = [
        ("text", "texts 'text': use a list of lists"),
        ([5], "text 0: use a list of token ids"),
        ([DOCUMENTS[0], []], "text 1: use a list of token ids"),
        ([DOCUMENTS[0], ["a"]], "text 1: use a list of token ids"),
        ([[[1], [1, 2]]], "text 0: use a list of token ids"),
        ([[1, VOCAB]], f"text 0: token ids must be from 0 to {VOCAB - 1}"),
        ([[-1]], "text 0: token ids must be from 0"),
    ]
    for texts, message in bad:
        with pytest.raises(RequestError, match=message):
            kv.precompute(texts)
    assert not any(held_names(kv, DOCUMENTS[0]))


def test_segments_are_refused_where_they_are_off(open_tier: Open) -> None:
    kv = open_tier(segments="off")
    for call in (
        lambda: kv.generate(ids(PROMPT), segments=SEGMENTS, **GREEDY),
        lambda: kv.load(ids(PROMPT), segments=[SEGMENTS]),
        lambda: kv.precompute(DOCUMENTS),
    ):
        with pytest.raises(RequestError, match=r'this KVTier reuses none; set \[cache\] segments = "on"'):
            call()
    kv.generate(ids(PROMPT), segments=[[]], **GREEDY)  # asks for nothing
    assert kv.segments is None
    assert not [name for name in kv.stats() if "segment" in name]
