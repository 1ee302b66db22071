"""The order of a slot under vLLM's names: one for every backend, or that of vLLM's memory, so that blocks are one run.

vLLM's own classes make the memory of each of its layouts; a real engine has the one that CPUs know.
"""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from lazy_cuda import LazyCuda, LazyDriver, pin
from test_vllm_groups import FULL, NUM_BLOCKS, kv_cache_configs, layers, memory_of
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_rig import BLOCK, engine, prompt, tiers

from kvtier.connector.vllm import slot_plan as vllm_slot_plan
from kvtier.connector.vllm.identity import identity
from kvtier.connector.vllm.options import VllmOptions
from kvtier.connector.vllm.slot_plan import slot_order, slot_plan, warn_of_order
from kvtier.connector.vllm.slots import SlotPlan, engine_blocks
from kvtier.tiers.config.sections import CacheConfig
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import BlockCopies, PartCopier
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.timeout(600)

NUM_LAYERS = 3


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_slot_plan, "block_content", lambda spec, dtype: "plain")


def planned(layout: str, order: Any) -> tuple[SlotPlan, Any, Any]:
    config, worker, scheduler = kv_cache_configs(layout, layers(NUM_LAYERS, attn=FULL))
    config.cache_config.kv_cache_layout = layout
    plans = [
        replace(slot_plan(config, kv, canonical=False), order=slot_order(order, config, kv))
        for kv in (worker, scheduler)
    ]
    assert plans[0] == plans[1]  # both halves say the same
    return plans[0], config, worker


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_in_its_own_order_a_block_of_vllm_is_one_run(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, worker = planned(layout, "physical")
    assert plan.order == ("token-head" if layout in ("LBNHC", "BLNHC") else "head-token")
    caches = memory_of(worker, layout)
    blocks = engine_blocks(plan, caches, 0)
    assert all(part.run_bytes() == part.num_bytes for part in blocks.parts)
    region = HostRegion.allocate(8, plan.block_bytes, prefault=False)
    cuda = LazyCuda(1)
    cuda.patch(monkeypatch)
    pin(region, cuda)
    driver: Any = LazyDriver(cuda)
    stream = CudaCopyStream(blocks, region, driver=driver, ways=CopyWays(CopyChoice(batch_from=0)))
    before = {name: tensor.clone() for name, tensor in caches.items()}
    assert stream.store(BlockCopies(np.array([5, 90, 33]), np.array([7, 1, 4]))).wait(5)
    # a piece a block if its layers lie side by side in vLLM's memory, too; nothing is transposed or staged
    assert (driver.num_batches, driver.num_pieces) == (1, 3 if layout.startswith("B") else 3 * NUM_LAYERS)
    assert cuda.num_ops == 1
    assert stream.load(BlockCopies(np.array([200, 201]), np.array([1, 4]))).wait(5)
    cuda.finish()
    for name, tensor in caches.items():
        assert torch.equal(tensor[200].view(torch.uint8), before[name][90].view(torch.uint8))
        assert torch.equal(tensor[201].view(torch.uint8), before[name][33].view(torch.uint8))
    stream.close(5)
    region.close()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_one_order_is_the_same_bytes_from_every_layout() -> None:
    slots = []
    for layout in ("LBHNC", "BLNHC"):
        plan, _, worker = planned(layout, "head-token")
        caches = memory_of(worker, layout)
        for number, tensor in enumerate(caches.values()):
            values = torch.randn(tensor[7].shape, generator=torch.Generator().manual_seed(number))
            tensor[7].copy_(values)
        region = HostRegion.allocate(1, plan.block_bytes, prefault=False)
        copies = BlockCopies(np.array([7]), np.array([0]))
        assert PartCopier(engine_blocks(plan, caches, 0), region).copy("store", copies) is None
        slots.append(region.array[0, : plan.block_bytes].copy())
        region.close()
    assert np.array_equal(slots[0], slots[1])
    assert NUM_BLOCKS > 7


@pytest.mark.usefixtures("as_on_a_gpu")
def test_another_order_is_another_name(model: Path) -> None:
    def layout_of(layout: str, order: str) -> tuple[str, bytes]:
        plan, config, worker = planned(layout, order)
        config.model_config = SimpleNamespace(**vars(config.model_config), quantization=None, hf_overrides={})
        config.model_config.model, config.model_config.revision = str(model), None
        config.model_config.hf_config_path = config.model_config.quantization_config = None
        config.model_config.multimodal_config = None
        config.cache_config.prefix_caching_hash_algo = "sha256"
        named = identity(config, worker, plan, CacheConfig())
        return named.layout, named.fingerprint()

    shared = layout_of("LBHNC", "head-token")
    assert shared[0] == "vllm-layer-head-token"  # the name of all that was stored before there was a choice
    assert layout_of("LBNHC", "head-token") == shared
    assert layout_of("LBHNC", "physical") == shared  # nothing to choose: it is that order
    own = layout_of("LBNHC", "physical")
    assert own[0] == "vllm-layer-token-head"
    assert own[1] != shared[1]
    assert layout_of("BLNHC", "physical") == own


def test_who_could_be_spared_a_transpose_is_told_so(caplog: pytest.LogCaptureFixture, as_on_a_gpu: None) -> None:
    caplog.set_level("INFO", logger="kvtier")
    for layout, order in (("LBHNC", "head-token"), ("LBNHC", "physical")):
        plan, config, worker = planned(layout, order)
        warn_of_order(plan, config, worker)
    assert not caplog.text
    plan, config, worker = planned("LBNHC", "head-token")
    warn_of_order(plan, config, worker)
    assert 'vLLM keeps KV as LBNHC, so every block is transposed; "order": "physical" keeps it so' in caplog.text


def test_an_order_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match="order 'NHD': use \"head-token\""):
        VllmOptions.of({"order": "NHD"})
    with pytest.raises(ConfigError, match='keys "kvtier" has one order for every engine; leave order out'):
        VllmOptions.of({"order": "physical", "keys": "kvtier"})
    nameless = SimpleNamespace(cache_config=SimpleNamespace())
    with pytest.raises(ConfigError, match="this vLLM does not name its KV layout; leave order out"):
        slot_order("physical", nameless, nameless)


def test_a_real_engine_keeps_its_own_order(model: Path, tmp_path: Path) -> None:
    """On a CPU that is the one order, so either finds what the other stored."""
    asked = prompt(1, 200)
    with engine(model) as cold:
        right = cold.text([asked], 8)
    with engine(model, tiers(tmp_path, order="physical")) as vllm:
        assert vllm.text([asked], 8) == right
        # a worker's copies are counted where vLLM looks, as on a GPU, which this one has not
        ways = get_kv_transfer_group()._worker._ways
        assert ways.wants_measuring
        ways.count("batch", 4096)
        time.sleep(1.1)  # reports come once a second
        vllm.text([prompt(2, 40)], 4)
        reported = {name: value for name, value in vllm.reported().items() if name.startswith("vllm:kvtier_copy_bytes")}
        assert list(reported.values()) == [4096]
    with engine(model, tiers(tmp_path)) as vllm:
        output = vllm.run([asked], 8)[0]
        assert output.num_cached_tokens == 6 * BLOCK
        assert [list(output.outputs[0].token_ids)] == right
    assert len(list(tmp_path.glob("*.slab"))) == 1
