"""llama.cpp's architectures, as a table: what a file's settings and tensors mean in Hugging Face's terms.

Facts: the keys and names of the package `gguf`, and what llama.cpp's converter and its models do with them
(https://github.com/ggml-org/llama.cpp: `conversion/`, `src/models/`). Some settings of a model are not in its file,
because llama.cpp's code has them as constants; such constants stand in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.checkpoints.gguf_adapted import XIELU_NUMBERS, of_apertus, of_glm4v
from jaxserve.checkpoints.gguf_recurrent import Config, Tensors, of_lfm2, of_mamba2, of_qwen3_5, of_qwen3_next
from jaxserve.checkpoints.gguf_settings import (
    BAMBA,
    DEEPSEEK_EXPERTS,
    DELTA,
    EXPERTS,
    LFM2,
    LOCAL_EXPERTS,
    NEMOTRON_H,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    Setting,
    attention_layers,
    but,
    deepseek,
    depth_scale,
    flag,
    gemma_scale,
    granite_hybrid,
    granite_moe,
    groups,
    has,
    kinds_by_attention,
    last_layer,
    layer_types,
    llama,
    mistral,
    mscale,
    number,
    of_experts,
    olmo,
    only,
    optional,
    real,
    same_as,
    size,
    somewhere,
    stored,
    turned_part,
    unused,
    width_base,
    window,
)

BIASED = {"attention_bias": somewhere("attn_q.bias")}
BIASES = BIASED | {"mlp_bias": somewhere("ffn_up.bias")}


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is.

    Attributes:
      name: the architecture in config.json; a function for one that depends on the file.
      settings: config.json's key -> Setting; beside those that all architectures have.
      roles: a tensor's name within its layer -> its role in `jaxserve.models`, where it differs from ROLES.
      norm_key: config.json's key of the norms' epsilon. The norms are LayerNorms unless it is rms_norm_eps.
      paired: rows of queries and keys are stored in pairs (see GGUFTensor).
      shifted: the weights of norms are stored with 1 added.
      turns: some channels turn by the position.
      latent: attention is over latents (DeepSeek), whose sizes have keys of their own.
      mixtures: all layers have experts, and a file may lack the size of a dense MLP.
      scaling: added to the rope scaling, if there is one.
      top: names outside of layers -> roles, beside TOP.
      same: role -> another role, which has the same tensor.
      adapt: a function of the tensors by name, the config and the file's metadata that brings tensors to the form of
        Hugging Face's checkpoints.
      reordered: tensors within a layer whose rows or columns `adapt` puts in another order; adapters in GGUF files
        cannot change them.
      holds: config.json's architectures whose models are in such files, where they are not just `name`.
      modules: a tensor's name within its layer -> its module in Hugging Face's model, for architectures whose tensors
        get Hugging Face's names.
    """

    name: Setting
    settings: Mapping[str, Setting] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    norm_key: str = "rms_norm_eps"
    paired: bool = False
    shifted: bool = False
    turns: bool = True
    latent: bool = False
    mixtures: bool = False
    scaling: Mapping[str, Setting] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Tensors, Config, Mapping[str, Any]], Tensors] = lambda tensors, config, metadata: tensors
    reordered: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)


# A tensor's name within its layer, or outside of layers -> its role. "weight" and "bias" are added to it.
TOP = {"token_embd": "embed", "position_embd": "positions", "output_norm": "norm", "output": "head"}
EXPERT_PARTS = {f"ffn_{role}_exps": f"expert_{role}" for role in ("gate", "up", "gate_up", "down")}
ROLES = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "post_attention_norm": "attention_out_norm",
    "post_ffw_norm": "mlp_out_norm",
    **{f"attn_{role}": role for role in ("q", "k", "v", "qkv", "q_a", "q_b", "kv_b")},
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_kv_a_mqa": "kv_a",
    "attn_kv_a_norm": "kv_norm",
    "attn_sinks": "sinks",
    **{f"ffn_{role}": role for role in ("gate", "up", "down")},
    "ffn_gate_inp": "router",
    "exp_probs_b": "correction",
    "ffn_gate_inp_shexp": "shared_expert_gate",
    **{f"ffn_{role}_shexp": f"shared_{role}" for role in ("gate", "up", "down")},
    **EXPERT_PARTS,
}
SAME = {"expert_fused_down": "expert_down"}  # beside gate and up in one tensor, or in two
# Roles that name one tensor, and which.
BARE_ROLES = {"sinks": "weight", "correction": "bias"} | {
    f"{kind}_{role}": part
    for kind in ("delta", "mamba")
    for role, part in (("a_log", "weight"), ("d", "weight"), ("dt_bias", "bias"))
}
BARE_ROLES |= dict.fromkeys(XIELU_NUMBERS, "weight")
XIELU = {f"xielu_{name}": name for name in XIELU_NUMBERS}
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
GATE_UP = {"ffn_up": "gate_up"}
POST_IS_MLP = {"post_attention_norm": "mlp_norm"}
RATES = {"a": "a_log", "dt": "dt_bias", "conv1d": "conv", "norm": "norm", "out": "out"}
DELTA_ROLES = POST_IS_MLP | {"attn_qkv": "delta_qkv", "attn_gate": "delta_z"}
DELTA_ROLES |= {f"ssm_{part}": f"delta_{role}" for part, role in RATES.items()}
# attn_qkv and attn_gate of Qwen3-Next become ssm_in (`gguf_recurrent`), so that their roles have no use.
QWEN3_NEXT_ROLES = DELTA_ROLES | {"ssm_in": "delta_qkvz", "ssm_ba": "delta_ba"}
QWEN3_5_ROLES = DELTA_ROLES | {"ssm_beta": "delta_b", "ssm_alpha": "delta_a"}
IN_TURNS = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_out")
MAMBA_ROLES = {f"ssm_{part}": f"mamba_{role}" for part, role in (RATES | {"d": "d", "in": "in"}).items()}
LFM2_ROLES = {"shortconv.in_proj": "conv_in", "shortconv.conv": "conv", "shortconv.out_proj": "conv_out"}
LFM2_TOP = {"token_embd_norm": "norm"}
LATENT_ROLES = {"attn_q_a_norm": "q_norm"}

# All layers of some models of Granite 4 have attention. Their files have settings of Mamba-2 even so, and the size of
# the MLP under another key.
GRANITE_4 = {
    "mamba": unused("ssm."),
    "intermediate_size": lambda keys, config: (
        keys.count("expert_shared_feed_forward_length") or config["intermediate_size"]
    ),
}
SHARED_MLP = {"shared_intermediate_size": size("expert_shared_feed_forward_length")}
GRANITE = BIASED | {
    "attention_multiplier": real("attention.scale", 1.0),
    "embedding_multiplier": real("embedding_scale", 1.0),
    "residual_multiplier": real("residual_scale", 1.0),
    "logits_scaling": real("logit_scale", 1.0),
}
COHERE = BIASED | {"logit_scale": real("logit_scale")}
GEMMA = BIASED | {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}

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
HF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


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
        holds=("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", modules=MODULES),
    "qwen2vl": Architecture("Qwen2ForCausalLM", modules=MODULES, holds=("Qwen2_5_VLForConditionalGeneration",)),
    "qwen3": Architecture("Qwen3ForCausalLM", BIASED, modules=MODULES),
    "qwen3vl": Architecture("Qwen3ForCausalLM", BIASED, modules=MODULES, holds=("Qwen3VLForConditionalGeneration",)),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", QWEN2_MOE, modules=MODULES),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", QWEN3_MOE, modules=MODULES),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", QWEN3_MOE, modules=MODULES, holds=("Qwen3VLMoeForConditionalGeneration",)
    ),
    "qwen3next": Architecture("Qwen3NextForCausalLM", QWEN3_NEXT, QWEN3_NEXT_ROLES, shifted=True, adapt=of_qwen3_next),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        DELTA,
        QWEN3_5_ROLES,
        shifted=True,
        adapt=of_qwen3_5,
        reordered=IN_TURNS,
        holds=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        DELTA | QWEN2_MOE,
        QWEN3_5_ROLES,
        shifted=True,
        mixtures=True,
        adapt=of_qwen3_5,
        reordered=IN_TURNS,
        holds=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ),
    "gemma": Architecture("GemmaForCausalLM", GEMMA, shifted=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        GEMMA
        | {
            "query_pre_attn_scalar": gemma_scale(46),
            "attn_logit_softcapping": real("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": real("final_logit_softcapping", 30.0),
            "sliding_window": window(4096),
            "layer_types": layer_types(2),
        },
        shifted=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "query_pre_attn_scalar": gemma_scale(62),
            "final_logit_softcapping": optional("final_logit_softcapping"),
            "rope_local_base_freq": real("rope.freq_base_swa", 10000.0),
            "sliding_window": window(),
            "layer_types": layer_types(6),
        },
        shifted=True,
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
        ),
    ),
    "mistral4": Architecture(
        "Mistral4ForCausalLM",
        DEEPSEEK_EXPERTS
        | {
            "n_group": size("expert_group_count", 1),
            "topk_group": size("expert_group_used_count", 1),
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
    "granitehybrid": Architecture(
        granite_hybrid,
        BIASES
        | BAMBA
        | but(
            "BambaForCausalLM",
            GRANITE
            | SHARED_MLP
            | {
                "num_local_experts": number("expert_count"),
                "num_experts_per_tok": number("expert_used_count"),
                "layer_types": kinds_by_attention("mamba", "attention"),
            },
        )
        | {
            "attention_bias": somewhere("attn_q.bias"),
            "attn_layer_indices": only("BambaForCausalLM", attention_layers),
            "partial_rotary_factor": only("BambaForCausalLM", turned_part),
        },
        MAMBA_ROLES,
        paired=True,
        adapt=of_mamba2,
        holds=("GraniteMoeHybridForCausalLM", "BambaForCausalLM"),
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            "NemotronHForCausalLM",
            NEMOTRON_H
            | {
                key: of_experts(setting)
                for key, setting in (
                    DEEPSEEK_EXPERTS
                    | {
                        "first_k_dense_replace": None,
                        "n_group": size("expert_group_count", 1),
                        "topk_group": size("expert_group_used_count", 1),
                        "moe_shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
                    }
                ).items()
            },
            MAMBA_ROLES,
            paired=True,
            turns=False,
            same={"mlp_norm": "attention_norm"},
            adapt=of_mamba2,
        ),
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", LFM2 | {"block_auto_adjust_ff_dim": False}, LFM2_ROLES, top=LFM2_TOP, adapt=of_lfm2
    ),
    # llama.cpp's code divides the weights of the chosen experts by their sum, and does not scale them.
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        LFM2
        | EXPERTS
        | {
            "num_experts": size("expert_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "num_dense_layers": number("leading_dense_block_count"),
            "scoring_func": lambda keys, config: keys.expect("expert_gating_func", 2),
            "use_expert_bias": somewhere("exp_probs_b.bias"),
            "norm_topk_prob": True,
        },
        LFM2_ROLES,
        top=LFM2_TOP,
        adapt=of_lfm2,
    ),
    "command-r": Architecture(
        "CohereForCausalLM", COHERE | {"use_qk_norm": has("blk.0.attn_q_norm.weight")}, norm_key="layer_norm_eps"
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        COHERE | {"sliding_window": window(4096), "layer_types": layer_types(4)},
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
        | {
            "partial_rotary_factor": turned_part,
            "n_group": size("expert_group_count", 1),
            "topk_group": size("expert_group_used_count", 1),
            "use_qk_norm": has("blk.0.attn_q_norm.weight"),
            "scoring_func": lambda keys, config: keys.expect("expert_gating_func", 2),
        },
        POST_IS_MLP,
        holds=("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration", "SolarOpenForCausalLM"),
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        BIASED
        | DEEPSEEK_EXPERTS
        | {
            "n_group": size("expert_group_count", 1),
            "topk_group": size("expert_group_used_count", 1),
            "scoring_func": lambda keys, config: keys.expect("expert_gating_func", 2),
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
        | {
            "num_experts": size("expert_count"),
            "num_shared_experts": number("expert_shared_count"),
            "n_group": size("expert_group_count", 1),
            "topk_group": size("expert_group_used_count", 1),
            "scoring_func": lambda keys, config: keys.expect("expert_gating_func", 2),
            "shared": unused("expert_shared_feed_forward_length"),
            "sliding_window": window(),
            "layer_types": layer_types(4),
        },
    ),
    # llama.cpp's code has the layers without windows, and scales embeddings.
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        EXPERTS
        | {
            "num_experts": size("expert_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "num_shared_experts": number("expert_shared_count"),
            "num_dense_layers": number("leading_dense_block_count"),
            "route_scale": real("expert_weights_scale", 1.0),
            "route_norm": flag("expert_weights_norm", True),
            "score_func": lambda keys, config: keys.expect("expert_gating_func", 2),
            "n_group": size("expert_group_count", 1),
            "topk_group": size("expert_group_used_count", 1),
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
        holds=("MistralForCausalLM", "Ministral3ForCausalLM"),
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
}


def gguf_names(architecture: str) -> list[str]:
    """The names in GGUF files of one of config.json's architectures."""
    return [name for name, row in ARCHITECTURES.items() if architecture in (row.holds or (row.name,))]
