"""Blends segments into prompts in vLLM's worker, through the layers of vLLM's own model. Needs no vLLM."""

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvtier.connector.segments import (
    BlendAttention,
    Blender,
    BlendRequest,
    BlendResult,
    Layers,
    Repair,
    ReusedPart,
    Scoring,
    Turns,
    checked_rotation,
    tolerance_of,
)
from kvtier.connector.vllm.segments import BlendOrder
from kvtier.connector.vllm.slots import SlotPlan, keys_and_values, split_blocks
from kvtier.tiers import ConfigError
from kvtier.tiers.host import HostRegion

if TYPE_CHECKING:
    from kvtier.connector.segments import Blend

_log = logging.getLogger(__name__)

FAMILIES: Final = {"llama": "LlamaModel", "qwen2": "Qwen2Model", "qwen3": "Qwen3Model"}
"""The kinds of models that are blended, and vLLM's class of their decoder."""

_FAILED: Final = "failed"


class VllmDecoder:
    """The decoder of vLLM's Llama, Qwen2 or Qwen3: their layers are plain modules, but for the attention."""

    def __init__(self, model: Any) -> None:
        self.layers = model.layers
        self.device: torch.device = model.layers[0].self_attn.qkv_proj.weight.device
        self._embed = model.embed_tokens

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self._embed(tokens)
        return states

    def turns(self, states: torch.Tensor, positions: torch.Tensor) -> Turns:
        """None: vLLM's rotary embedding takes the positions."""
        return ()

    def run(
        self, number: int, states: torch.Tensor, positions: torch.Tensor, turns: Turns, attention: BlendAttention
    ) -> torch.Tensor:
        layer = self.layers[number]
        query, key, value = (each.transpose(0, 1)[None] for each in self._projected(layer, states, positions))
        attended = attention.attend(number, query, key, value, Scoring(layer.self_attn.scaling))
        output, _ = layer.self_attn.o_proj(attended[0].flatten(1))
        normed, states = layer.post_attention_layernorm(output, states)
        computed: torch.Tensor = layer.mlp(normed) + states
        return computed

    def keys_and_values(
        self, number: int, states: torch.Tensor, positions: torch.Tensor, turns: Turns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, key, value = self._projected(self.layers[number], states, positions)
        return key, value

    def _projected(self, layer: Any, states: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Q, K and V, `[rows, heads, head dim]` each, Q and K rotated."""
        attention = layer.self_attn
        projected, _ = attention.qkv_proj(layer.input_layernorm(states))
        query, key, value = projected.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        if hasattr(attention, "q_norm"):  # Qwen3
            query, key = (
                norm(each.unflatten(-1, (-1, attention.head_dim))).flatten(1)
                for norm, each in ((attention.q_norm, query), (attention.k_norm, key))
            )
        query, key = attention.rotary_emb(positions, query, key)
        return [each.unflatten(-1, (-1, attention.head_dim)) for each in (query, key, value)]


class _Probe:
    """An attention of whole texts that keeps each layer's K and V."""

    def __init__(self) -> None:
        self.kept: Layers = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.kept.append((key.clone(), value.clone()))
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)


@torch.inference_mode()
def _probed(decoder: VllmDecoder, token_ids: torch.Tensor, positions: torch.Tensor) -> Layers:
    probe: Any = _Probe()
    states, places = decoder.embed(token_ids.to(decoder.device)), positions.to(decoder.device)
    for number in range(len(decoder.layers)):
        states = decoder.run(number, states, places, (), probe)
    kept: Layers = probe.kept
    return kept


def decoder_in(layers: Mapping[str, Any], plan: SlotPlan, config: Any) -> tuple[VllmDecoder, torch.Tensor]:
    """vLLM's decoder with these attention layers, and its `inv_freq`. ConfigError names why it is not blended.

    vLLM gives a connector its attention layers, but not the model around them: that is looked for in this process.
    """
    kind = config.model_type
    if (wanted := FAMILIES.get(kind)) is None:
        raise ConfigError(f"model kind {kind!r}: vLLM's layers of {', '.join(FAMILIES)} are blended")
    attention = [layers.get(name) for name in plan.layers]
    for model in gc.get_objects():
        is_one = type(model).__name__ == wanted and type(model).__module__.startswith("vllm.")
        if is_one and [each.self_attn.attn for each in model.layers] == attention:
            break
    else:
        raise ConfigError(f"model kind {kind!r}: no {wanted} of vLLM's in this process")
    for number, each in enumerate(attention):
        if trait := _trait_of(each, model.layers[number].self_attn):
            raise ConfigError(f"model kind {kind!r}: layer {number} has {trait}")
    decoder = VllmDecoder(model)
    inv_freq: Any = LlamaRotaryEmbedding(config).inv_freq
    dtype = model.layers[0].input_layernorm.weight.dtype
    return decoder, checked_rotation(config, dtype, inv_freq, partial(_probed, decoder))


_UNHEEDED: Final = {
    "sliding_window": (None, (-1, -1), -1),
    "logits_soft_cap": (None, 0),
    "alibi_slopes": (None,),
    "sinks": (None,),
    "kv_sharing_target_layer_name": (None,),
}
"""What a blend's attention ignores, and its values of a layer without it."""


def _trait_of(attention: Any, around: Any) -> str | None:
    """What in one of vLLM's attention layers a blend cannot compute; None: nothing."""
    for name, plain in _UNHEEDED.items():
        if (value := getattr(attention.impl, name, None)) not in plain:
            return f"{name} {value!r}"
    if (kind := getattr(attention.impl, "attn_type", "decoder")) != "decoder":  # a str's enum
        return f"attention of the kind {kind}"
    for name in ("dual_chunk_attention_config", "do_llama_4_scaling"):
        if getattr(around, name, None):
            return name
    return None


@dataclass(slots=True)
class _Blending:
    """One request's blend under way, in memory of its own."""

    order: BlendOrder
    blender: Blender
    blend: "Blend"
    tensor: torch.Tensor  # the request's own blocks, then those of its sources


class Blending:
    """The blends of one worker, called from its thread: `start` → `advance`, step by step, until it names them.

    A blend computes in memory of its own. The request's blocks of vLLM's are written once it is done.
    """

    def __init__(
        self,
        decoder: VllmDecoder,
        inv_freq: torch.Tensor,
        plan: SlotPlan,
        kv_caches: Mapping[str, torch.Tensor],
        step_tokens: int,
    ) -> None:
        """`step_tokens`: the most that one of vLLM's steps computes."""
        self._decoder = decoder
        self._inv_freq = inv_freq
        self._step_tokens = step_tokens
        self._caches = [keys_and_values(split_blocks(plan, kv_caches, name), plan.content) for name in plan.layers]
        keys = self._caches[0][0]
        self._block_shape = (len(plan.layers), 2, plan.block_size, *keys.shape[-2:])
        self._dtype = keys.dtype
        self._running: dict[str, _Blending] = {}
        self._is_tested = False  # KV that vLLM stored is what is computed here

    def start(self, request_id: str, order: BlendOrder, region: HostRegion) -> None:
        """Copy what is reused, which L2 may then forget. ConfigError if this model turns out not to be blended."""
        size = self._block_shape[2]
        num_own = -(-len(order.token_ids) // size)
        ends = [num_own]
        for source in order.parts:
            ends.append(ends[-1] + len(source.slots))
        tensor = torch.zeros(ends[-1], *self._block_shape, dtype=self._dtype, device=self._decoder.device)
        first = order.num_l1 // size
        for layer, (keys, values) in enumerate(self._caches):
            for half, cache in enumerate((keys, values)):
                own = cache[list(order.blocks[:first])]
                tensor[:first, layer, half] = own.reshape(first, *self._block_shape[2:])
        num_computed = order.num_l1
        if order.exact is not None:
            self._read(region, order.exact.slots, tensor[first:])
            num_computed = order.exact.end
        for source, start in zip(order.parts, ends, strict=False):
            self._read(region, source.slots, tensor[start:])
        if not self._is_tested:
            self._require_alike(order, tensor[ends[0] :])
            self._is_tested = True
        parts = [
            ReusedPart(each.start, each.end, each.origin, tuple(range(start, end)))
            for each, start, end in zip(order.parts, ends, ends[1:], strict=False)
        ]
        blender = Blender(self._decoder, tensor, self._inv_freq, self._step_tokens)
        blend = blender.begin(BlendRequest(order.token_ids, list(range(num_own)), num_computed, parts, order.repair))
        self._running[request_id] = _Blending(order, blender, blend, tensor)

    def drop(self, request_id: str) -> bool:
        """End a blend; its blocks stay as they are. Whether there was one."""
        return self._running.pop(request_id, None) is not None

    def advance(self, num_tokens: int) -> dict[str, BlendResult | str]:
        """Do what so many tokens pay for, the oldest first. Returns the blends that end now, or why one failed."""
        ended = dict[str, BlendResult | str]()
        for request_id, each in list(self._running.items()):
            if num_tokens < 1:
                break
            try:
                [num_tokens] = each.blender.advance([(each.blend, num_tokens)])
                if (result := each.blend.result) is not None:
                    self._write(each)
                    ended[request_id] = result
            except Exception:
                _log.exception("a blend failed; its prompt is computed")
                ended[request_id] = _FAILED
            if request_id in ended:
                del self._running[request_id]
        return ended

    def _read(self, region: HostRegion, slots: Sequence[int], blocks: torch.Tensor) -> None:
        for slot, block in zip(slots, blocks, strict=False):
            block.copy_(torch.frombuffer(region.slot(slot), dtype=self._dtype).view(self._block_shape))

    def _write(self, done: _Blending) -> None:
        """Copy what vLLM did not have to its blocks."""
        first, last = done.order.num_l1 // self._block_shape[2], len(done.order.blocks)
        ids = torch.tensor(done.order.blocks[first:last])
        for layer, halves in enumerate(self._caches):
            for half, cache in enumerate(halves):
                cache[ids] = done.tensor[first:last, layer, half].reshape(-1, *cache.shape[1:])

    def _require_alike(self, order: BlendOrder, stored: torch.Tensor) -> None:
        """ConfigError unless the first segment's first block, computed here, is what an engine has stored of it."""
        size, origin = self._block_shape[2], order.parts[0].origin
        token_ids = order.token_ids[origin : origin + size]
        tensor = stored.new_zeros(2, *self._block_shape)
        blender = Blender(self._decoder, tensor, self._inv_freq, self._step_tokens)
        blender.blend([BlendRequest([*token_ids, token_ids[-1]], [0, 1], 0, (), Repair(share=1.0))])
        tolerance = tolerance_of(self._dtype)
        for layer in range(len(tensor[0])):
            for half, name in enumerate("KV"):
                found, wanted = tensor[0, layer, half].float(), stored[0, layer, half].float()
                if not float((found - wanted).norm() / wanted.norm()) <= tolerance:
                    raise ConfigError(f"layer {layer} whose {name} a blend computes otherwise")
