"""Small random checkpoints of dense families that differ from Llama, for `tiny_models`.

The names and shapes of their tensors are those which transformers writes for such a config; `goldens/record.py` records
them with the results.
"""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.pallas_kernels.ngrams import multipliers, primes

GOLDENS = Path(__file__).parent / "goldens"


@dataclass(frozen=True)
class DenseCase:
    """config: of config.json, but for what `base` has. norm: mean of the norms' scales. gain: of the output head."""

    config: dict[str, Any]
    norm: float = 1.0
    gain: float = 2.0
    embed: float | None = None  # deviation of embeddings; None: 1, or the root of their size's inverse if tied
    prompt_lengths: tuple[int, ...] = (1, 7, 37, 130)
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    published: bool = False  # tensors have the names of DeepSeek's own files, which transformers changes when it saves

    @property
    def text(self) -> dict[str, Any]:
        """The settings of the language model, which may be a part of a model that also sees."""
        return self.config.get("text_config", self.config)


def dense(architecture: str, model_type: str, *, hidden: int = 64, heads: int = 4, layers: int = 2, modern: bool = True,
          norm: float = 1.0, gain: float = 2.0, embed: float | None = None, prompts: tuple[int, ...] = (1, 7, 37, 130),
          options: dict[str, Any] | None = None, published: bool = False,
          **config: Any) -> DenseCase:  # fmt: skip
    """`modern` as in `tiny_models`."""
    base: dict[str, Any] = {
        "architectures": [architecture],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": hidden,
        "intermediate_size": 160,
        "max_position_embeddings": 512,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "vocab_size": 512,
        "transformers_version": "5.0.0" if modern else "4.45.2",
        "dtype" if modern else "torch_dtype": "float32",
    }
    values = {key: value for key, value in (base | config).items() if value is not ABSENT}
    return DenseCase(dict(sorted(values.items())), norm, gain, embed, prompts, options or {}, published)


def seeing(architecture: str, model_type: str, text: DenseCase, vision: dict[str, Any], **config: Any) -> DenseCase:
    """A model that also sees, with this language model."""
    of_whole = {key: text.config[key] for key in ("transformers_version", "dtype", "torch_dtype") if key in text.config}
    values = {key: value for key, value in text.config.items() if key not in ("architectures", "transformers_version")}
    tied = values.pop("tie_word_embeddings", False)
    config = {"text_config": values, "vision_config": vision, "tie_word_embeddings": tied} | config
    config |= {"architectures": [architecture], "model_type": model_type} | of_whole
    return replace(text, config=dict(sorted(config.items())))


ABSENT = object()  # in the place of a value: the key is not in the file
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]
GEMMA = {"norm": 0.0, "num_key_value_heads": 2, "query_pre_attn_scalar": 24, "rms_norm_eps": 1e-5}
GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT2 = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"), ABSENT),
    "max_position_embeddings": ABSENT, "n_positions": 512, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-3,
}  # fmt: skip
BLOOM = dict.fromkeys(
    ("num_attention_heads", "num_hidden_layers", "intermediate_size", "max_position_embeddings"), ABSENT
)
XGLM = dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"), ABSENT)
MPT = BLOOM | {"hidden_size": ABSENT, "max_seq_len": 512}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 0.5}

DENSE_CASES: dict[str, DenseCase] = {
    "diffllama_hub": dense(
        "DiffLlamaForCausalLM", "diffllama", modern=False, hidden=96, heads=8, layers=3, num_key_value_heads=4,
        hidden_act="silu", rms_norm_eps=1e-3, rope_theta=7000.0, lambda_std_dev=0.1, attention_bias=False,
        tie_word_embeddings=False,
    ),
    "diffllama_saved": dense(
        "DiffLlamaForCausalLM", "diffllama", hidden=72, heads=6, num_key_value_heads=6, hidden_act="gelu",
        rms_norm_eps=1e-5, attention_bias=True, head_dim=20, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 9000.0, "rope_type": "linear", "factor": 2.0},
    ),
    "doge_hub": dense(
        "DogeForCausalLM", "doge", modern=False, hidden=72, heads=6, num_key_value_heads=3, hidden_act="silu",
        intermediate_size=156, rms_norm_eps=1e-3, rope_theta=7000.0, keep_window_size=2048, is_moe=False,
        num_experts=16384, num_experts_per_tok=64, norm_topk_prob=False, hidden_dropout=0.0, attention_bias=False,
        mlp_bias=False, sliding_window=None, tie_word_embeddings=False,
    ),
    "doge_saved": dense(
        "DogeForCausalLM", "doge", hidden=64, heads=4, layers=3, num_key_value_heads=2, hidden_act="gelu",
        rms_norm_eps=1e-5, keep_window_size=2048, sliding_window=29, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False, rope_parameters={"rope_theta": 9000.0, "rope_type": "linear", "factor": 2.0},
    ),
    "bitnet_hub": dense(
        "BitNetForCausalLM", "bitnet", modern=False, hidden=72, num_key_value_heads=2, hidden_act="relu2",
        rms_norm_eps=1e-3, rope_theta=7000.0, attention_bias=False,
    ),
    "bitnet_saved": dense(
        "BitNetForCausalLM", "bitnet", heads=6, hidden=96, num_key_value_heads=3, hidden_act="silu", rms_norm_eps=1e-5,
        attention_bias=True, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 9000.0, "rope_type": "linear", "factor": 2.0},
    ),
    "codegen_hub": dense(
        "CodeGenForCausalLM", "codegen", **GPT2, modern=False, n_embd=96, n_head=6, n_layer=3, n_inner=None,
        n_ctx=512, rotary_dim=8, tie_word_embeddings=False,
    ),
    "codegen_saved": dense(
        "CodeGenForCausalLM", "codegen", **GPT2 | {"activation_function": "relu"}, n_embd=64, n_head=4, n_layer=2,
        n_inner=100, n_ctx=2048, rotary_dim=16,
    ),
    "cohere_compass_hub": dense(
        "CohereCompassForCausalLM", "cohere_compass_text", modern=False, layers=4, num_key_value_heads=2,
        hidden_act="silu", layer_norm_eps=1e-3, sliding_window=20, layer_types=THREE_TO_ONE, logit_scale=0.7,
        rope_parameters={
            "sliding_attention": {"rope_theta": 7000.0, "rope_type": "default", "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    ),
    "cohere_compass_saved": dense(
        "CohereCompassForCausalLM", "cohere_compass_text", hidden=72, heads=6, num_key_value_heads=3,
        hidden_act="gelu", layer_norm_eps=1e-5, attention_bias=True, tie_word_embeddings=False,
        rope_parameters={"full_attention": {"rope_theta": 5000.0, "rope_type": "default"}},
    ),
    "phi4_multimodal_long": dense(
        "Phi4MultimodalForCausalLM", "phi4_multimodal", modern=False, num_key_value_heads=2, hidden_act="silu",
        rms_norm_eps=1e-3, original_max_position_embeddings=64, prompts=(66, 75, 100, 130),
        partial_rotary_factor=0.75, rope_theta=7000.0,
        rope_scaling={
            "type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [2.0 + 0.5 * i for i in range(6)],
        },
        tie_word_embeddings=True,
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14, "crop_size": 28,
        },
        audio_config={
            "hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 16, "nemo_conv_channels": 16, "depthwise_separable_out_channel": 16,
        },
    ),
    "phi4_multimodal_window": dense(
        "Phi4MultimodalForCausalLM", "phi4_multimodal", hidden=96, heads=6, num_key_value_heads=3, hidden_act="silu",
        rms_norm_eps=1e-5, sliding_window=22,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14, "crop_size": 28,
        },
        audio_config={
            "hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 16, "nemo_conv_channels": 16, "depthwise_separable_out_channel": 16,
        },
    ),
    "gemma_mqa": dense(
        "GemmaForCausalLM", "gemma", modern=False, norm=0.0, head_dim=32, num_key_value_heads=1, hidden_act="gelu",
        hidden_activation=None, rms_norm_eps=1e-5, rope_theta=10000.0, hidden=72,
    ),
    "gemma2_caps": dense(
        "Gemma2ForCausalLM", "gemma2", **GEMMA, modern=False, head_dim=32, hidden_act="gelu_pytorch_tanh", layers=3,
        hidden_activation="gelu_pytorch_tanh", sliding_window=16, attn_logit_softcapping=3.0, rope_theta=10000.0,
        final_logit_softcapping=2.5, cache_implementation="hybrid", hidden=72,
    ),
    "gemma3_older": dense(
        "Gemma3ForCausalLM", "gemma3_text", **GEMMA, modern=False, head_dim=32, layers=4, sliding_window=24,
        hidden_activation="gelu_pytorch_tanh", rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=3,
        rope_scaling={"rope_type": "linear", "factor": 4.0}, attn_logit_softcapping=None, final_logit_softcapping=None,
    ),
    "gemma3_layer_types": dense(
        "Gemma3ForCausalLM", "gemma3_text", **GEMMA, head_dim=16, layers=4, sliding_window=20, layer_types=THREE_TO_ONE,
        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=False, attention_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    "gemma3n_older": dense(
        "Gemma3nForCausalLM", "gemma3n_text", modern=False, hidden=72, layers=5, num_key_value_heads=2, head_dim=16,
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-3, sliding_window=20, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=480, intermediate_size=[160, 144, 160, 160, 160],
        activation_sparsity_pattern=[0.9, 0.6, 0.0, 0.0, 0.0], altup_active_idx=0, altup_coef_clip=120.0,
        altup_correct_scale=True, altup_lr_multiplier=1.0, altup_num_inputs=4, laurel_rank=8, rope_theta=1e6,
        rope_local_base_freq=1e4, rope_scaling=None, final_logit_softcapping=3.0, attention_bias=False,
        tie_word_embeddings=True,
    ),
    "gemma3n_second_stream": dense(
        "Gemma3nForCausalLM", "gemma3n_text", hidden=64, layers=4, num_key_value_heads=1, head_dim=24,
        hidden_activation="gelu", rms_norm_eps=1e-5, sliding_window=24, num_kv_shared_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=512, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.3],
        altup_active_idx=1, altup_correct_scale=False, altup_num_inputs=3, laurel_rank=6,
        final_logit_softcapping=9.0, attention_bias=True, tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    "gemma4_sharing": dense(
        "Gemma4ForCausalLM", "gemma4_text", modern=False, hidden=72, layers=6, num_key_value_heads=1, head_dim=16,
        global_head_dim=32, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-3, sliding_window=20,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, num_kv_shared_layers=3,
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=512, use_double_wide_mlp=True,
        final_logit_softcapping=2.5, attention_k_eq_v=False, num_global_key_value_heads=None, enable_moe_block=False,
        use_bidirectional_attention=None, num_experts=None, top_k_experts=None, moe_intermediate_size=None,
        tie_word_embeddings=True, rope_parameters=GEMMA4_ROPES,
    ),
    "gemma4_keys_are_values": dense(
        "Gemma4ForCausalLM", "gemma4_text", layers=4, num_key_value_heads=2, head_dim=16, hidden_activation="gelu",
        rms_norm_eps=1e-5, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2,
        per_layer_config={layer: {"head_dim": 24, "num_key_value_heads": 1} for layer in "13"}, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=262144, num_kv_shared_layers=0, attention_bias=True,
        tie_word_embeddings=False, use_bidirectional_attention="vision",
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e5, "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    "gemma4_unified_scalars": dense(
        "Gemma4UnifiedForCausalLM", "gemma4_unified_text", hidden=96, layers=4, num_key_value_heads=2, head_dim=16,
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-3, sliding_window=18, num_kv_shared_layers=2,
        layer_types=["full_attention", "sliding_attention"] * 2,
        per_layer_config={layer: {"head_dim": 32} for layer in "023"},
        use_double_wide_mlp=True, tie_word_embeddings=True, rope_parameters=GEMMA4_ROPES,
    ),
    "neox_parallel": dense(
        "GPTNeoXForCausalLM", "gpt_neox", modern=False, hidden=96, heads=3, hidden_act="gelu", rotary_pct=0.25,
        rotary_emb_base=5000, use_parallel_residual=True, layer_norm_eps=1e-3, tie_word_embeddings=False,
    ),
    "neox_sequential": dense(
        "GPTNeoXForCausalLM", "gpt_neox", hidden=80, hidden_act="gelu_new", use_parallel_residual=False,
        layer_norm_eps=1e-3,
        rope_parameters={"rope_theta": 7000.0, "partial_rotary_factor": 0.6, "rope_type": "default"},
    ),
    "opt_pre": dense(
        "OPTForCausalLM", "opt", modern=False, hidden=72, intermediate_size=ABSENT, ffn_dim=136,
        activation_function="relu", word_embed_proj_dim=72, do_layer_norm_before=True, dropout=0.1, init_std=0.02,
        layerdrop=0.0, _remove_final_layer_norm=False,
    ),
    "opt_350m": dense(
        "OPTForCausalLM", "opt", modern=False, hidden=96, intermediate_size=ABSENT, ffn_dim=160,
        activation_function="relu", word_embed_proj_dim=40, do_layer_norm_before=False, gain=3.0,
    ),
    "opt_untied": dense(
        "OPTForCausalLM", "opt", intermediate_size=ABSENT, ffn_dim=160, activation_function="gelu",
        tie_word_embeddings=False, enable_bias=False, layer_norm_elementwise_affine=False,
    ),
    "cohere_interleaved": dense(
        "CohereForCausalLM", "cohere", modern=False, hidden=96, num_key_value_heads=2, logit_scale=0.7,
        hidden_act="silu", layer_norm_eps=1e-3, rope_theta=7000.0, use_qk_norm=False,
    ),
    "cohere_qk_norm": dense(
        "CohereForCausalLM", "cohere", hidden=128, heads=8, num_key_value_heads=2, logit_scale=0.7, hidden_act="silu",
        layer_norm_eps=1e-3, use_qk_norm=True, attention_bias=True,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "cohere2_windows": dense(
        "Cohere2ForCausalLM", "cohere2", modern=False, layers=4, num_key_value_heads=2, logit_scale=0.7, head_dim=16,
        hidden_act="silu", layer_norm_eps=1e-3, rope_theta=7000.0, sliding_window=16, sliding_window_pattern=3,
        order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rotary_pct=1.0,
        layer_switch=3, use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
        use_parallel_embedding=False,
    ),
    "olmo_clip": dense(
        "OlmoForCausalLM", "olmo", modern=False, num_key_value_heads=2, hidden_act="silu", clip_qkv=0.9,
        tie_word_embeddings=False, rope_theta=10000.0,
    ),
    "olmo2_post": dense(
        "Olmo2ForCausalLM", "olmo2", hidden=128, heads=8, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-3,
        intermediate_size=256, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    ),
    "olmo3_yarn": dense(
        "Olmo3ForCausalLM", "olmo3", modern=False, layers=4, num_key_value_heads=2, hidden_act="silu", hidden=96,
        rms_norm_eps=1e-3, sliding_window=20, layer_types=THREE_TO_ONE, rope_theta=500000.0,
        rope_scaling=_YARN | {"attention_factor": 1.2},
    ),
    "granite_multipliers": dense(
        "GraniteForCausalLM", "granite", modern=False, hidden=96, num_key_value_heads=2, hidden_act="silu",
        embedding_multiplier=3.0, logits_scaling=0.6, residual_multiplier=0.4, attention_multiplier=0.11,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_theta=10000.0, rms_norm_eps=1e-3,
    ),
    "granite_plain_attention": dense(  # which is a MiniCPM by other names
        "GraniteForCausalLM", "granite", hidden=96, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-3,
        embedding_multiplier=3.0, logits_scaling=0.6, residual_multiplier=0.4, attention_multiplier=24**-0.5,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "phi3_window": dense(
        "Phi3ForCausalLM", "phi3", modern=False, hidden=96, num_key_value_heads=2, hidden_act="silu", sliding_window=19,
        rope_theta=10000.0, rope_scaling=None, original_max_position_embeddings=512, rms_norm_eps=1e-3,
        attention_bias=False, resid_pdrop=0.0, embd_pdrop=0.0,
    ),
    "phi3_longrope": dense(
        "Phi3ForCausalLM", "phi3", modern=False, num_key_value_heads=2, hidden_act="silu", rope_theta=10000.0,
        original_max_position_embeddings=32, prompts=(33, 41, 70, 130), partial_rotary_factor=0.75, rms_norm_eps=1e-3,
        rope_scaling={
            "type": "longrope", "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        },
    ),
    "phi3_longrope_short": dense(
        "Phi3ForCausalLM", "phi3", num_key_value_heads=2, hidden_act="silu", original_max_position_embeddings=256,
        rms_norm_eps=1e-3, options={"max_model_len": 256}, max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [8.0] * 8, "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
        },
    ),
    "phi_parallel": dense(
        "PhiForCausalLM", "phi", modern=False, hidden=80, hidden_act="gelu_new", partial_rotary_factor=0.4,
        layer_norm_eps=1e-3, qk_layernorm=False, rope_theta=10000.0, num_key_value_heads=4, embd_pdrop=0.0,
    ),
    "phi_qk_norm": dense(
        "PhiForCausalLM", "phi", hidden=96, hidden_act="gelu_new", layer_norm_eps=1e-3, qk_layernorm=True,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 9000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
    ),
    "gpt2_scaled": dense(
        "GPT2LMHeadModel", "gpt2", **GPT2, modern=False, n_embd=72, n_head=3, n_layer=3, n_ctx=512, n_inner=None,
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=False, resid_pdrop=0.1, summary_type="cls_index",
    ),
    "gpt2_inner": dense("GPT2LMHeadModel", "gpt2", **GPT2, n_embd=64, n_head=4, n_layer=2, n_inner=100),
    "falcon_7b": dense(
        "FalconForCausalLM", "falcon", modern=False, hidden=112, heads=7, intermediate_size=ABSENT, multi_query=True,
        parallel_attn=True, new_decoder_architecture=False, bias=False, alibi=False, layer_norm_epsilon=1e-3,
        apply_residual_connection_post_layernorm=False, num_kv_heads=71,
    ),
    "falcon_40b": dense(
        "FalconForCausalLM", "falcon", modern=False, heads=8, hidden=128, intermediate_size=ABSENT, num_kv_heads=2,
        parallel_attn=True, new_decoder_architecture=True, bias=False, alibi=False, layer_norm_epsilon=1e-3,
    ),
    "falcon_11b": dense(
        "FalconForCausalLM", "falcon", heads=4, intermediate_size=ABSENT, num_kv_heads=2, ffn_hidden_size=150,
        new_decoder_architecture=True, bias=True, num_ln_in_parallel_attn=1, tie_word_embeddings=False,
        layer_norm_epsilon=1e-3, activation="gelu", rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
    ),
    "falcon_sequential": dense(
        "FalconForCausalLM", "falcon", modern=False, intermediate_size=ABSENT, multi_query=False, parallel_attn=False,
        new_decoder_architecture=False, bias=True, alibi=False, layer_norm_epsilon=1e-3,
    ),
    "stablelm_2": dense(
        "StableLmForCausalLM", "stablelm", modern=False, num_key_value_heads=4, hidden_act="silu", use_qkv_bias=True,
        layer_norm_eps=1e-3, partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False,
    ),
    "stablelm_12b": dense(
        "StableLmForCausalLM", "stablelm", hidden=96, num_key_value_heads=2, hidden_act="silu", qk_layernorm=True,
        use_parallel_residual=True, layer_norm_eps=1e-3,
        rope_parameters={"rope_theta": 10000, "partial_rotary_factor": 0.34, "rope_type": "default"},
    ),
    "starcoder2_window": dense(
        "Starcoder2ForCausalLM", "starcoder2", modern=False, num_key_value_heads=2, hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-3, use_bias=True, sliding_window=18, rope_theta=10000.0, mlp_type="default",
        norm_type="layer_norm", embedding_dropout=0.1, residual_dropout=0.1,
    ),
    "smollm3_positions": dense(
        "SmolLM3ForCausalLM", "smollm3", modern=False, layers=4, num_key_value_heads=2, no_rope_layer_interval=3,
        hidden_act="silu", no_rope_layers=[1, 1, 0, 1], rope_theta=5000.0, use_sliding_window=False,
        max_window_layers=4, sliding_window=None, layer_types=["full_attention"] * 4, rms_norm_eps=1e-3,
        attention_bias=True, mlp_bias=True,
    ),
    "smollm3_windows": dense(
        "SmolLM3ForCausalLM", "smollm3", layers=4, num_key_value_heads=2, no_rope_layer_interval=2, hidden_act="silu",
        use_sliding_window=True, sliding_window=18, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    ),
    "glm_half": dense(
        "GlmForCausalLM", "glm", modern=False, hidden=96, head_dim=24, num_key_value_heads=2, hidden_act="silu",
        partial_rotary_factor=0.5, rope_theta=10000.0, attention_bias=True, rms_norm_eps=1e-3,
    ),
    "glm4_sandwich": dense(
        "Glm4ForCausalLM", "glm4", head_dim=32, num_key_value_heads=1, hidden_act="silu", attention_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
    ),
    "exaone4_windows": dense(
        "Exaone4ForCausalLM", "exaone4", modern=False, layers=4, num_key_value_heads=2, hidden_act="silu",
        sliding_window=17, sliding_window_pattern="LLG", head_dim=24, rms_norm_eps=1e-3, rope_theta=5000.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling={
            "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "exaone4_full": dense(
        "Exaone4ForCausalLM", "exaone4", num_key_value_heads=2, hidden_act="silu", sliding_window=None,
        layer_types=["full_attention"] * 2,
        rms_norm_eps=1e-3, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}, tie_word_embeddings=True,
    ),
    "seed_oss_biases": dense(
        "SeedOssForCausalLM", "seed_oss", modern=False, head_dim=24, num_key_value_heads=2, hidden_act="silu",
        attention_bias=True, attention_out_bias=True, mlp_bias=True, rope_theta=1e7, rms_norm_eps=1e-3,
        rope_scaling={"rope_type": "default"}, residual_dropout=0.1,
    ),
    "internlm3_biases": dense(
        "InternLM3ForCausalLM", "internlm3", head_dim=24, num_key_value_heads=2, hidden_act="silu",
        attention_bias=True, mlp_bias=True, rope_parameters={"rope_theta": 5e4, "rope_type": "default"},
        rms_norm_eps=1e-3,
    ),
    "ministral_windows": dense(
        "MinistralForCausalLM", "ministral", layers=4, head_dim=24, num_key_value_heads=2, hidden_act="silu",
        sliding_window=21, layer_types=THREE_TO_ONE, rms_norm_eps=1e-3,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "ministral3_scaled": dense(
        "Ministral3ForCausalLM", "ministral3", head_dim=24, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-3,
        rope_parameters=_YARN | {
            "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 32, "max_position_embeddings": 512,
        },
    ),
    "hunyuan_alpha": dense(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", modern=False, head_dim=24, num_key_value_heads=2,
        hidden_act="silu", rope_theta=10000.0, attention_bias=True, rms_norm_eps=1e-3, tie_word_embeddings=True,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                      "mscale_all_dim": 1.0},
    ),
    "nemotron_squares": dense(
        "NemotronForCausalLM", "nemotron", modern=False, norm=0.0, head_dim=24, num_key_value_heads=2,
        hidden_act="relu2", partial_rotary_factor=0.5, rope_theta=10000.0, norm_eps=1e-3, attention_bias=True,
        mlp_bias=True,
    ),
    "ernie_biases": dense(
        "Ernie4_5ForCausalLM", "ernie4_5", modern=False, head_dim=24, num_key_value_heads=2, hidden_act="silu",
        use_bias=True, rope_theta=5e5, rms_norm_eps=1e-3,
    ),
    "helium_pairs": dense(
        "HeliumForCausalLM", "helium", hidden=96, head_dim=24, num_key_value_heads=2, hidden_act="silu",
        attention_bias=True, mlp_bias=True, rope_parameters={"rope_theta": 5e4, "rope_type": "default"},
        rms_norm_eps=1e-3, tie_word_embeddings=False,
    ),
    "arcee_squares": dense(
        "ArceeForCausalLM", "arcee", modern=False, hidden_act="relu2", num_key_value_heads=2, head_dim=24,
        attention_bias=True, mlp_bias=True, rope_theta=1e4, rms_norm_eps=1e-3, tie_word_embeddings=False,
        rope_scaling=_YARN,
    ),
    "cwm_windows": dense(
        "CwmForCausalLM", "cwm", layers=5, hidden_act="silu", num_key_value_heads=2, head_dim=24, sliding_window=15,
        rms_norm_eps=1e-3, tie_word_embeddings=False,
        rope_parameters={
            "rope_theta": 1e6, "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    # DeepSeek: latent attention, experts from the second layer on.
    "deepseek_v2_lite": dense(
        "DeepseekV2ForCausalLM", "deepseek_v2", modern=False, layers=3, hidden_act="silu", rms_norm_eps=1e-5,
        q_lora_rank=None, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20,
        num_key_value_heads=4, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, n_group=1, topk_group=1,
        moe_intermediate_size=48, first_k_dense_replace=1, topk_method="greedy", scoring_func="softmax",
        norm_topk_prob=False, routed_scaling_factor=1.5, moe_layer_freq=1, rope_theta=10000.0,
        rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    ),
    "deepseek_v2_groups": dense(
        "DeepseekV2ForCausalLM", "deepseek_v2", layers=2, hidden_act="silu", rms_norm_eps=1e-5, attention_bias=True,
        q_lora_rank=36, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24,
        num_key_value_heads=4, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, n_group=4, topk_group=2,
        moe_intermediate_size=32, first_k_dense_replace=0, topk_method="group_limited_greedy", norm_topk_prob=True,
        routed_scaling_factor=2.0, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    ),
    "deepseek_v3_groups": dense(
        "DeepseekV3ForCausalLM", "deepseek_v3", layers=3, heads=8, hidden_act="silu", rms_norm_eps=1e-5,
        q_lora_rank=36, kv_lora_rank=48, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
        num_key_value_heads=8, n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, n_group=4, topk_group=2,
        moe_intermediate_size=40, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        rope_interleave=True, rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 1.0,
        },
    ),
    # As transformers 5 writes it. No prompt is longer than what the indexer chooses.
    "deepseek_v32_all_seen": dense(
        "DeepseekV32ForCausalLM", "deepseek_v32", layers=3, heads=8, hidden_act="silu", rms_norm_eps=1e-5,
        q_lora_rank=36, kv_lora_rank=48, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
        num_key_value_heads=8, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, n_group=3, topk_group=2,
        moe_intermediate_size=40, mlp_layer_types=["dense", "sparse", "sparse"], norm_topk_prob=True,
        routed_scaling_factor=1.5, index_topk=256, index_n_heads=2, index_head_dim=16,
        layer_types=["indexed_attention"] * 3, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    # Prompts are longer than what the indexers choose. With 16 heads hardly any tokens have the same score. With few
    # heads many scores are exactly zero; which of these tokens transformers chooses depends on the length of the pass.
    "deepseek_v32_hub": dense(
        "DeepseekV32ForCausalLM", "deepseek_v32", modern=False, layers=3, hidden_act="silu", rms_norm_eps=1e-5,
        q_lora_rank=36, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20, num_key_value_heads=4,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, n_group=4, topk_group=2, scoring_func="sigmoid",
        topk_method="noaux_tc", moe_intermediate_size=40, moe_layer_freq=1, ep_size=1, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, index_topk=11, index_n_heads=16, index_head_dim=20,
        num_nextn_predict_layers=1, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False,
        rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    ),
    "deepseek_v32_odd": dense(
        "DeepseekV32ForCausalLM", "deepseek_v32", layers=2, hidden=72, heads=6, hidden_act="silu", rms_norm_eps=1e-3,
        q_lora_rank=28, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=12, v_head_dim=24, head_dim=12,
        num_key_value_heads=6, n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=48, mlp_layer_types=["sparse", "dense"], norm_topk_prob=False, attention_bias=True,
        routed_scaling_factor=0.8, index_topk=19, index_n_heads=24, index_head_dim=12, tie_word_embeddings=False,
        layer_types=["indexed_attention"] * 2, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
    ),
    # As published: other names of settings, rates of layers with one more for a block behind them, and one object of
    # rotary settings. Prompts are longer than windows, than entries, and than what indexers choose. These have many
    # heads for the reason above.
    "deepseek_v4_hub": dense(
        "DeepseekV4ForCausalLM", "deepseek_v4", modern=False, published=True, layers=4, intermediate_size=ABSENT,
        hidden_act="silu", rms_norm_eps=1e-5, num_key_value_heads=1, head_dim=24, qk_rope_head_dim=8, q_lora_rank=36,
        o_groups=2, o_lora_rank=20, sliding_window=24, compress_ratios=[4, 0, 128, 4, 0], compress_rate_hca=20,
        index_topk=7, index_n_heads=16, index_head_dim=16, num_hash_layers=2, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=3, moe_intermediate_size=40, scoring_func="sqrtsoftplus", topk_method="noaux_tc",
        norm_topk_prob=True, routed_scaling_factor=1.5, swiglu_limit=1.2, hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-3,
        num_nextn_predict_layers=1, attention_bias=False, tie_word_embeddings=False, rope_theta=10000,
        compress_rope_theta=40000, rope_scaling={
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        },
    ),
    "deepseek_v4_saved": dense(
        "DeepseekV4ForCausalLM", "deepseek_v4", hidden=72, heads=6, layers=3, intermediate_size=ABSENT,
        hidden_act="gelu", rms_norm_eps=1e-3, num_key_value_heads=1, head_dim=20, partial_rotary_factor=0.4,
        q_lora_rank=28, o_groups=3, o_lora_rank=14, sliding_window=16, index_topk=9, index_n_heads=24,
        index_head_dim=12, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=48,
        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=0.8, swiglu_limit=1.5, hc_mult=2,
        hc_sinkhorn_iters=2, hc_eps=1e-2, num_nextn_predict_layers=1, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=False, rope_theta=8000.0, compress_rope_theta=160000.0, output_router_logits=False,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 10},
        mlp_layer_types=["moe", "hash_moe", "moe"],
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 8000.0, "partial_rotary_factor": 0.4},
            "compress": {
                "rope_type": "yarn", "rope_theta": 30000.0, "partial_rotary_factor": 0.4, "factor": 3.0,
                "original_max_position_embeddings": 64, "attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 2.0,
            },
        },
    ),
    "glm_moe_dsa_hub": dense(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", modern=False, layers=4, hidden_act="silu", rms_norm_eps=1e-5,
        q_lora_rank=36, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=28, num_key_value_heads=4,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1, scoring_func="sigmoid",
        topk_method="noaux_tc", moe_intermediate_size=40, moe_layer_freq=1, ep_size=1, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, index_topk=13, index_n_heads=16, index_head_dim=20,
        indexer_rope_interleave=True, rope_interleave=True, index_topk_freq=2, index_skip_topk_offset=1,
        index_topk_pattern=None, num_nextn_predict_layers=1, index_share_for_mtp_iteration=True, attention_bias=False,
        rope_theta=7000.0, rope_scaling=None, tie_word_embeddings=False,
    ),
    "glm_moe_dsa_saved": dense(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", layers=4, hidden=72, heads=6, hidden_act="silu", rms_norm_eps=1e-3,
        q_lora_rank=28, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=12, v_head_dim=24, head_dim=12,
        num_key_value_heads=6, n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=4, n_group=4, topk_group=2,
        moe_intermediate_size=40, mlp_layer_types=["dense", "sparse", "sparse", "dense"], norm_topk_prob=False,
        attention_bias=True, routed_scaling_factor=0.8, index_topk=9, index_n_heads=24, index_head_dim=12,
        indexer_types=["full", "shared", "full", "shared"], layer_types=["indexed_attention"] * 4,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 0.7, "mscale_all_dim": 0.9,
        },
    ),
    "youtu_hub": dense(
        "YoutuForCausalLM", "youtu", modern=False, hidden=72, hidden_act="silu", rms_norm_eps=1e-3, q_lora_rank=36,
        kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20, num_key_value_heads=4,
        attention_bias=True, rope_theta=7000.0, rope_scaling=None, rope_interleave=True, mlp_bias=False,
        pad_token_id=ABSENT,
    ),
    "youtu_untied": dense(
        "YoutuForCausalLM", "youtu", layers=3, hidden_act="silu", rms_norm_eps=1e-5, q_lora_rank=None, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=12, v_head_dim=24, num_key_value_heads=4, rope_interleave=False,
        tie_word_embeddings=False,
        rope_parameters=_YARN | {"rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "minicpm3_longrope": dense(
        "MiniCPM3ForCausalLM", "minicpm3", modern=False, hidden=72, hidden_act="silu", rms_norm_eps=1e-3,
        q_lora_rank=36, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, num_key_value_heads=4, scale_emb=3,
        scale_depth=1.1, dim_model_base=48, tie_word_embeddings=True, attention_bias=True, rope_theta=10000.0,
        prompts=(33, 41, 70, 130),
        rope_scaling={
            "type": "longrope", "original_max_position_embeddings": 32, "long_factor": [1.0, 2.0, 4.0, 9.0],
            "short_factor": [1.0, 1.1, 1.3, 1.5],
        },
    ),
    "minicpm3_plain": dense(
        "MiniCPM3ForCausalLM", "minicpm3", layers=3, hidden_act="silu", rms_norm_eps=1e-5, q_lora_rank=None,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=12, v_head_dim=24, num_key_value_heads=4, scale_emb=2.0,
        scale_depth=None, dim_model_base=None, mlp_bias=True, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "hyperclovax_post_norms": dense(
        "HyperCLOVAXForCausalLM", "hyperclovax", modern=False, hidden=72, head_dim=24, num_key_value_heads=2,
        hidden_act="silu", rms_norm_eps=1e-3, embedding_multiplier=3.0, logits_scaling=0.6, residual_multiplier=0.4,
        attention_multiplier=0.11, attention_bias=True, mlp_bias=True, use_post_norm=True, rope_theta=7000.0,
        rope_scaling=None,
    ),
    "hyperclovax_plain": dense(
        "HyperCLOVAXForCausalLM", "hyperclovax", num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-5,
        residual_multiplier=0.7, use_post_norm=False, tie_word_embeddings=True, attention_multiplier=None,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "granite_swa_bases": dense(
        "GraniteSWAForCausalLM", "granite_swa", layers=5, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-3,
        embedding_multiplier=3.0, logits_scaling=0.6, residual_multiplier=0.4, attention_multiplier=0.11,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False, sliding_window=18,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"],
        layer_rope_theta=[5000.0, 90000.0, 5000.0, 0.0, 700.0],
        rope_parameters={"rope_theta": 7000.0, "rope_type": "linear", "factor": 2.0},
    ),
    "granite_swa_older": dense(
        "GraniteSWAForCausalLM", "granite_swa", modern=False, hidden=72, layers=5, num_key_value_heads=4,
        hidden_act="silu", rms_norm_eps=1e-3, embedding_multiplier=2.0, sliding_window=21, attention_multiplier=0.2,
        rope_theta=7000.0, rope_scaling=None,
    ),
    "gpt_bigcode_shared": dense(
        "GPTBigCodeForCausalLM", "gpt_bigcode", **GPT2, modern=False, n_embd=72, n_head=3, n_layer=3, n_inner=None,
        multi_query=True, attention_softmax_in_fp32=True, scale_attention_softmax_in_fp32=True, inference_runner=0,
        max_batch_size=None, pad_key_length=True, pre_allocate_kv_cache=False, validate_runner_input=True,
        resid_pdrop=0.1, scale_attn_weights=True,
    ),
    "gpt_bigcode_each": dense(
        "GPTBigCodeForCausalLM", "gpt_bigcode", **GPT2 | {"activation_function": "gelu_pytorch_tanh"}, n_embd=64,
        n_head=4, n_layer=2, n_inner=100, multi_query=False, scale_attn_weights=False, tie_word_embeddings=False,
    ),
    "gptj_older": dense(
        "GPTJForCausalLM", "gptj", **GPT2, modern=False, n_embd=72, n_head=3, n_layer=3, n_inner=None, rotary_dim=8,
        rotary=True, scale_attn_weights=True, resid_pdrop=0.1, gradient_checkpointing=False,
    ),
    "gptj_inner": dense(
        "GPTJForCausalLM", "gptj", **GPT2 | {"activation_function": "gelu"}, n_embd=64, n_head=4, n_layer=2,
        n_inner=100, rotary_dim=16, tie_word_embeddings=False,
    ),
    "gpt_neo_windows": dense(
        "GPTNeoForCausalLM", "gpt_neo", modern=False, hidden=72, num_attention_heads=ABSENT, num_hidden_layers=ABSENT,
        num_heads=3, num_layers=4, intermediate_size=None, activation_function="gelu_new", layer_norm_epsilon=1e-3,
        attention_types=[[["global", "local"], 2]], attention_layers=["global", "local"] * 2, window_size=18,
        resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0, gradient_checkpointing=False,
    ),
    "gpt_neo_kinds": dense(
        "GPTNeoForCausalLM", "gpt_neo", num_attention_heads=ABSENT, num_hidden_layers=ABSENT, num_heads=4,
        num_layers=3, intermediate_size=100, activation_function="gelu", layer_norm_epsilon=1e-3,
        attention_types=[[["local"], 2], [["global"], 1]], window_size=25, tie_word_embeddings=False,
    ),
    "apertus_hub": dense(
        "ApertusForCausalLM", "apertus", modern=False, hidden=72, head_dim=24, num_key_value_heads=2,
        hidden_act="xielu", rms_norm_eps=1e-3, attention_bias=True, mlp_bias=False, post_norm=False, qk_norm=True,
        hidden_dropout=0.0, rope_theta=7000.0, tie_word_embeddings=False,
        rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
            "rope_type": "llama3", "type": "llama3",
        },
    ),
    "apertus_tied": dense(
        "ApertusForCausalLM", "apertus", num_key_value_heads=4, hidden_act="xielu", rms_norm_eps=1e-5, layers=3,
        tie_word_embeddings=True, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"}, pad_token_id=ABSENT,
    ),
    "nanochat_capped": dense(
        "NanoChatForCausalLM", "nanochat", modern=False, hidden=72, num_key_value_heads=2, hidden_act="relu2",
        rms_norm_eps=1e-3, attention_bias=True, final_logit_softcapping=2.5, rope_theta=7000.0, rope_scaling=None,
    ),
    "nanochat_plain": dense(
        "NanoChatForCausalLM", "nanochat", num_key_value_heads=4, hidden_act="gelu", rms_norm_eps=1e-5, layers=3,
        final_logit_softcapping=None, rope_parameters={"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
    ),
    "bloom_odd": dense(
        "BloomForCausalLM", "bloom", **BLOOM, modern=False, hidden=72, n_layer=3, n_head=6, layer_norm_epsilon=1e-3,
        seq_length=512, offset_alibi=100, masked_softmax_fusion=True, bias_dropout_fusion=True, skip_bias_add=True,
        attention_softmax_in_fp32=True, unk_token_id=0, apply_residual_connection_post_layernorm=False,
        hidden_dropout=0.0, pretraining_tp=2,
    ),
    "bloom_untied": dense(
        "BloomForCausalLM", "bloom", **BLOOM, n_layer=2, n_head=4, layer_norm_epsilon=1e-5, tie_word_embeddings=False,
    ),
    "mpt_clip": dense(
        "MptForCausalLM", "mpt", **MPT, modern=False, d_model=72, n_heads=6, n_layers=3, expansion_ratio=4,
        attn_config={
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": 1.3,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False, "qk_ln": False,
            "softmax_scale": 0.3,
        },
        emb_pdrop=0, embedding_fraction=1.0, init_device="cpu", learned_pos_emb=True, logit_scale=None, no_bias=True,
        resid_pdrop=0, verbose=0, norm_type="low_precision_layernorm", layer_norm_epsilon=1e-3,
    ),
    "mpt_untied": dense(
        "MptForCausalLM", "mpt", **MPT, d_model=64, n_heads=8, n_layers=2, tie_word_embeddings=False,
        attn_config={"model_type": "", "alibi_bias_max": 8},
    ),
    "vaultgemma_caps": dense(
        "VaultGemmaForCausalLM", "vaultgemma", **GEMMA, modern=False, head_dim=32, layers=3, sliding_window=16,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=3.0, rope_theta=7000.0, hidden=72,
        final_logit_softcapping=2.5, attention_bias=True,
    ),
    "vaultgemma_types": dense(
        "VaultGemmaForCausalLM", "vaultgemma", **GEMMA, head_dim=16, layers=2, sliding_window=21,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=None, final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention"], tie_word_embeddings=False,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "jais2_biases": dense(
        "Jais2ForCausalLM", "jais2", modern=False, hidden=72, hidden_act="relu2", num_key_value_heads=2,
        layer_norm_eps=1e-3, rope_theta=7000.0, rope_scaling=None, head_dim=18, tie_word_embeddings=False,
    ),
    "jais2_plain": dense(
        "Jais2ForCausalLM", "jais2", hidden_act="gelu", layer_norm_eps=1e-5, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=True, rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
    ),
    "persimmon_hub": dense(
        "PersimmonForCausalLM", "persimmon", modern=False, hidden=72, heads=3, hidden_act="relu2", layer_norm_eps=1e-3,
        qk_layernorm=True, partial_rotary_factor=0.5, rope_theta=25000.0, rope_scaling=None,
        tie_word_embeddings=False, num_key_value_heads=3, hidden_dropout=0.0, attention_dropout=0.0,
    ),
    "persimmon_plain": dense(
        "PersimmonForCausalLM", "persimmon", layers=3, hidden_act="gelu", layer_norm_eps=1e-5, qk_layernorm=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    ),
    "biogpt_hub": dense(
        "BioGptForCausalLM", "biogpt", modern=False, hidden=72, heads=3, hidden_act="gelu", layer_norm_eps=1e-12,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, activation_dropout=0.0, layerdrop=0.0,
        scale_embedding=True,
    ),
    "biogpt_untied": dense(
        "BioGptForCausalLM", "biogpt", layers=3, hidden_act="relu", scale_embedding=False, tie_word_embeddings=False,
    ),
    "xglm_hub": dense(
        "XGLMForCausalLM", "xglm", **XGLM, modern=False, d_model=72, attention_heads=3, num_layers=2, ffn_dim=140,
        activation_function="gelu", scale_embedding=True, dropout=0.1, attention_dropout=0.1, activation_dropout=0,
        layerdrop=0.0, init_std=0.02, decoder_start_token_id=2, tie_word_embeddings=False,
    ),
    "xglm_untied": dense(
        "XGLMForCausalLM", "xglm", **XGLM, d_model=64, attention_heads=4, num_layers=3, ffn_dim=160,
        activation_function="relu", scale_embedding=False, add_cross_attention=False, tie_word_embeddings=False,
    ),
}  # fmt: skip

recorded: dict[str, dict[str, tuple[int, ...]]] = {}  # shapes of cases that are being recorded


@cache
def _stored(name: str) -> dict[str, tuple[int, ...]]:
    with np.load(GOLDENS / f"{name}.npz") as golden:
        return {tensor: tuple(shape) for tensor, shape in json.loads(str(golden["manifest"])).items()}


# Parts of names in DeepSeek-V4's files, behind the parts that transformers writes instead.
PUBLISHED = (".attn.norm.", ".attn.kv_norm."), ("embed_tokens.", "embed."), ("hc_head.hc_", "hc_head_")
# Names of Kimi K2.5's own files. Of those that transformers writes, it cannot read all.
OF_KIMI_K25 = (
    ("language_model.model.blocks.", "language_model.model.layers."), ("model.mm_projector.", "mm_projector."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
)  # fmt: skip


def as_in_file(name: str, tensor: str) -> str:
    """What the case's file calls a tensor that save_pretrained calls `tensor`."""
    if name in DENSE_CASES and DENSE_CASES[name].published:
        tensor = tensor.removeprefix("model.")
        for saved, published in PUBLISHED:
            tensor = tensor.replace(saved, published)
    for saved, published in OF_KIMI_K25 if name.startswith("kimi_k25") else ():
        tensor = tensor.replace(saved, published)
    return tensor


def dense_manifest(name: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a case's checkpoint."""
    return recorded.get(name) or _stored(name)


def expert_table(config: dict[str, Any], words: np.ndarray) -> np.ndarray:
    """The experts of each token, no expert twice, from random words [vocab, experts]."""
    order = np.argsort(words, axis=1, kind="stable")
    return np.ascontiguousarray(order[:, : config["num_experts_per_tok"]]).astype(np.int64)


ENDED = [20, 21, 63, 64, 66, 100]  # places of a prompt that get a token which ends a text, for n-grams
FEW = 31  # tokens that a Doge's attention keeps in a test
NGRAM_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def ngram_buffer(config: dict[str, Any], name: str) -> np.ndarray:
    """What transformers computes from a config for hashes of n-grams, and writes to files."""
    longest, heads = config.get("ngram_size", 3), config.get("heads_per_ngram", 8)
    index = sorted(config["ple_layer_ids"]).index(int(name.split("layers.")[1].split(".")[0]) + 1)
    if name.endswith("layer_multipliers"):
        return np.array(multipliers(config["vocab_size"], longest, index, config.get("seed", 1234)), np.int64)
    count = (longest - 1) * heads
    sizes = primes(config["ngram_vocab_size_base"], index * count, count)
    return np.array(sizes if name.endswith("sizes") else np.cumsum([0, *sizes[:-1]]), np.int64)


LIGHTNING = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def lightning_buffer(config: dict[str, Any], name: str) -> np.ndarray:
    """What transformers computes from a config for lightning attention, and writes to files."""
    heads = config["num_attention_heads"]
    layer = int(name.split(".")[2])
    rate = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)[:, None, None]
    rate = rate * (1 - layer / (config["num_hidden_layers"] - 1 + 1e-5) + 1e-5)
    size = config.get("block_size", 256)
    index = np.arange(1, size + 1)[:, None]
    apart = index - index.T
    return {
        "slope_rate": rate,
        "query_decay": np.exp(-rate * index),
        "key_decay": np.exp(-rate * (size - index)),
        "diagonal_decay": np.where(apart >= 0, np.exp(-rate * np.maximum(apart, 0)), 0.0)[None],
    }[name.rpartition(".")[2]]


def dense_mean_and_std(case: DenseCase, name: str, shape: tuple[int, ...], transposed: bool) -> tuple[Any, Any]:
    """As `tiny_models._mean_and_std`; norms are the only weights of one axis. Tied embeddings are small, so that not
    every token predicts itself, and the norm before them is large."""
    tied = case.config.get("tie_word_embeddings", case.config["model_type"] not in UNTIED)
    name = name.replace("norm_attn_norm.", "")  # a module of DBRX, with more than norms
    if name.endswith(LIGHTNING):
        return lightning_buffer(case.config, name), 0.0
    if name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("balancing_biases"):  # transformers makes the last one -1 when it loads a model
        return -1.0, 0.1 * (np.arange(*shape) < shape[0] - 1)
    if "self_attn.lambda_" in name or name.endswith("self_attn.A"):
        return 0.0, 0.3
    if name.endswith(("put_min", "put_max")):  # bounds that some numbers exceed
        return (-1.5 if name.endswith("min") else 1.5), 0.2
    if "act_fn" in name:  # learned numbers of an activation, of which one is negative
        return (-0.3 if name.endswith("eps") else 0.5), 0.2
    if name.endswith("A_log"):  # states that last long in some heads
        return -1.0, 1.0
    if "embeddings_layernorm" in name:  # of any sign, so that not every token predicts itself
        return 0.0, 1.0
    if len(shape) == 1 or "norm" in name:
        queries = any(part in name for part in ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm"))
        last = tied and not any(part.isdigit() for part in name.split("."))
        return case.norm + 0.5 * queries + 2.0 * last, 0.1
    if "position" in name or "wpe" in name:
        return 0.0, 0.1
    if ("embed" in name and "out" not in name) or "wte" in name:
        return 0.0, case.embed or (0.4 * shape[1] ** -0.5 if tied else 1.0)
    fan_in = shape[0] if transposed else shape[1]
    if "_adapter_list" in name:  # two matrices beside another one
        return 0.0, 0.7 * fan_in**-0.5
    heads = ("lm_head", "embed_out")
    return 0.0, (case.gain if any(part in name for part in heads) else 1.5) * fan_in**-0.5


# Families whose head is not the embedding, unless the config says so.
UNTIED = (
    "gpt_neox", "olmo", "olmo2", "olmo3", "granite", "phi", "phi3", "stablelm", "glm", "glm4", "exaone4", "seed_oss",
    "internlm3", "ministral", "ministral3", "hunyuan_v1_dense", "nemotron", "arcee", "helium", "cwm", "deepseek_v2",
    "deepseek_v3", "deepseek_v4", "minimax_m2", "glm4_moe_lite", "olmoe", "flex_olmo", "dots1", "exaone_moe",
    "granitemoeshared", "phimoe", "hunyuan_v1_moe", "hy_v3", "solar_open", "mistral4", "afmoe",
    "hyperclovax", "gptj", "apertus", "nanochat", "dbrx", "persimmon", "axk1", "kolibri1",
    "longcat_flash", "hy_v4", "aria_text", "doge", "diffllama", "bitnet", "codegen", "phi4_multimodal", "axk2",
    "bamba", "nemotron_h", "kimi_linear", "bailing_hybrid",
    "falcon_h1", "mamba2", "jamba", "minimax",
)  # fmt: skip
