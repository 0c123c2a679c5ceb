"""Small random checkpoints of families with recurrent layers, for `tiny_models`; as those of `dense_models`."""

from dense_models import _YARN, ABSENT, DenseCase, dense, seeing

_ROPE = {"rope_theta": 7000.0, "rope_type": "default", "mrope_interleaved": True}
_SHARED = {
    "norm": 0.4, "tie_word_embeddings": False, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "hidden_act": "silu",
    "pad_token_id": ABSENT,
}  # fmt: skip
_OLMO = _SHARED | {"norm": 1.0, "pad_token_id": 0}
# Settings that published files have, and that nothing reads.
_PUBLISHED = {
    "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "full_attention_interval": 4,
}  # fmt: skip
_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_position_embeddings": 16,
    "patch_size": 4,
}  # fmt: skip

_QWEN4 = {"indexer_kv_heads": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}

_LATENT = {
    "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "hidden_act": "silu",
    "rms_norm_eps": 1e-3, "moe_intermediate_size": 40,
}  # fmt: skip
_NO_ATTENTION = {"max_position_embeddings": ABSENT, "num_attention_heads": ABSENT, "intermediate_size": ABSENT}
_KDA = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
_GRANITE = {"num_key_value_heads": 2, "rms_norm_eps": 1e-3, "hidden_act": "silu"}

LARA = {
    "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "hidden_act": "silu", "intermediate_size": ABSENT,
}  # fmt: skip
RECURRENT_CASES: dict[str, DenseCase] = {
    "qwen3_5_groups": dense(
        "Qwen3_5ForCausalLM", "qwen3_5_text", **_SHARED, hidden=96, layers=5, head_dim=16, attention_bias=False,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
        linear_conv_kernel_dim=4, layer_types=["full_attention"] + ["linear_attention"] * 3 + ["full_attention"],
        rope_parameters=_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    ),
    # As published, as part of a model that sees.
    "qwen3_5_whole": seeing(
        "Qwen3_5ForConditionalGeneration", "qwen3_5",
        dense(
            "", "qwen3_5_text", **_SHARED | {"num_key_value_heads": 3, "tie_word_embeddings": True}, **_PUBLISHED,
            hidden=72, heads=6, layers=4, head_dim=32, attention_bias=True, linear_num_key_heads=3,
            linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=20, linear_conv_kernel_dim=3,
            rope_parameters=_ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        ),
        _VISION | {"out_hidden_size": 72, "model_type": "qwen3_5"}, image_token_id=505, video_token_id=506,
        vision_start_token_id=507, vision_end_token_id=508,
    ),
    "qwen3_5_moe_odd": dense(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **_SHARED | {"num_key_value_heads": 3}, hidden=72, heads=6,
        layers=3, head_dim=32, attention_bias=True, linear_num_key_heads=3, linear_num_value_heads=6,
        linear_key_head_dim=24, linear_value_head_dim=20, linear_conv_kernel_dim=3, num_experts=6,
        num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56, intermediate_size=ABSENT,
        layer_types=["linear_attention", "full_attention", "linear_attention"], output_router_logits=False,
        router_aux_loss_coef=0.001, rope_parameters=_ROPE | {"partial_rotary_factor": 0.25},
    ),
    "qwen3_5_moe_whole": seeing(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        dense(
            "", "qwen3_5_moe_text", **_SHARED, **_PUBLISHED, hidden=96, layers=4, head_dim=16, attention_bias=False,
            linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
            linear_conv_kernel_dim=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
            shared_expert_intermediate_size=64, intermediate_size=ABSENT, mlp_only_layers=[],
            rope_parameters=_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        ),
        _VISION | {"out_hidden_size": 96, "model_type": "qwen3_5_moe"}, image_token_id=505, video_token_id=506,
        vision_start_token_id=507, vision_end_token_id=508,
    ),
    # Many heads choose blocks, so that no two blocks have the same score. Prompts are longer than what is chosen.
    "qwen4_exp_types": dense(
        "Qwen4ExpForCausalLM", "qwen4_exp_text", **_SHARED | {"num_key_value_heads": 3}, hidden=72, heads=6, layers=5,
        head_dim=20, attention_bias=True, intermediate_size=ABSENT, **_QWEN4, linear_num_key_heads=3,
        linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=20, linear_conv_kernel_dim=3,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56,
        norm_topk_prob=False, output_gate_type="sigmoid", hc_count=3, hc_lowrank=12, ple_layer_ids=[4, 2],
        ple_embed_dim=60, ple_conv_kernel_size=3, ngram_size=4, heads_per_ngram=2, ngram_vocab_size_base=90,
        make_ngram_vocab_size_divisible_by=7, seed=99, split_ngram_parts=5, indexer_n_heads=24, indexer_head_dim=14,
        indexer_budget=12, indexer_compress_ratio=3,
        layer_types=["indexed_attention"] + ["linear_attention"] * 3 + ["indexed_attention"],
        rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
    ),
    # As published: part of a model that sees, whose layers choose blocks under the name of full attention.
    "qwen4_exp_whole": seeing(
        "Qwen4ExpForConditionalGeneration", "qwen4_exp",
        dense(
            "", "qwen4_exp_text", **_SHARED, **_PUBLISHED, hidden=64, layers=4, head_dim=16, attention_bias=False,
            intermediate_size=ABSENT, **_QWEN4, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=64, hc_count=4,
            hc_lowrank=20, ple_layer_ids=[1], ngram_vocab_size_base=300, heads_per_ngram=4, split_ngram_parts=8,
            indexer_n_heads=16, indexer_head_dim=16, indexer_budget=32, indexer_compress_ratio=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            rope_parameters=_ROPE | {"mrope_section": [4, 2, 2]},
        ),
        _VISION | {"out_hidden_size": 64, "model_type": "qwen4_exp"}, image_token_id=505, video_token_id=506,
        vision_start_token_id=507, vision_end_token_id=508,
    ),
    # transformers cuts the convolution into three equal parts when it saves, so queries, keys and values are as wide.
    "olmo_hybrid_turning": dense(
        "OlmoHybridForCausalLM", "olmo_hybrid", **_OLMO | {"num_key_value_heads": 3}, modern=False, hidden=72, heads=6,
        layers=3, attention_bias=True, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=24,
        linear_value_head_dim=12, linear_conv_kernel_dim=3, linear_allow_neg_eigval=False, rope_theta=7000.0,
        layer_types=["linear_attention", "full_attention", "linear_attention"], rope_scaling=None,
    ),
    # As published, without rotary positions, and with rates up to 2.
    "olmo_hybrid_still": dense(
        "OlmoHybridForCausalLM", "olmo_hybrid", **_OLMO, hidden=96, layers=4, attention_bias=False,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=18, linear_conv_kernel_dim=4,
        linear_a_log_min=0.0, linear_a_log_max=16.0, linear_dt_min=0.001, linear_dt_max=0.1, linear_dt_init_floor=1e-4,
        linear_allow_neg_eigval=True, rope_parameters={"rope_theta": None, "rope_type": "default"},
    ),
    "lfm2_odd": dense(
        "Lfm2ForCausalLM", "lfm2", modern=False, hidden=72, heads=6, layers=4, num_key_value_heads=2, conv_L_cache=4,
        intermediate_size=ABSENT, block_ff_dim=200, block_ffn_dim_multiplier=1.3, block_multiple_of=24, conv_bias=True,
        block_auto_adjust_ff_dim=True, full_attn_idxs=[1], norm_eps=1e-3, rope_theta=10000.0, tie_embedding=False,
        block_dim=72, block_norm_eps=1e-5, block_use_swiglu=True, conv_dim=72, num_heads=6, use_pos_enc=True,
    ),
    "lfm2_tied": dense(
        "Lfm2ForCausalLM", "lfm2", layers=5, num_key_value_heads=2, conv_L_cache=3, block_auto_adjust_ff_dim=False,
        norm_eps=1e-5, layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "bamba_odd": dense(
        "BambaForCausalLM", "bamba", modern=False, hidden=72, heads=6, layers=4, num_key_value_heads=2,
        hidden_act="silu", rms_norm_eps=1e-3, attn_layer_indices=[2], attention_bias=True, mlp_bias=True,
        mamba_n_heads=9, mamba_n_groups=3, mamba_d_state=24, mamba_d_head="auto", mamba_d_conv=5, mamba_expand=2,
        mamba_chunk_size=48, mamba_conv_bias=True, mamba_proj_bias=True, num_logits_to_keep=1, attn_rotary_emb=6,
        partial_rotary_factor=0.5, rope_theta=7000.0, rope_scaling=None,
    ),
    "bamba_groups": dense(
        "BambaForCausalLM", "bamba", layers=5, num_key_value_heads=4, hidden_act="silu", rms_norm_eps=1e-5,
        attn_layer_indices=[0, 3], mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_head=16,
        mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=False, mamba_proj_bias=False, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "nemotron_h_pattern": dense(
        "NemotronHForCausalLM", "nemotron_h", modern=False, hidden=72, heads=6, layers=7, num_key_value_heads=2,
        head_dim=16, intermediate_size=104, hybrid_override_pattern="M-M*-M-", mamba_num_heads=9, mamba_head_dim=14,
        n_groups=3, ssm_state_size=20, conv_kernel=3, expand=2, chunk_size=48, use_conv_bias=True, use_bias=True,
        mlp_bias=True, mlp_hidden_act="relu2", mamba_hidden_act="silu", layer_norm_epsilon=1e-3, rms_norm_eps=1e-5,
        time_step_floor=1e-4, time_step_max=0.1, time_step_min=0.001, time_step_rank=8, num_logits_to_keep=1,
        mamba_proj_bias=False, attention_head_dim=16, rescale_prenorm_residual=True, sliding_window=None,
    ),
    "nemotron_h_types": dense(
        "NemotronHForCausalLM", "nemotron_h", layers=5, num_key_value_heads=4, head_dim=24, intermediate_size=96,
        layers_block_type=["full_attention", "mlp", "linear_attention", "full_attention", "linear_attention"],
        mamba_num_heads=4, mamba_head_dim=32, n_groups=2, ssm_state_size=16, conv_kernel=4, use_conv_bias=False,
        mlp_hidden_act="silu", mamba_hidden_act="gelu", layer_norm_epsilon=1e-5, time_step_min=0.0001,
    ),
    "lfm2_moe_bias": dense(
        "Lfm2MoeForCausalLM", "lfm2_moe", modern=False, hidden=72, heads=6, layers=4, num_key_value_heads=3,
        conv_L_cache=3, conv_bias=True, intermediate_size=104, moe_intermediate_size=40, num_dense_layers=1,
        num_experts=7, num_experts_per_tok=3, norm_topk_prob=True, routed_scaling_factor=1.3, use_expert_bias=True,
        norm_eps=1e-3, rope_theta=10000.0, layer_types=["conv", "full_attention", "conv", "conv"],
    ),
    "lfm2_moe_plain": dense(
        "Lfm2MoeForCausalLM", "lfm2_moe", layers=4, num_key_value_heads=2, conv_L_cache=5, intermediate_size=96,
        moe_intermediate_size=48, num_dense_layers=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
        routed_scaling_factor=0.7, use_expert_bias=False, norm_eps=1e-5, tie_word_embeddings=False,
        layer_types=["full_attention", "conv", "conv", "full_attention"],
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "granite_hybrid_experts": dense(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", **_GRANITE, modern=False, hidden=72, heads=6, layers=4,
        tie_word_embeddings=False, intermediate_size=40, shared_intermediate_size=56, num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=3.0, logits_scaling=0.6, residual_multiplier=0.4, attention_multiplier=0.11,
        attention_bias=True, layer_types=["mamba", "attention", "mamba", "mamba"], position_embedding_type="nope",
        mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=20, mamba_d_head=24, mamba_d_conv=3, mamba_expand=2,
        mamba_chunk_size=32, mamba_conv_bias=True, mamba_proj_bias=True, rope_theta=10000.0,
        init_method="mup", normalization_function="rmsnorm", output_router_logits=False,
    ),
    "granite_hybrid_dense": dense(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", **_GRANITE, tie_word_embeddings=True, layers=5,
        shared_intermediate_size=104, num_local_experts=0, num_experts_per_tok=0, attention_multiplier=0.3,
        layer_types=["linear_attention"] * 2 + ["full_attention"] + ["linear_attention"] * 2,
        position_embedding_type="rope", mamba_n_heads=4, mamba_n_groups=1, mamba_d_state=16, mamba_d_head="auto",
        mamba_d_conv=4, mamba_expand=3, mamba_conv_bias=False, mamba_proj_bias=False,
        rope_parameters={"rope_theta": 7000.0, "rope_type": "default"},
    ),
    "kimi_linear_hub": dense(
        "KimiLinearForCausalLM", "kimi_linear", **_LATENT, modern=False, hidden=72, heads=6, layers=5,
        linear_attn_config={
            "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 20, "num_heads": 5,
            "short_conv_kernel_size": 3,
        },
        max_position_embeddings=ABSENT, model_max_length=512, head_dim=12, num_key_value_heads=6, q_lora_rank=None,
        first_k_dense_replace=1, moe_layer_freq=1, moe_renormalize=True, moe_router_activation_func="sigmoid",
        num_expert_group=3, topk_group=2, num_experts=9, num_experts_per_token=3, num_shared_experts=2,
        routed_scaling_factor=1.7, use_grouped_topk=True, mla_use_nope=True, rope_theta=10000.0, rope_scaling=None,
        num_nextn_predict_layers=0,
    ),
    "kimi_linear_types": dense(
        "KimiLinearForCausalLM", "kimi_linear", **_LATENT, layers=5, layer_types=_KDA, q_lora_rank=36,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"], attention_bias=True, norm_topk_prob=False,
        num_local_experts=6, num_experts_per_tok=2, n_shared_experts=1, linear_num_heads=4, linear_head_dim=16,
        linear_conv_kernel_dim=4, num_key_value_heads=4,
    ),
    "bailing_hybrid_groups": dense(
        "BailingHybridForCausalLM", "bailing_hybrid", **_LATENT, modern=False, hidden=72, heads=6, layers=5,
        head_dim=20, num_key_value_heads=6, q_lora_rank=None, layer_group_size=3, short_conv_kernel_size=3,
        num_experts=12, num_experts_per_token=3, num_expert_group=4, topk_group=2, num_shared_experts=2,
        moe_renormalize=True, first_k_dense_replace=1, routed_scaling_factor=1.7, kda_safe_gate=True,
        kda_lower_bound=-3.0, rope_theta=7000.0, num_nextn_predict_layers=1, mtp_loss_scaling_factor=0.1,
    ),
    "bailing_hybrid_types": dense(
        "BailingHybridForCausalLM", "bailing_hybrid", **_LATENT, layers=5, layer_types=_KDA, q_lora_rank=36,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"], attention_bias=True, norm_topk_prob=False,
        head_dim=16,
        num_local_experts=6, n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, kda_safe_gate=False,
        num_key_value_heads=4, rope_parameters=_YARN | {"rope_theta": 10000.0, "mscale": 0.8, "mscale_all_dim": 1.0},
    ),
    "falcon_h1_multipliers": dense(
        "FalconH1ForCausalLM", "falcon_h1", modern=False, hidden=72, heads=6, layers=3, num_key_value_heads=2,
        head_dim=16, hidden_act="silu", rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True, projectors_bias=True,
        mamba_d_ssm=108, mamba_n_heads=9, mamba_n_groups=3, mamba_d_state=20, mamba_d_head=12, mamba_d_conv=3,
        mamba_expand=2, mamba_chunk_size=48, mamba_conv_bias=True, mamba_proj_bias=True, mamba_rms_norm=True,
        mamba_norm_before_gate=True, mamba_use_mlp=True, attn_layer_indices=None, mlp_expansion_factor=8,
        num_logits_to_keep=1, time_step_floor=1e-4, time_step_max=0.1, time_step_min=0.001, rope_scaling=None,
        rope_theta=7000.0, lm_head_multiplier=0.6, embedding_multiplier=2.5, mlp_multipliers=[0.7, 1.3],
        key_multiplier=0.8, attention_in_multiplier=1.2, attention_out_multiplier=0.9, ssm_in_multiplier=1.4,
        ssm_out_multiplier=0.75, ssm_multipliers=[0.6, 1.5, 0.85, 1.25, 0.7],
    ),
    "falcon_h1_norm_behind": dense(
        "FalconH1ForCausalLM", "falcon_h1", layers=2, num_key_value_heads=4, hidden_act="silu", rms_norm_eps=1e-5,
        mamba_d_ssm=None, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
        mamba_conv_bias=False, mamba_rms_norm=True, mamba_norm_before_gate=False, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "falcon_h1_plain": dense(
        "FalconH1ForCausalLM", "falcon_h1", layers=2, num_key_value_heads=1, hidden_act="silu", rms_norm_eps=1e-5,
        mamba_d_ssm=96, mamba_n_heads=4, mamba_n_groups=1, mamba_d_state=16, mamba_rms_norm=False,
        ssm_multipliers=[0.6, 1.5, 0.85, 1.25, 0.7], rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "mamba2_hub": dense(
        "Mamba2ForCausalLM", "mamba2", **_NO_ATTENTION | {"intermediate_size": 144}, modern=False, hidden=72,
        layers=3, num_heads=9, head_dim=16, n_groups=3, state_size=20, conv_kernel=3, expand=2, use_bias=True,
        use_conv_bias=True, chunk_size=48, layer_norm_epsilon=1e-3, hidden_act="silu", norm_before_gate=True,
        rms_norm=True,
        rescale_prenorm_residual=False, residual_in_fp32=True, time_step_floor=1e-4, time_step_init_scheme="random",
        time_step_max=0.1, time_step_min=0.001, time_step_rank=5, time_step_scale=1.0, tie_word_embeddings=False,
    ),
    "mamba2_tied": dense(
        "Mamba2ForCausalLM", "mamba2", **_NO_ATTENTION, layers=2, num_heads=8, head_dim=24, n_groups=2, state_size=16,
        conv_kernel=4, expand=3, use_bias=False, use_conv_bias=False, hidden_act="gelu", tie_word_embeddings=True,
    ),
    "mamba_hub": dense(
        "MambaForCausalLM", "mamba", **_NO_ATTENTION | {"intermediate_size": 144}, modern=False, hidden=72, layers=3,
        state_size=12, conv_kernel=3, expand=2, use_bias=True, use_conv_bias=True, layer_norm_epsilon=1e-3,
        hidden_act="silu", rescale_prenorm_residual=False, residual_in_fp32=True, time_step_floor=1e-4,
        time_step_init_scheme="random", time_step_max=0.1, time_step_min=0.001, time_step_rank=7, time_step_scale=1.0,
        use_mambapy=False, tie_word_embeddings=False,
    ),
    "mamba_tied": dense(
        "MambaForCausalLM", "mamba", **_NO_ATTENTION, layers=2, state_size=16, conv_kernel=4, expand=3,
        use_conv_bias=False, hidden_act="gelu", time_step_rank="auto",
    ),
    "falcon_mamba_hub": dense(
        "FalconMambaForCausalLM", "falcon_mamba", **_NO_ATTENTION | {"intermediate_size": 144}, modern=False, hidden=72,
        layers=3, state_size=12, conv_kernel=3, expand=16, use_bias=True, layer_norm_epsilon=1e-3, mixer_rms_eps=0.3,
        time_step_rank=9, tie_word_embeddings=False, use_falcon_mambapy=False, time_step_scale=1.0,
    ),
    "falcon_mamba_tied": dense(
        "FalconMambaForCausalLM", "falcon_mamba", **_NO_ATTENTION, layers=2, state_size=16, expand=3,
        use_conv_bias=False, hidden_act="gelu_pytorch_tanh",
    ),
    "jamba_experts": dense(
        "JambaForCausalLM", "jamba", modern=False, hidden=72, heads=6, layers=5, num_key_value_heads=2,
        hidden_act="silu", rms_norm_eps=1e-3, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=0, num_experts=5, num_experts_per_tok=3, mamba_d_state=12, mamba_d_conv=3, mamba_expand=2,
        mamba_dt_rank=7, mamba_conv_bias=True, mamba_proj_bias=True, mamba_inner_layernorms=True,
        num_logits_to_keep=1, use_mamba_kernels=False, sliding_window=None,
    ),
    "jamba_dense": dense(
        "JambaForCausalLM", "jamba", layers=4, num_key_value_heads=4, hidden_act="gelu", rms_norm_eps=1e-5,
        attn_layer_period=2, attn_layer_offset=0, num_experts=1, num_experts_per_tok=1, mamba_d_state=16,
        mamba_expand=3, mamba_conv_bias=False, tie_word_embeddings=True,
    ),
    # The first layer has lightning attention, as in the published model. transformers takes a token's position from the
    # cache of the first layer, which then has none, and counts from 0 again, unless it is given positions. Without a
    # cache, and in the published inference code, positions go on. `goldens/record.py` gives them.
    "minimax_lightning_first": dense(
        "MiniMaxForCausalLM", "minimax", modern=False, hidden=72, heads=6, layers=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=56, hidden_act="silu", rms_norm_eps=1e-3, num_local_experts=5, num_experts_per_tok=3,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"], block_size=48,
        full_attn_alpha_factor=2.5, full_attn_beta_factor=1.3, linear_attn_alpha_factor=1.7,
        linear_attn_beta_factor=0.8, mlp_alpha_factor=2.1, mlp_beta_factor=0.9, rope_theta=7000.0, rope_scaling=None,
    ),
    "minimax_by_turns": dense(
        "MiniMaxForCausalLM", "minimax", layers=4, heads=8, num_key_value_heads=4, intermediate_size=48,
        hidden_act="gelu", rms_norm_eps=1e-5, num_local_experts=4, num_experts_per_tok=2, sliding_window=24,
        tie_word_embeddings=True, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "nemotron_h_experts": dense(
        "NemotronHForCausalLM", "nemotron_h", layers=6, num_key_value_heads=2, head_dim=24, intermediate_size=96,
        layers_block_type=["moe", "linear_attention", "full_attention", "moe", "linear_attention", "mlp"],
        mamba_num_heads=6, mamba_head_dim=20, n_groups=2, ssm_state_size=12, conv_kernel=4, use_conv_bias=True,
        mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, n_routed_experts=12, num_experts_per_tok=3, n_group=4,
        topk_group=2, moe_intermediate_size=40, moe_shared_expert_intermediate_size=56, norm_topk_prob=True,
        routed_scaling_factor=1.7, n_shared_experts=1, moe_latent_size=None, tie_word_embeddings=False,
    ),
    # As Nemotron 3 Super: experts compute with a latent of the token.
    "nemotron_h_latent": dense(
        "NemotronHForCausalLM", "nemotron_h", modern=False, hidden=72, heads=6, layers=5, num_key_value_heads=2,
        head_dim=16, intermediate_size=104, hybrid_override_pattern="ME*EM", mamba_num_heads=6, mamba_head_dim=14,
        n_groups=3, ssm_state_size=20, conv_kernel=3, expand=2, chunk_size=48, use_conv_bias=True,
        mlp_hidden_act="relu2", mamba_hidden_act="silu", layer_norm_epsilon=1e-3, n_routed_experts=9,
        num_experts_per_tok=4, n_group=1, topk_group=1, moe_intermediate_size=44, moe_latent_size=28,
        moe_shared_expert_intermediate_size=60, norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1,
        moe_shared_expert_overlap=True, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E",
    ),
    "nemotron_h_latent_types": dense(
        "NemotronHForCausalLM", "nemotron_h", layers=4, num_key_value_heads=4, head_dim=24, intermediate_size=96,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"], mamba_num_heads=4, mamba_head_dim=16,
        n_groups=2, ssm_state_size=16, conv_kernel=4, mlp_hidden_act="relu2", layer_norm_epsilon=1e-5,
        n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=3, moe_intermediate_size=40,
        moe_latent_size=32, moe_shared_expert_intermediate_size=56, norm_topk_prob=False, routed_scaling_factor=1.3,
        n_shared_experts=1, tie_word_embeddings=False,
    ),
    "lfm3_usual": dense(
        "Lfm3ForCausalLM", "lfm3", modern=False, hidden=72, layers=5, heads=4, num_key_value_heads=2, head_dim=24,
        conv_L_cache=5, conv_bias=True, sliding_window=19, norm_eps=1e-3, attention_bias=True,
        tie_word_embeddings=False,
    ),
    "lfm3_types": dense(
        "Lfm3ForCausalLM", "lfm3", layers=4, num_key_value_heads=4, head_dim=16, conv_L_cache=3, sliding_window=23,
        norm_eps=1e-5, use_sandwich_norm=True, use_attention_gate=False,
        layer_types=["sliding_attention", "conv", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.75, "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
        },
    ),
    "lfm3_pre": dense(
        "Lfm3ForCausalLM", "lfm3", hidden=96, layers=3, num_key_value_heads=2, head_dim=32, conv_L_cache=7,
        norm_eps=1e-5, use_sandwich_norm=False, use_attention_gate=True,
        layer_types=["conv", "full_attention", "conv"],
        rope_parameters={"full_attention": {"rope_type": "proportional", "rope_theta": 700.0,
                                            "partial_rotary_factor": 0.25}},
    ),
    "zamba2_hub": dense(
        "Zamba2ForCausalLM", "zamba2", modern=False, hidden=48, heads=4, layers=6, num_key_value_heads=4,
        rms_norm_eps=1e-3, intermediate_size=88, adapter_rank=6, add_bias_linear=False, attention_head_dim=24,
        attention_hidden_size=96, chunk_size=16, hidden_act="gelu", hybrid_layer_ids=[1, 3, 4], kv_channels=12,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"], mamba_d_conv=4, mamba_d_state=12,
        mamba_expand=2, mamba_headdim=16, mamba_ngroups=2, n_mamba_heads=6, num_logits_to_keep=1, num_mem_blocks=2,
        num_query_groups=4, rope_theta=7000.0, time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001,
        use_conv_bias=True, use_long_context=False, use_mamba_kernels=True, use_mem_rope=True,
        use_shared_attention_adapter=True, use_shared_mlp_adapter=True, tie_word_embeddings=True,
    ),
    "zamba2_plain": dense(
        "Zamba2ForCausalLM", "zamba2", hidden=64, heads=4, layers=4, num_key_value_heads=4, rms_norm_eps=1e-5,
        intermediate_size=100, adapter_rank=4, hidden_act="gelu", mamba_d_conv=3, mamba_d_state=16, mamba_expand=2,
        mamba_ngroups=1, n_mamba_heads=8, num_mem_blocks=1, use_mem_rope=False, use_shared_attention_adapter=False,
        layers_block_type=["hybrid", "linear_attention", "hybrid", "linear_attention"], tie_word_embeddings=False,
    ),
    "lara_mini_hub": dense(
        "LaraMiniForCausalLM", "lara_mini", **LARA, modern=False, hidden=72, layers=5,
        heads=6, head_dim=24, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40,
        shared_expert_intermediate_size=56, norm_topk_prob=True, linear_num_key_heads=3, linear_num_value_heads=6,
        linear_key_head_dim=24, linear_value_head_dim=20, linear_conv_kernel_dim=3, sliding_window=18,
        rope_theta=7000.0, router_aux_loss_coef=0.001, output_router_logits=False,
    ),
    "lara_mini_types": dense(
        "LaraMiniForCausalLM", "lara_mini", **LARA, tie_word_embeddings=False, layers=5, head_dim=16, num_experts=7,
        num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40, norm_topk_prob=False,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=24,
        linear_conv_kernel_dim=4, sliding_window=21, attention_bias=True,
        layer_types=["full_attention"] + ["linear_attention", "sliding_attention"] * 2,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    "zamba_hub": dense(
        "ZambaForCausalLM", "zamba", modern=False, hidden=72, heads=6, layers=5, num_key_value_heads=6,
        attention_hidden_size=144, attention_head_dim=24, intermediate_size=104, hidden_act="gelu",
        hidden_mamba_act="silu", rms_norm_eps=1e-3, n_mamba_heads=4, mamba_d_state=12, mamba_d_conv=4, mamba_expand=2,
        mamba_dt_rank="auto", mamba_conv_bias=True, mamba_proj_bias=False, attn_layer_period=6, attn_layer_offset=1,
        use_mamba_kernels=True, num_logits_to_keep=1, time_step_floor=1e-4, time_step_max=0.1, time_step_min=0.001,
        tie_word_embeddings=True,
    ),
    "zamba_types": dense(
        "ZambaForCausalLM", "zamba", layers=4, num_key_value_heads=4, hidden_act="silu", hidden_mamba_act="gelu",
        rms_norm_eps=1e-5, n_mamba_heads=2, mamba_d_state=16, mamba_d_conv=3, mamba_expand=3, mamba_dt_rank=7,
        mamba_conv_bias=False, mamba_proj_bias=True, attention_head_dim=20,
        layer_types=["hybrid", "linear_attention", "hybrid", "hybrid"], tie_word_embeddings=False,
    ),
    "zaya_hub": dense(
        "ZayaForCausalLM", "zaya", hidden=72, heads=6, layers=4, num_key_value_heads=2, head_dim=12,
        intermediate_size=ABSENT, moe_intermediate_size=40, num_experts=5, num_experts_per_tok=1, hidden_act="silu",
        rms_norm_eps=1e-3, router_hidden_size=28, cca_time0=2, cca_time1=2, attention_bias=False, lm_head_bias=False,
        tie_word_embeddings=False, rope_parameters={
            "hybrid": {"rope_theta": 7000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "hybrid_sliding": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "rope_type": "default",
        },
    ),
    "zaya_sliding": dense(
        "ZayaForCausalLM", "zaya", heads=8, layers=4, num_key_value_heads=2, head_dim=16, intermediate_size=ABSENT,
        moe_intermediate_size=48, num_experts=4, hidden_act="gelu", rms_norm_eps=1e-5, router_hidden_size=32,
        cca_time0=3, cca_time1=4, sliding_window=20, lm_head_bias=True, tie_word_embeddings=False,
        layer_types=["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"], rope_parameters={
            "hybrid": {"rope_theta": 9000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "hybrid_sliding": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        },
    ),
}  # fmt: skip
