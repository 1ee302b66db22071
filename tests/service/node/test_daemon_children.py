"""Partial hits through the daemon: a client is told of the blocks that follow its last common one, and of no others."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, wait_until
from service_rig import (
    FINGERPRINT,
    PATIENCE,
    Attach,
    DaemonThread,
    Serve,
    ask,
    fill,
    greeted,
    load,
    store,
    store_partial,
    unpack_reply,
    verify,
)

from kvtier.connector.daemon.client import RemoteTiers
from kvtier.connector.daemon.wire import MAX_FRAME, Ask, FrameReader, News, Reserve, Seal, pack_request
from kvtier.connector.scheduler import SchedulerSide
from kvtier.service.node.namespaces import BlockDimensions
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Claim, Overlap, Wanted
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.tier import BlockRecord, ChildBlock

ROOT = root_hash(FINGERPRINT)


def prompt(*tokens: int, salt: str | None = None) -> TokenChain:
    """Two common blocks, and then these tokens."""
    chain = TokenChain(root_hash(FINGERPRINT, cache_salt=salt), BLOCK_SIZE)
    chain.extend([*range(2 * BLOCK_SIZE), *tokens])
    return chain


def told(chain: TokenChain) -> ChildBlock:
    return ChildBlock(chain.hashes[2], chain.block_tokens(2))


def answered(tiers: RemoteTiers, chain: TokenChain) -> Claim:
    claim, _ = ask(tiers, chain)
    tiers.cancel(claim)
    return claim


def test_one_client_takes_a_part_of_what_another_stored(home: Path, serve: Serve, attach: Attach) -> None:
    serve(file={"path": home / "slab", "size": "1MiB"})
    one, other = attach(), attach()
    first, second = prompt(70, 71, 72, 1), prompt(70, 71, 72, 2)
    store(one, first)
    store(one, second, first=2)
    # The other's prompt shares three tokens of the third block with both.
    mine = prompt(70, 71, 72, 9)
    claim, promised = ask(other, mine)
    assert promised == 2
    assert set(claim.children) == {told(first), told(second)}
    # It asks for the chain that ends with one of them, and gets that block, byte for byte.
    other.cancel(claim)
    view = other.submit([*mine.hashes[:2], second.hashes[2]], ROOT, block_size=BLOCK_SIZE)
    wait_until(lambda: other.poll(view) == 3)
    with other.lease(view) as lease:
        assert lease.hashes[2] == second.hashes[2]
        verify(other, lease)
    # Another tenant is told nothing, and who stands at the end of a chain neither.
    assert answered(other, prompt(70, 71, 72, 9, salt="another tenant")).children == ()
    assert answered(other, first).children == ()


def test_a_tail_that_one_client_left_is_where_another_begins(home: Path, serve: Serve, attach: Attach) -> None:
    daemon = serve(file={"path": home / "slab", "size": "1MiB"})
    one, other, mine = attach(), attach(), prompt(70, 71, 72, 9)
    store(one, prompt(), last=2)
    tail = store_partial(one, prompt(70, 71, 72))
    claim, promised = ask(other, mine)
    assert promised == 2
    assert list(claim.children) == [ChildBlock(tail.chain_hash, tail.tokens)]
    other.cancel(claim)
    view = other.submit([*mine.hashes[:2], tail.chain_hash], ROOT, block_size=BLOCK_SIZE)
    wait_until(lambda: other.poll(view) == 3)
    with other.lease(view) as lease:
        verify(other, lease)
    # The whole block that begins as it does takes its place, whoever stores it; the slab never had it.
    store(other, mine, first=2)
    assert list(answered(one, prompt(70, 71, 72, 8)).children) == [told(mine)]
    (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
    assert namespace.hierarchy.drain(PATIENCE)
    (port,) = namespace.hierarchy.ports
    assert port.holds([*mine.hashes, tail.chain_hash]) == [True, True, True, False]


def test_a_daemon_without_partial_blocks_takes_no_tail(serve: Serve, attach: Attach) -> None:
    serve(cache={"partial_blocks": False})
    tiers = attach()
    store(tiers, prompt(), last=2)
    tail = store_partial(tiers, prompt(70, 71, 72))
    assert tiers.holds([tail.chain_hash]) == [False]
    assert not [name for name in tiers.stats() if name.startswith("kvtier_store_dropped")]


@pytest.mark.parametrize("num_tokens", [0, BLOCK_SIZE])
def test_a_tail_that_is_none_is_refused(home: Path, serve: Serve, attach: Attach, num_tokens: int) -> None:
    """FAULTS 39: a whole block stored as a tail would never reach the slab, and nobody else could store it."""
    served = serve()
    tiers, stored = attach(), prompt(70, 71, 72, 1)
    store(tiers, stored, last=2)
    with greeted(home / "s") as rude:
        wanted = Wanted(stored.hashes[2:], stored.hashes[1], stored.tenant, is_partial=True)
        rude.sendall(pack_request(1, [Reserve.of(1, [wanted])]))
        assert rude.recv(4096)
        rude.sendall(pack_request(0, [Seal(0, [1], [1], [np.arange(num_tokens, dtype="<u4").tobytes()])]))
        assert rude.recv(10) == b""
    with greeted(home / "s") as rude:
        wanted = Wanted(stored.hashes[1:], stored.hashes[0], stored.tenant, is_partial=True)
        rude.sendall(pack_request(1, [Reserve.of(1, [wanted])]))
        assert rude.recv(10) == b""
    wait_until(lambda: served.daemon.counts["malformed_holding"] + served.daemon.counts["malformed"] == 2)
    assert answered(tiers, prompt(70, 71, 72, 9)).children == ()


def test_what_the_slab_holds_is_told_after_a_restart(home: Path, serve: Serve, attach: Attach) -> None:
    slab = {"path": home / "slab", "size": "1MiB"}
    daemon = DaemonThread(home / "s", host={"size": 1 << 20}, file=slab)
    tiers, stored = attach(), prompt(70, 71, 72, 1)
    store(tiers, stored)
    tiers.close()
    daemon.check()
    daemon.close()
    serve(file=slab)
    tiers = attach()
    assert list(answered(tiers, prompt(70, 71, 72, 9)).children) == [told(stored)]


def test_switched_off_a_daemon_tells_nothing(home: Path, serve: Serve, attach: Attach) -> None:
    serve(cache={"partial_blocks": False}, file={"path": home / "slab", "size": "1MiB"})
    tiers = attach()
    store(tiers, prompt(70, 71, 72, 1))
    assert answered(tiers, prompt(70, 71, 72, 9)).children == ()


def test_a_child_evicted_between_answer_and_question_is_not_promised(serve: Serve, attach: Attach) -> None:
    daemon = serve()
    tiers, stored, mine = attach(), prompt(70, 71, 72, 1), prompt(70, 71, 72, 9)
    store(tiers, stored)
    (child,) = answered(tiers, mine).children
    (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
    assert namespace.hierarchy.host.pool.evict([child.chain_hash]) == 1
    view = tiers.submit([*mine.hashes[:2], child.chain_hash], ROOT, block_size=BLOCK_SIZE)
    wait_until(lambda: tiers.poll(view) == 2)
    with tiers.lease(view) as lease:
        assert lease.hashes == mine.hashes[:2]


def test_blocks_without_tokens_are_no_children(home: Path, serve: Serve, attach: Attach) -> None:
    """An engine that does not tell its tokens stores blocks all the same."""
    serve(file={"path": home / "slab", "size": "1MiB"})
    tiers, stored = attach(), prompt(70, 71, 72, 1)
    (reservation,) = tiers.reserve([Wanted(stored.hashes, stored.root, stored.tenant)])
    assert reservation is not None
    fill(tiers, reservation)
    tiers.seal(reservation, [BlockRecord(h, stored.parent(i), b"", 0) for i, h in enumerate(stored.hashes)], 0)
    assert tiers.drain(PATIENCE)
    assert answered(tiers, prompt(70, 71, 72, 9)).children == ()
    assert load(tiers, stored) == 3


def test_a_client_that_seals_too_many_tokens_harms_nobody(home: Path, serve: Serve, attach: Attach) -> None:
    """FAULTS 39: what it says would be told to the others."""
    served = serve()
    tiers, stored = attach(), prompt(70, 71, 72, 1)
    store(tiers, stored, last=2)
    with greeted(home / "s") as rude:
        rude.sendall(pack_request(1, [Reserve.of(1, [Wanted(stored.hashes[2:], stored.hashes[1], stored.tenant)])]))
        assert rude.recv(4096)
        rude.sendall(pack_request(0, [Seal(0, [1], [1], [np.arange(BLOCK_SIZE + 1, dtype="<u4").tobytes()])]))
        assert rude.recv(10) == b""
    wait_until(lambda: served.daemon.counts["malformed_holding"] == 1)  # its process, this one, lives
    assert answered(tiers, prompt(70, 71, 72, 9)).children == ()
    another = prompt(70, 71, 72, 2)
    assert store(tiers, another, first=2) == 1
    assert list(answered(tiers, prompt(70, 71, 72, 9)).children) == [told(another)]


def test_who_leaves_much_unread_is_told_no_children(home: Path, serve: Serve, attach: Attach) -> None:
    """They are what makes an answer long: without them he is not cut off for what he was told unasked."""
    serve()
    tiers = attach()
    for number in range(8):
        store(tiers, prompt(70, 71, 72, number))
    mine = prompt(70, 71, 72, 9)
    with greeted(home / "s") as rude:
        num_asked = 8000
        for first in range(1, num_asked, 100):
            rude.sendall(
                pack_request(
                    0, [Ask(n, ROOT, 0, BLOCK_SIZE, mine.hashes[2], Overlap.NONE) for n in range(first, first + 100)]
                )
            )
        # He reads at last: every claim has its answer.
        reader, news = FrameReader(MAX_FRAME), list[News]()
        while len(news) < num_asked:
            for body in reader.feed(rude.recv(1 << 20)):
                news += unpack_reply(body).news
    assert sorted(each.claim for each in news) == list(range(1, num_asked + 1))


@dataclass
class Prompt:
    """A request of an engine that takes a part of a block."""

    request_id: str
    chain: TokenChain

    @property
    def num_tokens(self) -> int:
        return self.chain.num_tokens


def test_the_question_for_a_part_is_asked_in_the_step_it_comes_up_in(serve: Serve, attach: Attach) -> None:
    """It comes up where the first one is answered: else the request would wait for a step more."""
    serve()
    tiers = attach()
    store(tiers, prompt(70, 71, 72, 1))
    side, request = SchedulerSide(tiers, partial_blocks=True), Prompt("a", prompt(70, 71, 72, 9))
    asked = []

    def takes_the_view() -> bool:
        assert side.lookup(request, 0) is PENDING
        asked.append(side.requests["a"].view is not None)
        side.build_plan()
        link = tiers._attachment.link
        assert link is not None
        assert not any(type(each) is Ask for each in link.unsent)  # a step leaves none
        return asked[-1]

    wait_until(takes_the_view)
    wait_until(lambda: side.lookup(request, 0) == 2 * BLOCK_SIZE + 3)
    side.finished("a")


# A model's tiers as clients of the daemon have them: what is remembered of questions in vain is soon forgotten.


def test_a_question_in_vain_is_remembered_only_while_it_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of them took memory that grew."""
    monkeypatch.setattr("kvtier.service.node.served_tiers._SAME", 0.05)
    config = Config.model_validate({"host": {"size": 1 << 20}})
    hierarchy = open_hierarchy(config, b"f" * 32, BlockDimensions(BLOCK_SIZE, SLOT_BYTES))
    tiers = ServedTiers(hierarchy, b"f" * 32)

    def ask(number: int) -> None:
        chain = chain_of(2, first_token=1000 * number)
        assert tiers.poll(hierarchy.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)) == 0

    for number in range(50):
        ask(number)
    time.sleep(0.1)
    ask(50)
    assert len(tiers._missed) == 1
    hierarchy.check()
    hierarchy.close()
