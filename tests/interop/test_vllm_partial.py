"""vLLM goes on from inside a block: prompts that part from a held one there, from every tier, by every way to load."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from node_rig import Node
from vllm_rig import BLOCK, Engine, FailingLoads, before_copies, engine, greedy, make_checkpoint, prompt, tiers

from kvtier.connector.scheduler import SchedulerSide

pytestmark = pytest.mark.timeout(300)

BASE = prompt(1, 240)
ANSWER = 16  # tokens
SHARED = (150, 131, 139, 64, 200)  # tokens: inside a block, the fourth at its end
WHOLE = [shared // BLOCK * BLOCK for shared in SHARED]


def parting(shared: int, number: int) -> list[int]:
    """A prompt that has so many tokens in common with the first one, and 30 of its own."""
    return [*BASE[:shared], (BASE[shared] + 1) % 500 + 3, *prompt(100 + number, 30)]


PROMPTS = [parting(shared, number) for number, shared in enumerate(SHARED)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What a vLLM without kvtier answers."""
    with engine(model) as plain:
        return plain.text([BASE, *PROMPTS])


def ask(vllm: Engine, prompts: list[list[int]], salt: str | None = None) -> tuple[list[list[int]], list[int]]:
    """(text, cached tokens) of every prompt, each asked when vLLM's own cache is empty."""
    texts, cached = [], []
    for tokens in prompts:
        vllm.forget_l1()
        [output] = vllm.run([tokens], salt=salt)
        texts.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
    return texts, cached


WAYS = ["synchronous", "asynchronous", "layerwise"]


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load is waited for in its step, however short."""
    for name in ("_TINY", "_SHORT"):
        monkeypatch.setattr(f"kvtier.connector.vllm.scheduler.{name}", 0)


@pytest.mark.parametrize("keys", brief(["kvtier"], ["vllm", "kvtier"]))
@pytest.mark.parametrize("way", brief(["layerwise"], WAYS))
def test_a_prompt_that_parts_inside_a_block_computes_only_what_is_its_own(
    model: Path, expected: list[list[int]], way: str, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "asynchronous":
        at_once(monkeypatch)
    with engine(model, tiers(layerwise=way == "layerwise", keys=keys)) as vllm:
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        assert ask(vllm, PROMPTS) == (expected[1:], list(SHARED))
        # What a prompt had a part of is its own block now: filled by it, and named by its tokens. Where its answer
        # filled the prompt's last block, that is of use to the prompt, too.
        held = [(len(tokens) + ANSWER - 1) // BLOCK * BLOCK for tokens in [BASE, *PROMPTS]]
        again = [min(count, len(tokens) - 1) for count, tokens in zip(held, [BASE, *PROMPTS], strict=True)]
        assert ask(vllm, [BASE, *PROMPTS]) == (expected, again)
        assert again[1:] == [180, 160, 160, 94, 224]


def test_the_slab_has_parts_too(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path)) as first:
        assert ask(first, [BASE]) == (expected[:1], [0])
    with engine(model, tiers(tmp_path)) as second:
        told: list[dict[str, int]] = []
        sources = second.scheduler.connector.get_external_cache_hit_sources

        def listen(request: Any, num_tokens: int) -> Any:
            found = sources(request, num_tokens)
            told.append({source.value: count for source, count in found.items()})
            return found

        second.scheduler.connector.get_external_cache_hit_sources = listen
        assert ask(second, PROMPTS[:2]) == (expected[1:3], list(SHARED[:2]))
        # what both want, the second one may have brought to L2 by the time that the first one is told
        assert [sum(each.values()) for each in told] == [150, 131]
        assert told[0]["disk"] >= 128
        assert told[1] == {"host": 131}


def test_an_option_leaves_it_at_whole_blocks(model: Path, expected: list[list[int]]) -> None:
    with engine(model, tiers(cache={"partial_blocks": False})) as vllm:
        assert ask(vllm, [BASE, *PROMPTS]) == (expected, [0, *WHOLE])


def test_through_a_daemon(model: Path, expected: list[list[int]], daemon: Node) -> None:
    told = {"service": daemon.section, "host": {"size": "16MiB"}, "cache": {"prefetch_deadline": "60s"}}
    with engine(model, told) as first:
        assert ask(first, [BASE]) == (expected[:1], [0])
    with engine(model, told) as second:
        assert ask(second, PROMPTS) == (expected[1:], list(SHARED))


def test_several_groups_of_layers_stay_at_whole_blocks(tmp_path: Path) -> None:
    path = make_checkpoint("gemma3", tmp_path / "model")
    with engine(path) as plain:
        right = plain.text([BASE, *PROMPTS])
    with engine(path, tiers()) as vllm:
        assert len(vllm.half._plan.groups) > 1
        assert ask(vllm, [BASE, *PROMPTS]) == (right, [0, *WHOLE])


def test_a_first_block_of_another_tenant_is_no_part_of_a_prompt(model: Path, expected: list[list[int]]) -> None:
    """vLLM's chains begin at one root for all tenants, whose first blocks so have one parent."""
    own = parting(20, 9)
    with engine(model) as plain:
        right = plain.text([own])
    with engine(model, tiers()) as vllm:
        assert ask(vllm, [BASE], salt="tenant") == (expected[:1], [0])
        assert ask(vllm, [own]) == (right, [0])
        assert ask(vllm, [own], salt="other") == (right, [0])
        assert ask(vllm, [own], salt="tenant") == (right, [20])  # its own
        vllm.half.reset()
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        assert ask(vllm, [own], salt="tenant") == (right, [0])
        assert ask(vllm, [own]) == (right, [20])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("caching", brief([True], [True, False]))
def test_a_load_that_fails_is_computed_again(
    model: Path,
    expected: list[list[int]],
    way: str,
    caching: bool,
    failing_loads: FailingLoads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "asynchronous":
        at_once(monkeypatch)
    with engine(model, tiers(layerwise=way == "layerwise"), enable_prefix_caching=caching) as vllm:
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        failing_loads.on = True
        assert ask(vllm, PROMPTS[:1])[0] == expected[1:2]
        assert failing_loads.num_failed
        failing_loads.on = False
        # What was computed instead is right, and so is what another prompt loads a part of.
        assert ask(vllm, PROMPTS[1:]) == (expected[2:], list(SHARED[1:]))


def test_an_expired_promise_is_computed(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has planned a step with these tokens; their blocks are told to it as ones that did not come."""
    with engine(model, tiers()) as vllm:
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        take = SchedulerSide.allocated
        monkeypatch.setattr(
            SchedulerSide, "allocated", lambda self, request_id, *_, **__: take(self, request_id, (), 0)
        )
        assert ask(vllm, PROMPTS[:1])[0] == expected[1:2]
        monkeypatch.setattr(SchedulerSide, "allocated", take)
        assert ask(vllm, PROMPTS[1:]) == (expected[2:], list(SHARED[1:]))


def test_who_shares_a_part_and_comes_at_once_is_served_right(model: Path, expected: list[list[int]]) -> None:
    """All prompts in one batch: some wait for blocks that another loads, none takes another's part for its own."""
    with engine(model, tiers()) as vllm:
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        for _ in range(2):
            vllm.forget_l1()
            assert vllm.text(PROMPTS) == expected[1:]


def test_a_request_that_is_aborted_while_its_part_is_loaded_leaves_nothing(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    goes_on = threading.Event()
    with engine(model, tiers()) as vllm:
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        vllm.forget_l1()
        before_copies(monkeypatch, lambda direction: direction == "store" or goes_on.wait(60))
        llm = vllm.llm.llm_engine
        llm.add_request("guest", {"prompt_token_ids": PROMPTS[0]}, greedy())
        while not vllm.half._ops:
            llm.step()
        llm.abort_request(["guest"])
        goes_on.set()
        # Nothing of the guest's own was stored: the next one has just as much.
        assert ask(vllm, PROMPTS) == (expected[1:], list(SHARED))


def test_no_load_overwrites_computed_kv(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM writes a layer's KV and then waits for it to be loaded: too late for a block that is loaded in part."""
    before_copies(monkeypatch, lambda direction: time.sleep(0.05 * (direction == "load")))
    with engine(model, tiers(layerwise=True)) as vllm:
        assert ask(vllm, [BASE]) == (expected[:1], [0])
        assert ask(vllm, PROMPTS) == (expected[1:], list(SHARED))
