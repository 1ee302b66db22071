"""An engine's KV events: what is told of its L1 and its tiers is what its lookups find, tenants apart."""

from collections.abc import Sequence

from small_engines import GREEDY, Make, settled
from tiny_models import prompt

from kvtier.connector.local import LocalConnector
from kvtier.engine.llm import Engine
from kvtier.service.events.prefix_index import PrefixIndex, prompt_hashes
from kvtier.service.events.publisher import AnnouncedBlocks, Source
from kvtier.service.events.wire import KVEvent, namespace_of
from kvtier.tiers.hierarchy.hierarchy import EventSource, TierEvents
from kvtier.tiers.naming.chain import chain_hashes, root_hash


class Listener:
    """Told of an engine from its start; believes it."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.connector, LocalConnector)
        self.engine = engine
        self.size = engine.config.block_size
        self.fingerprint = engine.identity.fingerprint()
        self.told = AnnouncedBlocks(self.fingerprint)
        self.index = PrefixIndex(self.size)
        self.sources: list[Source] = [TierEvents("l1", engine.pool), EventSource(engine.connector.hierarchy)]

    def apply(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            self.index.apply("engine", event)

    def read(self) -> None:
        for source in self.sources:
            while source.waiting:
                for event in source.take(1000):
                    self.apply(self.told.apply(event))
        self.told.check()
        self.index.check()
        assert not self.index.counts

    def found(self, tokens: Sequence[int], salt: str | None = None) -> dict[str, int]:
        root = root_hash(self.fingerprint, cache_salt=salt)
        namespace = None if salt is None else namespace_of(root)
        return self.index.matches(prompt_hashes(tokens, self.size, namespace=namespace)).get("engine", {})

    def in_l1(self, tokens: Sequence[int], salt: str | None = None) -> int:
        root = root_hash(self.fingerprint, cache_salt=salt)
        return self.engine.pool.lookup(chain_hashes(root, tokens, self.size))


def test_what_an_engine_holds_is_known(make: Make) -> None:
    engine = make(tiers=True, num_blocks=24)
    listener = Listener(engine)
    prompts = [prompt(seed, 70) for seed in range(8)]
    for tokens in prompts:  # more than L1 has room for
        engine.generate([tokens], GREEDY)
        settled(engine)
        listener.read()
    held = [listener.in_l1(tokens) for tokens in prompts]
    assert held[-1] == 70 // listener.size
    assert min(held) < 70 // listener.size
    for tokens, num_l1 in zip(prompts, held, strict=True):
        found = listener.found(tokens)
        assert found.get("GPU", 0) == num_l1
        assert found.get("CPU", 0) == 70 // listener.size - num_l1
    # a tenant's blocks are nobody else's, and untold until its root is known
    mine = prompt(20, 70)
    engine.generate([mine], GREEDY, cache_salt="alice")
    settled(engine)
    listener.read()
    assert listener.found(mine, "alice") == {}
    listener.apply(listener.told.begin_at(root_hash(listener.fingerprint, cache_salt="alice")))
    assert listener.found(mine, "alice") == {"GPU": 70 // listener.size}
    assert listener.found(mine) == {}
    # a reset forgets it all, and the answer's blocks are told like the prompt's
    engine.reset_cache()
    listener.read()
    assert listener.index.num_blocks == 0
    [answer] = engine.generate([prompts[0]], GREEDY)
    listener.read()
    whole = [*prompts[0], *answer.token_ids]
    assert listener.found(whole)["GPU"] == listener.in_l1(whole) > 0
