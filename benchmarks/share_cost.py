"""What [cache] share_across_tp costs: copies between ranks' memory and blocks laid out for other numbers of ranks.

Blocks are those of a Llama of 8B: 32 layers, 8 KV heads of 128 numbers, 16 tokens, bfloat16: 2 MiB. "vLLM": all ranks
of an engine copy scattered blocks to and from slots, one after the other, as the connector's worker does. "SGLang": one
rank stores pages into L2, looks them up and loads them again, cut into pieces; another hierarchy has each. Lookups and
records of vLLM do not depend on the option. A ratio is the median over interleaved rounds of the time by that of the
engine's own layout.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Final

import numpy as np
import torch
from _report import Given, Result, Row, in_turns, of_pairs, program, progress, took
from _rig import NO_PARENT, Shape, random_names

from kvtier.connector.sglang import CutPageStore, PageStore
from kvtier.connector.vllm import GroupLane, SlotPlan, engine_blocks
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopies, BlockPart, CopyDirection, EngineBlocks, PartCopier
from kvtier.tiers.hierarchy import open_hierarchy
from kvtier.tiers.host import HostRegion

LAYERS, HEADS, TOKENS, DIM = 32, 8, 16, 128
BLOCK_BYTES: Final = LAYERS * HEADS * TOKENS * 2 * DIM * 2
SIZES: Final = (1, 2, 4, 8)
NAMES: Final = tuple(f"layer.{number}" for number in range(LAYERS))


def plan_of(tp: int, share: int) -> SlotPlan:
    return SlotPlan(
        block_size=TOKENS,
        hash_size=TOKENS,
        groups=(NAMES,),
        group_sizes=(TOKENS,),
        lanes=(GroupLane(0),),
        layers=NAMES,
        layer_bytes=(BLOCK_BYTES // LAYERS // tp,) * LAYERS,
        num_parts=tp,
        replicas=1,
        content="plain",
        canonical=False,
        num_pieces=share,
    )


def vllm_rows(num_blocks: int, rounds: int) -> list[Row]:
    region = HostRegion.allocate(num_blocks, BLOCK_BYTES)
    region.wait_prefaulted()
    rng, rows = np.random.default_rng(7), list[Row]()
    for tp in (1, 2, 4):
        progress(f"vLLM, {tp} ranks")
        kv = [torch.ones(num_blocks, HEADS // tp, TOKENS, 2 * DIM, dtype=torch.bfloat16) for _ in range(tp * LAYERS)]
        memory = [dict(zip(NAMES, kv[rank * LAYERS : (rank + 1) * LAYERS], strict=True)) for rank in range(tp)]
        times: dict[tuple[int, CopyDirection], list[float]] = {}
        actions: dict[tuple[int, CopyDirection], Callable[[], float]] = {}
        for share in SIZES:
            plan = plan_of(tp, share)
            ranks = [PartCopier(engine_blocks(plan, memory[rank], rank), region) for rank in range(tp)]

            def copy(ranks: list[PartCopier], direction: CopyDirection) -> float:
                blocks, slots = rng.permutation(num_blocks), rng.permutation(num_blocks)
                copies = BlockCopies(blocks, slots)
                return took(lambda: [rank.copy(direction, copies) for rank in ranks])

            for direction in ("store", "load"):
                actions[share, direction] = partial(copy, ranks, direction)
        times = in_turns(actions, rounds, warm_up=1)
        for share in SIZES:
            row: Row = {"engine": "vLLM", "tp": tp, "share": share}
            for direction in ("store", "load"):
                row[f"{direction} GB/s"] = num_blocks * BLOCK_BYTES / median(times[share, direction]) / 1e9
                row[f"{direction} ratio"] = of_pairs(times[share, direction], times[tp, direction])
            rows.append(row)
    region.close()
    return rows


def sglang_store(num_pages: int, pieces: int) -> PageStore | CutPageStore:
    """A rank's pages in so many pieces, and L2 for each, in which all of them fit."""
    kv = torch.ones(num_pages, LAYERS, 2, TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    width, size = HEADS // pieces, BLOCK_BYTES // pieces
    stores = []
    for piece in range(pieces):
        units = [kv[:, layer, half, :, piece * width :][:, :, :width] for layer in range(LAYERS) for half in (0, 1)]
        parts = [BlockPart(unit, number // 2, number * size // len(units)) for number, unit in enumerate(units)]
        config = Config.load(host={"size": 2 * num_pages * size})
        tiers = open_hierarchy(config, bytes([piece, pieces]) * 16, Shape(TOKENS, size))
        tiers.host.region.wait_prefaulted()
        stores.append(PageStore(tiers, EngineBlocks(parts, size), NO_PARENT, config.cache))
    return stores[0] if pieces == 1 else CutPageStore(stores)


def sglang_rows(num_pages: int, rounds: int) -> list[Row]:
    stores = {pieces: sglang_store(num_pages, pieces) for pieces in SIZES}
    rng, pages, rows = np.random.default_rng(7), np.arange(num_pages), list[Row]()

    def turn(store: PageStore | CutPageStore) -> tuple[float, float]:
        names = random_names(rng, num_pages)
        stored = took(lambda: store.store(names, pages))
        assert store.held(names)
        return stored, took(lambda: store.load(names, pages))

    progress("SGLang, 1 rank")
    times = in_turns({pieces: partial(turn, store) for pieces, store in stores.items()}, rounds, warm_up=1)
    for pieces in times:
        row: Row = {"engine": "SGLang", "tp": 1, "share": pieces}
        for place, what in ((0, "store"), (1, "load")):
            ours, own = ([each[place] for each in times[number]] for number in (pieces, 1))
            row[f"{what} GB/s"] = num_pages * BLOCK_BYTES / median(ours) / 1e9
            row[f"{what} ratio"] = of_pairs(ours, own)
        rows.append(row)
    return rows


@program()
def main(chosen: Given) -> Result:
    num_blocks, rounds = (16, 3) if chosen.quick else (128, 21)
    rows = [*vllm_rows(num_blocks, rounds), *sglang_rows(num_blocks // 2, rounds)]
    return rows
