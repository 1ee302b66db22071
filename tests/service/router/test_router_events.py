"""Stories of the router that hears real publishers: it goes where the prefix is, or takes turns."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import zmq
from doubles import chain_over, records_of
from fork_rig import SERVICES, Forked
from node_rig import event_ports
from router_rig import MODEL, PATIENCE, RoutedReplicas, ToldReplica, replicas, routed, until
from service_rig import end_child, environment

from kvtier.service.events.prefix_index import Feeds, PrefixIndex, prompt_hashes
from kvtier.service.events.publisher import Publisher
from kvtier.service.events.wire import BlockRemoved, BlockStored, EventBatch, encode_batch, namespace_of
from kvtier.service.router.holdings import Prefixes, VersionHoldings
from kvtier.service.router.replica_list import Publishers
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.hierarchy.hierarchy import Removed, Stored
from kvtier.tiers.naming.chain import TokenChain, root_hash

FINGERPRINT = bytes.fromhex("ab" * 32)
SIZE = 4
chain_of = partial(chain_over, fingerprint=FINGERPRINT)
PROMPT = list(range(100, 140))  # ten blocks


class Told:
    """A publisher that tells what it is told to, where a replica or a daemon would."""

    def __init__(self) -> None:
        self.ports = event_ports()
        self.start()

    def start(self, **options: object) -> None:
        self._publisher = Publisher(EventsConfig.model_validate({**self.ports, **options}))

    def store(self, chain: TokenChain, tier: str = "l1", blocks: int | None = None) -> None:
        if chain.root != root_hash(FINGERPRINT):
            self._publisher.begin_at(FINGERPRINT, chain.root)
        self._publisher.announce(FINGERPRINT, [Stored(tier, records_of(chain, last=blocks))])
        assert self._publisher.flush(60)

    def remove(self, chain: TokenChain, tier: str = "l1") -> None:
        self._publisher.announce(FINGERPRINT, [Removed(tier, tuple(chain.hashes), False)])
        assert self._publisher.flush(60)

    def store_as_vllm(self, first_name: int, tokens: list[int], lora_name: str | None) -> None:
        """Blocks under names of vLLM's own, of an adapter or of the model itself."""
        names = range(first_name, first_name + len(tokens) // SIZE)
        keys = None if lora_name is None else [(lora_name,)] * len(names)
        stored = BlockStored(list(names), None, tokens, SIZE, None, "GPU", lora_name, keys)
        self._publisher._submit(0, lambda: self._publisher._send(FINGERPRINT, [stored]))
        assert self._publisher.flush(60)

    def stop(self) -> None:
        self._publisher.close()


def nature(events: Told | None, node: Told | None = None, **more: object) -> Mapping[str, object]:
    ours = {"block_size": SIZE, "fingerprint": FINGERPRINT.hex(), "max_model_len": 512, **more}
    told = {"events": events and events.ports, "node": node and node.ports}
    return {**MODEL, "kvtier": {**ours, **told}}


@contextmanager
def publishers(number: int) -> Iterator[list[Told]]:
    with ExitStack() as stack:
        told = [Told() for _ in range(number)]
        for each in told:
            stack.callback(each.stop)
        yield told


def live(router: RoutedReplicas) -> bool:
    feeds = [each[feed] for each in router.status()["replicas"] for feed in ("events", "node_events")]
    return {feed["state"] for feed in feeds if feed is not None} == {"live"}


def blocks(router: RoutedReplicas, replica: ToldReplica) -> dict[str, int]:
    found: dict[str, int] = next(e["blocks"] for e in router.status()["replicas"] if e["name"] == replica.name)
    return found


def asked(router: RoutedReplicas, prompt: object = PROMPT, **fields: object) -> str:
    return router.complete(prompt, **fields).headers["x-kvtier-replica"]


def test_a_prompt_goes_to_who_holds_most_of_it_until_nothing_is_heard() -> None:
    with publishers(2) as (one, other), ExitStack() as stack:
        first, second = stack.enter_context(replicas(2, nature(one), nature(other)))
        router = stack.enter_context(routed(first.url, second.url))
        until(lambda: live(router))
        # nobody holds anything: equals take turns
        assert {asked(router) for _ in range(4)} == {first.name, second.name}
        assert router.status()["decisions"][0]["reason"] == "equal"

        # it sticks to the best
        chain = chain_of(PROMPT)
        one.store(chain)
        until(lambda: blocks(router, first) == {"GPU": 10})
        assert [asked(router) for _ in range(4)] == [first.name] * 4
        last = router.status()["decisions"][0]
        assert (last["reason"], last["prompt_blocks"], last["chosen"]) == ("prefix", 10, first.name)
        assert {score["name"]: score["cached"] for score in last["scores"]} == {first.name: 10, second.name: 0}
        metrics = router.metrics()
        assert metrics["kvtier_route_promised_tokens_total"] == 4 * 40
        assert metrics["kvtier_route_indexed_blocks"] == 10
        assert not any("skipped_events" in name and value for name, value in metrics.items())

        # and spreads again when both hold the same
        other.store(chain)
        until(lambda: blocks(router, second) == {"GPU": 10})
        assert {asked(router) for _ in range(4)} == {first.name, second.name}

        # what has gone does not count
        one.remove(chain)
        until(lambda: blocks(router, first) == {})
        assert {asked(router) for _ in range(4)} == {second.name}

        # a tenant's prompt is nobody else's: the same words under a salt are not there, and the other way round
        assert {asked(router, cache_salt="alice") for _ in range(4)} == {first.name, second.name}
        one.store(chain_of(PROMPT, salt="alice"))
        until(lambda: blocks(router, first) == {"GPU": 10})
        assert {asked(router, cache_salt="alice") for _ in range(4)} == {first.name}
        assert {asked(router, cache_salt="bob") for _ in range(4)} == {first.name, second.name}
        assert {asked(router) for _ in range(4)} == {second.name}

        # no events any more: nobody is believed, they take turns, nobody is refused anything
        other.stop()
        one.stop()
        until(lambda: not live(router))
        until(lambda: {e["events"]["state"] for e in router.status()["replicas"]} == {"stale"})
        names = [asked(router) for _ in range(6)]
        assert sorted(names) == sorted([first.name, second.name] * 3)
        assert router.status()["decisions"][0]["reason"] == "unsure"

        # they come back, and with them what is held
        one.start()
        other.start()
        one.store(chain)
        until(lambda: live(router) and blocks(router, first) == {"GPU": 10})
        assert [asked(router) for _ in range(4)] == [first.name] * 4


def test_requests_that_come_together_go_to_who_computes_their_document() -> None:
    with publishers(2) as (one, other), ExitStack() as stack:
        first, second = stack.enter_context(replicas(2, nature(one), nature(other)))
        router = stack.enter_context(routed(first.url, second.url))
        until(lambda: live(router))
        for replica in (first, second):
            replica.behave(wait=PATIENCE)
        document = list(range(1000, 1400))  # a hundred blocks
        with ThreadPoolExecutor(4) as pool:
            alike = [pool.submit(asked, router, [*document, number]) for number in range(3)]
            until(lambda: sum(len(each.seen) for each in (first, second)) == 3)
            another = pool.submit(asked, router, [7] * 400)  # goes to the one with nothing to do
            until(lambda: sum(len(each.seen) for each in (first, second)) == 4)
            for replica in (first, second):
                replica.behave()
            (name,) = {each.result(PATIENCE) for each in alike}
            assert another.result(PATIENCE) != name
        # nothing was announced: once the answers have begun, nobody is known to hold it
        assert {asked(router, document) for _ in range(4)} == {first.name, second.name}


def test_what_the_node_holds_is_had_by_its_replicas_and_what_redis_holds_by_all() -> None:
    with publishers(4) as (one, other, node, far), ExitStack() as stack:
        near, beside = nature(one, node), nature(other, node)
        with replicas(3, near, beside, nature(None, far)) as (first, second, third):
            router = stack.enter_context(routed(first.url, second.url, third.url))
            until(lambda: live(router))
            chain = chain_of(PROMPT)
            node.store(chain, "l2", 6)
            one.store(chain, "l1", 3)
            until(lambda: blocks(router, first) == {"GPU": 3, "CPU": 6} and blocks(router, second) == {"CPU": 6})
            assert asked(router) == first.name  # three blocks are on its device already
            cached = {score["name"]: score["cached"] for score in router.status()["decisions"][0]["scores"]}
            assert cached == {first.name: 6, second.name: 6, third.name: 0}

            # what its node tells is in Redis, a replica of another node with Redis can load, too
            node.store(chain, "redis", 8)
            until(lambda: blocks(router, second) == {"CPU": 6, "EXTERNAL": 8})
            far.store(chain_of([1, 2, 3, 4]), "redis")
            until(lambda: blocks(router, third) == {"EXTERNAL": 1})
            assert asked(router) == first.name
            cached = {score["name"]: score["cached"] for score in router.status()["decisions"][0]["scores"]}
            assert cached == {first.name: 8, second.name: 8, third.name: 8}


def test_an_adapters_prompt_is_not_the_models() -> None:
    adapters = [{"id": "ad1", "object": "model", "parent": "m"}, {"id": "ad2", "object": "model", "parent": "m"}]
    vllm = {"id": "m", "object": "model", "parent": None, "adapters": adapters}
    with publishers(2) as (one, other), replicas(2, vllm, vllm) as (first, second):
        parts = [f",events={told.ports['publish']},replay={told.ports['replay']},block_size=4" for told in (one, other)]
        with routed(first.url + parts[0], second.url + parts[1]) as router:
            until(lambda: live(router))
            # the same words, to the model and to one of its adapters
            one.store_as_vllm(1, PROMPT, None)
            other.store_as_vllm(1, PROMPT, "ad1")
            until(lambda: blocks(router, first) == blocks(router, second) == {"GPU": 10})
            for model, holder in (("m", first), ("ad1", second)):
                assert {asked(router, model=model) for _ in range(4)} == {holder.name}
                cached = {score["name"]: score["cached"] for score in router.status()["decisions"][0]["scores"]}
                assert sum(cached.values()) == cached[holder.name] == 10
            # nobody holds anything of the other adapter's, nor of a tenant's
            for asks in ({"model": "ad2"}, {"model": "ad1", "cache_salt": "alice"}):
                assert {asked(router, **asks) for _ in range(4)} == {first.name, second.name}
                assert router.status()["decisions"][0]["reason"] == "equal"


def test_an_engines_own_salt_counts_where_a_request_has_none() -> None:
    namespace = namespace_of(root_hash(FINGERPRINT, cache_salt="the engine's"))
    with publishers(2) as (one, other), ExitStack() as stack:
        salted = [nature(told, namespace=namespace) for told in (one, other)]
        first, second = stack.enter_context(replicas(2, *salted))
        router = stack.enter_context(routed(first.url, second.url))
        until(lambda: live(router))
        one.store(chain_of(PROMPT))
        other.store(chain_of(PROMPT, salt="the engine's"))
        until(lambda: blocks(router, first) == blocks(router, second) == {"GPU": 10})
        assert {asked(router) for _ in range(4)} == {second.name}
        assert {asked(router, cache_salt="the engine's") for _ in range(4)} == {second.name}
        assert {asked(router, cache_salt="alice") for _ in range(4)} == {first.name, second.name}


def test_a_daemon_under_a_topic_of_its_own_is_refused_with_both(caplog: pytest.LogCaptureFixture) -> None:
    with publishers(1) as (node,), replicas(2, nature(None, node)) as (first, second):
        node.stop()
        node.start(topic="kv")
        node.store(chain_of(PROMPT), "l2")
        with routed(first.url, second.url) as router:
            until(lambda: router.status()["replicas"][0]["node_events"]["state"] == "refused")
            why = router.status()["replicas"][0]["node_events"]["why"]
            assert '"kv"' in why
            assert f'"kv@{FINGERPRINT.hex()[:16]}"' in why
            assert sum(why in line for line in caplog.messages) == 1
            assert {asked(router) for _ in range(4)} == {first.name, second.name}
            assert router.status()["decisions"][0]["reason"] == "unsure"  # whatever it holds, nobody knows
            # told as it should be, it is heard again
            node.stop()
            node.start()
            node.store(chain_of(PROMPT), "l2")
            until(lambda: router.status()["replicas"][0]["node_events"]["state"] == "live")
            until(lambda: blocks(router, first) == {"CPU": 10})


def test_of_a_very_long_prompt_the_beginning_is_looked_for() -> None:
    prompt = list(range(70_000))
    with publishers(2) as (one, other), replicas(2, nature(one), nature(other)) as (first, second):
        one.store(chain_of(prompt))
        with routed(first.url, second.url) as router:
            until(lambda: live(router) and blocks(router, first) == {"GPU": 17_500})
            assert asked(router, prompt) == first.name
            last = router.status()["decisions"][0]
            assert last["prompt_blocks"] == 17_500
            assert {score["name"]: score["cached"] for score in last["scores"]} == {first.name: 16_384, second.name: 0}
            # what would take long to read is not read, and goes by load: of both alike, once what they did is over
            until(lambda: all(each["in_flight"] == 0 and each["load"] == 0 for each in router.status()["replicas"]))
            assert {asked(router, prompt * 4) for _ in range(2)} == {first.name, second.name}
            assert router.status()["unknown_prompts"] == {"too_long": 2}


def test_who_publishes_elsewhere_is_forgotten_there() -> None:
    with publishers(2) as (one, other):
        one.store(chain_of(PROMPT))
        other.store(chain_of(PROMPT[:20]))
        holdings = VersionHoldings(strict=False)
        try:
            for told, num_blocks in ((one, 10), (other, 5), (one, 10), (other, 5)):
                at = Publishers(told.ports["publish"], told.ports["replay"])
                holdings.follow("r", at, SIZE, FINGERPRINT)
                until(lambda num_blocks=num_blocks: holdings.state("r").blocks == {"GPU": num_blocks})
                until(
                    lambda num_blocks=num_blocks: holdings.index is not None and holdings.index.num_blocks == num_blocks
                )
            assert holdings.index is not None
            assert not holdings.index.counts
        finally:
            holdings.close()


def test_who_comes_back_waits_for_nobody_to_forget_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # an address that flaps: `follow` runs on the router's loop, and a batch under way may take seconds to its end
    may_forget, drop = threading.Event(), PrefixIndex.drop

    def slowly(self: PrefixIndex, worker: str) -> None:
        if threading.current_thread().name.startswith("kvtier-forget"):
            may_forget.wait(PATIENCE)
        drop(self, worker)

    monkeypatch.setattr(PrefixIndex, "drop", slowly)
    holdings = VersionHoldings(strict=False)
    with publishers(1) as (one,), ThreadPoolExecutor(1) as loop:
        at = Publishers(one.ports["publish"], one.ports["replay"])
        one.store(chain_of(PROMPT))
        try:
            for _ in range(3):
                loop.submit(holdings.follow, "r", at, SIZE, FINGERPRINT).result(PATIENCE / 4)
                until(lambda: holdings.state("r").blocks == {"GPU": 10})
                until(lambda: "r" in holdings.of(len(PROMPT), []).sure)
                holdings.leave("r")
            assert holdings.state("r").blocks == {}
            may_forget.set()
            until(lambda: holdings.index is not None and holdings.index.num_blocks == 0)  # of all three
        finally:
            may_forget.set()
            holdings.close()


@pytest.mark.parametrize(
    ("own", "node", "shared", "prefix"),
    [
        ({}, {}, {}, {}),
        ({"GPU": 3}, {}, {}, {"GPU": 3}),
        ({}, {"CPU": 2, "STORAGE": 5}, {}, {"CPU": 2, "STORAGE": 5}),
        ({"GPU": 3}, {"CPU": 2, "STORAGE": 5}, {}, {"GPU": 3, "STORAGE": 4}),
        ({"GPU": 9}, {"CPU": 2, "STORAGE": 5}, {}, {"GPU": 9}),
        ({"GPU": 1}, {"CPU": 2}, {"EXTERNAL": 6}, {"GPU": 1, "CPU": 1, "EXTERNAL": 4}),
        ({"GPU": 1, "EXTERNAL": 2}, {}, {"EXTERNAL": 6}, {"GPU": 1, "EXTERNAL": 5}),
        ({"GPU": 1}, {}, {"EXTERNAL": 4, "OBJECT": 6}, {"GPU": 1, "EXTERNAL": 3, "OBJECT": 2}),  # two that are shared
    ],
)
def test_prefixes_lie_behind_each_other(
    own: dict[str, int], node: dict[str, int], shared: dict[str, int], prefix: dict[str, int]
) -> None:
    index, tokens = PrefixIndex(1), [*range(9)]
    whole = {"other": {medium: (0, count) for medium, count in shared.items()}}
    for worker, counts in (("engine", own), ("node", node)):
        ends = list(accumulate(counts.values()))
        whole[worker] = {m: (end - n, end) for (m, n), end in zip(counts.items(), ends, strict=True)}
    for worker, by_medium in whole.items():
        for medium, (first, end) in by_medium.items():
            parent = first - 1 if first else None
            index.apply(worker, BlockStored([*range(first, end)], parent, tokens[first:end], 1, None, medium, None))
    for medium in shared:  # it has something there, if another chain
        index.apply("teller", BlockStored([99], None, [99], 1, None, medium, None))
    rows = {"r": 0, "without": 1}
    feeds = Feeds(["engine", "engine"], ["node", "node"], ["teller", None])
    found = Prefixes(rows, index.prefixes(prompt_hashes(tokens, 1), feeds))
    assert found["r"] == prefix
    assert not {"EXTERNAL", "OBJECT"} & (found["without"].keys() - own.keys())


def test_publishers_are_what_both_say() -> None:
    told = Publishers("tcp://*:5557", "tcp://0.0.0.0:5558").reached_at("engine-1")
    assert told == Publishers("tcp://engine-1:5557", "tcp://engine-1:5558")
    assert Publishers(node="tcp://n:1").agreed(told) == Publishers(
        "tcp://engine-1:5557", "tcp://engine-1:5558", "tcp://n:1"
    )
    why = Publishers("tcp://engine-2:5557").agreed(told)
    assert why == (
        'events "tcp://engine-1:5557", but its --replica says "tcp://engine-2:5557"; give the value the replica has'
    )


@pytest.mark.parametrize(
    ("variable", "level"), [({}, "WARNING"), ({"DYN_KV_ENFORCE_ENGINE_HASH_STABILITY": "1"}, "ERROR")]
)
def test_the_log_names_impossible_events_and_the_cause(tmp_path: Path, variable: Mapping[str, str], level: str) -> None:
    behind = BlockStored([7], 3, PROMPT[:SIZE], SIZE, None, "GPU", None)  # nobody has told of 3
    payload = encode_batch(EventBatch(1.0, [behind, BlockRemoved([9], "GPU")], 0))
    log = tmp_path / "log"
    command = ["-m", "kvtier.cli", "route", "--http", "127.0.0.1:0"]
    with replicas(1) as (replica,), zmq.Context() as context, context.socket(zmq.PUB) as engine, log.open("w") as file:
        engine.setsockopt(zmq.LINGER, 0)
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        spec = f"{replica.url},events=tcp://127.0.0.1:{port},block_size={SIZE}"
        run = Forked([*command, "--replica", spec], SERVICES, env={**environment(), **variable}, stderr=file)
        try:
            numbers = iter(range(1 << 20))

            def is_told() -> bool:
                engine.send_multipart([b"", next(numbers).to_bytes(8, "big"), payload])
                return "removal" in log.read_text()

            until(is_told)
        finally:
            end_child(run)
    lines = [line for line in log.read_text().splitlines() if "unknown parent" in line or "removal" in line]
    assert len(lines) >= 2
    for line in lines:
        assert f" {level} kvtier: KV events: tcp://127.0.0.1:{port}: " in line
        assert "events were missed, or" in line
    assert "its hash seed (PYTHONHASHSEED) or block size has changed" in lines[0]
