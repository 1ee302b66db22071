"""Each of the commonest causes is recognised, and named with what helps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from doubles import SLOT_BYTES, MemoryTier, chain_over, hierarchy_of, store

from kvtier.connector.daemon.wire import MAX_HELLO, Hello, pack_handshake
from kvtier.connector.local import open_tiers
from kvtier.service.explain.lines import explained, finding
from kvtier.service.node.namespaces import BlockDimensions, Namespace
from kvtier.service.node.operators import BlockSelection, NotFound, explain, explain_request
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.tiers import Outcome
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy import Wanted
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.naming.identity import ModelIdentity, with_lossy

BLOCK = 4  # tokens
FINGERPRINT = b"one model".ljust(32, b".")
SPECIAL = 900  # a special token; all others below 900 are characters
LLO = 901  # "llo" as one token


def opened(fingerprint: bytes = FINGERPRINT, block_size: int = BLOCK) -> Namespace:
    """A model as the daemon has it open, without the daemon."""
    hierarchy = hierarchy_of(slots=32)
    tiers = ServedTiers(hierarchy, fingerprint)
    return Namespace(fingerprint, BlockDimensions(block_size, SLOT_BYTES), 32 * SLOT_BYTES, tiers, None)


def hold(model: Namespace, tokens: Sequence[int], salt: str | None = None) -> TokenChain:
    """Have the prompt stored, as an engine of this tenant does."""
    chain = chain_over(tokens, salt, model.fingerprint, model.blocks.block_size)
    model.tiers.tenants.record([Wanted(chain.hashes, chain.root, chain.tenant)])
    store(model.hierarchy, chain)
    return chain


def decode(tokens: Sequence[int]) -> str:
    return "".join({SPECIAL: "<|turn|>", LLO: "llo"}.get(each) or chr(each) for each in tokens)


def told(
    model: Namespace, tokens: Sequence[int], salt: str | None = None, others: Sequence[Namespace] = ()
) -> list[str]:
    """What `kvtier explain` prints."""
    answer = explain(model, others, BlockSelection((), tokens, salt), 1.0)
    return list(explained(answer, decode, tokens, (SPECIAL,)))


MINE = ModelIdentity(
    model="tiny", revision="ab" * 20, config_digest="0" * 64, dtype="bfloat16", kv_dtype="bfloat16",
    compute_dtype="bfloat16", num_kv_heads=2, head_dim=8, block_size=BLOCK, layers=(0, 1),
)  # fmt: skip


def told_apart(here: ModelIdentity, there: ModelIdentity) -> list[str]:
    """What it prints of a prompt that an engine of another fingerprint has stored."""
    model, other = opened(here.fingerprint()), opened(there.fingerprint())
    model.about, other.about = here.shown(), there.shown()
    hold(other, TEXT)
    return told(model, TEXT, others=[other])


TEXT = [*map(ord, "you say a hello to all of them")]


def cut_anew(tokens: Sequence[int]) -> list[int]:
    at = decode(tokens).index("llo")
    return [*tokens[:at], LLO, *tokens[at + 3 :]]


@pytest.mark.parametrize(
    ("held", "asked", "line", "advice"),
    [
        pytest.param(
            TEXT,
            cut_anew(TEXT),
            "the same text is other tokens at token 12: `llo` for `l|l|o`",
            "An answer that is sent back as text is tokenised anew",
            id="a re-tokenised answer",
        ),
        pytest.param(
            TEXT,
            [1, *TEXT],
            "differs at token 0: this prompt has one token more there, `\x01`",
            "Another chat template, or another choice of add_special_tokens",
            id="a token before all others",
        ),
        pytest.param(
            [SPECIAL, *map(ord, "user: hello")],
            [SPECIAL, *map(ord, "system: hello")],
            "differs at token 1: `sys` for `use`",
            "A special token is there: another chat template",
            id="another template",
        ),
        pytest.param(
            TEXT,
            [*TEXT[:8], *map(ord, "nothing at all to them")],
            "differs at token 8: `noth` for `a he`",
            "Put what changes behind all that stays the same",
            id="another text",
        ),
    ],
)
def test_what_differs_in_the_tokens(held: list[int], asked: list[int], line: str, advice: str) -> None:
    model = opened()
    hold(model, held)
    lines = told(model, asked)
    assert lines[-2] == line
    assert lines[-1].startswith(advice)


def test_a_prompt_that_goes_on_where_a_held_one_ends_is_no_fault() -> None:
    model = opened(block_size=8)
    hold(model, TEXT[:16])
    assert told(model, TEXT)[-2:] == [
        "no held prompt that is known goes on behind token 15",
        "Nothing to do where that text is new: it is held once it was computed.",
    ]
    differs = {"token": 20, "tokens": TEXT[16:24], "held_tokens": TEXT[16:20], "same": 4}
    line, advice = finding(differs, decode, TEXT[:16], ())
    assert line == "the held prompt ends at token 19, and this one goes on"
    assert advice.startswith("Nothing to do")


def test_blocks_that_are_cheaper_to_compute_and_tiers_out_of_reach_are_named() -> None:
    hierarchy = hierarchy_of(32, MemoryTier(), load_policy="auto")
    model = Namespace(
        FINGERPRINT, BlockDimensions(BLOCK, SLOT_BYTES), 32 * SLOT_BYTES, ServedTiers(hierarchy, FINGERPRINT), None
    )
    hold(model, TEXT[:16])
    assert hierarchy.drain(30)
    hierarchy.host.pool.reset()
    assert told(model, TEXT[:16])[-1] == "Every whole block is held: nothing to do."
    hierarchy.rates.computed(1_000_000, 0.001)
    hierarchy.rates.loaded(hierarchy.ports[0].name, 10, 10.0)
    slow, advice = told(model, TEXT[:16])[-2:]
    assert slow.endswith("takes longer than computing these blocks: engines compute them")
    assert '[cache] load_or_recompute = "load"' in advice
    hierarchy.ports[0].breakers["read"].trip()
    lines = told(model, TEXT[:16])
    assert lines[-2].endswith(": not reachable now, and may hold it")
    assert "kvtier status" in lines[-1]


AGENT = "You are an agent and call tools for those who ask. "
SCHEMA = '{"name": "weather", "parameters": {'


@pytest.mark.parametrize(
    ("held", "asked", "line", "option"),
    [
        pytest.param(
            f"x-anthropic-billing-header: cc_version=2.1.37; cch=1;\n{AGENT}",
            f"x-anthropic-billing-header: cc_version=2.1.37; cch=2;\n{AGENT}",
            "`x-anthropic-billing-header: cc_version=2.1.37; cch=2;` for `x-anthropic-billing-header: cc_version=2.1",
            '[chat] drop_lines = ["billing"]',
            id="a billing header",
        ),
        pytest.param(
            f"Today is 2026-11-21.\n{AGENT}",
            f"Today is 2026-11-22.\n{AGENT}",
            "`2026-11-22` for `2026-11-21`",
            '[chat] move_lines = ["date"]',
            id="a date in a line of its own",
        ),
        pytest.param(
            f'{AGENT}{SCHEMA}"type": "object", "required": ["city"], "properties": {{}}}}}}',
            f'{AGENT}{SCHEMA}"required": ["city"], "properties": {{}}, "type": "object"}}}}',
            '`"required"` for `"type":`',
            "[chat] sort_tools = true",
            id="another order of keys",
        ),
        pytest.param(
            f"{AGENT}<think>\nThey ask for a town.\n</think>\nRome.",
            f"{AGENT}Rome.\nAnd then?",
            "reasoning begins there in the held prompt",
            '[cache] store_generated = "answers"',
            id="reasoning that the template leaves out",
        ),
        pytest.param(
            f"{AGENT}Rome.\nAnd then?",
            f"{AGENT}<think>\n\nRome.\nAnd then?",
            "reasoning begins there in this prompt",
            '[cache] store_generated = "answers"',
            id="reasoning that it adds",
        ),
    ],
)
def test_what_an_option_helps_against_is_named_with_it(held: str, asked: str, line: str, option: str) -> None:
    model = opened(block_size=32)
    tokens = [*map(ord, asked.ljust(128))]
    hold(model, [*map(ord, held.ljust(128))])
    lines = told(model, tokens)
    assert line in lines[-2]
    assert option in lines[-1]
    # without a tokenizer nobody knows the text
    assert option not in "".join(explained(explain(model, (), BlockSelection((), tokens, None), 1.0)))


def test_a_prompt_is_compared_with_nothing_that_shares_nothing() -> None:
    model = opened(block_size=16)
    unrelated = [*map(ord, "Write three short poems of Rome.")]
    asked = [*map(ord, "How are trains scheduled at night?")]
    nothing = "nothing alike is known: no held prompt that was compared begins like it"
    assert told(model, asked)[-2] == nothing  # nothing is held at all
    hold(model, unrelated)
    lines = told(model, asked)
    assert lines[-2:] == [nothing, "If it should have been stored, compare cache salt, model and chat template."]
    assert "Write" not in "".join(lines)
    # of several the one that shares most, if it begins otherwise, too: here all tokens but the first
    hold(model, [SPECIAL, *asked])
    assert told(model, asked)[-2] == "differs at token 0: the held prompt has one token more there, `<|turn|>`"
    # of a template that writes several tokens before the text
    turn = [SPECIAL, *map(ord, "user:"), *map(ord, "Which train is the first to Rome?")]
    hold(model, turn)
    place, advice = told(model, turn[6:])[-2:]
    assert place == "differs at token 0: the held prompt has 6 tokens more there, `<|turn|>user:`"
    assert advice == "Another chat template, or text before all that stays the same: use the same in every client."
    # the same tokens of another model are told without it
    other = opened(b"another model".ljust(32, b"."), 16)
    hold(other, [*map(ord, "What is held by another model alone?")])
    lines = told(model, [*map(ord, "What is held by another model alone?")], others=[other])
    assert nothing not in lines
    assert "another model holds the same tokens" in lines[-2]
    # nothing was compared: the prompt is known by its blocks' names
    names = chain_over([*map(ord, "Nobody has ever asked for this before.")], None, FINGERPRINT, 16)
    assert nothing not in explained(explain(model, (), BlockSelection(names.hashes), 1.0))


def test_a_first_token_that_all_prompts_share_is_told_as_little() -> None:
    model = opened(block_size=16)
    hold(model, [SPECIAL, *map(ord, "Write three short poems of Rome.")])
    asked = [SPECIAL, *map(ord, "How are trains scheduled at night?")]
    place, advice = told(model, asked)[-2:]
    assert place == "differs at token 1: `How ` for `Writ`"
    assert advice.startswith("A special token is there: another chat template, other roles")
    assert advice.endswith("or another prompt.")
    # nobody knows that the token is special
    answer = explain(model, (), BlockSelection((), asked, None), 1.0)
    assert list(explained(answer))[-1].startswith("Little before and behind is the same: another prompt")


def test_another_salt() -> None:
    model = opened()
    hold(model, TEXT, "anna")
    lines = told(model, TEXT)
    number = f"{int.from_bytes(root_hash(FINGERPRINT, cache_salt='anna')[:4], 'little'):08x}"
    assert lines[-2] == f"another tenant holds the same tokens: cache_salt {number}, {len(TEXT) // BLOCK} blocks"
    assert lines[-1].startswith("Another cache_salt stored this prompt")
    assert "anna" not in "".join(lines)
    hold(model, TEXT)
    assert "a request without a cache_salt" in told(model, TEXT, "bert")[-2] + told(model, TEXT, "bert")[-3]


def test_blocks_of_another_size_and_prompts_shorter_than_one() -> None:
    model, other = opened(), opened(b"small blocks".ljust(32, b"."), 2)
    hold(other, TEXT[:3])
    lines = told(model, TEXT[:3], others=[other])
    assert lines[0] == "block 0 is missing: the prompt has 3 tokens, and a block has 4"
    assert lines[1] == f"another model holds the same tokens: {other.fingerprint.hex()[:16]}, 1 blocks of 2 tokens"
    assert lines[2].startswith("Another fingerprint (block size) stored this prompt")
    assert told(model, TEXT[:3])[-1].startswith("Less than a block is never stored")


def test_another_models_fingerprint_field_by_field() -> None:
    mine = replace(MINE, layers=tuple(range(12)))
    theirs = replace(mine, kv_dtype="float16", layers=(0, 1, 2, 5, 7, 9), window=None, epoch=1)
    lines = told_apart(mine, theirs)
    told_layers = theirs.shown()["layers"]
    assert lines[-4:-1] == [
        "  kv_dtype: bfloat16 here, float16 there",
        f"  layers: 0 to 11 here, {told_layers} there",
        "  epoch: 0 here, 1 there",
    ]
    assert told_layers.startswith("6 values, ")
    assert lines[-1].startswith("Another fingerprint (kv_dtype, layers, epoch) stored this prompt")


def test_an_engine_that_keeps_kv_with_loss() -> None:
    theirs = with_lossy(MINE, "fp8", SLOT_BYTES)
    for here, there in ((MINE, theirs), (theirs, MINE)):
        lines = told_apart(here, there)
        assert lines[-2] == f"  lossy: {here.lossy or 'none'} here, {there.lossy or 'none'} there"
        assert lines[-1] == "One engine keeps KV with loss, the other does not: give both the same [cache] lossy."


def test_an_engine_of_another_number_of_ranks_is_told_the_option() -> None:
    two = replace(MINE, tp_ranks=(0, 2), tp_size=2)
    of_stages = replace(two, num_kv_heads=1, layers=(1,), pp_stages=(1, 2), pp_size=2)
    for here, there, options in (
        (MINE, two, "share_across_tp = 2"),
        (two, MINE, "share_across_tp = 1"),
        (MINE, of_stages, "share_across_tp = 2, share_across_pp = 2"),
    ):
        assert (
            told_apart(here, there)[-1]
            == f"Ranks of another number stored such blocks: with [cache] {options} this engine finds those."
        )


def test_an_engine_says_what_its_fingerprint_is_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Hello] = []
    monkeypatch.setattr("kvtier.connector.local.RemoteTiers", lambda path, hello, *_, **__: said.append(hello))
    config = Config(service={"socket": "/tmp/none"})
    open_tiers(config, MINE.fingerprint(), BlockDimensions(BLOCK, SLOT_BYTES), MINE)
    assert dict(said[0].about)["kv_dtype"] == "bfloat16"
    assert len(pack_handshake(said[0])) < MAX_HELLO


@pytest.mark.parametrize(
    ("reason", "line", "advice"),
    [
        (Outcome.NOT_ADMITTED, "it was not admitted to host memory 0 s ago", "Lower [cache] admit_after"),
        (Outcome.OUTRANKED, "host memory kept blocks that are likelier to return, 0 s ago", "Give host memory more"),
        (Outcome.QUOTA, "its tenant's quota was used up 0 s ago", "Give this tenant a larger quota"),
        (
            Outcome.QUEUE_FULL,
            "it could not be stored in host memory 0 s ago: queue_full",
            "See docs/troubleshooting.md",
        ),
    ],
)
def test_a_block_that_was_not_stored(reason: Outcome, line: str, advice: str) -> None:
    model = opened()
    model.hierarchy.host.pool.not_stored(chain_over(TEXT, fingerprint=FINGERPRINT).hashes, reason)
    lines = told(model, TEXT)
    assert lines[1] == f"block 0 is missing: {line}"
    assert lines[-1].startswith(advice)


def test_a_request_by_its_id() -> None:
    model = opened()
    chain = hold(model, TEXT)
    client = int.from_bytes(chain.root[:4], "little")
    model.tiers.seen.recent.record(client, "chat-1", chain.hashes)
    model.tiers.seen.recent.record(client, "chat-2", ())
    answer: dict[str, Any] = explain_request(model, "chat-1", None, 1.0)
    assert (answer["held"], answer["cause"]) == (len(TEXT) // BLOCK, None)
    assert explain_request(model, "chat-2", None, 1.0)["cause"]["name"] == "short"
    for request, salt in (("chat-1", "anna"), ("chat-3", None)):  # a tenant sees its own alone
        with pytest.raises(NotFound, match="no request of this id and cache salt"):
            explain_request(model, request, salt, 1.0)
