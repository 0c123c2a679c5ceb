"""Small random checkpoints of families with experts, for `tiny_models`; as those of `dense_models`."""

from dense_models import ABSENT, THREE_TO_ONE, DenseCase, dense

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
_SHARED = {"tie_word_embeddings": False, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "hidden_act": "silu"}

MOE_CASES: dict[str, DenseCase] = {
    "granite_moe_stacked": dense(
        "GraniteMoeForCausalLM", "granitemoe", **_SHARED, modern=False, hidden=96, num_local_experts=7,
        num_experts_per_tok=3, intermediate_size=56, embedding_multiplier=3.0, logits_scaling=0.6,
        residual_multiplier=0.4, attention_multiplier=0.11, attention_bias=True, rope_theta=10000.0,
        router_aux_loss_coef=0.01, output_router_logits=False,
    ),
    "gpt_oss_sinks": dense(
        "GptOssForCausalLM", "gpt_oss", **_SHARED, modern=False, hidden=96, layers=4, head_dim=32, num_local_experts=6,
        num_experts_per_tok=3, intermediate_size=64, swiglu_limit=1.5, sliding_window=20, rope_theta=150000.0,
        rope_scaling=_YARN | {"beta_fast": 8.0, "beta_slow": 0.5}, attention_bias=True, experts_per_token=3,
        initial_context_length=64, layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "glm4_moe_groups": dense(
        "Glm4MoeForCausalLM", "glm4_moe", **_SHARED, modern=False, hidden=96, layers=3, head_dim=32,
        n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=2,
        moe_intermediate_size=40, norm_topk_prob=True, routed_scaling_factor=1.7, first_k_dense_replace=1,
        use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5, rope_theta=10000.0,
        num_nextn_predict_layers=0,
    ),
    "glm4_moe_plain": dense(
        "Glm4MoeForCausalLM", "glm4_moe", **_SHARED, layers=2, n_routed_experts=6, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=1, moe_intermediate_size=48, norm_topk_prob=False, routed_scaling_factor=0.8,
        first_k_dense_replace=0, use_qk_norm=False, num_nextn_predict_layers=0, head_dim=16,
        rope_parameters={"rope_theta": 7000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
    ),
    "ernie4_5_moe_mixed": dense(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", **_SHARED, hidden=96, layers=4, moe_num_experts=8, moe_k=3,
        moe_intermediate_size=40, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=2,
        moe_layer_interval=1, moe_norm_min=0.5, use_bias=False,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "llama4_mixed": dense(
        "Llama4ForCausalLM", "llama4_text", **_SHARED, hidden=96, layers=4, head_dim=32, num_local_experts=5,
        num_experts_per_tok=2, intermediate_size=64, intermediate_size_mlp=136, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 1], attention_chunk_size=512, floor_scale=8, attn_scale=0.3, use_qk_norm=True,
        attn_temperature_tuning=True, pad_token_id=ABSENT,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "llama4_chunks": dense(
        "Llama4ForCausalLM", "llama4_text", **_SHARED, hidden=96, layers=5, head_dim=16, num_local_experts=4,
        num_experts_per_tok=1, intermediate_size=80, intermediate_size_mlp=120, interleave_moe_layer_step=1,
        no_rope_layers=[1, 1, 0, 1, 1], attention_chunk_size=48, floor_scale=24, attn_scale=0.2, use_qk_norm=True,
        attn_temperature_tuning=True, pad_token_id=ABSENT,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "qwen3_next_odd": dense(
        "Qwen3NextForCausalLM", "qwen3_next", **_SHARED | {"num_key_value_heads": 3}, modern=False, norm=0.4, hidden=72,
        heads=6, layers=5, head_dim=32, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40,
        shared_expert_intermediate_size=56, mlp_only_layers=[1], decoder_sparse_step=1, norm_topk_prob=True,
        attention_bias=True, partial_rotary_factor=0.25, rope_theta=7000.0, full_attention_interval=4,
        linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=20,
        linear_conv_kernel_dim=3, router_aux_loss_coef=0.001, output_router_logits=False,
    ),
    "qwen3_next_groups": dense(
        "Qwen3NextForCausalLM", "qwen3_next", **_SHARED, norm=0.4, hidden=96, layers=8, head_dim=16, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=64, mlp_only_layers=[],
        decoder_sparse_step=2, norm_topk_prob=False, attention_bias=False, linear_num_key_heads=2,
        linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
        rope_parameters={"rope_theta": 7000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
        layer_types=(["full_attention"] + ["linear_attention"] * 3) * 2,
    ),
    "minimax_m2_hub": dense(
        "MiniMaxM2ForCausalLM", "minimax_m2", **_SHARED, modern=False, hidden=96, layers=3, head_dim=24,
        intermediate_size=40, num_local_experts=7, num_experts_per_tok=3, rotary_dim=12, rope_theta=7000.0,
        attn_type_list=[1, 1, 1], layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0, mlp_intermediate_size=160, mtp_transformer_layers=1, num_mtp_modules=3, use_mtp=True,
        qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0, shared_moe_mode="sigmoid",
        use_qk_norm=True, use_routing_bias=True, sliding_window=None,
    ),
    "minimax_m2_saved": dense(
        "MiniMaxM2ForCausalLM", "minimax_m2", **_SHARED | {"tie_word_embeddings": True}, heads=6, head_dim=16,
        intermediate_size=56, num_local_experts=8, num_experts_per_tok=2,
        rope_parameters={"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "rope_type": "default"},
    ),
    "glm4_moe_lite_hub": dense(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", **_SHARED | {"num_key_value_heads": 4}, modern=False, layers=3,
        q_lora_rank=36, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=28, n_routed_experts=9,
        n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1, moe_intermediate_size=48,
        first_k_dense_replace=1, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.8,
        partial_rotary_factor=1.0, rope_theta=7000.0, rope_scaling=None, attention_bias=False,
        num_nextn_predict_layers=1,
    ),
    "glm4_moe_lite_groups": dense(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", **_SHARED | {"num_key_value_heads": 4}, layers=3, hidden=72,
        q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=12, v_head_dim=20, n_routed_experts=12,
        n_shared_experts=2, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=40,
        mlp_layer_types=["sparse", "dense", "sparse"], norm_topk_prob=False, routed_scaling_factor=0.9,
        rope_interleave=False, attention_bias=True,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 0.7, "mscale_all_dim": 0.9,
        },
    ),
    "olmoe_clip": dense(
        "OlmoeForCausalLM", "olmoe", **_SHARED, modern=False, hidden=72, intermediate_size=56, num_experts=7,
        num_experts_per_tok=3, norm_topk_prob=True, clip_qkv=1.4, attention_bias=True, rope_theta=7000.0,
        rope_scaling=None, router_aux_loss_coef=0.01, output_router_logits=False,
    ),
    "olmoe_plain": dense(
        "OlmoeForCausalLM", "olmoe", **_SHARED | {"num_key_value_heads": 4}, intermediate_size=48, num_experts=8,
        num_experts_per_tok=4, norm_topk_prob=False, clip_qkv=None,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "flex_olmo_post": dense(
        "FlexOlmoForCausalLM", "flex_olmo", **_SHARED, modern=False, hidden=96, intermediate_size=56, num_experts=7,
        num_experts_per_tok=5, norm_topk_prob=False, attention_bias=True, rope_theta=500000.0, rope_scaling=None,
    ),
    "flex_olmo_normalized": dense(
        "FlexOlmoForCausalLM", "flex_olmo", **_SHARED | {"num_key_value_heads": 4}, intermediate_size=40, num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=True, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "dots1_windows": dense(
        "Dots1ForCausalLM", "dots1", **_SHARED, modern=False, layers=4, head_dim=24, n_routed_experts=8,
        n_shared_experts=2, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=40,
        first_k_dense_replace=1, moe_layer_freq=1, norm_topk_prob=True, routed_scaling_factor=2.5, attention_bias=True,
        sliding_window=18, max_window_layers=2, rope_theta=7000.0, rope_scaling=None,
    ),
    "dots1_layer_types": dense(
        "Dots1ForCausalLM", "dots1", **_SHARED, layers=3, hidden=72, n_routed_experts=6, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48, first_k_dense_replace=0,
        norm_topk_prob=False, routed_scaling_factor=0.8, sliding_window=21, max_window_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "exaone_moe_hub": dense(
        "ExaoneMoeForCausalLM", "exaone_moe", **_SHARED, modern=False, layers=4, head_dim=24, num_experts=8,
        num_shared_experts=2, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=40,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.6, sliding_window=18,
        sliding_window_pattern="LLLG", layer_types=THREE_TO_ONE, rope_theta=7000.0, rope_scaling=None,
        num_nextn_predict_layers=1,
    ),
    "exaone_moe_pattern": dense(
        "ExaoneMoeForCausalLM", "exaone_moe", **_SHARED, layers=3, hidden=72, num_experts=6, num_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=48, mlp_layer_types=["sparse", "dense", "sparse"],
        norm_topk_prob=False, routed_scaling_factor=0.8, sliding_window=21, sliding_window_pattern=2,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "granite_moe_shared": dense(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", **_SHARED, modern=False, hidden=72, num_local_experts=5,
        num_experts_per_tok=3, intermediate_size=56, shared_intermediate_size=88, embedding_multiplier=3.0,
        logits_scaling=0.6, residual_multiplier=0.4, attention_multiplier=0.11, attention_bias=True, rope_theta=7000.0,
        router_aux_loss_coef=0.01, output_router_logits=False,
    ),
    "granite_moe_shared_none": dense(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", **_SHARED | {"tie_word_embeddings": True},
        num_local_experts=6, num_experts_per_tok=2, intermediate_size=48, shared_intermediate_size=0,
        embedding_multiplier=2.0, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "phimoe_longrope": dense(
        "PhimoeForCausalLM", "phimoe", **_SHARED, modern=False, intermediate_size=48, num_local_experts=6,
        num_experts_per_tok=2, router_jitter_noise=0.2, input_jitter_noise=0.1, attention_bias=True, lm_head_bias=True,
        sliding_window=40, rope_theta=7000.0, original_max_position_embeddings=256, options={"max_model_len": 256},
        rope_scaling={
            "type": "longrope", "long_factor": [8.0] * 8, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0],
            "original_max_position_embeddings": 256, "short_mscale": 1.2, "long_mscale": 1.2,
        },
    ),
    "phimoe_plain": dense(
        "PhimoeForCausalLM", "phimoe", **_SHARED, hidden=72, intermediate_size=40, num_local_experts=5,
        num_experts_per_tok=2, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "hunyuan_moe_alpha": dense(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", **_SHARED | {"tie_word_embeddings": True}, modern=False, layers=3,
        head_dim=24, intermediate_size=56, moe_intermediate_size=[56] * 3, moe_topk=[3] * 3, num_experts=7,
        num_shared_expert=[1] * 3, use_mixed_mlp_moe=True, norm_topk_prob=True, rope_theta=10000.0, attention_bias=True,
        use_qk_norm=True, use_cla=False, attention_head_dim=24,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                      "mscale_all_dim": 1.0},
    ),
    "hunyuan_moe_plain": dense(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", **_SHARED, intermediate_size=40, head_dim=16, moe_topk=2,
        num_experts=6, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "hy_v3_hub": dense(
        "HYV3ForCausalLM", "hy_v3", **_SHARED, modern=False, layers=3, head_dim=24, num_experts=7,
        num_experts_per_tok=3, num_shared_experts=2, moe_intermediate_size=40, router_scaling_factor=1.7,
        attention_bias=True, rope_theta=7000.0, rope_scaling=None, enable_moe_fp32_combine=False,
    ),
    "hy_v3_layer_types": dense(
        "HYV3ForCausalLM", "hy_v3", **_SHARED, layers=3, hidden=72, head_dim=16, num_experts=6, num_experts_per_tok=2,
        num_shared_experts=1, moe_intermediate_size=48, router_scaling_factor=0.8,
        mlp_layer_types=["sparse", "dense", "sparse"], rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "cohere2_moe_average": dense(
        "Cohere2MoeForCausalLM", "cohere2_moe", modern=False, layers=6, hidden=72, head_dim=24, num_key_value_heads=2,
        intermediate_size=40, num_experts=7, num_experts_per_tok=3, num_shared_experts=2, logit_scale=0.7,
        hidden_act="silu", layer_norm_eps=1e-3, first_k_dense_replace=2, prefix_dense_intermediate_size=88,
        prefix_dense_sliding_window_pattern=1, sliding_window=18, sliding_window_pattern=3,
        shared_expert_combination_strategy="average", expert_selection_fn="sigmoid", norm_topk_prob=False,
        attention_bias=True, rope_theta=7000.0,
    ),
    "cohere2_moe_sum": dense(
        "Cohere2MoeForCausalLM", "cohere2_moe", layers=4, head_dim=16, num_key_value_heads=2, intermediate_size=48,
        num_experts=6, num_experts_per_tok=2, num_shared_experts=1, logit_scale=0.9, hidden_act="silu",
        rms_norm_eps=1e-3, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        prefix_dense_sliding_window_pattern=2, layer_types=["full_attention", *THREE_TO_ONE[1:]], sliding_window=21,
        shared_expert_combination_strategy="sum", expert_selection_fn="softmax", tie_word_embeddings=False,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "solar_open_hub": dense(
        "SolarOpenForCausalLM", "solar_open", **_SHARED, modern=False, hidden=72, head_dim=24, n_routed_experts=8,
        n_shared_experts=2, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=40,
        first_k_dense_replace=0, norm_topk_prob=True, routed_scaling_factor=1.7, use_qk_norm=False, attention_bias=True,
        rope_theta=7000.0, rope_scaling=_YARN,
    ),
    "solar_open_plain": dense(
        "SolarOpenForCausalLM", "solar_open", **_SHARED, intermediate_size=ABSENT, head_dim=16, n_routed_experts=6,
        n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=False,
        routed_scaling_factor=0.8, rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "mistral4_groups": dense(
        "Mistral4ForCausalLM", "mistral4", **_SHARED | {"num_key_value_heads": 4}, layers=3, hidden=72, q_lora_rank=36,
        kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=12,
        n_shared_experts=2, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=40,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.7,
        rope_parameters=_YARN | {
            "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.4,
            "original_max_position_embeddings": 32, "max_position_embeddings": 512,
        },
    ),
    "mistral4_older": dense(
        "Mistral4ForCausalLM", "mistral4", **_SHARED | {"num_key_value_heads": 4}, modern=False, q_lora_rank=None,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48,
        first_k_dense_replace=0, norm_topk_prob=False, routed_scaling_factor=2.0, rope_interleave=False,
        attention_bias=True,
        rope_parameters={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "llama_4_scaling_beta": 0.3,
            "mscale_all_dim": 1.0, "mscale": 1.0, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        },
    ),
    "afmoe_hub": dense(
        "AfmoeForCausalLM", "afmoe", **_SHARED, modern=False, layers=4, hidden=72, head_dim=24, num_experts=7,
        num_experts_per_tok=3, num_shared_experts=2, moe_intermediate_size=40, num_dense_layers=2, route_scale=1.7,
        route_norm=True, score_func="sigmoid", n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1,
        load_balance_coeff=0.001, use_grouped_mm=True, mup_enabled=True, global_attn_every_n_layers=3,
        sliding_window=18, rope_theta=7000.0, rope_scaling=None,
    ),
    "afmoe_layer_types": dense(
        "AfmoeForCausalLM", "afmoe", **_SHARED, layers=3, head_dim=16, num_experts=6, num_experts_per_tok=2,
        num_shared_experts=1, moe_intermediate_size=48, num_dense_layers=0, route_scale=0.8, mup_enabled=False,
        sliding_window=21, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
}  # fmt: skip
