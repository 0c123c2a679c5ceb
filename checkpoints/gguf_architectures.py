"""llama.cpp's architectures, as a table: what a file's settings and tensors mean in Hugging Face's terms.

Facts: the keys and names of the package `gguf`, and what llama.cpp's converter and its models do with them
(https://github.com/ggml-org/llama.cpp: `conversion/`, `src/models/`). Some settings of a model are not in its file,
because llama.cpp's code has them as constants; such constants stand in the table.
"""

from __future__ import annotations

from jaxserve.checkpoints.gguf_adapted import XIELU_NUMBERS, of_apertus, of_glm4v
from jaxserve.checkpoints.gguf_gemmas import GEMMAS
from jaxserve.checkpoints.gguf_hybrids import HYBRIDS
from jaxserve.checkpoints.gguf_positions import step35_positions, two_ropes
from jaxserve.checkpoints.gguf_row import GATE_UP, LATENT_ROLES, POST_IS_MLP, Architecture
from jaxserve.checkpoints.gguf_settings import (
    BIASED,
    BIASES,
    DEEPSEEK_EXPERTS,
    EXPERTS,
    GRANITE,
    LOCAL_EXPERTS,
    ONE_GROUP,
    QWEN2_MOE,
    QWEN3_MOE,
    SHARED_MLP,
    SIGMOIDS,
    but,
    by_layer,
    clamps,
    dbrx_attention,
    dbrx_experts,
    deepseek,
    depth_scale,
    flag,
    four_times,
    granite_moe,
    groups,
    has,
    indexer_types,
    laguna_gates,
    last_layer,
    layer_types,
    layers_from_full,
    llama,
    mellum_layers,
    mimo_heads,
    mimo_window,
    mistral,
    mlp_kinds,
    mpt_attention,
    mscale,
    number,
    of_kind,
    olmo,
    only,
    optional,
    real,
    rows_of,
    same_as,
    sigmoids,
    size,
    stored,
    turned_part,
    unused,
    width_base,
    window,
)

XIELU = {f"xielu_{name}": name for name in XIELU_NUMBERS}
INDEXER_ROLES = {
    "indexer.attn_q_b": "index_q",
    "indexer.attn_k": "index_k",
    "indexer.k_norm": "index_k_norm",
    "indexer.proj": "index_weights",
}

# All layers of some models of Granite 4 have attention. Their files have settings of Mamba-2 even so, and the size of
# the MLP under another key.
GRANITE_4 = {
    "mamba": unused("ssm."),
    "intermediate_size": lambda keys, config: (
        keys.count("expert_shared_feed_forward_length") or config["intermediate_size"]
    ),
}
COHERE = BIASED | {"logit_scale": real("logit_scale")}
INDEXED = (
    DEEPSEEK_EXPERTS
    | ONE_GROUP
    | SIGMOIDS
    | {
        "index_n_heads": size("attention.indexer.head_count"),
        "index_head_dim": size("attention.indexer.key_length"),
        "index_topk": size("attention.indexer.top_k"),
    }
)

# The first architectures, whose tensors get Hugging Face's names.
MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{role}": f"self_attn.{role}_proj" for role in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{role}": f"mlp.{role}_proj" for role in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{role}_exps": f"mlp.experts.{role}_proj" for role in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{role}_shexp": f"mlp.shared_expert.{role}_proj" for role in ("gate", "up", "down")},
}
MIXTRAL_MODULES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        llama,
        BIASES
        | {
            "sliding_window": window(),
            "num_local_experts": only("MixtralForCausalLM", size("expert_count")),
            "num_experts_per_tok": only("MixtralForCausalLM", size("expert_used_count")),
        },
        paired=True,
        modules=MODULES | MIXTRAL_MODULES,
        holds=(
            *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "InternLM3ForCausalLM"),
            *("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"),
        ),
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", modules=MODULES, holds=("Qwen2ForCausalLM", "InternVLForConditionalGeneration")
    ),
    "qwen2vl": Architecture(
        "Qwen2ForCausalLM",
        modules=MODULES,
        holds=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        BIASED,
        modules=MODULES,
        holds=(
            "Qwen3ForCausalLM",
            "InternVLForConditionalGeneration",
            "LightOnOcrForConditionalGeneration",
        ),
    ),
    "qwen3vl": Architecture("Qwen3ForCausalLM", BIASED, modules=MODULES, holds=("Qwen3VLForConditionalGeneration",)),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", QWEN2_MOE, modules=MODULES),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        QWEN3_MOE,
        modules=MODULES,
        holds=("Qwen3MoeForCausalLM", "InternVLForConditionalGeneration"),
    ),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", QWEN3_MOE, modules=MODULES, holds=("Qwen3VLMoeForConditionalGeneration",)
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        {
            "partial_rotary_factor": turned_part,
            "sliding_window": window(),
            "original_max_position_embeddings": lambda keys, config: keys.left.get(
                "rope.scaling.original_context_length"
            ),
        },
        GATE_UP,
    ),
    "deepseek2": Architecture(
        deepseek,
        {
            # Youtu's MLPs count as dense ones, which have the size of an expert, too.
            "experts": only("YoutuForCausalLM", unused("expert_", "leading_dense_block_count")),
            **but(
                "YoutuForCausalLM",
                DEEPSEEK_EXPERTS
                | {
                    "n_group": groups("expert_group_count", 8, 8),
                    "topk_group": groups("expert_group_used_count", 4, 3),
                    "topk_method": lambda keys, config: (
                        "noaux_tc"
                        if config["architectures"] == ["DeepseekV3ForCausalLM"]
                        else "group_limited_greedy"
                        if config["n_group"] > 1
                        else "greedy"
                    ),
                },
            ),
        },
        LATENT_ROLES,
        latent=True,
        scaling={"mscale": mscale, "mscale_all_dim": mscale},
        holds=(
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "YoutuForCausalLM",
            "Kimi_K25ForConditionalGeneration",
            "KimiK25ForConditionalGeneration",
        ),
    ),
    "mistral4": Architecture(
        "Mistral4ForCausalLM",
        DEEPSEEK_EXPERTS
        | ONE_GROUP
        | {
            "scoring_func": lambda keys, config: keys.expect("expert_gating_func", 1),
        },
        LATENT_ROLES,
        latent=True,
        scaling={
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "llama_4_scaling_beta": lambda keys, config: optional("attention.temperature_scale")(keys, config) or 0.0,
        },
    ),
    # llama.cpp's code has the scales.
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        LATENT_ROLES,
        latent=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        BIASED
        | LOCAL_EXPERTS
        | {
            "intermediate_size": size("expert_feed_forward_length"),
            "sliding_window": window(),
            "layer_types": layer_types(2),
        },
        POST_IS_MLP,
        scaling={"truncate": False},
    ),
    "granite": Architecture("GraniteForCausalLM", GRANITE | BIASES | GRANITE_4, paired=True),
    "granitemoe": Architecture(
        granite_moe,
        GRANITE
        | LOCAL_EXPERTS
        | {key: only("GraniteMoeSharedForCausalLM", setting) for key, setting in SHARED_MLP.items()}
        | {"mamba": unused("ssm.")},
        paired=True,
        holds=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    ),
    "command-r": Architecture(
        "CohereForCausalLM", COHERE | {"use_qk_norm": has("blk.0.attn_q_norm.weight")}, norm_key="layer_norm_eps"
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        COHERE | {"sliding_window": window(4096), "layer_types": layer_types(4)},
        norm_key="layer_norm_eps",
    ),
    # llama.cpp's code averages the results of experts and of shared ones.
    "cohere2moe": Architecture(
        "Cohere2MoeForCausalLM",
        COHERE
        | EXPERTS
        | {
            "num_experts": size("expert_count"),
            "num_shared_experts": number("expert_shared_count"),
            "intermediate_size": size("expert_feed_forward_length"),
            "prefix_dense_intermediate_size": rows_of("ffn_up"),
            "first_k_dense_replace": number("leading_dense_block_count"),
            "sigmoids": sigmoids,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": flag("expert_weights_norm", False),
            "sliding_window": window(),
            "layer_types": layers_from_full,
        },
        norm_key="layer_norm_eps",
    ),
    # The converter writes attention_factor, the whole factor of YaRN's attention, as yarn_attn_factor.
    "olmo2": Architecture(
        olmo,
        BIASED
        | {
            "layer_types": only("Olmo3ForCausalLM", layer_types(4)),
            "sliding_window": only("Olmo3ForCausalLM", window()),
        },
        scaling={"attention_factor": stored("rope.scaling.yarn_attn_factor"), "attn_factor": None},
        holds=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    ),
    "chatglm": Architecture(
        "GlmForCausalLM",
        {
            "attention_bias": lambda keys, config: any(keys.has(f"blk.0.attn_{part}.bias") for part in ("q", "qkv")),
            "partial_rotary_factor": turned_part,
        },
        GATE_UP,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        BIASED | {"partial_rotary_factor": turned_part},
        GATE_UP,
        adapt=of_glm4v,
        holds=("Glm4ForCausalLM", "Glm4vForConditionalGeneration"),
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        BIASED
        | DEEPSEEK_EXPERTS
        | ONE_GROUP
        | SIGMOIDS
        | {
            "partial_rotary_factor": turned_part,
            "use_qk_norm": has("blk.0.attn_q_norm.weight"),
        },
        POST_IS_MLP,
        holds=("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "SolarOpenForCausalLM"),
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        BIASED
        | DEEPSEEK_EXPERTS
        | ONE_GROUP
        | SIGMOIDS
        | {
            "sliding_window": None,
        },
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        {
            key: setting
            for key, setting in DEEPSEEK_EXPERTS.items()
            if key not in ("n_routed_experts", "n_shared_experts")
        }
        | ONE_GROUP
        | SIGMOIDS
        | {
            "num_experts": size("expert_count"),
            "num_shared_experts": number("expert_shared_count"),
            "shared": unused("expert_shared_feed_forward_length"),
            "sliding_window": window(),
            "layer_types": layer_types(4),
        },
    ),
    # llama.cpp's code has the layers without windows, and scales embeddings.
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        EXPERTS
        | ONE_GROUP
        | {
            "num_experts": size("expert_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "num_shared_experts": number("expert_shared_count"),
            "num_dense_layers": number("leading_dense_block_count"),
            "route_scale": real("expert_weights_scale", 1.0),
            "route_norm": flag("expert_weights_norm", True),
            "score_func": sigmoids,
            "sliding_window": window(),
            "layer_types": layer_types(4),
            "mup_enabled": True,
        },
        {"attn_gate": "out_gate"},
    ),
    "apertus": Architecture(
        "ApertusForCausalLM",
        BIASED | {"hidden_act": "xielu", "rope_scaling": {"rope_type": "default"}},
        XIELU,
        adapt=of_apertus,
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        BIASED
        | {
            "num_experts": size("expert_count"),
            "moe_topk": size("expert_used_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "num_shared_expert": number("expert_shared_count"),
            "shared": lambda keys, config: keys.expect(
                "expert_shared_feed_forward_length", config["intermediate_size"]
            ),
        },
    ),
    "phimoe": Architecture(
        "PhimoeForCausalLM",
        BIASED
        | LOCAL_EXPERTS
        | {
            "lm_head_bias": has("output.bias"),
            "sliding_window": window(),
        },
    ),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM",
        {"hidden_act": "gelu_pytorch_tanh", "multi_query": lambda keys, config: config["num_key_value_heads"] == 1},
        norm_key="layer_norm_epsilon",
        turns=False,
    ),
    "minicpm": Architecture(
        "MiniCPMForCausalLM",
        BIASED | {"scale_emb": real("embedding_scale", 12.0), "scale_depth": depth_scale, "dim_model_base": width_base},
        paired=True,
    ),
    # Ministral 3, and Mistral Small 3.1, whose queries have no scale that grows.
    "mistral3": Architecture(
        mistral,
        paired=True,
        scaling={
            "mscale": optional("rope.scaling.yarn_log_multiplier"),
            "mscale_all_dim": same_as("mscale"),
            "llama_4_scaling_beta": optional("attention.temperature_scale"),
        },
        holds=("MistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", BIASES | {"no_rope_layer_interval": 4}, paired=True),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        {
            "use_qkv_bias": has("blk.0.attn_q.bias"),
            "qk_layernorm": has("blk.0.attn_q_norm.weight"),
            # The converter writes the key even for models that are not parallel; those have a norm before the MLP.
            "use_parallel_residual": lambda keys, config: (
                keys.left.pop("use_parallel_residual", None),
                not keys.has("blk.0.ffn_norm.weight"),
            )[1],
            "partial_rotary_factor": turned_part,
        },
        norm_key="layer_norm_eps",
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {
            "use_bias": has("blk.0.attn_q.bias"),
            "sliding_window": window(4096),  # of all published models; the converter does not write it
            "hidden_act": "gelu_pytorch_tanh",
        },
        norm_key="norm_epsilon",
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        {
            "partial_rotary_factor": turned_part,
            "qk_layernorm": has("blk.0.attn_q_norm.weight"),
            "hidden_act": "gelu_new",
        },
        norm_key="layer_norm_eps",
    ),
    "gpt2": Architecture("GPT2LMHeadModel", {"hidden_act": "gelu_new"}, norm_key="layer_norm_epsilon", turns=False),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {
            "attention_bias": has("blk.0.attn_qkv.bias"),
            "use_parallel_residual": flag("use_parallel_residual", True),
            "partial_rotary_factor": turned_part,
            "hidden_act": "gelu",
        },
        norm_key="layer_norm_eps",
    ),
    # With two norms in parallel (40B, 180B), attn_norm is the MLP's and attn_norm_2 that of attention.
    "falcon": Architecture(
        "FalconForCausalLM",
        {
            "bias": has("blk.0.attn_qkv.bias"),
            "multi_query": lambda keys, config: config["num_key_value_heads"] == 1,
            "new_decoder_architecture": lambda keys, config: config["num_key_value_heads"] > 1,
            "num_ln_in_parallel_attn": lambda keys, config: 2 if keys.has("blk.0.attn_norm_2.weight") else 1,
            "hidden_act": "gelu",
        },
        {"attn_norm_2": "attention_norm"},
        norm_key="layer_norm_epsilon",
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", {"sliding_window": window(), "layer_types": layer_types(4)}),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", BIASES | {"attention_out_bias": has("blk.0.attn_output.bias")}, POST_IS_MLP
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", BIASES),
    "nemotron": Architecture(
        "NemotronForCausalLM",
        BIASES | {"partial_rotary_factor": turned_part, "hidden_act": "relu2"},
        norm_key="norm_eps",
        shifted=True,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", {"use_bias": has("blk.0.attn_q.bias")}),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": size("expert_count"),
            "moe_k": size("expert_used_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "moe_num_shared_experts": number("expert_shared_count"),
            "moe_layer_start_index": number("leading_dense_block_count"),
            "moe_layer_end_index": last_layer("ffn_gate_inp"),
            "moe_layer_interval": size("interleave_moe_layer_step", 1),
            # The size in the file is not that of the shared experts; their number says it.
            "use_bias": lambda keys, config: bool(keys.left.pop("expert_shared_feed_forward_length", 0)) and False,
        },
    ),
    # llama.cpp's code has the chunks, the layers without positions and the temperature. The model with 128 experts has
    # no norms of queries and keys.
    "llama4": Architecture(
        "Llama4ForCausalLM",
        BIASED
        | LOCAL_EXPERTS
        | {
            "intermediate_size_mlp": same_as("intermediate_size"),
            "intermediate_size": size("expert_feed_forward_length"),
            "interleave_moe_layer_step": size("interleave_moe_layer_step"),
            "attention_chunk_size": size("attention.sliding_window", 8192),
            "no_rope_layer_interval": 4,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "use_qk_norm": lambda keys, config: config["num_local_experts"] != 128,
        },
        holds=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    ),
    "arcee": Architecture("ArceeForCausalLM", BIASES | {"hidden_act": "relu2"}, paired=True),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        BIASED
        | EXPERTS
        | {
            "num_experts": size("expert_count"),
            "norm_topk_prob": False,
            "clip_qkv": optional("attention.clamp_kqv"),
        },
    ),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", LOCAL_EXPERTS | {"partial_rotary_factor": turned_part}),
    "olmo": Architecture(
        "OlmoForCausalLM", BIASED | {"clip_qkv": optional("attention.clamp_kqv")}, norm_key="", paired=True
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        {
            "seq_length": same_as("max_position_embeddings"),
            "max_position_embeddings": None,
            "intermediate_size": four_times,
            "hidden_act": None,
        },
        norm_key="layer_norm_epsilon",
        turns=False,
        top={"token_embd_norm": "embed_norm"},
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        {"attn_config": mpt_attention, "intermediate_size": four_times, "hidden_act": None},
        norm_key="layer_norm_epsilon",
        turns=False,
    ),
    "dbrx": Architecture(
        "DbrxForCausalLM",
        {
            "attn_config": dbrx_attention,
            "ffn_config": dbrx_experts,
            "intermediate_size": None,
            "num_key_value_heads": None,
            "hidden_act": None,
        },
        {"attn_output_norm": "mlp_norm"},
        norm_key="",
    ),
    "jais2": Architecture("Jais2ForCausalLM", BIASES | {"hidden_act": "relu2"}, norm_key="layer_norm_eps"),
    "glm-dsa": Architecture(
        "GlmMoeDsaForCausalLM",
        INDEXED | {"indexer_types": indexer_types},
        LATENT_ROLES | INDEXER_ROLES,
        latent=True,
        scaling={"mscale": mscale, "mscale_all_dim": mscale},
    ),
    "deepseek32": Architecture(
        "DeepseekV32ForCausalLM",
        INDEXED,
        LATENT_ROLES | INDEXER_ROLES,
        latent=True,
        scaling={"mscale": mscale, "mscale_all_dim": mscale},
    ),
    # Files from before the key for the values' scale are of the published model, which has this one.
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM",
        BIASED
        | DEEPSEEK_EXPERTS
        | ONE_GROUP
        | SIGMOIDS
        | {
            "norm_topk_prob": flag("expert_weights_norm", True),
            "first_k_dense_replace": unused("leading_dense_block_count"),
            "mlp_layer_types": mlp_kinds,
            "v_head_dim": size("attention.value_length"),
            "attention_value_scale": real("attention.value_scale", 0.707),
            "layer_types": layer_types(6),
            "sliding_window": mimo_window,
            "num_key_value_heads": mimo_heads,
        },
        varied=("attention.head_count_kv",),
        positions=two_ropes,
    ),
    "step35": Architecture(
        "Step3p7ForConditionalGeneration",
        BIASED
        | EXPERTS
        | {
            "layer_types": layer_types(4),
            "sliding_window": window(),
            "num_sliding_attention_heads": of_kind("attention.head_count", "sliding_attention"),
            "num_attention_heads": lambda keys, config: (
                of_kind("attention.head_count", "full_attention")(keys, config) or config["num_attention_heads"]
            ),
            "mlp_layer_types": mlp_kinds,
            "dense": unused("leading_dense_block_count", "moe_every_n_layers"),
            "n_routed_experts": size("expert_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "share_expert_dim": size("expert_shared_feed_forward_length"),
            "moe_router_scaling_factor": real("expert_weights_scale", 1.0),
            "norm_expert_weight": flag("expert_weights_norm", True),
            "moe_router_activation": sigmoids,
            "swiglu_limits": clamps("swiglu_clamp_exp"),
            "swiglu_limits_shared": clamps("swiglu_clamp_shexp"),
        },
        {"attn_gate": "out_gate"},
        shifted=True,
        varied=("attention.head_count", "attention.head_count_kv"),
        positions=step35_positions,
        within=True,
    ),
    # llama.cpp's code divides the weights of the chosen experts by their sum.
    "mellum": Architecture(
        "MellumForCausalLM",
        QWEN3_MOE | {"sliding_window": window(), "layer_types": mellum_layers},
        positions=two_ropes,
    ),
    "laguna": Architecture(
        "LagunaForCausalLM",
        BIASED
        | EXPERTS
        | {
            "num_experts": size("expert_count"),
            "sliding_window": window(),
            "layer_types": layers_from_full,
            "num_attention_heads_per_layer": lambda keys, config: by_layer(keys, config, "attention.head_count"),
            "gating": laguna_gates,
            "mlp_layer_types": mlp_kinds,
            "dense": unused("leading_dense_block_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
            "moe_routed_scaling_factor": real("expert_weights_scale", 1.0),
            "normalized": lambda keys, config: keys.expect("expert_weights_norm", True),
            "sigmoids": sigmoids,
        },
        {"attn_gate": "out_gate"},
        varied=("attention.head_count",),
        positions=two_ropes,
    ),
    **GEMMAS,
    **HYBRIDS,
}


def gguf_names(architecture: str) -> list[str]:
    """The names in GGUF files of one of config.json's architectures."""
    return [name for name, row in ARCHITECTURES.items() if architecture in (row.holds or (row.name,))]
