"""Small random checkpoints of families with experts, for `tiny_models`; as those of `dense_models`."""

from dense_models import ABSENT, DenseCase, dense

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
}  # fmt: skip
