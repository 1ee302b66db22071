"""The prefix index: Dynamo's names, who holds how much of a prompt where, and doubtful events skipped with a reason."""

import logging
import random
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, ExternalHash, ExtraKeys, pieces
from kvtier.tiers.compiled import extension
from kvtier.tiers.kinds import TIERS
from kvtier.tiers.naming.key_schemes import VllmKeys

SIZE = 4
TOKENS = [*range(1, 13)]
MEDIA = [kind.medium for kind in TIERS.values()]  # nearest first


def stored(
    names: Sequence[ExternalHash],
    tokens: Sequence[int],
    parent: ExternalHash | None = None,
    medium: str | None = "GPU",
    lora: str | None = None,
    extra: Sequence[ExtraKeys | None] | None = None,
) -> BlockStored:
    return BlockStored(names, parent, tokens, SIZE, None, medium, lora, extra)


def test_blocks_have_the_names_dynamo_gives_them() -> None:
    # what Dynamo's router computes from the token ids of the same events
    index = PrefixIndex(SIZE)
    index.apply("w", stored([1, 2, 3], TOKENS))
    vector = [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert prompt_hashes(TOKENS, SIZE) == vector
    assert index.matches(vector) == {"w": {"GPU": 3}}
    # block by block, an adapter, a namespace
    index = PrefixIndex(SIZE)
    index.apply("w", stored([1], TOKENS[:4]))
    index.apply("w", stored([2, 3], TOKENS[4:], parent=1))
    index.apply("adapter", stored([1], TOKENS[:4], lora="ad1", extra=[("ad1",)]))
    index.apply("tenant", stored([1], TOKENS[:4], extra=[("t1",)]))
    assert index.matches(vector) == {"w": {"GPU": 3}}
    assert index.matches([4033386159037673140]) == {"adapter": {"GPU": 1}}
    assert index.matches([17295713339124324089]) == {"tenant": {"GPU": 1}}
    # what another engine calls its disk, and a prompt of nothing
    index.apply("disk", stored([1], TOKENS[:4], medium="NVME"))
    assert index.matches(vector)["disk"] == {"STORAGE": 1}
    assert index.matches([]) == {}
    index.check()


def test_digests_and_their_last_eight_bytes_are_one_name() -> None:
    names = VllmKeys().hashes(TOKENS, SIZE)
    index = PrefixIndex(SIZE)
    short = [int.from_bytes(name[-8:], "big") for name in names]  # as vLLM's events have it by default
    index.apply("w", stored(short[:1], TOKENS[:4]))
    index.apply("w", stored(names[1:2], TOKENS[4:8], parent=names[0]))
    index.apply("w", BlockRemoved(short[1:2], "GPU"))
    assert index.matches(prompt_hashes(TOKENS, SIZE)) == {"w": {"GPU": 1}}
    assert not index.counts


def test_tenants_adapters_and_images_are_not_confused() -> None:
    index = PrefixIndex(SIZE)
    plain = prompt_hashes(TOKENS, SIZE)
    index.apply("salt", stored([1], TOKENS[:4], extra=[("t1",)]))
    index.apply("salt", stored([2], TOKENS[4:8], parent=1, extra=[None]))  # vLLM names the salt on the first block only
    index.apply("both", stored([1, 2], TOKENS[:8], lora="ad1", extra=[("ad1", "t1"), ("ad1",)]))
    index.apply("lora", stored([1, 2], TOKENS[:8], lora="ad1", extra=[("ad1",), ("ad1",)]))
    index.apply("image", stored([1, 2], TOKENS[:8], extra=[None, (("mm-1", 0),)]))
    index.apply("image2", stored([1, 2], TOKENS[:8], extra=[None, (("mm-2", 0),)]))
    assert index.matches(plain) == {"image": {"GPU": 1}, "image2": {"GPU": 1}}
    assert index.matches(prompt_hashes(TOKENS, SIZE, namespace="t1")) == {"salt": {"GPU": 2}}
    assert index.matches(prompt_hashes(TOKENS, SIZE, lora_name="ad1")) == {"lora": {"GPU": 2}}
    assert index.matches(prompt_hashes(TOKENS, SIZE, "ad1", "t1")) == {"both": {"GPU": 2}}
    assert index.num_blocks == 2 + 2 + 2 + 1 + 2  # only the block before the images is shared
    for worker in list(index._workers):
        index.drop(worker)
    index.check()


def test_what_cannot_be_true_is_skipped_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    index = PrefixIndex(SIZE, clock=lambda: now)
    index.apply("w", stored([1, 2], TOKENS[:8]))
    index.apply("w", stored([4], TOKENS[8:], parent=3))
    index.apply("w", stored([5], TOKENS[8:], parent=3))
    index.apply("w", BlockRemoved([9], "GPU"))
    index.apply("w", BlockRemoved([1], "CPU"))  # it is on the GPU
    index.apply("w", BlockStored([6], None, TOKENS[:8], 8, None, "GPU", None))
    index.apply("w", stored([6], TOKENS[:8]))
    index.apply("w", stored([6], TOKENS[:4], medium="TAPE"))
    index.apply("w", stored([2], TOKENS[8:], parent=1))
    assert index.counts == {"unknown_parent": 2, "unknown_removal": 2, "block_size": 2, "medium": 1, "other_tokens": 1}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5  # one a second of each kind
    for cause in ("events were missed", "PYTHONHASHSEED", "block size", "'TAPE'"):
        assert any(cause in line for line in lines)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    # nothing of it was applied but the block's new tokens
    assert index.matches(prompt_hashes(TOKENS, SIZE)) == {"w": {"GPU": 1}}
    assert index.matches(prompt_hashes([*TOKENS[:4], *TOKENS[8:]], SIZE)) == {"w": {"GPU": 2}}
    index.check()
    caplog.clear()
    now = 1.0
    index.apply("w", BlockRemoved([9], "GPU"))
    assert len(caplog.records) == 1
    strict = PrefixIndex(SIZE, strict=True)
    caplog.clear()
    strict.apply("w", stored([4], TOKENS[8:], parent=3))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert strict.num_blocks == 0


def test_of_several_groups_the_one_that_keeps_prefixes_counts() -> None:
    index = PrefixIndex(SIZE)
    window = BlockStored([1], None, TOKENS[:4], SIZE, None, "GPU", None, None, 0, "sliding_window", 128)
    index.apply("w", window)
    index.apply("w", BlockStored([1, 2], None, TOKENS[:8], SIZE, None, "GPU", None, None, 1, "full_attention"))
    index.apply("w", BlockRemoved([1], "GPU", 0))
    assert index.matches(prompt_hashes(TOKENS, SIZE)) == {"w": {"GPU": 2}}
    index.apply("w", BlockRemoved([1], "GPU", 1))
    assert index.matches(prompt_hashes(TOKENS, SIZE)) == {}
    # an engine that speaks of groups means those alone when it clears them; what a connector keeps stays
    index.apply("w", stored([1, 2], TOKENS[:8], medium="CPU"))
    index.apply("w", AllBlocksCleared())
    assert index.holdings("w") == {"CPU": 2}
    assert not index.counts


def test_who_tells_too_much_forgets_its_oldest_and_costs_nobody_else_anything(caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex(SIZE, max_blocks=64)
    honest, tokens = prompt_hashes(TOKENS, SIZE), [*range(1000, 1400)]
    index.apply("honest", stored([1, 2, 3], TOKENS))
    # a hundred blocks of one chain, told one by one: the first of them make room for the last
    for number in range(100):
        block = tokens[4 * number : 4 * number + 4]
        index.apply("greedy", stored([100 + number], block, parent=99 + number if number else None))
        index.check()
    told = sum(index.holdings("greedy").values())
    assert told <= 61
    assert index.num_forgotten == 100 - told
    assert "[router] max_blocks" in caplog.text
    assert index.matches(honest) == {"honest": {"GPU": 3}}
    assert index.matches(prompt_hashes(tokens, SIZE)) == {}  # what is left of it begins nowhere
    # what it says of a forgotten block is no contradiction, and what it says of others counts
    index.apply("greedy", BlockRemoved([100], "GPU"))
    index.apply("greedy", stored([300], TOKENS[:4], parent=100))
    assert index.counts == {"forgotten": 2}
    index.apply("greedy", BlockRemoved([199], "GPU"))
    assert sum(index.holdings("greedy").values()) == told - 1
    # one event of more blocks than there may be
    index.apply("greedy", stored([*range(500, 600)], tokens))
    index.check()
    assert index.matches(honest) == {"honest": {"GPU": 3}}
    # with all of it gone it is trusted as before
    index.apply("greedy", AllBlocksCleared())
    index.apply("greedy", BlockRemoved([100], "GPU"))
    assert index.counts["unknown_removal"] == 1
    index.drop("greedy")
    index.drop("honest")
    index.check()
    assert index.num_blocks == 0


# A tree of blocks: engine's name → (parent's name, tokens). Two names share their tokens, as after a restart.
TREE: dict[int, tuple[int | None, list[int]]] = {
    1: (None, [1, 1, 1, 1]),
    2: (1, [2, 2, 2, 2]),
    3: (2, [3, 3, 3, 3]),
    4: (1, [4, 4, 4, 4]),
    5: (None, [5, 5, 5, 5]),
    6: (5, [1, 1, 1, 1]),
    7: (None, [1, 1, 1, 1]),
}


def path(name: int) -> list[int]:
    """All tokens from the chain's start to a block's end."""
    parent, tokens = TREE[name]
    return [*([] if parent is None else path(parent)), *tokens]


class IndexMachine(RuleBasedStateMachine):
    """Against a model that remembers every (worker, tier, name)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(SIZE)
        self.held: set[tuple[str, str, int]] = set()
        self.unknown = 0

    workers = st.sampled_from("abc")
    media = st.sampled_from(MEDIA)

    @rule(worker=workers, medium=media, name=st.sampled_from(list(TREE)), count=st.integers(1, 2))
    def store(self, worker: str, medium: str, name: int, count: int) -> None:
        parent, tokens = TREE[name]
        known = {held for who, _, held in self.held if who == worker}
        names = [name]
        if count == 2:  # its first child along with it, as one event
            child = next((one for one, (above, _) in TREE.items() if above == name), None)
            names += [child] if child is not None else []
            tokens = [*tokens, *(TREE[child][1] if child is not None else [])]
        self.index.apply(worker, stored(names, tokens, parent, medium))
        if parent is None or parent in known:
            self.held |= {(worker, medium, one) for one in names}
        else:
            self.unknown += 1

    @rule(worker=workers, medium=media, name=st.sampled_from(list(TREE)))
    def remove(self, worker: str, medium: str, name: int) -> None:
        self.index.apply(worker, BlockRemoved([name], medium))
        if (worker, medium, name) in self.held:
            self.held.remove((worker, medium, name))
        else:
            self.unknown += 1

    @rule(worker=workers, forget=st.booleans())
    def clear(self, worker: str, forget: bool) -> None:
        if forget:
            self.index.drop(worker)
        else:
            self.index.apply(worker, AllBlocksCleared())
        self.held = {held for held in self.held if held[0] != worker}

    @invariant()
    def is_right(self) -> None:
        self.index.check()
        assert sum(self.index.counts.values()) == self.unknown
        where: dict[tuple[str, tuple[int, ...]], set[str]] = {}
        for worker, medium, name in self.held:
            where.setdefault((worker, tuple(path(name))), set()).add(medium)
        assert self.index.num_blocks == len({tokens for _, tokens in where})
        for tokens in [*map(path, TREE), [*path(3), 9, 9, 9, 9], [8, 8, 8, 8]]:
            expected: dict[str, dict[str, int]] = {}
            for worker in "abc":
                split: dict[str, int] = {}
                for end in range(SIZE, len(tokens) + 1, SIZE):
                    media = where.get((worker, tuple(tokens[:end])))
                    if media is None:
                        break
                    best = min(media, key=MEDIA.index)
                    split[best] = split.get(best, 0) + 1
                if split:
                    expected[worker] = split
            assert self.index.matches(prompt_hashes(tokens, SIZE)) == expected


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=brief(10, 40), stateful_step_count=40)


_MEASURE = """
import random
import sys
from kvtier.service.events.wire import BlockStored
from kvtier.service.events.prefix_index import PrefixIndex
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
random.seed(1)
index, before = PrefixIndex(16), resident()
for prompt in range(NUM):
    names = [random.getrandbits(64) for _ in range(100)]
    tokens = [random.getrandbits(17) for _ in range(1_600)]
    for medium in sys.argv[1:]:
        named = [int(str(name)) for name in names]  # each event brings its own
        index.apply(f"worker {prompt % 8}", BlockStored(named, None, tokens, 16, None, medium, None))
assert index.num_blocks == 100 * NUM
print((resident() - before) / 100 / NUM)
"""


@pytest.mark.parametrize("media", brief([["CPU", "STORAGE"]], [["GPU"], ["CPU", "STORAGE"]]), ids="+".join)
def test_a_block_takes_less_than_90_bytes(media: list[str]) -> None:
    measure = _MEASURE.replace("NUM", brief("900", "2_000"))
    # a part of them, in a process of its own: tables double, so what a block costs at most shows early
    ran = subprocess.run(
        [sys.executable, "-c", measure, *media], capture_output=True, text=True, timeout=100, check=True
    )
    print(f"{float(ran.stdout):.0f} bytes a block")
    assert float(ran.stdout) < (90 if extension("kvtier.service.events.holders_compiled") else 400)


def test_whoever_asks_while_a_worker_goes_is_answered() -> None:
    index = PrefixIndex(SIZE)
    rng = random.Random(5)
    tokens = [rng.getrandbits(17) for _ in range(SIZE * 30_000)]
    hashes = prompt_hashes(tokens, SIZE)
    names = [*range(1, 30_001)]
    for worker in "ab":
        index.apply(worker, stored(names, tokens))
    done = threading.Event()

    def drop() -> None:
        index.drop("a")
        index.apply("c", stored(names[:10], tokens[: 10 * SIZE]))  # a newcomer gets no bit that is still in use
        done.set()

    thread = threading.Thread(target=drop)
    thread.start()
    while not done.is_set():
        found = index.matches(hashes[:100])
        assert found["b"] == {"GPU": 100}
        assert found.get("a") in (None, {"GPU": 100})  # whole or not at all
    thread.join()
    assert index.matches(hashes) == {"b": {"GPU": 30_000}, "c": {"GPU": 10}}
    index.check()


@given(st.integers(1, 7), st.integers(0, 9), st.booleans())
def test_pieces_say_what_the_whole_does(most: int, num_blocks: int, is_tenants: bool) -> None:
    tokens, names = [*range(4 * num_blocks)], [*range(100, 100 + num_blocks)]
    keys = [("tenant",), *[None] * (num_blocks - 1)] if is_tenants and num_blocks else None
    whole = BlockStored(names, None, tokens, 4, None, "GPU", None, keys)
    said: list[BlockStored | BlockRemoved] = [
        whole,
        BlockRemoved(names[1::2], "GPU"),
        BlockStored([7], names[0] if names else None, [1] * 4, 4, None, "CPU", None),
    ]
    at_once, piecewise = PrefixIndex(4), PrefixIndex(4)
    for event in said:
        at_once.apply("w", event)
        for piece in pieces(event, most):
            assert isinstance(piece, BlockStored | BlockRemoved)
            assert len(piece.block_hashes) <= most
            piecewise.apply("w", piece)
    for index in (at_once, piecewise):
        index.check()
        assert not index.counts
    prompt = prompt_hashes(tokens, 4, namespace="tenant" if is_tenants else None)
    assert piecewise.matches(prompt) == at_once.matches(prompt)
    assert piecewise._holders.blocks() == at_once._holders.blocks()
    # what cannot be cut is left to the reader to refuse
    torn = BlockStored(names, None, tokens[1:], 4, None, "GPU", None)
    assert list(pieces(torn, 1)) == [torn] or num_blocks == 0
    assert list(pieces(AllBlocksCleared(), 1)) == [AllBlocksCleared()]
