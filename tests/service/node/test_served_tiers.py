"""A model's tiers as clients of the daemon have them: what is remembered of questions in vain is soon forgotten."""

import time

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of

from kvtier.service.node.namespaces import BlockDimensions
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.opening import open_hierarchy


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
