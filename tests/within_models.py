"""Small random checkpoints of language models inside models that see or hear and are read for text only, for
`tiny_models`; as those of `dense_models`. Each has a config as files were published, and one as transformers 5 writes
it."""

from dense_models import ABSENT, DenseCase, dense, seeing

_SHARED = {"rms_norm_eps": 1e-3, "hidden_act": "silu", "num_key_value_heads": 2, "pad_token_id": ABSENT}
_SAVED = {"rope_parameters": {"rope_theta": 9000.0, "rope_type": "default"}}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 16,
}  # fmt: skip
_QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "num_key_value_heads": 2,
    "fullatt_block_indexes": [0],
}  # fmt: skip
_WHISPER = {
    "d_model": 16, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8,
    "max_source_positions": 20,
}  # fmt: skip
_COHERE2 = {"num_key_value_heads": 2, "hidden_act": "silu", "layer_norm_eps": 1e-3, "pad_token_id": ABSENT}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_MROPE = {"rope_theta": 7000.0, "rope_type": "default", "mrope_section": [4, 2, 2]}
_OMNI_AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 8,
    "max_source_positions": 20, "n_window": 4, "downsample_hidden_size": 8,
}  # fmt: skip
_PINPOINTS = [[16, 16], [16, 32], [32, 16]]


def hearing(architecture: str, model_type: str, text: DenseCase, audio: dict, **config: object) -> DenseCase:
    case = seeing(architecture, model_type, text, {}, audio_config=audio, **config)
    del case.config["vision_config"]
    return case


WITHIN_CASES: dict[str, DenseCase] = {
    "aya_vision_hub": seeing(
        "AyaVisionForConditionalGeneration", "aya_vision",
        dense(
            "", "cohere2", **_COHERE2, modern=False, hidden=72, heads=6, layers=4, head_dim=12, sliding_window=20,
            sliding_window_pattern=4, order_of_interleaved_layers="local_attn_first", logit_scale=1.0,
            rope_theta=7000.0, rope_scaling=None, position_embedding_type="rope_gptj", rotary_pct=1.0,
            tie_word_embeddings=True,
        ),
        _SIGLIP, image_token_index=505, downsample_factor=2, adapter_layer_norm_eps=1e-6, vision_feature_layer=-1,
        vision_feature_select_strategy="full", alignment_intermediate_size=32,
    ),
    "cohere2_vision_saved": seeing(
        "Cohere2VisionForConditionalGeneration", "cohere2_vision",
        dense(
            "", "cohere2", **_COHERE2, **_SAVED, layers=3, head_dim=16, sliding_window=24, layer_types=_TYPES,
            attention_bias=True, logit_scale=1.0, tie_word_embeddings=False,
        ),
        _SIGLIP, image_token_id=505, downsample_factor=2, alignment_intermediate_size=32,
    ),
    "llava_next_hub": seeing(
        "LlavaNextForConditionalGeneration", "llava_next",
        dense(
            "", "mistral", **_SHARED, modern=False, hidden=72, heads=6, layers=3, tie_word_embeddings=False,
            sliding_window=None, rope_theta=7000.0,
        ),
        _CLIP, image_token_index=505, image_grid_pinpoints=_PINPOINTS, projector_hidden_act="gelu",
        use_image_newline_parameter=True, vision_feature_layer=-2, vision_feature_select_strategy="default",
    ),
    "llava_next_saved": seeing(
        "LlavaNextForConditionalGeneration", "llava_next",
        dense("", "llama", **_SHARED, **_SAVED, head_dim=24, attention_bias=True, tie_word_embeddings=True),
        _CLIP, image_token_index=505, image_grid_pinpoints=_PINPOINTS, multimodal_projector_bias=False,
    ),
    "exaone4_5_hub": seeing(
        "Exaone4_5_ForConditionalGeneration", "exaone4_5",
        dense(
            "", "exaone4_5_text", **_SHARED, modern=False, hidden=72, heads=6, layers=4, sliding_window=20,
            sliding_window_pattern=4, layer_types=["sliding_attention"] * 3 + ["full_attention"], rope_theta=7000.0,
            head_dim=12, tie_word_embeddings=False,
        ),
        _QWEN | {"out_hidden_size": 72}, image_token_id=505, video_token_id=506,
    ),
    "exaone4_5_saved": seeing(
        "Exaone4_5_ForConditionalGeneration", "exaone4_5",
        dense("", "exaone4", **_SHARED, **_SAVED, layers=3, sliding_window=24, layer_types=_TYPES),
        _QWEN | {"out_hidden_size": 64}, image_token_id=505, video_token_id=506,
    ),
    "ovis2_hub": seeing(
        "Ovis2ForConditionalGeneration", "ovis2",
        dense(
            "", "qwen2", **_SHARED, modern=False, hidden=72, heads=6, layers=3, tie_word_embeddings=True,
            rope_theta=7000.0, use_sliding_window=False, sliding_window=None, max_window_layers=2,
        ),
        {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4, "vocab_size": 40, "num_visual_indicator_tokens": 5, "hidden_stride": 2,
        },
        image_token_id=505, visual_indicator_token_ids=[506, 507, 508, 509, 510], hidden_size=72, vocab_size=512,
    ),
    "glm_ocr_hub": seeing(
        "GlmOcrForConditionalGeneration", "glm_ocr",
        dense(
            "", "glm_ocr_text", **_SHARED, hidden=72, heads=6, layers=3, head_dim=16, tie_word_embeddings=False,
            num_nextn_predict_layers=1,
            rope_parameters=_MROPE | {"partial_rotary_factor": 1.0},
        ),
        _QWEN | {"out_hidden_size": 72, "image_size": 8}, image_token_id=505, video_token_id=506,
        image_start_token_id=507, image_end_token_id=508, video_start_token_id=509, video_end_token_id=510,
    ),
    "paddleocr_vl_hub": seeing(
        "PaddleOCRVLForConditionalGeneration", "paddleocr_vl",
        dense(
            "", "paddleocr_vl_text", **_SHARED, hidden=72, heads=6, layers=3, head_dim=16, tie_word_embeddings=True,
            rope_parameters=_MROPE, use_bias=True,
        ),
        {
            "model_type": "paddleocr_vl_vision", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        },
        image_token_id=505, video_token_id=506, vision_start_token_id=507, vision_end_token_id=508,
    ),
    "minicpm_v4_6_hub": seeing(
        "MiniCPMV4_6ForConditionalGeneration", "minicpmv4_6",
        dense(
            "", "qwen3_5_text", **_SHARED, norm=0.4, hidden=72, heads=6, layers=4, head_dim=32, attention_bias=True,
            linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=24, linear_value_head_dim=20,
            linear_conv_kernel_dim=3, tie_word_embeddings=False, full_attention_interval=4,
            rope_parameters={"rope_theta": 7000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        image_token_id=505, video_token_id=506, insert_layer_id=1, image_size=16,
    ),
    "voxtral_hub": hearing(
        "VoxtralForConditionalGeneration", "voxtral",
        dense(
            "", "llama", **_SHARED, modern=False, hidden=72, heads=6, layers=3, head_dim=16, rope_theta=7000.0,
            attention_bias=False, mlp_bias=False, rope_scaling=None, sliding_window=None, tie_word_embeddings=False,
        ),
        _WHISPER | {"model_type": "voxtral_encoder"}, audio_token_id=24, projector_hidden_act="gelu", hidden_size=72,
        vocab_size=512,
    ),
    "qwen2_audio_hub": hearing(
        "Qwen2AudioForConditionalGeneration", "qwen2_audio",
        dense(
            "", "qwen2", **_SHARED, modern=False, hidden=72, heads=6, layers=3, rope_theta=7000.0,
            use_mrope=False, sliding_window=None, use_sliding_window=False, tie_word_embeddings=False,
        ),
        _WHISPER | {"model_type": "qwen2_audio_encoder"}, audio_token_index=505, vocab_size=512, ignore_index=-100,
    ),
    "qwen2_5_omni_thinker": seeing(
        "Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker",
        dense(
            "", "qwen2_5_omni_text", **_SHARED, hidden=72, heads=6, layers=3, tie_word_embeddings=False,
            use_sliding_window=False, sliding_window=32768, max_window_layers=28,
            rope_parameters=_MROPE | {"mrope_section": [2, 2, 2]},
        ),
        _QWEN | {"out_hidden_size": 72}, audio_config=_OMNI_AUDIO | {"output_dim": 72}, audio_token_index=505,
        image_token_index=506, video_token_index=507, position_id_per_seconds=25, seconds_per_chunk=2,
        audio_start_token_id=508, audio_end_token_id=509, user_token_id=5, vision_start_token_id=510,
        vision_end_token_id=511,
    ),
    "qwen3_omni_thinker": seeing(
        "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker",
        dense(
            "", "qwen3_omni_moe_text", **_SHARED, hidden=72, heads=6, layers=3, head_dim=16,
            num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[1], use_qk_norm=True, shared_expert_intermediate_size=0,
            rope_parameters=_MROPE | {"mrope_interleaved": True, "interleaved": True},
        ),
        _QWEN | {"out_hidden_size": 72, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        audio_config=_OMNI_AUDIO | {"output_dim": 72, "n_window_infer": 8, "conv_chunksize": 4}, audio_token_id=505,
        image_token_id=506, video_token_id=507, position_id_per_seconds=25, audio_start_token_id=508, user_token_id=5,
        vision_start_token_id=510, vision_end_token_id=511,
    ),
}  # fmt: skip
