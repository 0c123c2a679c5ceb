"""Small random checkpoints of families with recurrent layers, for `tiny_models`; as those of `dense_models`."""

from dense_models import ABSENT, DenseCase, dense, seeing

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
}  # fmt: skip
