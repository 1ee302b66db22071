"""The index's core, interpreted and compiled: random programs against a plain model, what it refuses, what it keeps."""

import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from extent import brief

from kvtier.service.events import holders as interpreted
from kvtier.tiers.compiled import extension

NUM_TIERS = 6
SHARED = 0b111000
COMPILED = extension("kvtier.service.events.holders_compiled")
each_form = pytest.mark.parametrize(
    "form",
    [
        pytest.param(interpreted, id="interpreted"),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.skipif(COMPILED is None, reason="`make compiled`")),
    ],
)


class Model:
    """Who holds what, as one would write it down."""

    def __init__(self) -> None:
        self.names: dict[
            int, dict[int, tuple[int, int]]
        ] = {}  # worker → name → (sequence hash, tiers), the oldest first
        self.seeds: dict[int, int] = {}

    def store(self, worker: int, names: list[int], sequences: list[int], tier: int, seed: int) -> list[int]:
        others, own = [], self.names[worker]
        for place, (name, sequence) in enumerate(zip(names, sequences, strict=True)):
            if name in own and own[name][0] != sequence:
                others.append(place)
                del own[name]
            own[name] = sequence, own.get(name, (sequence, 0))[1] | 1 << tier
            self._tidy()
            if seed:
                self.seeds[sequence] = seed
        return others

    def remove(self, worker: int, names: list[int], tier: int) -> list[int]:
        unknown, own = [], self.names[worker]
        for place, name in enumerate(names):
            if own.get(name, (0, 0))[1] >> tier & 1:
                self._release(worker, name, 1 << tier)
            else:
                unknown.append(place)
        self._tidy()
        return unknown

    def forget(self, worker: int, most: int) -> int:
        oldest = list(self.names[worker])[:most]
        for name in oldest:
            del self.names[worker][name]
        self._tidy()
        return len(oldest)

    def release(self, worker: int, tiers: int) -> None:
        for name in list(self.names[worker]):
            self._release(worker, name, tiers)
        self._tidy()

    def _release(self, worker: int, name: int, tiers: int) -> None:
        sequence, here = self.names[worker][name]
        if here & ~tiers:
            self.names[worker][name] = sequence, here & ~tiers
        else:
            del self.names[worker][name]

    def _tidy(self) -> None:
        held = self.blocks()
        self.seeds = {sequence: seed for sequence, seed in self.seeds.items() if sequence in held}

    def blocks(self) -> dict[int, dict[int, int]]:
        found: dict[int, dict[int, int]] = {}
        for worker, own in self.names.items():
            for sequence, tiers in own.values():
                holders = found.setdefault(sequence, {})
                holders[worker] = holders.get(worker, 0) | tiers
        return found

    def leading(self, sequences: list[int], shut: set[int]) -> dict[int, list[int]]:
        held, found = self.blocks(), dict[int, list[int]]()
        for worker in self.names.keys() - shut:
            counts = [0] * NUM_TIERS
            for tiers in takewhile(bool, (held.get(each, {}).get(worker, 0) for each in sequences)):
                counts[(tiers & -tiers).bit_length() - 1] += 1
            if any(counts):
                found[worker] = counts
        return found

    def shared(self, sequences: list[int], tier: int) -> int:
        held = self.blocks()
        return sum(
            1 for _ in takewhile(bool, (any(t >> tier & 1 for t in held.get(s, {}).values()) for s in sequences))
        )

    def prefix(self, sequences: list[int], engine: int, node: int, teller: int, shut: set[int]) -> list[int]:
        """What a replica need not compute: its own, what its node has beyond that, what all share beyond both."""
        leading = self.leading(sequences, shut)
        own, of_node = (leading.get(each, [0] * NUM_TIERS) for each in (engine, node))
        found, known = list(own), sum(own)
        for tier, count in enumerate(of_node):
            found[tier] += max(0, count - known)
            known = max(0, known - count)
        for tier in range(NUM_TIERS):
            told = any(tiers >> tier & 1 for _, tiers in self.names.get(teller, {}).values())
            if SHARED >> tier & 1 and told:
                found[tier] += max(0, self.shared(sequences, tier) - sum(found))
        return found


def drawn_chains(rng: random.Random) -> list[list[int]]:
    """Sequence hashes of prompts that begin alike."""
    first = [rng.getrandbits(64) for _ in range(4)]
    return [first[: rng.randrange(5)] + [rng.getrandbits(64) for _ in range(rng.randrange(1, 8))] for _ in range(6)]


def steps(seed: int, number: int) -> Iterator[tuple[random.Random, str]]:
    rng = random.Random(seed)
    verbs = ["store"] * 6 + ["remove"] * 3 + ["forget", "release", "open", "shut"]
    for _ in range(number):
        yield rng, rng.choice(verbs)


@each_form
@pytest.mark.parametrize("seed", range(brief(6, 40)))
def test_it_holds_what_a_plain_model_does(form: Any, seed: int) -> None:
    core, model, shut = form.Holders(NUM_TIERS), Model(), set[int]()
    chains = drawn_chains(random.Random(-seed - 1))
    for rng, verb in steps(seed, 120):
        workers = sorted(model.names.keys() - shut)
        worker, chain = rng.choice(workers) if workers else -1, rng.choice(chains)
        first = rng.randrange(len(chain))
        sequences = chain[first : first + rng.randrange(1, 5)]
        # few names, so that a block gets several and a name another block; engines say them as they like
        names = [rng.choice([each % 13, each % 2**64]) for each in sequences]
        said = [rng.choice([name, name - 2**64, b"longer, ends so: " + name.to_bytes(8, "big")]) for name in names]
        tier = rng.randrange(NUM_TIERS)
        if verb == "open" and len(model.names) < 9:
            number = core.open()
            assert number not in model.names
            model.names[number] = {}
        elif verb == "shut" and worker >= 0 and len(workers) > 2:
            core.shut(worker)
            shut.add(worker)
        elif verb == "store" and worker >= 0:
            salt = rng.choice([0, 0, 7])
            assert core.store(worker, said, sequences, tier, salt) == model.store(worker, names, sequences, tier, salt)
        elif verb == "remove" and worker >= 0:
            assert core.remove(worker, said, tier) == model.remove(worker, names, tier)
        elif verb == "forget" and worker >= 0:
            most = rng.randrange(4)
            assert core.forget(worker, most) == model.forget(worker, most)
        elif verb == "release":
            for gone in [*shut, *([worker] if worker >= 0 and rng.random() < 0.2 else [])]:
                tiers, after = 0xFF if gone in shut else 1, -1
                while after:
                    after = core.release(gone, tiers, 3, after)
                model.release(gone, tiers)
                if gone in shut:
                    del model.names[gone]
            shut.clear()
        core.check()
        assert core.blocks() == model.blocks()
        for number, own in model.names.items():
            assert core.size(number) == len(own)
            assert core.counts(number) == [sum(t >> tier & 1 for _, t in own.values()) for tier in range(NUM_TIERS)]
            for name, (sequence, _) in own.items():
                assert core.sequence_of(number, name) == (sequence, model.seeds.get(sequence, 0))
        at = [rng.choice([-1, *(model.names.keys() - shut)]) for _ in range(12)]
        for each in chains:
            assert dict(core.leading(each)) == model.leading(each, shut)
            found = core.prefixes(each, np.array(at, np.int64), SHARED).reshape(-1, 8)[:, :NUM_TIERS].tolist()
            assert found == [model.prefix(each, at[i], at[i + 1], at[i + 2], shut) for i in range(0, 12, 3)]


@each_form
def test_sets_are_shared_and_those_that_nobody_names_go(form: Any) -> None:
    core, chain = form.Holders(NUM_TIERS), list(range(1, 65))
    workers = [core.open() for _ in range(brief(300, 2_000))]
    for worker in workers:
        core.store(worker, chain, chain, 0, 0)
        core.store(worker, [1_000 + worker], [1_000 + worker], 1, 0)
    core.check()
    assert len(core.leading(chain)) == len(workers)
    assert {tuple(counts) for _, counts in core.leading(chain)} == {(64, 0, 0, 0, 0, 0)}
    for worker in workers[1:]:
        core.shut(worker)
        assert len(core.leading(chain[:1])) == len(workers) - worker
        after = -1
        while after:
            after = core.release(worker, 0xFF, 16, after)
    core.check()
    assert core.num_names == 65
    assert core.open() == workers[-1]


@each_form
def test_what_cannot_be_is_refused_and_harms_nothing(form: Any) -> None:
    for num_tiers in (0, 9):
        with pytest.raises(ValueError, match="tiers"):
            form.Holders(num_tiers)
    core = form.Holders(NUM_TIERS)
    worker = core.open()
    core.store(worker, [1, 2], [11, 12], 0, 0)
    for wrong in (-1, 1, 2**40):
        for verb in (core.size, core.counts, core.shut, lambda w: core.store(w, [1], [1], 0, 0),
                     lambda w: core.remove(w, [1], 0), lambda w: core.forget(w, 1), lambda w: core.release(w, 1, 1, -1),
                     lambda w: core.sequence_of(w, 1)):  # fmt: skip
            with pytest.raises(IndexError, match="worker"):
                verb(wrong)
        if wrong != -1:
            with pytest.raises(IndexError, match="worker"):
                core.prefixes([11], np.array([wrong, -1, -1], np.int64), SHARED)
        with pytest.raises(IndexError, match="tier"):
            core.store(worker, [1], [11], wrong + NUM_TIERS if wrong > 0 else wrong, 0)
    with pytest.raises(ValueError, match="2 names, 1 sequence"):
        core.store(worker, [1, 2], [11], 0, 0)
    for name in ("text", None, 1.5, [1]):
        with pytest.raises(TypeError):
            core.store(worker, [3, name], [13, 14], 0, 0)
        core.check()
    for after in (-5, 0, 7, 2**40):  # whatever a caller goes on by
        assert core.release(worker, 0b10, 100, after) == 0
    # what came before a wrong name counts; names are taken by their last 64 bits
    assert core.blocks() == {11: {worker: 1}, 12: {worker: 1}, 13: {worker: 1}}
    assert core.remove(worker, [1 + 2**64, 2 - 2**64, b"\0\0\0\0\0\0\0\3", b"\3"], 0) == [3]
    core.shut(worker)
    with pytest.raises(ValueError, match="shut"):
        core.store(worker, [1], [11], 0, 0)
    for _ in range(3):  # its number is free once, however often that is asked for
        assert core.release(worker, 0xFF, 100, -1) == 0
        core.shut(worker)
    core.check()
    assert core.num_blocks == 0
    assert [core.open(), core.open()] == [worker, worker + 1]
