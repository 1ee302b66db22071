"""Names of a hash cache: those that hashing gives, for any edit and growth, never another tenant's, and bounded."""

import hashlib
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from at_once import at_once
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.naming import chain as chain_module
from kvtier.tiers.naming.chain import _OVERHEAD, RUN, HashCache, TokenChain, chain_hashes, compiled, root_hash

pytestmark = pytest.mark.usefixtures("way")

ROOT = root_hash(bytes(range(32)))
SIZE = 2  # tokens in a block
TOKENS = [random.Random(3).randrange(2**32) for _ in range(4 * RUN * SIZE + 7)]  # four runs, three blocks and a token


@pytest.fixture(params=["Python", "compiled"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """An item for each block that goes through SHA-256 in this test, which is told twice: for either way."""
    seen: list[bytes] = []
    real, module = hashlib.sha256, compiled() if request.param == "compiled" else None

    def counting(data: bytes = b"") -> "hashlib._Hash":
        seen.append(data)
        return real(data)

    monkeypatch.setattr(hashlib, "sha256", counting)
    if request.param == "compiled":
        if module is None:
            pytest.skip("not built: `make compiled`")
        names_of = module.names

        def counted(*arguments: Any) -> list[bytes]:
            names: list[bytes] = names_of(*arguments)
            seen.extend(names)
            return names

        module = SimpleNamespace(fill=module.fill, names=counted)
    monkeypatch.setattr(chain_module, "compiled", lambda: module)
    return seen


def kept_chain(
    kept: HashCache, tokens: list[int], root: bytes = ROOT, size: int = SIZE, scheme: str = "sha256"
) -> TokenChain:
    chain = TokenChain(root, size, scheme, kept=kept)
    chain.extend(tokens)
    return chain


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(TOKENS)), st.sampled_from(["set", "cut", "insert", "delete"]), st.integers(0, 9)),
        max_size=3,
    ),
    pieces=st.lists(st.integers(1, len(TOKENS)), max_size=4),
    scheme=st.sampled_from(["sha256", "xxh3"]),
    size=st.sampled_from([1, SIZE, 3]),
    other_root=st.booleans(),
)
def test_kept_names_are_those_that_hashing_gives(
    edits: list[tuple[int, str, int]], pieces: list[int], scheme: str, size: int, other_root: bool
) -> None:
    kept = HashCache()
    for known in ("sha256", "xxh3"):  # the last turns: one of each kind
        for known_size in (1, SIZE, 3):
            kept_chain(kept, TOKENS, size=known_size, scheme=known)
    tokens = TOKENS.copy()
    for at, kind, value in edits:
        tokens[at : at + (kind in ("set", "delete"))] = [value] * (kind in ("set", "insert"))
        tokens = tokens[:at] if kind == "cut" else tokens
    root = root_hash(bytes(range(32)), cache_salt="t2") if other_root else ROOT

    for _ in range(2):  # the second time all of it may be kept
        chain = TokenChain(root, size, scheme, kept=kept)
        ends = sorted({min(end, len(tokens)) for end in pieces} | {len(tokens)})
        for first, end in zip([0, *ends], ends, strict=False):
            chain.extend(tokens[first:end])
        assert chain.hashes == chain_hashes(root, tokens, size, scheme)
        assert chain.num_tokens == len(tokens)
        assert chain.next_tokens(len(chain.hashes)) == b"".join(
            token.to_bytes(4, "little") for token in tokens[len(chain.hashes) * size :]
        )


def test_the_next_turn_hashes_only_what_is_new(hashed: list[bytes]) -> None:
    kept = HashCache()
    first = kept_chain(kept, TOKENS)
    assert len(hashed) == len(first.hashes) == 4 * RUN + 3
    # the same prompt again: what is behind its last whole run
    hashed.clear()
    assert kept_chain(kept, TOKENS).hashes == first.hashes
    assert len(hashed) == 3
    # two runs more: they and the three blocks before them
    hashed.clear()
    turn = kept_chain(kept, [*TOKENS[:-1], *range(2 * RUN * SIZE)])
    assert len(hashed) == 3 + 2 * RUN
    assert turn.hashes == chain_hashes(ROOT, [*TOKENS[:-1], *range(2 * RUN * SIZE)], SIZE)
    # decoding: a block is hashed when it is full, and nothing is looked for
    hashed.clear()
    turn.extend([1] * SIZE)
    assert len(hashed) == 1


def test_no_other_tenant_model_scheme_or_size_finds_them(hashed: list[bytes]) -> None:
    kept = HashCache()
    whole = TOKENS[: 4 * RUN * SIZE]
    mine = kept_chain(kept, whole, root_hash(bytes(32), cache_salt="t1"))
    others = [
        root_hash(bytes(32)),
        root_hash(bytes(32), cache_salt="t2"),
        root_hash(bytes(32), cache_salt=""),
        root_hash(b"m" * 32, cache_salt="t1"),
        root_hash(bytes(32), cache_salt="t1", lora_name="a"),
    ]
    for root in others:
        hashed.clear()
        theirs = kept_chain(kept, whole, root)
        assert len(hashed) == len(theirs.hashes)  # every one of them
        assert set(theirs.hashes).isdisjoint(mine.hashes)
    hashed.clear()
    assert len(kept_chain(kept, whole, mine.root, size=4).hashes) == len(hashed)
    assert kept_chain(kept, whole, mine.root, scheme="xxh3").hashes == chain_hashes(mine.root, whole, SIZE, "xxh3")


def test_a_key_that_two_runs_share_leads_to_neither_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is a hash that somebody could aim at: it is never trusted."""
    monkeypatch.setattr(chain_module, "compiled", lambda: None)
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: 7)
    kept = HashCache()
    for tokens in (TOKENS, TOKENS[::-1], TOKENS):
        assert kept_chain(kept, tokens).hashes == chain_hashes(ROOT, tokens, SIZE)
    assert len(kept) == 1


def test_blocks_with_extra_keys_are_hashed(hashed: list[bytes]) -> None:
    kept = HashCache()
    plain = kept_chain(kept, TOKENS)
    hashed.clear()
    chain = TokenChain(ROOT, SIZE, extra_keys={1: [("image", b"1")]}, kept=kept)
    chain.extend(TOKENS)
    assert len(hashed) == len(chain.hashes) == 4 * RUN + 3
    assert chain.hashes[0] == plain.hashes[0]
    assert set(chain.hashes[1:]).isdisjoint(plain.hashes)
    assert kept_chain(kept, TOKENS).hashes == plain.hashes  # and nothing of it was kept


def test_no_more_than_the_bound_is_kept_and_a_prompt_s_beginning_longest(hashed: list[bytes]) -> None:
    run_bytes = 12 + 32 + 4 * SIZE * RUN + _OVERHEAD
    kept = HashCache(3 * run_bytes)
    kept_chain(kept, TOKENS)
    assert (len(kept), kept.num_bytes) == (3, 3 * run_bytes)  # of four runs the last one went
    hashed.clear()
    kept_chain(kept, TOKENS[: 3 * RUN * SIZE])
    assert not hashed
    # what was used last stays: the first run is used once more, then another prompt comes
    kept_chain(kept, TOKENS[: RUN * SIZE])
    kept_chain(kept, [5] * (2 * RUN * SIZE))
    hashed.clear()
    kept_chain(kept, TOKENS[: RUN * SIZE])
    assert not hashed
    assert kept.num_bytes <= 3 * run_bytes
    for number in range(50):
        kept_chain(kept, [number] * (2 * RUN * SIZE))
        assert kept.num_bytes == len(kept) * run_bytes <= 3 * run_bytes
    assert len(HashCache(0)) == 0
    none = HashCache(0)
    assert kept_chain(none, TOKENS).hashes == chain_hashes(ROOT, TOKENS, SIZE)
    assert len(none) == none.num_bytes == 0


def test_a_run_takes_no_more_memory_than_it_is_counted_for() -> None:
    import tracemalloc

    tokens = [random.Random(1).randrange(2**32) for _ in range(40 * RUN * 16)]
    kept = HashCache()
    tracemalloc.start()
    kept_chain(kept, tokens, size=16)
    taken, _ = tracemalloc.get_traced_memory()  # the chain is gone
    tracemalloc.stop()
    assert len(kept) == 40
    assert taken <= 1.1 * kept.num_bytes


def test_threads_share_them() -> None:
    kept = HashCache(20 * (1 << 14))
    prompts = [[number] * 100 + TOKENS for number in range(8)]
    wrong: list[int] = []

    def name(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            tokens = draw.choice(prompts)[: draw.randrange(len(TOKENS))]
            if kept_chain(kept, tokens).hashes != chain_hashes(ROOT, tokens, SIZE):
                wrong.append(seed)

    at_once(*(partial(name, seed) for seed in range(4)))
    assert not wrong
    assert kept.num_bytes <= 20 * (1 << 14)
