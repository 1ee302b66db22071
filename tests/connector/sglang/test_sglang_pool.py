"""SGLang's host pools as canonical blocks: every memory layout gives the same bytes; what would not is refused."""

import re
import subprocess
import sys
from typing import Any, Final

import numpy as np
import pytest
import torch

from kvtier.connector.sglang.pool import page_blocks, pool_pages
from kvtier.tiers.copies.transfer import BlockCopies, PartCopier
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.host.host import HostRegion

PAGES, LAYERS, TOKENS, HEADS, DIM, GROUPS = 5, 3, 4, 6, 8, 2
SIZE: Final = PAGES * TOKENS
MHA: Final[dict[str, tuple[int, ...]]] = {  # as SGLang 0.5.23 allocates them
    "layer_first": (2, LAYERS, SIZE, HEADS, DIM),
    "page_first": (2, SIZE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, TOKENS, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, TOKENS, LAYERS, DIM),
    "page_unified": (PAGES, GROUPS, LAYERS, 2, TOKENS, HEADS // GROUPS, DIM),
}
MLA: Final[dict[str, tuple[int, ...]]] = {
    "layer_first": (LAYERS, SIZE, 1, DIM),
    "page_first": (SIZE, LAYERS, 1, DIM),
    "page_first_direct": (PAGES, LAYERS, TOKENS, 1, DIM),
    "page_unified": (PAGES, LAYERS, TOKENS, DIM),
}


class _Pool:
    """What of SGLang's host pools is read."""

    storage_format_tag: str | None = None

    def __init__(self, layout: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, TOKENS
        self.layer_num, self.start_layer, self.end_layer = LAYERS, 4, 4 + LAYERS  # a later pipeline stage's
        self.head_num, self.head_dim, self.v_head_dim, self.kv_cache_dim = HEADS, DIM, DIM, DIM
        self.kv_buffer: torch.Tensor | None = torch.zeros(shape, dtype=dtype)


class MHATokenToKVPoolHost(_Pool):
    def __init__(self, layout: str = "layer_first", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(layout, MHA.get(layout, (1,)), dtype)

    def element(self, layer: int, kv: int, token: int, head: int) -> torch.Tensor:
        """`[DIM]`, found as SGLang finds it: by token number, over all pages."""
        assert self.kv_buffer is not None
        page, inner = divmod(token, TOKENS)
        group, member = divmod(head, HEADS // GROUPS)
        where = {
            "layer_first": (kv, layer, token, head),
            "page_first": (kv, token, layer, head),
            "page_first_direct": (kv, page, layer, inner, head),
            "page_head": (kv, page, head, inner, layer),
            "page_unified": (page, group, layer, kv, inner, member),
        }[self.layout]
        return self.kv_buffer[where]


class MLATokenToKVPoolHost(_Pool):
    def __init__(self, layout: str = "layer_first", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(layout, MLA.get(layout, (1,)), dtype)

    def element(self, layer: int, token: int) -> torch.Tensor:
        assert self.kv_buffer is not None
        page, inner = divmod(token, TOKENS)
        where = {
            "layer_first": (layer, token, 0),
            "page_first": (token, layer, 0),
            "page_first_direct": (page, layer, inner, 0),
            "page_unified": (page, layer, inner),
        }[self.layout]
        return self.kv_buffer[where]


def through_slots(source: Any, target: Any) -> list[bytes]:
    """Copy every page of one pool into slots and from there, in another order, into another pool; the slots' bytes."""
    pages = pool_pages(source)
    assert pool_pages(target).page_bytes == pages.page_bytes
    region = HostRegion.allocate(PAGES, pages.page_bytes, huge_pages=False, prefault=False)
    copies = BlockCopies(np.arange(PAGES), np.arange(PAGES)[::-1].copy())
    for direction, each in (("store", source), ("load", target)):
        blocks = page_blocks(pool_pages(each), pages.page_bytes, whole=True)
        assert PartCopier(blocks, region).copy(direction, copies) is None
    slots = [bytes(region.slot(slot)) for slot in range(PAGES)][::-1]
    region.close()
    return slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", MHA)
def test_every_layout_of_keys_and_values_is_one_canonical_block(layout: str, dtype: torch.dtype) -> None:
    source, target = MHATokenToKVPoolHost(layout, dtype), MHATokenToKVPoolHost("page_first_direct", dtype)
    content = torch.randn(PAGES, LAYERS, 2, TOKENS, HEADS, DIM).to(dtype)
    for page, layer, kv, inner, head in np.ndindex(PAGES, LAYERS, 2, TOKENS, HEADS):
        source.element(layer, kv, page * TOKENS + inner, head)[:] = content[page, layer, kv, inner, head]
    slots = through_slots(source, target)
    # In a slot: [layers, K or V, tokens, heads, elements], C-contiguous, whatever the pool's layout.
    assert slots == [bytes(content[page].contiguous().view(torch.uint8).numpy().tobytes()) for page in range(PAGES)]
    # And in the other pool every element is where SGLang looks for it, to the last bit.
    for page, layer, kv, inner, head in np.ndindex(PAGES, LAYERS, 2, TOKENS, HEADS):
        token = page * TOKENS + inner
        assert torch.equal(target.element(layer, kv, token, head), content[page, layer, kv, inner, head])


@pytest.mark.parametrize("layout", MLA)
def test_every_layout_of_latents_is_one_canonical_block(layout: str) -> None:
    source, target = MLATokenToKVPoolHost(layout), MLATokenToKVPoolHost("layer_first")
    content = torch.randn(PAGES, LAYERS, TOKENS, DIM).to(torch.bfloat16)
    for page, layer, inner in np.ndindex(PAGES, LAYERS, TOKENS):
        source.element(layer, page * TOKENS + inner)[:] = content[page, layer, inner]
    slots = through_slots(source, target)
    assert pool_pages(source).page_bytes == LAYERS * TOKENS * DIM * 2  # once, not as K and as V
    assert slots == [bytes(content[page].contiguous().view(torch.uint8).numpy().tobytes()) for page in range(PAGES)]
    for page, layer, inner in np.ndindex(PAGES, LAYERS, TOKENS):
        assert torch.equal(target.element(layer, page * TOKENS + inner), content[page, layer, inner])


def pool(**changes: Any) -> MHATokenToKVPoolHost:
    made = MHATokenToKVPoolHost()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class MHATokenToKOnlyPoolHost(MHATokenToKVPoolHost):
    """A subclass keeps something else."""


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (MHATokenToKOnlyPoolHost(), "host pool MHATokenToKOnlyPoolHost: "),
        (pool(layout="page_first_kv_split"), "layout 'page_first_kv_split' of MHATokenToKVPoolHost: "),
        (pool(v_head_dim=4), "heads of 8 (K) and 4 (V) in one buffer: "),
        (pool(storage_format_tag="packed"), "page format 'packed': "),
        (pool(kv_buffer=None), "a host pool without memory: "),
    ],
)
def test_pools_that_no_block_holds_are_refused_in_one_line(refused: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^SGLang: {re.escape(why)}kvtier cannot store that; .*$"):
        pool_pages(refused)


# Without SGLang the adapter's import says what is missing, in one line.


def test_the_import_names_the_package_and_its_versions() -> None:
    without = "import sys; sys.modules['sglang'] = None; from kvtier.connector.sglang import KVTierStorage"
    run = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kvtier.connector.sglang needs SGLang, sglang>=0.5.23,<0.6 (")
