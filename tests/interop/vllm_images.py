"""A real vLLM on the CPU over a small random BLIP-2, with a connector for encoder outputs. Only for where vLLM is."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import vllm_rig  # sets what vLLM reads of the environment

# ruff: isort: split
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.blip import BlipImageProcessorPil
from vllm import LLM
from vllm.config import ECTransferConfig
from vllm.distributed.parallel_state import destroy_model_parallel

ROWS: Final = 32  # of an image's output
PATCH: Final = 14  # pixels
WORDS: Final = "w1 w2 w5 w6"


def make_model(path: Path, *, width: int = 64, layers: int = 3, side: int = 112) -> Path:
    """A checkpoint whose image encoder has that width and depth. Each image has an answer of its own."""
    special, vocabulary = ["<unk>", "<s>", "</s>", "<pad>", "<image>"], vllm_rig.VOCAB
    names = [*(f"w{number}" for number in range(vocabulary - len(special))), *special]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 32}
    text: dict[str, Any] = {"model_type": "opt", "vocab_size": vocabulary, "hidden_size": 128, "ffn_dim": 192}
    text |= {"word_embed_proj_dim": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "init_std": 0.2}
    config = transformers.Blip2Config(
        vision_config={**sizes, "num_hidden_layers": layers, "image_size": side, "patch_size": PATCH},
        qformer_config={**sizes, "num_hidden_layers": 2, "encoder_hidden_size": width, "vocab_size": 32},
        text_config=text,
        num_query_tokens=ROWS,
        image_token_index=vocabulary - 1,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = transformers.Blip2ForConditionalGeneration(config)
    made.float().save_pretrained(path)
    images = BlipImageProcessorPil(size={"height": side, "width": side})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=ROWS).save_pretrained(path)
    return path


def image(seed: int, side: int = 112) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def kvtier(extra: dict[str, Any], role: str = "ec_both") -> dict[str, Any]:
    """The `ec_transfer_config` of kvtier's connector with this extra configuration."""
    return {"ec_connector": "KVTierECConnector", "ec_role": role, "ec_connector_extra_config": extra}


class ImageEngine:
    """One vLLM with a connector of that `ec_transfer_config`, or with none."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None = None, **options: Any) -> None:
        if transfer is not None:
            options["ec_transfer_config"] = ECTransferConfig(**transfer)
        destroy_model_parallel()
        defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 64}
        defaults |= {"block_size": vllm_rig.BLOCK, "enforce_eager": True, "disable_log_stats": False}
        self.llm: Any = LLM(model=str(model), **defaults | options)
        self.core: Any = self.llm.llm_engine.engine_core
        self.llm.generate([{"prompt_token_ids": [1, 2, 3]}], vllm_rig.greedy(1), use_tqdm=False)  # workers map L2

    def text(
        self,
        images: Sequence[Image.Image],
        uuids: Sequence[str] | None = None,
        num_tokens: int = 8,
        settings: dict[str, Any] | None = None,
    ) -> list[list[int]]:
        """The new tokens about each image. vLLM's own caches of images and KV are empty before.

        `settings`: the requests' `mm_processor_kwargs`.
        """
        self.llm.llm_engine.reset_encoder_cache()
        assert self.llm.llm_engine.reset_prefix_cache()
        asked: list[dict[str, Any]] = [{"prompt": WORDS, "multi_modal_data": {"image": each}} for each in images]
        for one, uuid in zip(asked, uuids or (), strict=bool(uuids)):
            one["multi_modal_uuids"] = {"image": [uuid]}
        if settings is not None:
            asked = [{**one, "mm_processor_kwargs": settings} for one in asked]
        return vllm_rig.said(self.llm.generate(asked, vllm_rig.greedy(num_tokens), use_tqdm=False))[0]

    @property
    def half(self) -> Any:
        """The scheduler's half of kvtier's connector (in this process)."""
        return self.core.engine_core.scheduler.ec_connector._scheduler_half

    def close(self) -> None:
        """Our laws hold, nothing leaked, and the engine goes."""
        if getattr(self.core.engine_core.scheduler.ec_connector, "_scheduler_half", None) is not None:
            assert self.half.side.tiers.drain(30)
            self.half.side.tiers.check()
            assert not self.half._items
            assert not self.half._writing
            assert not self.half._loading
        self.core.shutdown()


def image_engine(
    model: Path, transfer: dict[str, Any] | None = None, **options: Any
) -> AbstractContextManager[ImageEngine]:
    """An engine for a `with` block; checked and shut down behind it."""
    return vllm_rig.shut_down(ImageEngine(model, transfer, **options))
