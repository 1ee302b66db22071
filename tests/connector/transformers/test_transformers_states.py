"""Stories of KVTier with models that keep recurrent states: where prompts go on, and what a lost record costs."""

import mmap
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from extent import brief
from kv_tier_rig import Open, hits, ids, restarted
from state_models import COARSE_STEPS, CONFIGS, FROM_ZERO, ONE_BY_ONE, PURE, SHOWN, model_of
from tiny_models import VOCAB, prompt

from kvtier.connector.models import cache_option, given_cache, returned_cache
from kvtier.connector.transformers import state_calls
from kvtier.connector.transformers.adapter import KVTier
from kvtier.connector.transformers.cache_form import CacheForm, empty_cache
from kvtier.connector.transformers.going_on import GoingOn, how_it_goes_on
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.hierarchy import evict_everywhere

GREEDY: dict[str, Any] = {
    "max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "suppress_tokens": [0],
}  # fmt: skip
BLOCK = 16


def names_of(kv: KVTier, tokens: list[int], border: int) -> list[bytes]:
    """The names of a state's records behind the first `border` blocks."""
    assert kv._states is not None
    return list(kv._states._records._pieces(kv._blocks.row(tokens), border).hashes)


@pytest.mark.parametrize("kind", SHOWN)
def test_a_prompt_is_found_again_by_the_next_call_turn_and_process(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    tokens, other = ids(prompt(1, 391)), ids(prompt(2, 391))
    expected = model.generate(tokens, **GREEDY)
    # The comparison proves something: the text depends on the prompt.
    assert not torch.equal(expected[:, 391:], model.generate(other, **GREEDY)[:, 391:])
    kv = open_tier(model)
    for num_cached in (0, 384):
        assert hits(kv, tokens, expected, GREEDY) == num_cached
    # The next turn goes on behind the answer, or behind the prompt if transformers computes answers less exactly.
    turn = torch.cat([expected, ids(prompt(3, 6))], dim=1)
    assert hits(kv, turn, options=GREEDY) == (384 if kind in COARSE_STEPS else 400)
    # So does another process.
    again = restarted(kv, open_tier)
    assert hits(again, tokens, expected, GREEDY) == 384
    assert hits(again, turn, options=GREEDY) == 416


@pytest.mark.parametrize("kind", brief(["bamba", "minimax"], [*CONFIGS]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_tells_how_each_kind_goes_on(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, dtype)
    found = how_it_goes_on(model, CacheForm.of(model, BLOCK))
    assert found.in_pieces == (kind not in ONE_BY_ONE)
    assert found.from_zero == (kind in FROM_ZERO)
    if dtype is torch.float32:
        assert found == GoingOn(kind not in ONE_BY_ONE, kind not in COARSE_STEPS, kind in FROM_ZERO)


@pytest.mark.parametrize("kind", ["lfm2", *brief([], ["mamba2", "qwen3.5", "falcon-h1", "jamba"])])
def test_states_come_back_bit_for_bit(open_tier: Open, kind: str) -> None:
    model = model_of(kind, torch.bfloat16)
    rows = ids(prompt(1, 391), prompt(2, 391))
    kv = open_tier(model)
    kv.generate(rows, **GREEDY)
    form, direct = kv._form.states, CacheForm.of(model, BLOCK)
    assert form is not None
    loaded, num_cached = kv.load(rows[:, :385])
    cache: Any = loaded
    assert num_cached == 384
    with torch.no_grad():
        own: Any = model(rows[:, :384], use_cache=True)
    whole = returned_cache(own)
    found, expected = (form.rows(form.take(each)).wait(0) for each in (cache, whole))
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    for number in direct.kept:
        assert torch.equal(cache.layers[number].keys, whole.layers[number].keys)


@pytest.mark.parametrize("kind", ["qwen3.5", *brief([], ["mamba2", "kimi-linear"])])
def test_prompts_that_part_in_the_middle_share_what_is_before(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    shared = prompt(1, 1100)
    kv = open_tier(model)
    found = []
    for seed in (2, 3, 4):
        tokens = ids([*shared, *prompt(seed, 100)])
        assert torch.equal(kv.generate(tokens, **GREEDY), model.generate(tokens, **GREEDY))
        found.append(kv.num_cached_tokens)
    # A long prompt leaves states at powers of two. With K and V the second prompt sees where it parts from the first.
    assert found == ([0, 1024, 1024] if kind in PURE else [0, 1024, 1088])


@pytest.mark.parametrize("kind", ["qwen3.5", *brief([], ["mamba", "mamba2", "falcon-h1"])])
def test_rows_of_a_batch_go_on_from_one_border(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    one, two, three = prompt(1, 391), prompt(2, 391), prompt(3, 391)
    kv = open_tier(model)
    both = ids(one, two)
    expected = model.generate(both, **GREEDY)
    for num_cached in (0, 384):
        assert hits(kv, both, expected, GREEDY) == num_cached
    # Each is known by itself, too, but not beside a row that nobody knows.
    assert hits(kv, ids(two), options=GREEDY) == 384
    mixed = ids(two, three)
    assert hits(kv, mixed, options=GREEDY) == 0


def computed(open_tier: Open, kind: str) -> tuple[KVTier, list[int], torch.Tensor]:
    """A tier that a long prompt was computed over: the tier, the prompt, and what its model says to it."""
    model, tokens = model_of(kind), prompt(1, 1200)
    expected = model.generate(ids(tokens), **GREEDY)
    kv = open_tier(model)
    kv.generate(ids(tokens), **GREEDY)
    return kv, tokens, expected


@pytest.mark.parametrize("kind", ["falcon-h1", *brief([], ["mamba2", "qwen3.5"])])
def test_a_lost_state_costs_hits_and_nothing_else(open_tier: Open, kind: str) -> None:
    kv, tokens, expected = computed(open_tier, kind)
    assert kv.drain()
    hierarchy: Any = kv._opened
    # One record of the last border's state is gone, and its blocks are there: the border before serves.
    last = names_of(kv, tokens, 74)
    assert evict_everywhere(hierarchy, last[-1:], 60)["file"] == 1
    assert hits(kv, ids(tokens), expected, GREEDY) == 1024
    assert torch.equal(kv.generate(ids(tokens), **GREEDY), expected)  # it was stored again
    assert kv.num_cached_tokens == 1184
    # All states are gone.
    assert kv.drain()
    for border in (32, 64, 74):
        evict_everywhere(hierarchy, names_of(kv, tokens, border), 60)
    assert hits(kv, ids(tokens), expected, GREEDY) == 0


@pytest.mark.parametrize("kind", ["qwen3.5", *brief([], ["falcon-h1"])])
def test_a_state_whose_blocks_are_lost_is_not_used(open_tier: Open, kind: str) -> None:
    kv, tokens, expected = computed(open_tier, kind)
    assert kv.drain()
    lost = kv._blocks.row(tokens).chain.hashes[70]
    hierarchy: Any = kv._opened
    evict_everywhere(hierarchy, [lost], 60)
    assert hits(kv, ids(tokens), expected, GREEDY) == 1024
    assert hits(kv, ids(tokens), expected, GREEDY) == 1184


@pytest.mark.parametrize("kind", [*brief([], ["mamba2"]), "qwen3.5"])
def test_a_corrupt_state_in_the_slab_is_a_miss(open_tier: Open, kind: str) -> None:
    kv, tokens, expected = computed(open_tier, kind)
    again = restarted(kv, open_tier)
    [port] = again._opened.ports  # type: ignore[union-attr]
    slab: Any = port.tier
    name = names_of(again, tokens, 74)[0]
    rotten = memoryview(mmap.mmap(-1, slab.superblock.stride))  # aligned, as the slab wants it
    slab._payload.write(slab.superblock.payload_offset(slab._blocks.index.find_one(name)), [rotten])
    assert hits(again, ids(tokens), expected, GREEDY) == 1024
    assert again.stats()['kvtier_corruption_total{tier="file"}'] == 1


@pytest.mark.parametrize("kind", ["mamba2", *brief([], ["qwen3.5"])])
def test_after_a_reset_no_state_is_found(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    tokens = ids(prompt(1, 391))
    kv = open_tier(model)
    kv.generate(tokens, **GREEDY)
    assert kv._opened is not None
    kv._opened.reset()
    expected = model.generate(tokens, **GREEDY)
    for num_cached in (0, 384):
        assert hits(kv, tokens, expected, GREEDY) == num_cached


def test_a_reset_while_text_is_generated_keeps_nothing_of_it(open_tier: Open) -> None:
    model = model_of("qwen3.5")
    tokens = ids(prompt(1, 391))
    kv = open_tier(model)

    class Resetting(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if input_ids.shape[1] == 395:
                assert kv._opened is not None
                kv._opened.reset()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    kv.generate(tokens, **GREEDY, stopping_criteria=transformers.StoppingCriteriaList([Resetting()]))
    kv.generate(tokens, **GREEDY)
    assert kv.num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["mamba2", *brief([], ["qwen3.5", "lfm2", "mamba", "minimax"])])
def test_a_model_that_is_another_one_in_some_pass_leaves_no_state_of_that_text(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    tokens = ids(prompt(1, 391))
    kv, looks, hooks = open_tier(model), list[None](), list[Any]()

    class Changing(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if input_ids.shape[1] == 395:
                hooks.append(model.base_model.register_forward_hook(lambda *_: None))
            elif hooks:
                hooks.pop().remove()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    kv.generate(tokens, **GREEDY, stopping_criteria=transformers.StoppingCriteriaList([Changing()]))
    look = kv._live.look
    with patch.object(kv._live, "look", lambda: looks.append(look())):
        for found in (0, 384):
            kv.generate(tokens, **GREEDY)
            assert kv.num_cached_tokens == found
    assert not looks  # a call by itself changes nothing of the model


def test_segments_are_refused_with_a_state(open_tier: Open) -> None:
    with pytest.raises(ConfigError, match="segments \"on\": model kind 'qwen3_5_text' keeps recurrent states"):
        open_tier(model_of("qwen3.5"), segments="on")


def test_a_state_that_host_memory_cannot_hold_is_no_failure(open_tier: Open) -> None:
    model = model_of("qwen3.5")
    tokens = ids(prompt(1, 391))
    kv = open_tier(model, host="64KiB")
    for _ in range(2):
        assert torch.equal(kv.generate(tokens, **GREEDY), model.generate(tokens, **GREEDY))


def test_where_one_token_at_a_time_would_take_too_long_the_prompt_is_computed(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("mamba")
    kv = open_tier(model)
    tokens = ids(prompt(1, 391))
    monkeypatch.setitem(state_calls._STEP_COSTS, "cpu", 100)  # 7 tokens one by one would be too many
    expected = model.generate(tokens, **GREEDY)
    for _ in range(2):
        assert hits(kv, tokens, expected, GREEDY) == 0
    # The answer's last border cost nothing. Behind it there are few tokens.
    turn = torch.cat([expected, ids(prompt(3, 1))], dim=1)[:, :403]
    assert hits(kv, turn, options=GREEDY) == 400


def test_answers_are_not_kept_if_they_are_not_wanted(open_tier: Open) -> None:
    model = model_of("qwen3.5")
    kv = open_tier(model, store_generated=False)
    expected = kv.generate(ids(prompt(1, 391)), **GREEDY)
    turn = torch.cat([expected, ids(prompt(3, 6))], dim=1)
    assert hits(kv, turn, options=GREEDY) == 384


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 100},
        {"return_dict_in_generate": True, "output_scores": True},
        {"guidance_scale": 1.5},  # its passes over the answer alone have a cache of their own
    ],
)
def test_ways_to_generate_are_those_of_the_model(open_tier: Open, options: dict[str, Any]) -> None:
    model = model_of("qwen3.5")
    tokens = ids(prompt(1, 391))
    expected = model.generate(tokens, **GREEDY, **options)
    expected = expected if isinstance(expected, torch.Tensor) else expected.sequences
    kv = open_tier(model)
    for num_cached in (0, 384):
        result = kv.generate(tokens, **GREEDY, **options)
        assert torch.equal(result if isinstance(result, torch.Tensor) else result.sequences, expected)
        assert kv.num_cached_tokens == num_cached
    turn = torch.cat([expected, ids(prompt(3, 6))], dim=1)
    assert hits(kv, turn, options=GREEDY) == 400


def test_the_two_halves_keep_what_ends_with_a_block(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("qwen3.5")
    tokens = ids(prompt(1, 391))
    kv = open_tier(model)
    cache, num_cached = kv.load(tokens)
    with torch.no_grad():
        model(tokens[:, num_cached:384], **cache_option(model, cache))
        kv.store(tokens[:, :384], cache)
        cache, num_cached = kv.load(tokens)
        assert num_cached == 384
        loaded = model(tokens[:, 384:], **cache_option(model, cache)).logits[0, -1]
        whole = model(tokens).logits[0, -1]
    assert torch.allclose(loaded, whole, atol=1e-4)
    # A cache of more tokens than these would be stored under a wrong name.
    kv.store(tokens[:, :384], cache)
    assert "other tokens than these" in caplog.text


@pytest.mark.parametrize(("kind", "ends"), [("bamba", [128, 384, 385]), ("minimax", [384, 385])])
def test_a_loop_of_ones_own_needs_no_positions(open_tier: Open, kind: str, ends: list[int]) -> None:
    """Without them transformers computes another text, and what was stored of it would be wrong for everyone."""
    model, plain = model_of(kind), model_of(kind)
    tokens = ids(prompt(1, 385))

    def go_on(model: Any, cache: Any, ends: list[int], start: int = 0) -> torch.Tensor:
        logits = torch.empty(0)
        for end in ends:
            logits = model(tokens[:, start:end], **cache_option(model, cache), use_cache=True).logits[0, -1]
            start = end
        return logits

    with torch.no_grad():
        whole = plain(tokens).logits[0, -1]
        tolerance = 1e-4 * float(whole.abs().max())
        strange = empty_cache(plain)
        assert not torch.allclose(go_on(plain, strange, ends), whole, atol=tolerance)  # in transformers itself
        kv = open_tier(model)
        short = empty_cache(plain)
        go_on(plain, short, ends[:-1])
        kv.store(tokens[:, :384], short)  # nobody watched its passes
        cache, num_cached = kv.load(tokens)
        assert num_cached == 0
        go_on(model, cache, ends[:-1])
        kv.store(tokens[:, :384], cache)
        assert torch.allclose(go_on(model, cache, ends[-1:], 384), whole, atol=tolerance)
        cache, num_cached = kv.load(tokens)
        assert num_cached == 384
        kv.close()  # what was loaded stays good
        assert torch.allclose(go_on(model, cache, ends[-1:], 384), whole, atol=tolerance)
        # A caller's own positions are the caller's.
        shifted = torch.arange(7, 7 + 385)[None]
        assert torch.equal(model(tokens, position_ids=shifted).logits, plain(tokens, position_ids=shifted).logits)


def test_chunks_of_a_prompt_leave_nothing_if_the_model_loses_its_state_between_them(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("jamba")
    tokens = ids(prompt(1, 100))
    kv = open_tier(model)
    options = GREEDY | {"prefill_chunk_size": 16}
    expected = model.generate(tokens, **options)
    assert not torch.equal(expected, model.generate(tokens, **GREEDY))  # in transformers itself
    assert torch.equal(kv.generate(tokens, **options), expected)
    assert "prefill_chunk_size, of a model with recurrent states; leave it out" in caplog.text
    assert hits(kv, tokens, options=GREEDY) == 0


@pytest.mark.parametrize("kind", ["minimax", *brief([], ["qwen3.5", "mamba2"])])
def test_the_two_halves_give_a_cache_of_the_models_own_also_when_nothing_is_kept(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    tokens = ids(prompt(1, 40))
    kv = open_tier(model)
    with torch.no_grad():
        whole = model(tokens).logits[0, -1]
        cache, num_tokens = kv.load(tokens)
        kv.store(tokens, cache)  # without a forward pass it has nothing
        kv.close()
        cache, num_tokens = kv.load(tokens)
        assert num_tokens == 0
        logits = model(tokens, **cache_option(model, cache), use_cache=True).logits[0, -1]
        kv.store(tokens, cache)
    assert torch.allclose(logits, whole, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("kind", ["RwkvConfig", "RecurrentGemmaConfig"])
def test_a_state_outside_of_the_cache_is_refused_by_name(kind: str) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"attention_hidden_size": 32} if kind == "RwkvConfig" else {"intermediate_size": 64, "lru_width": 32}
    model = auto.from_config(getattr(transformers, kind)(**sizes, **more)).eval()
    with pytest.raises(ConfigError, match="keeps a state outside of transformers' cache"):
        CacheForm.of(model, BLOCK)


def test_a_model_that_does_not_go_on_behind_a_state_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba's passes of one token lose the state here, as those of several do in transformers."""
    model = model_of("mamba")
    form = CacheForm.of(model, BLOCK)
    mixer = type(model.backbone.layers[0].mixer)
    own = mixer.forward

    def forgetful(self: Any, hidden_states: Any, **options: Any) -> Any:
        _, cache = given_cache(options)
        if cache is not None and hidden_states.shape[1] == 1:
            cache.layers[self.layer_idx].recurrent_states[0].zero_()
        return own(self, hidden_states, **options)

    monkeypatch.setattr(mixer, "forward", forgetful)
    with pytest.raises(ConfigError, match="transformers computes whole prompts of it only"):
        how_it_goes_on(model, form)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_mask": torch.tensor([[0] * 10 + [1] * 381])}, "padding, of a model with recurrent states"),
        ({"num_return_sequences": 2, "do_sample": True}, "several answers or beams, of a model"),
        *brief([], [({"num_beams": 2}, "several answers or beams, of a model")]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_other_ways_to_generate_go_on_as_ever_and_are_named_once(
    open_tier: Open, caplog: pytest.LogCaptureFixture, options: dict[str, Any], said: str
) -> None:
    model = model_of("qwen3.5")
    tokens = ids(prompt(1, 391))
    kv = open_tier(model)
    for _ in range(2):
        torch.manual_seed(5)
        expected = model.generate(tokens, **{**GREEDY, **options})
        torch.manual_seed(5)
        assert torch.equal(kv.generate(tokens, **{**GREEDY, **options}), expected)
        assert kv.num_cached_tokens == 0
    [warning] = [record.message for record in caplog.records if record.name == "kvtier.connector.transformers"]
    assert said in warning
    assert "greedy and sampled decoding of rows of one length work" in warning


def test_a_row_that_ends_early_is_kept_up_to_its_end(open_tier: Open) -> None:
    model = model_of("qwen3.5")
    rows = ids(prompt(1, 391), prompt(2, 391))
    answers = model.generate(rows, **GREEDY)[:, 391:].tolist()
    ends = next(token for token in answers[0][:8] if token not in answers[1])
    options = GREEDY | {"eos_token_id": ends}
    kv = open_tier(model)
    expected = model.generate(rows, **options)
    assert torch.equal(kv.generate(rows, **options), expected)
    for row, num_cached in ((0, 384), (1, 400)):
        turn = torch.cat([expected[row : row + 1, :400], ids(prompt(3, 6))], dim=1)
        kv.generate(turn, **GREEDY | {"attention_mask": torch.ones_like(turn)})
        assert kv.num_cached_tokens == num_cached
