"""The architectures of docs/models.md: each one's tiny configuration, and its checkpoint with random weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers

VOCAB: Final = 512
WINDOW: Final = 64  # tokens that sliding and chunked layers see: less than a prompt
Options = dict[str, Any]
_IDS: Final[Options] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
_SIZES: Final[Options] = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=2048, **_IDS,
    initializer_range=0.2,  # logits far enough apart that greedy text is a fair test
)  # fmt: skip
_HEAD: Final[Options] = dict(head_dim=32)
_SLIDING: Final[Options] = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
_SMALL: Final[Options] = dict(initializer_range=0.02)  # tied embeddings: else a greedy text repeats its last token
_EXPERTS: Final[Options] = dict(num_experts_per_tok=2, moe_intermediate_size=64)
_TWO_OF_FOUR: Final[Options] = dict(num_local_experts=4, num_experts_per_tok=2)
_EVERY_OTHER: Final[Options] = dict(layer_types=["linear_attention", "full_attention"] * 2)
_LINEAR: Final[Options] = _EVERY_OTHER | dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128
)
_MLA: Final[Options] = dict(
    num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
    first_k_dense_replace=4, n_routed_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1,
)  # fmt: skip
_MLA_Q: Final[Options] = _MLA | dict(q_lora_rank=32)
_INDEX: Final[Options] = dict(index_n_heads=32, index_head_dim=128, index_topk=64)
_STATE: Final[Options] = dict(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2)
_GEMMA4: Final[Options] = _HEAD | _SLIDING | _SMALL | dict(
    global_head_dim=64, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16
)  # fmt: skip
_BARE: Final[Options] = dict(hidden_size=128, num_attention_heads=4, vocab_size=VOCAB, initializer_range=0.2)
_FALCON: Final[Options] = _BARE | _IDS | dict(num_hidden_layers=4)

_IMAGES: Final = "AutoModelForImageTextToText"
_MROPE: Final[Options] = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]})
_QWEN_IDS: Final[Options] = dict(
    image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503
)
_EYE: Final[Options] = dict(  # the smallest vision part
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
_QWEN_EYE: Final[Options] = dict(
    depth=1, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=128, patch_size=4
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row: a configuration class of transformers and what it is given."""

    name: str  # on the command line
    label: str  # in the table
    config: str  # transformers' class
    options: Options  # beside the common sizes
    bare: bool = False  # the sizes have other names: `options` are all there is
    model: str = "AutoModelForCausalLM"
    text: str | None = None  # the class of the text half, which gets the options, of a model of several halves
    outer: Options = field(default_factory=dict)  # options of the whole, beside its text half
    vllm_dtype: str = "float32"  # vLLM's CPU kernels of some layers take bfloat16 alone

    def make_config(self) -> Any:
        """A fresh configuration, or None if this transformers lacks the architecture."""
        kind = getattr(transformers, self.config, None)
        if kind is None:
            return None
        options = self.options if self.bare else {**_SIZES, **self.options}
        if self.text is None:
            return kind(**options)
        return kind(text_config=getattr(transformers, self.text)(**options).to_dict(), **self.outer)

    def make_model(self) -> Any:
        auto: Any = getattr(transformers, self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return auto.from_config(self.make_config(), dtype=torch.float32).eval()

    def save(self, path: Path) -> None:
        self.make_model().save_pretrained(path)


def _of(name: str, label: str, config: str, /, *, vllm_dtype: str = "float32", **options: Any) -> Architecture:
    return Architecture(name, label, f"{config}Config", options, vllm_dtype=vllm_dtype)


def _bare(name: str, label: str, config: str, /, model: str = "AutoModelForCausalLM", **options: Any) -> Architecture:
    return Architecture(name, label, f"{config}Config", options, True, model)


def _seeing(
    name: str, label: str, config: str, text: str, options: Options, eye: Options, **outer: Any
) -> Architecture:
    """A model whose text half is asked, and whose vision part has nothing to see."""
    whole = {"vision_config": eye, **outer}
    return Architecture(name, f"{label}, text only", f"{config}Config", options, False, _IMAGES, f"{text}Config", whole)


ARCHITECTURES: Final = (
    _of("llama", "Llama 2, 3", "Llama", **_HEAD),
    _of("llama4", "Llama 4, text", "Llama4Text", **_HEAD, attention_chunk_size=WINDOW, num_local_experts=2,
        intermediate_size_mlp=192, interleave_moe_layer_step=2, no_rope_layers=[1, 0] * 2,
        layer_types=["chunked_attention", "full_attention"] * 2),
    _of("mistral", "Mistral, sliding window", "Mistral", **_HEAD, sliding_window=WINDOW),
    _of("mixtral", "Mixtral", "Mixtral", **_HEAD, **_TWO_OF_FOUR),
    _of("ministral", "Ministral", "Ministral", **_HEAD, **_SLIDING),
    _of("qwen2", "Qwen 2, 2.5", "Qwen2"),
    _of("qwen3", "Qwen 3", "Qwen3", **_HEAD),
    _of("qwen3-moe", "Qwen 3 MoE", "Qwen3Moe", **_HEAD, **_EXPERTS, num_experts=4),
    _of("qwen3-next", "Qwen 3 Next", "Qwen3Next", vllm_dtype="bfloat16", **_EXPERTS, num_experts=4,
        shared_expert_intermediate_size=64, head_dim=128, num_attention_heads=8, num_key_value_heads=8,
        **_LINEAR | {"linear_num_value_heads": 2}),  # small states and large heads: blocks of 64
    _of("qwen3.5", "Qwen 3.5, text", "Qwen3_5Text", **_HEAD,
        **_LINEAR | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    _of("gemma2", "Gemma 2", "Gemma2", **_HEAD, **_SLIDING, query_pre_attn_scalar=32, initializer_range=0.05),
    _of("gemma3", "Gemma 3, text", "Gemma3Text", **_HEAD, **_SLIDING, query_pre_attn_scalar=32, **_SMALL),
    _of("gemma3n", "Gemma 3n, text", "Gemma3nText", **_HEAD, **_SLIDING, num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4, **_SMALL),
    _of("gemma4", "Gemma 4, text", "Gemma4Text", **_GEMMA4, num_kv_shared_layers=0),
    _of("gemma4-shared", "Gemma 4, text, shared K and V", "Gemma4Text", **_GEMMA4, num_kv_shared_layers=2),
    _of("gpt-oss", "gpt-oss", "GptOss", **_HEAD, **_SLIDING, **_TWO_OF_FOUR),
    _of("phi3", "Phi-3 4k, Phi-4", "Phi3"),
    _of("phi3-long", "Phi-3 128k, Phi-4 mini", "Phi3", original_max_position_embeddings=1024,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16,
                         "long_factor": [2.0] * 16, "original_max_position_embeddings": 1024}),
    _of("phimoe", "Phi-3.5 MoE", "Phimoe", num_local_experts=4),
    _of("deepseek-v2", "DeepSeek V2", "DeepseekV2", **_MLA),
    _of("deepseek-v3", "DeepSeek V3, R1, Kimi K2", "DeepseekV3", **_MLA_Q),
    _of("deepseek-v3-moe", "DeepSeek V3 with experts", "DeepseekV3",
        **_MLA_Q | {"first_k_dense_replace": 1, "n_routed_experts": 4}, n_shared_experts=1, moe_intermediate_size=64),
    _of("deepseek-v3.2", "DeepSeek V3.2", "DeepseekV32", **_MLA_Q, **_INDEX),
    _of("minicpm3", "MiniCPM 3", "MiniCPM3", **_MLA_Q),
    _of("longcat-flash", "LongCat-Flash", "LongcatFlash", **_MLA_Q, head_dim=64, num_layers=2,
        ffn_hidden_size=192, expert_ffn_hidden_size=64, moe_topk=2, zero_expert_num=1),
    _of("glm4-moe-lite", "GLM-4.7-Flash", "Glm4MoeLite", **_MLA_Q, moe_intermediate_size=64),
    _of("glm-moe-dsa", "GLM-5", "GlmMoeDsa", **_MLA_Q, **_INDEX, head_dim=64, moe_intermediate_size=64),
    _of("mimo-v2-flash", "MiMo-V2-Flash", "MiMoV2Flash", **_SLIDING, **_EXPERTS, head_dim=48, v_head_dim=32,
        n_routed_experts=4, mlp_layer_types=["dense"] * 4),
    _of("mamba", "Mamba", "Mamba", intermediate_size=256, state_size=16),
    _of("mamba2", "Mamba 2", "Mamba2", **_HEAD, intermediate_size=256, num_heads=8, state_size=16, n_groups=1),
    _of("jamba", "Jamba", "Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=2, mamba_d_state=16, use_mamba_kernels=False),
    _of("bamba", "Bamba", "Bamba", **_STATE, attn_layer_indices=[1, 3]),
    _of("falcon-h1", "Falcon-H1", "FalconH1", **_HEAD, **_STATE, mamba_d_ssm=256),
    _of("granite", "Granite 3", "Granite"),
    _of("granite-hybrid", "Granite 4 hybrid", "GraniteMoeHybrid", **_STATE, layer_types=["mamba", "attention"] * 2,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64),
    _of("nemotron-h", "Nemotron-H", "NemotronH", **_HEAD, layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=1),
    _of("kimi-linear", "Kimi-Linear", "KimiLinear", **_MLA, **_EVERY_OTHER,
        linear_head_dim=32, linear_num_heads=4),
    _of("olmo2", "OLMo 2", "Olmo2"),
    _of("olmo3", "OLMo 3", "Olmo3", **_SLIDING),
    _of("olmoe", "OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _of("cohere", "Command-R", "Cohere"),
    _of("cohere2", "Command-R7B, Command-A", "Cohere2", **_HEAD, **_SLIDING),
    _of("starcoder2", "StarCoder 2", "Starcoder2", sliding_window=WINDOW),
    _bare("falcon", "Falcon 40B", "Falcon", **_FALCON, num_kv_heads=2, new_decoder_architecture=True),
    _bare("falcon-7b", "Falcon 7B", "Falcon", **_FALCON, multi_query=True, new_decoder_architecture=False),
    _bare("gpt2", "GPT-2", "GPT2", vocab_size=VOCAB, n_embd=128, n_layer=4, n_head=4, initializer_range=0.2, **_IDS),
    _bare("gpt-neox", "GPT-NeoX, Pythia", "GPTNeoX", **_FALCON, intermediate_size=192, max_position_embeddings=1024),
    _bare("opt", "OPT", "OPT", hidden_size=128, ffn_dim=192, num_hidden_layers=4, num_attention_heads=4, **_IDS,
          vocab_size=VOCAB, max_position_embeddings=1024, init_std=0.2, word_embed_proj_dim=128),
    _bare("bloom", "BLOOM", "Bloom", hidden_size=128, n_layer=4, n_head=4, vocab_size=VOCAB, initializer_range=0.2,
          **_IDS),
    _bare("mpt", "MPT", "Mpt", d_model=128, n_layers=4, n_heads=4, vocab_size=VOCAB, max_seq_len=1024,
          initializer_range=0.2, use_cache=True),  # its checkpoints switch that off
    _of("glm4", "GLM-4", "Glm4", **_HEAD),
    _of("exaone4", "EXAONE 4", "Exaone4", **_SLIDING, sliding_window_pattern=2),
    _of("smollm3", "SmolLM 3", "SmolLM3"),
    _of("seed-oss", "Seed-OSS", "SeedOss", **_HEAD),
    _of("minimax", "MiniMax", "MiniMax", **_HEAD, **_EVERY_OTHER,
        num_local_experts=4, num_experts_per_tok=2, block_size=32),
    _of("lfm2", "LFM2", "Lfm2", layer_types=["conv", "full_attention"] * 2, conv_L_cache=3),
    _bare("t5", "T5", "T5", "AutoModelForSeq2SeqLM", vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2,
          num_heads=4, tie_word_embeddings=False, initializer_factor=4.0, decoder_start_token_id=0),
    _bare("bart", "BART", "Bart", "AutoModelForSeq2SeqLM", vocab_size=VOCAB, d_model=64, encoder_layers=2,
          decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
          decoder_ffn_dim=96, decoder_start_token_id=1, forced_eos_token_id=None, init_std=0.2),
    _seeing("qwen2-vl", "Qwen 2 VL", "Qwen2VL", "Qwen2VLText", _MROPE,
            dict(depth=1, hidden_size=128, num_heads=2, embed_dim=32, patch_size=4), **_QWEN_IDS),
    _seeing("qwen2.5-vl", "Qwen 2.5 VL", "Qwen2_5_VL", "Qwen2_5_VLText", _MROPE,
            {**_QWEN_EYE, "fullatt_block_indexes": [0]}, **_QWEN_IDS),
    _seeing("qwen3-vl", "Qwen 3 VL", "Qwen3VL", "Qwen3VLText", _HEAD | _MROPE,
            {**_QWEN_EYE, "deepstack_visual_indexes": [0]}, **_QWEN_IDS),
    _seeing("gemma3-vl", "Gemma 3", "Gemma3", "Gemma3Text",
            {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 32, **_SMALL}, {**_EYE, "model_type": "siglip_vision_model"},
            mm_tokens_per_image=4, image_token_index=500, boi_token_index=501, eoi_token_index=502),
    _seeing("mistral3", "Mistral Small 3", "Mistral3", "Mistral", {**_HEAD, "model_type": "mistral"},
            {**_EYE, "model_type": "pixtral"}, image_token_index=500),
    _seeing("llava", "LLaVA", "Llava", "Llama", {**_HEAD, "model_type": "llama"},
            {**_EYE, "model_type": "clip_vision_model"}, image_token_index=500, vision_feature_layer=-1),
)  # fmt: skip
