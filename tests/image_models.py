"""Small random checkpoints of language models inside models that see, for `tiny_models`; as those of `dense_models`.

Each family has a config as it was published, with settings in older forms, and one as transformers 5 writes it.
"""

from dense_models import ABSENT, GEMMA4_ROPES, DenseCase, dense, seeing

_SHARED = {"rms_norm_eps": 1e-3, "hidden_act": "silu", "num_key_value_heads": 2, "pad_token_id": ABSENT}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
_QWEN2 = {"depth": 2, "embed_dim": 16, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}
_QWEN3 = _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_GLM = _QWEN | {"image_size": 8}
_TOKENS = {"image_token_id": 505, "video_token_id": 506}
_OF_QWEN = _TOKENS | {"vision_start_token_id": 507, "vision_end_token_id": 508}
_OF_GLM = _TOKENS | {
    "image_start_token_id": 507, "image_end_token_id": 508, "video_start_token_id": 509, "video_end_token_id": 510,
}  # fmt: skip
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "head_dim": 8,
}  # fmt: skip
_INTERN = {
    "model_type": "internvl_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": [16, 16], "patch_size": [4, 4],
}  # fmt: skip
_LLAMA4 = {
    "model_type": "llama4_vision_model", "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projector_input_dim": 24, "projector_output_dim": 24,
    "vision_output_dim": 24,
}  # fmt: skip
_ONEVISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32], [48, 32], [16, 48], [48, 48]]

_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
_OF_GEMMA3 = {"boi_token_index": 506, "eoi_token_index": 507, "image_token_index": 505, "mm_tokens_per_image": 16}
_GEMMA3 = {"num_key_value_heads": 2, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA4 = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}  # fmt: skip
# Beyond the vocabulary: transformers embeds the first three like the token for padding.
_OF_GEMMA4 = {
    "image_token_id": 525, "video_token_id": 526, "audio_token_id": 527, "boi_token_id": 508, "eoi_token_id": 509,
    "boa_token_id": 510, "eoa_token_index": 511, "audio_config": None, "vision_soft_tokens_per_image": 4,
}  # fmt: skip
_UNIFIED = {
    "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 24,
    "mm_posemb_size": 80, "output_proj_dims": 24, "rms_norm_eps": 1e-4,
}  # fmt: skip
_SLIDING_FIRST = ["sliding_attention", "full_attention"] * 2

_IDEFICS3 = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_KIMI = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "kv_lora_rank": 48, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_shared_experts": 1, "moe_intermediate_size": 40, "norm_topk_prob": True,
    "pad_token_id": ABSENT,
}  # fmt: skip
_STEP = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    "mlp_ratio": 2.0,
}  # fmt: skip
IMAGE_CASES: dict[str, DenseCase] = {
    # A picture is longer than the window.
    "gemma3_seeing": seeing(
        "Gemma3ForConditionalGeneration", "gemma3",
        dense(
            "", "gemma3_text", **_GEMMA3, modern=False, norm=0.0, layers=4, head_dim=32, sliding_window=12,
            query_pre_attn_scalar=24, rms_norm_eps=1e-5, rope_theta=1e6, rope_local_base_freq=1e4,
            sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 4.0},
            attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True,
        ),
        _SIGLIP, **_OF_GEMMA3,
    ),
    "gemma3_wide": seeing(
        "Gemma3ForConditionalGeneration", "gemma3",
        dense(
            "", "gemma3_text", **_GEMMA3, norm=0.0, hidden=96, layers=3, head_dim=16, sliding_window=24,
            query_pre_attn_scalar=16, rms_norm_eps=1e-3, attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"], tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        ),
        _SIGLIP | {"hidden_size": 24, "num_hidden_layers": 2, "image_size": 40, "hidden_act": "gelu"}
        | {"layer_norm_eps": 1e-3, "patch_size": 5},
        boi_token_index=501, eoi_token_index=502, image_token_index=510, mm_tokens_per_image=4,
    ),
    "gemma4_seeing": seeing(
        "Gemma4ForConditionalGeneration", "gemma4",
        dense(
            "", "gemma4_text", modern=False, layers=5, num_key_value_heads=2, head_dim=24, global_head_dim=32,
            num_global_key_value_heads=4, attention_k_eq_v=False, hidden_activation="gelu_pytorch_tanh", hidden=96,
            rms_norm_eps=1e-3, sliding_window=16, num_kv_shared_layers=2, hidden_size_per_layer_input=16,
            layer_types=["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
            vocab_size_per_layer_input=512, tie_word_embeddings=True, final_logit_softcapping=3.0,
            rope_parameters=GEMMA4_ROPES,
        ),
        _GEMMA4, **_OF_GEMMA4,
    ),
    # As the smaller models: products of the encoder are clipped, and tokens of a picture see what is before them.
    "gemma4_clipped": seeing(
        "Gemma4ForConditionalGeneration", "gemma4",
        dense(
            "", "gemma4_text", modern=False, layers=5, num_key_value_heads=1, head_dim=16, global_head_dim=32,
            hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-3, sliding_window=24, num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"], tie_word_embeddings=True,
            hidden_size_per_layer_input=12, vocab_size_per_layer_input=512, final_logit_softcapping=3.0, pad_token_id=3,
            use_bidirectional_attention=None, rope_parameters=GEMMA4_ROPES,
        ),
        _GEMMA4 | {"position_embedding_size": 256, "pooling_kernel_size": 3, "use_clipped_linears": True},
        **_OF_GEMMA4 | {"image_token_id": 505},
    ),
    # As the larger ones.
    "gemma4_joint": seeing(
        "Gemma4ForConditionalGeneration", "gemma4",
        dense(
            "", "gemma4_text", hidden=96, layers=4, num_key_value_heads=2, head_dim=16, hidden_activation="gelu",
            rms_norm_eps=1e-5, sliding_window=40, layer_types=["sliding_attention", "full_attention"] * 2,
            per_layer_config={layer: {"head_dim": 24, "num_key_value_heads": 1} for layer in "13"},
            attention_k_eq_v=True, hidden_size_per_layer_input=0, num_kv_shared_layers=0, tie_word_embeddings=True,
            use_bidirectional_attention="vision", enable_moe_block=True, num_experts=4, top_k_experts=2,
            moe_intermediate_size=32, rope_parameters=GEMMA4_ROPES,
        ),
        _GEMMA4 | {"hidden_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-4}
        | {"position_embedding_size": 256, "pooling_kernel_size": 2, "standardize": True},
        **_OF_GEMMA4 | {"image_token_id": 506},
    ),
    "gemma4_unified_wide": seeing(
        "Gemma4UnifiedForConditionalGeneration", "gemma4_unified",
        dense(
            "", "gemma4_unified_text", hidden=64, layers=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-3,
            hidden_activation="gelu_pytorch_tanh", sliding_window=40, layer_types=_SLIDING_FIRST,
            per_layer_config={layer: {"head_dim": 32} for layer in "13"}, tie_word_embeddings=True,
            use_bidirectional_attention="vision", rope_parameters=GEMMA4_ROPES,
        ),
        _UNIFIED, **_OF_GEMMA4 | {"image_token_id": 506},
    ),
    "gemma4_unified_older": seeing(
        "Gemma4UnifiedForConditionalGeneration", "gemma4_unified",
        dense(
            "", "gemma4_unified_text", modern=False, hidden=96, layers=4, num_key_value_heads=2, head_dim=24,
            global_head_dim=32, num_global_key_value_heads=None, rms_norm_eps=1e-3, attention_k_eq_v=False,
            hidden_activation="gelu_pytorch_tanh", sliding_window=16, layer_types=_SLIDING_FIRST,
            tie_word_embeddings=True, rope_parameters=GEMMA4_ROPES,
        ),
        _UNIFIED | {"mm_embed_dim": 20, "output_proj_dims": 20, "pooling_kernel_size": 2},
        **_OF_GEMMA4 | {"image_token_id": 505},
    ),
    # The settings of the text are beside those of the whole.
    "qwen2_vl_flat": dense(
        "Qwen2VLForConditionalGeneration", "qwen2_vl", **_SHARED, **_OF_QWEN, modern=False, hidden=96,
        tie_word_embeddings=True, use_sliding_window=False, sliding_window=19, max_window_layers=2, rope_theta=7000.0,
        rope_scaling={"type": "mrope", "mrope_section": [2, 5, 5]},
        vision_config=_QWEN2 | {"model_type": "qwen2_vl", "hidden_size": 96, "in_chans": 3, "spatial_patch_size": 4},
    ),
    "qwen2_vl_whole": seeing(
        "Qwen2VLForConditionalGeneration", "qwen2_vl",
        dense(
            "", "qwen2_vl_text", **_SHARED, tie_word_embeddings=False, layers=3, use_sliding_window=False,
            sliding_window=None, max_window_layers=3, layer_types=["full_attention"] * 3,
            rope_parameters={"rope_type": "default", "rope_theta": 9000.0, "mrope_section": [2, 3, 3]},
        ),
        _QWEN2 | {"model_type": "qwen2_vl_vision", "hidden_size": 64, "hidden_act": "gelu"}, **_OF_QWEN,
    ),
    "qwen2_5_vl_flat": dense(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", **_SHARED, **_OF_QWEN, modern=False, hidden=96,
        layers=3, tie_word_embeddings=True, use_sliding_window=True, sliding_window=19, max_window_layers=1,
        rope_theta=7000.0, rope_scaling={"type": "mrope", "mrope_section": [4, 4, 4]},
        vision_config=_QWEN | {"model_type": "qwen2_5_vl", "out_hidden_size": 96, "window_size": 8},
    ),
    "qwen2_5_vl_yarn": seeing(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
        dense(
            "", "qwen2_5_vl_text", **_SHARED, tie_word_embeddings=False, layers=2, use_sliding_window=False,
            sliding_window=None, max_window_layers=2, layer_types=["full_attention"] * 2,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 7000.0, "mrope_section": [2, 3, 3], "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        _QWEN | {"model_type": "qwen2_5_vl_vision", "out_hidden_size": 64, "window_size": 8}, **_OF_QWEN,
    ),
    "qwen3_vl_tied": seeing(
        "Qwen3VLForConditionalGeneration", "qwen3_vl",
        dense(
            "", "qwen3_vl_text", **_SHARED, modern=False, hidden=72, heads=6, head_dim=16, attention_bias=True,
            tie_word_embeddings=True, rope_theta=7000.0,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        ),
        _QWEN3 | {"model_type": "qwen3_vl", "out_hidden_size": 72}, **_OF_QWEN,
    ),
    "qwen3_vl_wide": seeing(
        "Qwen3VLForConditionalGeneration", "qwen3_vl",
        dense(
            "", "qwen3_vl_text", **_SHARED, layers=3, head_dim=32, attention_bias=False, tie_word_embeddings=False,
            rope_parameters={"rope_theta": 9000.0, "mrope_section": [8, 4, 4], "rope_type": "default"},
        ),
        _QWEN3 | {"model_type": "qwen3_vl_vision", "out_hidden_size": 64}, **_OF_QWEN,
    ),
    "qwen3_vl_moe_steps": seeing(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
        dense(
            "", "qwen3_vl_moe_text", **_SHARED, modern=False, layers=3, head_dim=24, attention_bias=True,
            tie_word_embeddings=False, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40,
            decoder_sparse_step=1, mlp_only_layers=[1], norm_topk_prob=True, rope_theta=7000.0,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [4, 4, 4], "rope_type": "default"},
        ),
        _QWEN3 | {"model_type": "qwen3_vl_moe", "out_hidden_size": 64}, **_OF_QWEN,
    ),
    "qwen3_vl_moe_wide": seeing(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
        dense(
            "", "qwen3_vl_moe_text", **_SHARED, hidden=96, layers=4, attention_bias=False, tie_word_embeddings=False,
            num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=56, decoder_sparse_step=2,
            mlp_only_layers=[], head_dim=32,
            rope_parameters={"rope_theta": 9000.0, "mrope_section": [8, 4, 4], "rope_type": "default"},
        ),
        _QWEN3 | {"model_type": "qwen3_vl_moe_vision", "out_hidden_size": 96}, **_OF_QWEN,
    ),
    "glm4v_half": seeing(
        "Glm4vForConditionalGeneration", "glm4v",
        dense(
            "", "glm4v_text", **_SHARED, modern=False, hidden=96, attention_bias=True, tie_word_embeddings=False,
            partial_rotary_factor=0.5, rope_theta=7000.0,
            rope_scaling={"type": "default", "mrope_section": [2, 2, 2]},
        ),
        _GLM | {"model_type": "glm4v", "out_hidden_size": 96}, **_OF_GLM,
    ),
    "glm4v_whole": seeing(
        "Glm4vForConditionalGeneration", "glm4v",
        dense(
            "", "glm4v_text", **_SHARED | {"num_key_value_heads": 1}, layers=3, tie_word_embeddings=True,
            rope_parameters={"rope_theta": 9000.0, "mrope_section": [2, 3, 3], "rope_type": "default"},
        ),
        _GLM | {"model_type": "glm4v_vision", "out_hidden_size": 64}, **_OF_GLM,
    ),
    "glm4v_moe_groups": seeing(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe",
        dense(
            "", "glm4v_moe_text", **_SHARED, modern=False, hidden=96, layers=3, head_dim=32, attention_bias=True,
            tie_word_embeddings=False, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2,
            n_shared_experts=2, moe_intermediate_size=40, norm_topk_prob=True, routed_scaling_factor=1.7,
            first_k_dense_replace=1, use_qk_norm=False, partial_rotary_factor=0.5, rope_theta=7000.0,
            rope_scaling={"type": "default", "mrope_section": [2, 3, 3]},
        ),
        _GLM | {"model_type": "glm4v_moe", "out_hidden_size": 96}, **_OF_GLM,
    ),
    "glm4v_moe_plain": seeing(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe",
        dense(
            "", "glm4v_moe_text", **_SHARED, layers=2, head_dim=16, attention_bias=False, tie_word_embeddings=False,
            n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
            moe_intermediate_size=48, norm_topk_prob=False, routed_scaling_factor=0.8, first_k_dense_replace=0,
            rope_parameters={
                "rope_theta": 9000.0, "mrope_section": [2, 1, 1], "rope_type": "default", "partial_rotary_factor": 0.5,
            },
        ),
        _GLM | {"model_type": "glm4v_moe_vision", "out_hidden_size": 64}, **_OF_GLM,
    ),
    "glm46v_dense": seeing(
        "Glm46VForConditionalGeneration", "glm46v",
        dense(
            "", "glm4v_text", **_SHARED, hidden=96, attention_bias=True, tie_word_embeddings=False,
            rope_parameters={
                "rope_theta": 9000.0, "mrope_section": [2, 2, 2], "rope_type": "default", "partial_rotary_factor": 0.5,
            },
        ),
        _GLM | {"model_type": "glm4v_vision", "out_hidden_size": 96}, **_OF_GLM,
    ),
    "glm46v_experts": seeing(
        "Glm46VForConditionalGeneration", "glm46v",
        dense(
            "", "glm4v_moe_text", **_SHARED, layers=3, head_dim=32, attention_bias=True, tie_word_embeddings=False,
            n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
            moe_intermediate_size=48, norm_topk_prob=True, routed_scaling_factor=0.8, first_k_dense_replace=1,
            use_qk_norm=False,
            rope_parameters={
                "rope_theta": 7000.0, "mrope_section": [2, 3, 3], "rope_type": "default", "partial_rotary_factor": 0.5,
            },
        ),
        _GLM | {"model_type": "glm4v_moe_vision", "out_hidden_size": 64}, **_OF_GLM,
    ),
    # Pictures have fewer patches than the table has entries; the first configs have settings of other models.
    "idefics3_hub": seeing(
        "Idefics3ForConditionalGeneration", "idefics3",
        dense(
            "", "llama", **_SHARED, modern=False, hidden=96, layers=3, rope_theta=7000.0, tie_word_embeddings=False,
            pixel_shuffle_factor=2, qk_layer_norms=False, use_resampler=False, neftune_noise_alpha=0.0,
            perceiver_config={"qk_layer_norms_perceiver": True}, is_llama_config=True, _flash_attn_2_enabled=True,
        ),
        _IDEFICS3 | {
            "model_type": "idefics3", "image_size": 20, "max_image_size": {"longest_edge": 16},
            "size": {"longest_edge": 32}, "use_base_siglip": False, "tie_word_embeddings": False,
        },
        image_token_id=505, scale_factor=2,
    ),
    # Up to nine tiles, of nine features each, and positions of the encoder that not all pictures reach.
    "idefics3_saved": seeing(
        "Idefics3ForConditionalGeneration", "idefics3",
        dense(
            "", "llama", **_SHARED, hidden=84, heads=6, head_dim=20, intermediate_size=136, mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 9000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
        ),
        {
            "model_type": "idefics3_vision", "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3,
            "num_attention_heads": 3, "num_channels": 3, "image_size": 27, "patch_size": 3, "hidden_act": "gelu",
            "layer_norm_eps": 1e-4, "attention_dropout": 0.0, "initializer_range": 0.02,
        },
        image_token_id=505, scale_factor=2, use_cache=True,
    ),
    "smolvlm_tied": seeing(
        "SmolVLMForConditionalGeneration", "smolvlm",
        dense(
            "", "llama", **_SHARED, head_dim=24, attention_bias=True, tie_word_embeddings=True,
            rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
        ),
        _IDEFICS3 | {
            "model_type": "smolvlm_vision", "image_size": 24, "num_hidden_layers": 2, "hidden_act": "gelu",
            "layer_norm_eps": 1e-3,
        },
        image_token_id=505, scale_factor=3,
    ),
    # A tile has one feature.
    "smolvlm_hub": seeing(
        "SmolVLMForConditionalGeneration", "smolvlm",
        dense(
            "", "llama", **_SHARED | {"num_key_value_heads": 1}, modern=False, hidden=72, heads=6, layers=3,
            intermediate_size=100, rope_theta=7000.0, rope_scaling=None, rope_interleaved=False,
            tie_word_embeddings=False, pixel_shuffle_factor=4, qk_layer_norms=False, use_resampler=False,
            neftune_noise_alpha=0.0, perceiver_config={"model_type": "smolvlm", "qk_layer_norms_perceiver": False},
            is_llama_config=True, _flash_attn_2_enabled=True,
        ),
        {
            "model_type": "smolvlm_vision", "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 1,
            "num_attention_heads": 5, "image_size": 20, "patch_size": 5, "max_image_size": {"longest_edge": 20},
            "size": {"longest_edge": 60}, "use_base_siglip": False, "tie_word_embeddings": False,
        },
        image_token_id=505, scale_factor=4, vocab_size=512, image_seq_len=1, use_cache=False,
        use_reentrant_checkpoints=False,
    ),
    "lfm2_vl_hub": seeing(
        "Lfm2VlForConditionalGeneration", "lfm2_vl",
        dense(
            "", "lfm2", modern=False, hidden=72, heads=6, layers=4, num_key_value_heads=2, conv_L_cache=4,
            intermediate_size=ABSENT, block_ff_dim=200, block_ffn_dim_multiplier=1.3, block_multiple_of=24,
            block_auto_adjust_ff_dim=True, full_attn_idxs=[1], norm_eps=1e-3, rope_theta=10000.0, conv_bias=True,
            block_use_swiglu=True, conv_dim=72, num_heads=6, use_pos_enc=True, tie_word_embeddings=False,
        ),
        _IDEFICS3 | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        image_token_id=505, downsample_factor=2, projector_hidden_size=40, projector_bias=True, vision_feature_layer=-1,
        do_image_splitting=True, tile_size=16, max_image_tokens=6, use_thumbnail=True,
    ),
    "lfm2_vl_saved": seeing(
        "Lfm2VlForConditionalGeneration", "lfm2_vl",
        dense(
            "", "lfm2", layers=5, num_key_value_heads=2, conv_L_cache=3, block_auto_adjust_ff_dim=False, norm_eps=1e-5,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"], tie_word_embeddings=True,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        ),
        _IDEFICS3 | {
            "model_type": "siglip2_vision_model", "num_patches": 25, "num_hidden_layers": 2, "hidden_act": "gelu",
            "layer_norm_eps": 1e-3,
        },
        image_token_id=505, downsample_factor=2, projector_hidden_size=36, projector_bias=False,
        projector_use_layernorm=False, projector_hidden_act="gelu_pytorch_tanh",
    ),
    "kimi_k25_hub": seeing(
        "Kimi_K25ForConditionalGeneration", "kimi_k25",
        dense(
            "", "kimi_k2", **_KIMI, modern=False, layers=3, heads=8, num_key_value_heads=8, q_lora_rank=36,
            n_routed_experts=12, num_experts_per_tok=3, n_group=1, topk_group=1, first_k_dense_replace=1,
            routed_scaling_factor=2.8, tie_word_embeddings=False, rope_theta=7000.0, rope_scaling=None,
        ),
        _IDEFICS3 | {
            "model_type": "kimi_k25_vision", "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4,
            "merge_kernel_size": [2, 2], "num_hidden_layers": 2,
        },
        image_token_id=505, video_token_id=526, projection_hidden_size=16, projection_layer_norm_eps=1e-5,
        use_unified_vision_chunk=True, video_placeholder="<|kimi_k25_video_placeholder|>",
    ),
    "kimi_k25_groups": seeing(
        "Kimi_K25ForConditionalGeneration", "kimi_k25",
        dense(
            "", "deepseek_v3", **_KIMI, layers=2, num_key_value_heads=4, q_lora_rank=24, n_routed_experts=8,
            num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=0, routed_scaling_factor=1.3,
            tie_word_embeddings=False, rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
        ),
        _IDEFICS3 | {
            "model_type": "kimi_k25_vision", "pos_emb_height": 3, "pos_emb_width": 3, "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
        image_token_id=505, video_token_id=526, projection_hidden_size=16, projection_layer_norm_eps=1e-3,
    ),
    "internvl_qwen2": seeing(
        "InternVLForConditionalGeneration", "internvl",
        dense(
            "", "qwen2", **_SHARED, modern=False, hidden=96, layers=3, tie_word_embeddings=True, rope_theta=7000.0,
            use_sliding_window=True, sliding_window=19, max_window_layers=1, rope_scaling=None,
        ),
        _INTERN, image_token_id=505, image_seq_length=4, downsample_ratio=0.5, projector_hidden_act="gelu",
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    ),
    "internvl_qwen3_moe": seeing(
        "InternVLForConditionalGeneration", "internvl",
        dense(
            "", "qwen3_moe", **_SHARED, layers=3, head_dim=24, tie_word_embeddings=False, attention_bias=True,
            decoder_sparse_step=1, mlp_only_layers=[1], moe_intermediate_size=40, norm_topk_prob=True, num_experts=6,
            num_experts_per_tok=3, sliding_window=None, use_sliding_window=False,
            rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
        ),
        _INTERN | {
            "num_hidden_layers": 2, "hidden_size": 24, "norm_type": "rms_norm", "use_qk_norm": True,
            "attention_bias": True, "use_mean_pooling": False, "image_size": 16, "patch_size": 2, "hidden_act": "silu",
        },
        image_token_id=505, image_seq_length=4, downsample_ratio=0.25, projector_hidden_act="relu",
    ),
    "llama4_seeing": seeing(
        "Llama4ForConditionalGeneration", "llama4",
        dense(
            "", "llama4_text", **_SHARED, modern=False, hidden=96, layers=4, head_dim=16, num_local_experts=4,
            num_experts_per_tok=1, intermediate_size=80, intermediate_size_mlp=120, interleave_moe_layer_step=2,
            no_rope_layers=[1, 1, 0, 1], attention_chunk_size=24, floor_scale=24, attn_scale=0.2, use_qk_norm=True,
            attn_temperature_tuning=True, rope_theta=7000.0, rope_scaling=None, tie_word_embeddings=False,
        ),
        _LLAMA4 | {"rope_theta": 100.0, "norm_eps": 1e-3, "hidden_act": "silu", "vision_feature_layer": -1},
        image_token_index=505, boi_token_index=507, eoi_token_index=508,
    ),
    "llama4_seeing_saved": seeing(
        "Llama4ForConditionalGeneration", "llama4",
        dense(
            "", "llama4_text", **_SHARED, layers=2, head_dim=24, num_local_experts=3, num_experts_per_tok=2,
            intermediate_size=80, intermediate_size_mlp=120, moe_layers=[0], no_rope_layers=[0, 1],
            attention_chunk_size=512, floor_scale=8, attn_scale=0.3, use_qk_norm=False, attn_temperature_tuning=True,
            tie_word_embeddings=False, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
        ),
        _LLAMA4 | {
            "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 384, "patch_size": 2,
            "pixel_shuffle_ratio": 0.25, "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        },
        image_token_index=505, boi_token_index=507, eoi_token_index=508,
    ),
    "llava_onevision_tied": seeing(
        "LlavaOnevisionForConditionalGeneration", "llava_onevision",
        dense(
            "", "qwen2", **_SHARED, modern=False, hidden=96, layers=3, tie_word_embeddings=True, rope_theta=7000.0,
            use_sliding_window=True, sliding_window=19, max_window_layers=1, rope_scaling=None,
        ),
        _ONEVISION, image_token_index=505, video_token_index=506, image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2", vision_feature_layer=-1, vision_feature_select_strategy="full",
        projector_hidden_act="gelu", use_image_newline_parameter=True,
    ),
    "llava_onevision_saved": seeing(
        "LlavaOnevisionForConditionalGeneration", "llava_onevision",
        dense(
            "", "qwen2", **_SHARED, layers=2, tie_word_embeddings=False, sliding_window=None, use_sliding_window=False,
            layer_types=["full_attention"] * 2, rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
        ),
        _ONEVISION | {
            "num_hidden_layers": 3, "hidden_size": 24, "patch_size": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-3,
        },
        image_token_index=505, video_token_index=506, image_grid_pinpoints=PINPOINTS[:4],
        vision_aspect_ratio="anyres_max_9", vision_feature_layer=-2, projector_hidden_act="relu",
        multimodal_projector_bias=False,
    ),
    "lighton_ocr_tied": seeing(
        "LightOnOcrForConditionalGeneration", "lighton_ocr",
        dense(
            "", "qwen3", **_SHARED, head_dim=24, attention_bias=False, tie_word_embeddings=True, sliding_window=None,
            rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
        ),
        _PIXTRAL | {"hidden_act": "silu"}, image_token_id=505, spatial_merge_size=2,
    ),
    "lighton_ocr_hub": seeing(
        "LightOnOcrForConditionalGeneration", "lighton_ocr",
        dense(
            "", "qwen3", **_SHARED | {"num_key_value_heads": 1}, modern=False, hidden=80, heads=6, layers=3,
            head_dim=16, intermediate_size=136, attention_bias=False, tie_word_embeddings=False, rope_theta=7000.0,
            rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=3,
        ),
        _PIXTRAL | {
            "num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 3, "head_dim": 12, "patch_size": 3,
            "intermediate_size": 44, "image_size": 54, "hidden_act": "gelu", "rope_theta": 300.0, "num_channels": 3,
            "attention_dropout": 0.0, "initializer_range": 0.02,
        },
        image_token_id=505, spatial_merge_size=3, multimodal_projector_bias=False, projector_hidden_act="gelu",
        vision_feature_layer=-1,
    ),
    "llava_pixtral": seeing(
        "LlavaForConditionalGeneration", "llava",
        dense("", "mistral", **_SHARED, modern=False, head_dim=24, tie_word_embeddings=False, sliding_window=None),
        _PIXTRAL | {"num_hidden_layers": 2, "hidden_act": "silu", "rope_theta": 7000.0},
        image_token_index=505, image_seq_length=1, projector_hidden_act="gelu", vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    # Rows of a picture are longer than the window.
    "llava_pixtral_saved": seeing(
        "LlavaForConditionalGeneration", "llava",
        dense(
            "", "mistral", **_SHARED | {"num_key_value_heads": 1}, hidden=96, heads=6, layers=3, head_dim=16,
            intermediate_size=136, tie_word_embeddings=True, sliding_window=9,
            rope_parameters={"rope_theta": 9000.0, "rope_type": "default"},
        ),
        _PIXTRAL | {
            "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 3, "patch_size": 5, "hidden_act": "gelu",
            "intermediate_size": 44, "image_size": 55, "num_channels": 3, "attention_dropout": 0.0,
            "initializer_range": 0.02, "rope_parameters": {"rope_theta": 200.0, "rope_type": "axial"},
        },
        image_token_index=505, image_seq_length=1, projector_hidden_act="relu", vision_feature_layer=-1,
        vision_feature_select_strategy="full", multimodal_projector_bias=False,
    ),
    "mistral3_seeing": seeing(
        "Mistral3ForConditionalGeneration", "mistral3",
        dense("", "mistral", **_SHARED, modern=False, head_dim=24, tie_word_embeddings=False, sliding_window=None),
        _PIXTRAL | {"num_hidden_layers": 2, "hidden_size": 24, "head_dim": 12, "hidden_act": "silu"},
        image_token_id=505, projector_hidden_act="gelu", vision_feature_layer=-1, spatial_merge_size=2,
        multimodal_projector_bias=False,
    ),
    # As Ministral 3: queries far from the beginning are scaled.
    "mistral3_saved": seeing(
        "Mistral3ForConditionalGeneration", "mistral3",
        dense(
            "", "ministral3", **_SHARED, hidden=80, heads=6, layers=3, head_dim=16, intermediate_size=136,
            tie_word_embeddings=True, sliding_window=None, max_position_embeddings=256,
            rope_parameters={
                "type": "yarn", "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                "rope_theta": 7000.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        _PIXTRAL | {
            "num_hidden_layers": 3, "hidden_size": 40, "head_dim": 20, "patch_size": 3, "intermediate_size": 44,
            "image_size": 54, "hidden_act": "silu", "num_channels": 3, "attention_dropout": 0.0,
            "initializer_range": 0.02, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        },
        image_token_index=505, projector_hidden_act="relu", vision_feature_layer=-1, spatial_merge_size=3,
        multimodal_projector_bias=True,
    ),
    "cohere_compass_whole": seeing(
        "CohereCompassForConditionalGeneration", "cohere_compass",
        dense(
            "", "cohere_compass_text", layers=3, num_key_value_heads=2, hidden_act="silu", layer_norm_eps=1e-3,
            sliding_window=18, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False, logit_scale=0.4, pad_token_id=ABSENT,
            rope_parameters={
                "sliding_attention": {"rope_theta": 7000.0, "rope_type": "default", "mrope_section": [4, 2, 2]},
                "full_attention": {"rope_theta": 9000.0, "rope_type": "default", "mrope_section": [4, 2, 2]},
            },
        ),
        _QWEN3 | {"model_type": "cohere_compass_vision", "out_hidden_size": 64}, **_OF_QWEN,
    ),
    "minimax_m3_hub": seeing(
        "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl",
        dense(
            "", "minimax_m3_vl_text", **_SHARED | {"hidden_act": "swigluoai"}, modern=False, norm=0.0, hidden=96,
            heads=6, layers=3, head_dim=16, tie_word_embeddings=False, intermediate_size=48,
            dense_intermediate_size=120, shared_intermediate_size=40, num_local_experts=6, num_experts_per_tok=2,
            routed_scaling_factor=2.0, swiglu_alpha=1.702, swiglu_limit=2.0, moe_layer_freq=[0, 1, 1],
            rope_theta=5000.0, partial_rotary_factor=0.5, rotary_dim=8,
            sparse_attention_config={
                "use_sparse_attention": True, "sparse_attention_freq": [1, 0, 1], "sparse_num_index_heads": 2,
                "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 5, "sparse_local_block": 2,
            },
        ),
        {
            "model_type": "minimax_m3_vl_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        },
        image_token_index=505, projector_hidden_size=24,
    ),
    "mistral_large4_older": seeing(
        "MistralLarge4ForConditionalGeneration", "mistral_large4",
        dense(
            "", "mistral_large4_text", **_SHARED | {"num_key_value_heads": 4}, modern=False, layers=4,
            tie_word_embeddings=False, kv_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20,
            n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, n_group=4, topk_group=2,
            moe_intermediate_size=40, first_k_dense_replace=1, routed_scaling_factor=1.5, attention_bias=False,
            index_topk=11, index_n_heads=16, index_head_dim=20, index_topk_freq=2, index_skip_topk_offset=1,
            no_rope_layer_interval=3, final_logit_softcapping=2.5, rope_theta=7000.0, rope_scaling=None,
        ),
        _PIXTRAL,
    ),
    "mistral_large4_saved": seeing(
        "MistralLarge4ForConditionalGeneration", "mistral_large4",
        dense(
            "", "mistral_large4_text", **_SHARED | {"num_key_value_heads": 6}, hidden=72, heads=6, layers=3,
            tie_word_embeddings=False, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=12, v_head_dim=24,
            n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1,
            moe_intermediate_size=48, mlp_layer_types=["sparse", "dense", "sparse"], routed_scaling_factor=0.8,
            attention_bias=True, index_topk=9, index_n_heads=24, index_head_dim=12, final_logit_softcapping=4.0,
            indexer_types=["full", "full", "shared"], no_rope_layers=[0, 1, 1], kv_source_layers=[0, 1, 2],
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "attention_factor": 0.9,
            },
        ),
        _PIXTRAL, projector_hidden_act="gelu", vision_feature_layer=-1, spatial_merge_size=2,
    ),
    # Lists have entries for two layers that predict further tokens.
    "step3p7_hub": seeing(
        "Step3p7ForConditionalGeneration", "step3p7",
        dense(
            "", "step3p5", modern=False, norm=0.0, hidden=72, layers=4, head_dim=24, num_attention_groups=2,
            hidden_act="silu", rms_norm_eps=1e-3, layer_types=["full_attention", *["sliding_attention"] * 5],
            attention_other_setting={
                "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2,
                "head_dim": 24, "true_head_dim": 24,
            },
            sliding_window=18, moe_layers_enum="1,2,3,4,5", moe_num_experts=7, moe_top_k=3, moe_intermediate_size=40,
            share_expert_dim=56, moe_router_scaling_factor=1.7, swiglu_limits=[0.0, 0.0, 0.8, 0.0, 0.0, 0.0],
            swiglu_limits_shared=[0.7, 0.0, 0.0, 0.5, 0.0, 0.0], num_nextn_predict_layers=2,
            rope_theta=[7000.0, *[500.0] * 5], partial_rotary_factors=[0.5, *[1.0] * 5],
            rope_scaling={
                "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            yarn_only_types=["full_attention"], use_head_wise_attn_gate=True, use_moe_router_bias=True,
            moe_router_activation="sigmoid", need_fp32_gate=True, attention_bias=True, tie_word_embeddings=False,
            query_pre_attn_scalar=16,
        ),
        _STEP, image_token_id=505, projector_bias=False,
    ),
    "step3p7_types": seeing(
        "Step3p7ForConditionalGeneration", "step3p7",
        dense(
            "", "step3p5", norm=0.0, layers=3, head_dim=16, num_key_value_heads=2, hidden_act="silu",
            rms_norm_eps=1e-5, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            num_sliding_attention_heads=2, sliding_window=21, mlp_layer_types=["sparse", "dense", "sparse"],
            n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, share_expert_dim=40,
            per_layer_config={"0": {"num_attention_heads": 2}, "2": {"num_attention_heads": 2}},
            swiglu_limits=[None, None, 0.6], tie_word_embeddings=False,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            },
        ),
        _STEP, image_token_id=505,
    ),
}  # fmt: skip
