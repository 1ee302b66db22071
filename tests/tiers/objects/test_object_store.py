"""The tier itself over a real S3 server: what is stored is found, by anybody, in few requests, and is the same."""

from itertools import pairwise

from doubles import SLOT_BYTES, chain_of, wait_until
from object_rig import ObjectServer, object_of, open_store, opened, read, requests, write, written

from kvtier.tiers.objects.layout import MAX_BLOCKS, TABLE_BYTES
from kvtier.tiers.tier import Outcome

LONG = chain_of(24)


def test_a_batch_is_one_object_and_one_request(server: ObjectServer) -> None:
    with opened(server.endpoint) as store:
        assert requests(store, lambda: written(store, LONG)) == {"put": 1}
        (key,) = server.keys()
        assert key == object_of(store, LONG.hashes[0])
        assert len(server.content(key)) == TABLE_BYTES + 24 * store.space.record_bytes
        # What is known to be there is not sent again, and its bytes come with one request.
        assert requests(store, lambda: written(store, LONG)) == {}
        assert requests(store, lambda: read(store, LONG)) == {"get": 1}
        assert store.stats()["bytes_received"] >= 24 * SLOT_BYTES
        assert store.stats()["bytes_sent"] >= 24 * SLOT_BYTES
    with opened(server.endpoint) as reader:
        # One table says what the object holds; one question more, whether the chain goes on, if it is longer.
        assert requests(reader, lambda: reader.locate(LONG.hashes)) == {"get": 1}
        longer = chain_of(30)
        assert requests(reader, lambda: reader.locate(longer.hashes)) == {"get": 1}
        assert reader.lookup(longer.hashes) == 24


def test_long_reads_come_in_parts_and_long_batches_become_several_objects(server: ObjectServer) -> None:
    many = chain_of(MAX_BLOCKS + 40)
    with opened(server.endpoint, part_size="64KiB") as store:
        assert requests(store, lambda: written(store, many)) == {"put": 2}
        per_part = (64 << 10) // store.space.record_bytes
        num_parts = -(-MAX_BLOCKS // per_part) + -(-40 // per_part)
        assert requests(store, lambda: read(store, many)) == {"get": num_parts}
        assert store.stats()["read_ok"] == len(many.hashes)


def test_a_chain_of_many_objects_is_located_in_few_rounds(server: ObjectServer) -> None:
    chain = chain_of(60)
    with opened(server.endpoint) as writer:
        for first in range(0, 60, 2):
            written(writer, chain, first, first + 2)
    with opened(server.endpoint) as reader:
        # 30 objects of two blocks each: 1 table, then 2, 4, 8 and 15 at once.
        asked = requests(reader, lambda: reader.locate(chain.hashes))
        assert asked == {"get": 30}
        assert reader.lookup(chain.hashes) == 60
    # Objects of unequal length: what was guessed wrong costs requests, and no block.
    server.empty()
    edges = [0, 1, 4, 5, 12, 13, 20, 60]
    with opened(server.endpoint) as writer:
        for first, last in pairwise(edges):
            written(writer, chain, first, last)
    with opened(server.endpoint) as reader:
        assert reader.locate(chain.hashes) == 60
        assert read(reader, chain) == [Outcome.OK] * 60


def test_a_chain_that_branches_off_inside_an_object_finds_the_part_it_shares(server: ObjectServer) -> None:
    trunk, branch = chain_of(8), chain_of(5)
    branch.extend(list(range(900, 900 + 4 * 5)))  # five blocks of the trunk, then five of its own
    assert branch.hashes[:5] == trunk.hashes[:5]
    with opened(server.endpoint) as writer:
        written(writer, trunk)
        written(writer, branch)
        assert len(server.keys()) == 2
    with opened(server.endpoint) as reader:
        assert reader.locate(branch.hashes) == 10
        assert read(reader, branch) == [Outcome.OK] * 10
        assert reader.lookup(trunk.hashes) == 5  # no more was asked for
        assert reader.locate(trunk.hashes) == 8


def test_two_writers_of_one_chain_store_it_once(server: ObjectServer) -> None:
    with opened(server.endpoint) as one, opened(server.endpoint) as other:
        written(one, LONG, 0, 10)
        # The other one knows nothing of it. Objects do not change: it learns what is there, and stores the rest.
        assert requests(other, lambda: written(other, LONG)) == {"get": 1, "put": 2}
        assert sorted(server.keys()) == sorted([object_of(one, LONG.hashes[0]), object_of(one, LONG.hashes[10])])
        assert read(one, LONG, LONG.hashes[:10]) == [Outcome.OK] * 10
        assert one.locate(LONG.hashes) == 24


def test_a_discarded_block_goes_for_everybody_and_can_be_stored_again(server: ObjectServer) -> None:
    with opened(server.endpoint) as one, opened(server.endpoint) as other:
        written(one, LONG, 0, 12)
        written(one, LONG, 12)
        assert other.locate(LONG.hashes) == 24
        one.discard(LONG.hashes[14:16])
        assert server.keys() == [object_of(one, LONG.hashes[0])]
        assert one.lookup(LONG.hashes) == 12
        # The other one learns it when it reads: the object's blocks are gone, and nothing else.
        assert read(other, LONG) == [Outcome.OK] * 12 + [Outcome.EVICTED] * 12
        assert other.lookup(LONG.hashes) == 12
        assert other.stats()["evicted"] == 12
        written(other, LONG)
        assert one.locate(LONG.hashes) == 24
        # Of a chain that this process never heard of, the objects go that its blocks begin.
        with opened(server.endpoint) as stranger:
            stranger.discard(LONG.hashes)
        assert server.keys() == []


def test_a_reset_is_everybodys_and_what_comes_after_it_is_found(server: ObjectServer) -> None:
    with opened(server.endpoint) as one, opened(server.endpoint) as other:
        written(one, LONG)
        assert other.locate(LONG.hashes) == 24
        one.reset()
        assert one.lookup(LONG.hashes) == 0
        wait_until(lambda: one.locate(LONG.hashes) == 0)
        # The others look at the epoch from time to time.
        other._epoch._fresh_until = 1e-9
        assert other.locate(LONG.hashes) == 0
        assert other.lookup(LONG.hashes) == 0
        written(other, LONG)
        assert one.locate(LONG.hashes) == 24
        assert read(one, LONG) == [Outcome.OK] * 24
    # A process that starts later has the new epoch.
    with opened(server.endpoint) as late:
        assert late.locate(LONG.hashes) == 24
    # Whoever knows a higher epoch than stands there writes it again: nothing old is found after somebody deleted it.
    with opened(server.endpoint) as one:
        (epoch_key,) = server.keys("kvtier/epochs")
        before = server.content(epoch_key)
        server.delete(epoch_key)
        one._epoch._fresh_until = 1e-9
        assert one.locate(LONG.hashes) == 24
        assert server.content(epoch_key) == before


def test_reset_while_nobody_answers_is_told_later(server: ObjectServer) -> None:
    with opened(server.endpoint, deadline="300ms", connect_timeout="300ms") as store:
        written(store, LONG)
        with server.frozen():
            store.reset()
            assert store.lookup(LONG.hashes) == 0
            assert store.locate(LONG.hashes) is Outcome.TIMEOUT
        wait_until(lambda: store.locate(LONG.hashes) == 0)


def test_it_tells_what_it_wrote_and_read_and_what_is_gone(server: ObjectServer) -> None:
    with opened(server.endpoint) as writer, opened(server.endpoint) as reader:
        writer.change_feed.listen()
        reader.change_feed.listen()
        written(writer, LONG, 0, 8)
        assert {r.chain_hash for r in writer.change_feed.take(100).stored} == set(LONG.hashes[:8])
        assert not reader.change_feed.waiting
        reader.locate(LONG.hashes)
        read(reader, LONG, LONG.hashes[:8])
        assert len(reader.change_feed.take(100).stored) == 8
        server.empty()
        read(reader, LONG, LONG.hashes[:8])
        assert set(reader.change_feed.take(100).gone) == set(LONG.hashes[:8])


def test_after_close_everything_is_refused(server: ObjectServer) -> None:
    store = open_store(server.endpoint)
    written(store, LONG)
    store.close()
    store.close()
    assert read(store, LONG) == [Outcome.CLOSED] * 24
    assert set(write(store, LONG)) == {Outcome.CLOSED}
    assert store.locate(LONG.hashes) is Outcome.CLOSED
