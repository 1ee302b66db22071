"""One store for every size: ranks and stages of one size load, bit for bit, what those of another have stored."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_layouts import slot_plan_of

from kvtier.connector.vllm.slots import SlotPlan, engine_blocks
from kvtier.tiers.copies.transfer import BlockCopies, PartCopier
from kvtier.tiers.host.host import HostRegion

BLOCKS, LAYERS, TOKENS, DIM = 6, 4, 32, 8
FORMS = [("head-token", "plain", False), ("head-token", "cpu-vec", False), ("token-head", "plain", False)]
FORMS += [("head-token", "plain", True), ("head-token", "cpu-vec", True)]


class Fleet:
    """Engines of one model, which has `heads` KV heads, over one region whose slots are laid out for `share` ranks."""

    def __init__(self, heads: int, share: int, form: tuple[str, str, bool]) -> None:
        self.heads, self.pieces, self.form = heads, min(share, heads), form
        self.kv = torch.randn(LAYERS, BLOCKS, heads, TOKENS, 2 * DIM)
        self.region = HostRegion.allocate(BLOCKS, self.kv[:, 0].nbytes)
        self.copies = BlockCopies(np.arange(BLOCKS), np.arange(BLOCKS)[::-1].copy())

    def plan(self, tp: int, layers: range) -> SlotPlan:
        order, content, canonical = self.form
        names, parts = tuple(f"layer.{number}" for number in layers), min(tp, self.heads)
        layer_bytes = self.kv[0, 0].nbytes // parts
        ranks = {"num_parts": parts, "replicas": tp // parts, "num_pieces": self.pieces}
        around = layers.start * layer_bytes, (LAYERS - layers.stop) * layer_bytes
        form = {"content": content, "canonical": canonical, "order": order}
        return slot_plan_of(names, TOKENS, layer_bytes, around=around, **ranks, **form)

    def engine(self, tp: int, pp: int, *, stores: bool) -> None:
        """All of an engine's ranks, one after another, store what they have, or find in the slots what they need."""
        for rank in range(tp):
            for stage in range(pp):
                layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp)
                plan = self.plan(tp, layers)
                part, width = rank // plan.replicas, self.heads // plan.num_parts
                own = self.kv[layers.start : layers.stop, :, part * width : (part + 1) * width]
                memory = own.clone() if stores else torch.zeros_like(own)
                caches = dict(zip(plan.layers, memory.unbind(), strict=True))
                copier = PartCopier(engine_blocks(plan, caches, rank), self.region)
                if not stores:
                    assert copier.copy("load", self.copies) is None
                    assert torch.equal(memory, own)
                elif rank % plan.replicas == 0:
                    assert copier.copy("store", self.copies) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "share"), [(4, 1), (4, 2), (4, 4), (8, 8), (2, 4), (2, 1)])
def test_every_size_finds_what_another_stored(heads: int, share: int, form: tuple[str, str, bool]) -> None:
    engines = [(tp, pp) for tp in (1, 2, 4, 1) for pp in (1, 2)]
    for stored, loaded in pairwise(engines):
        fleet = Fleet(heads, share, form)
        fleet.engine(*stored, stores=True)
        fleet.engine(*loaded, stores=False)
        fleet.region.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size", "named"), [(1, 2), (2, 1), (4, 1), (4, 2)])
def test_slots_are_those_of_an_engine_of_the_named_size(size: int, named: int, form: tuple[str, str, bool]) -> None:
    """What such engines stored before is found: TP=1 with `share_across_tp` 2 writes the slots of TP=2 without it."""
    fleet = Fleet(4, named, form)
    fleet.engine(size, 1, stores=True)
    shared = fleet.region.array.copy()
    fleet.region.array[:] = 0
    fleet.pieces = None  # type: ignore[assignment]
    fleet.engine(named, 1, stores=True)
    assert (fleet.region.array == shared).all()
    fleet.region.close()
