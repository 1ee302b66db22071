"""Stories of a real vLLM on CPU with a small BLIP-2: images that were encoded before are loaded from kvtier's tiers."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from vllm.config import KVTransferConfig
from vllm_images import image, image_engine, kvtier, make_model
from vllm_rig import tiers

from kvtier.connector.vllm.encoder import EncoderWorker

IMAGES = [image(seed) for seed in (1, 2, 3)]
Texts = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("blip2"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Texts:
    """What vLLM alone says about the three images."""
    with image_engine(model) as alone:
        texts = alone.text(IMAGES)
    assert len(set(map(tuple, texts))) == 3
    return texts


@pytest.fixture
def slab(tmp_path: Path) -> dict[str, Any]:
    return tiers(tmp_path / "slab")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The items that workers of this process load."""
    seen: list[str] = []
    load = EncoderWorker._load

    def counted(self: EncoderWorker, op: Any) -> torch.Tensor:
        seen.append(op.request_id)
        return load(self, op)

    monkeypatch.setattr(EncoderWorker, "_load", counted)
    return seen


def test_images_are_loaded_after_vllm_has_forgotten_them_and_after_a_restart(
    model: Path, plain: Texts, loads: list[str], slab: dict[str, Any]
) -> None:
    with image_engine(model, kvtier(slab)) as first:
        assert first.text(IMAGES[:2]) == plain[:2]
        assert loads == []
        assert first.text(IMAGES[1::-1]) == plain[1::-1]
        assert len(set(loads)) == 2
    with image_engine(model, kvtier(slab)) as second:
        assert second.text(IMAGES) == plain
        assert len(loads) == 4
        found = second.half.side.tiers.stats()
        assert found['kvtier_lookup_blocks_total{tier="file"}'] == 2
        series = {each.name for each in second.llm.get_metrics() if each.name.startswith("vllm:encoder_kvtier_")}
        assert "vllm:encoder_kvtier_pool_slots" in series


def test_an_encoding_server_fills_the_tiers_of_one_that_only_loads(
    model: Path, plain: Texts, loads: list[str], slab: dict[str, Any]
) -> None:
    """vLLM drops the reports of a worker that only encodes: the heads in L2 say what it has stored."""
    with image_engine(model, kvtier(slab, "ec_producer")) as encodes:
        encodes.text(IMAGES[:2])
    with image_engine(model, kvtier(slab, "ec_consumer")) as loading:
        assert loading.text(IMAGES) == plain
        assert len(loads) == 2
        assert loading.text(IMAGES[2:]) == plain[2:]  # it stores nothing
        assert len(loads) == 2


def test_both_ranks_of_a_tensor_parallel_vllm_load_an_image(model: Path, plain: Texts, slab: dict[str, Any]) -> None:
    with image_engine(model, kvtier(slab)) as first:
        first.text(IMAGES[:2])
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with image_engine(model, kvtier(slab), **ranks) as second:
        assert second.text(IMAGES) == plain
        assert second.text([IMAGES[2], IMAGES[0]]) == [plain[2], plain[0]]
        found = second.half.side.tiers.stats()
        assert found['kvtier_bytes_total{tier="l2",direction="load"}'] == 4 * second.half._shape.block_bytes


def test_it_stands_beside_the_kv_connector(
    model: Path, plain: Texts, loads: list[str], slab: dict[str, Any], tmp_path: Path
) -> None:
    for _ in range(2):
        with image_engine(model, kvtier(slab), kv_transfer_config=kv(tmp_path / "kv")) as started:
            assert started.text(IMAGES[:2]) == plain[:2]
    assert len(loads) <= 2  # KV of a whole block is loaded as well, and may spare an image's output


def kv(path: Path) -> KVTransferConfig:
    ours = {"kv_connector_extra_config": tiers(path), "kv_load_failure_policy": "recompute"}
    return KVTransferConfig(kv_connector="KVTierConnector", kv_role="kv_both", **ours)


@pytest.mark.parametrize(
    ("options", "name", "settings"),
    [
        ({"enable_prefix_caching": False, "mm_processor_cache_gb": 0}, None, None),
        ({"mm_processor_cache_gb": 0}, "my-image", None),
        ({}, "my-image", {"do_normalize": True}),  # what the model does anyway: vLLM hashes the name with it
    ],
)
def test_kv_of_an_image_that_a_request_or_a_client_names_is_not_kept(
    model: Path,
    plain: Texts,
    loads: list[str],
    slab: dict[str, Any],
    tmp_path: Path,
    options: dict[str, Any],
    name: str | None,
    settings: dict[str, Any] | None,
) -> None:
    """The next process has another image of that name, behind the same words."""
    for number in (0, 1):
        with image_engine(model, kvtier(slab), kv_transfer_config=kv(tmp_path / "kv"), **options) as started:
            assert started.text([IMAGES[number]], name and [name], settings=settings) == [plain[number]]
    assert loads == []


def test_another_way_to_an_encoders_input_is_another_namespace(
    plain: Texts, loads: list[str], slab: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM's hash of an image has no settings of the server, and none of the checkpoint."""
    model, mean = make_model(tmp_path / "model"), [0.0, 0.9, 0.1]
    both: dict[str, Any] = {"transfer": kvtier(slab), "kv_transfer_config": kv(tmp_path / "kv")}
    with image_engine(model, **both) as first:
        assert first.text(IMAGES[:1]) == plain[:1]
    with image_engine(model, **both, mm_processor_kwargs={"image_mean": mean}) as second:
        darker = second.text(IMAGES[:1])
        assert darker != plain[:1]
    file = model / "processor_config.json"
    saved = json.loads(file.read_text())
    saved["image_processor"]["image_mean"] = mean
    file.write_text(json.dumps(saved))
    with image_engine(model, **both) as third:
        assert third.text(IMAGES[:1]) == darker
    assert loads == []
