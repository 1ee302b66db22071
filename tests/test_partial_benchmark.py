"""Stories of benchmarks/partial_blocks.py: what of a prompt counts as held."""

import json
from pathlib import Path

import partial_blocks
import pytest
from _prefix_reuse import (
    CHILDREN,
    BoundedCache,
    Exchange,
    PrefixReuse,
    chats,
    computed_in,
    replay,
    trace_exchanges,
)
from partial_blocks import BLOCK_SIZES


def said(prompt: list[int], answer: int = 1) -> Exchange:
    """A prompt, and an answer of so many tokens of its own."""
    symbols = [*prompt, *range(10_000, 10_000 + answer)]
    return Exchange(symbols, 1, len(prompt), len(symbols) - 1, len(symbols))


def cached(exchanges: list[Exchange], reuse: PrefixReuse, block_size: int = 16) -> int:
    return replay(exchanges, block_size, reuse).cached_tokens


def test_a_prompt_that_parts_inside_a_block_has_the_tokens_before_it() -> None:
    first = list(range(40))
    parts = [*range(25), 99, *range(26, 40)]
    # 40 tokens are two full blocks and a tail. The second prompt parts in the second block, at its token 9.
    assert cached([said(first), said(parts)], PrefixReuse.WHOLE) == 16
    assert cached([said(first), said(parts)], PrefixReuse.PARTIAL) == 25
    # The same prompt again: its tail is of use only if it was kept, and its last token is always computed.
    assert cached([said(first), said(first)], PrefixReuse.PARTIAL) == 32
    assert cached([said(first), said(first)], PrefixReuse.TAILS) == 39


def test_the_index_remembers_eight_children() -> None:
    stem = list(range(16))
    prompts = [said([*stem, *([number] * 20)]) for number in range(100, 101 + CHILDREN)]
    # The first child was forgotten for the ninth: what follows the stem is then nowhere known.
    again = said([*stem, *([100] * 10), 7, 7, 7])
    known = said([*stem, *([101] * 10), 7, 7, 7])
    before = cached(prompts, PrefixReuse.PARTIAL)
    assert cached([*prompts, again], PrefixReuse.PARTIAL) - before == 16
    assert cached([*prompts, known], PrefixReuse.PARTIAL) - before == 26


def test_a_trace_tells_next_turns_by_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 51, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 2, "input_length": 1120, "output_length": 5, "hash_ids": [1, 2, 5]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, turn, short = trace_exchanges(path, None)
    # The last token of an answer has no KV. A prompt shorter than the first with its answer is no next turn of it.
    assert (first.num_continued, turn.num_continued, short.num_continued) == (0, 1150, 0)
    assert (turn.num_prompt, len(turn.tokens())) == (1300, 1304)
    assert cached([first, turn], PrefixReuse.TAILS, 256) == 1150
    assert cached([first, turn], PrefixReuse.WHOLE, 256) == 1024


def test_in_little_room_old_blocks_and_old_tails_go() -> None:
    first, second = (said(list(range(start, start + 40))) for start in (0, 100))
    turn = said([*range(40), 7, 7, 7])

    def computed(room: int, *asked: Exchange) -> int:
        cache = BoundedCache(room, 16)
        return [one.num_prompt - cache.ask(one) for one in asked][-1]

    assert computed(100, first, turn) == 43 - 40
    assert computed(6, first, second, first) == 40 - 32  # one tail of six slots: the second one's
    assert computed(6, first, second, second) == 1
    # With room for everything they are what the replay without bounds counts.
    made = chats(40)
    unbounded = replay(made, 64, PrefixReuse.WHOLE)
    whole = (unbounded.prompt_tokens - unbounded.cached_tokens) / len(made)
    assert computed_in(made, 10**7, 64) < whole


def test_chats_are_the_same_every_time() -> None:
    made = chats(30)
    assert [each.symbols for each in made] == [each.symbols for each in chats(30)]
    assert len(made) == 30
    # Parts of blocks and tails never cost a hit.
    for block_size in BLOCK_SIZES:
        off, on, tails = (replay(made, block_size, reuse) for reuse in PrefixReuse)
        assert off.cached_tokens <= on.cached_tokens <= tails.cached_tokens


@pytest.mark.exhaustive  # its parts are shown above
def test_the_program_runs_without_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("partial_blocks.TRACE", tmp_path / "none")
    monkeypatch.setattr("sys.argv", ["partial_blocks.py", "--quick", "--json", "--no-engine"])
    assert partial_blocks.main() == 0
    told = capsys.readouterr()
    assert "only chats are replayed" in told.err
    results = json.loads(told.out)["results"]
    rows = [row for row in results if row["workload"] == "chat"]
    assert len(rows) == len(BLOCK_SIZES) * len(PrefixReuse)
    assert all(row["index MB"] > 0 and row["names hashed"] > 0 for row in rows)
    tight = [row for row in results if row["workload"] == "bounded chat"]
    assert len(rows) + len(tight) == len(results)
