"""llama.cpp's architectures, as a table: what a file's settings and tensors mean in Hugging Face's terms.

Facts: the keys and names of the package `gguf`, and what llama.cpp's converter and its models do with them
(https://github.com/ggml-org/llama.cpp: `conversion/`, `src/models/`). Some settings of a model are not in its file,
because llama.cpp's code has them as constants; such constants stand in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.checkpoints.gguf_settings import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    LOCAL_EXPERTS,
    QWEN2_MOE,
    QWEN3_NEXT,
    QWEN_EXPERTS,
    Setting,
    deepseek,
    depth_scale,
    flag,
    gemma_scale,
    groups,
    has,
    last_layer,
    layer_types,
    llama,
    mistral,
    mscale,
    number,
    of_mixtral,
    of_olmo3,
    olmo,
    optional,
    real,
    same_as,
    size,
    stored,
    turned_part,
    width_base,
    window,
)

BIASED = {"attention_bias": has("blk.0.attn_q.bias")}
BIASES = BIASED | {"mlp_bias": has("blk.0.ffn_up.bias")}


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
      recurrent: some layers are gated delta nets.
      scaling: added to the rope scaling, if there is one.
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
    recurrent: bool = False
    scaling: Mapping[str, Setting] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)


# A tensor's name within its layer, or outside of layers -> its role. "weight" and "bias" are added to it.
TOP = {"token_embd": "embed", "position_embd": "positions", "output_norm": "norm", "output": "head"}
EXPERT_PARTS = {f"ffn_{role}_exps": f"expert_{role}" for role in ("gate", "up", "down")}
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
# Roles that name one tensor, and which.
BARE_ROLES = {"sinks": "weight", "correction": "bias", "delta_a_log": "weight", "delta_dt_bias": "bias"}
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
GATE_UP = {"ffn_up": "gate_up"}
DELTA_PARTS = {"in": "qkvz", "ba": "ba", "conv1d": "conv", "a": "a_log", "dt": "dt_bias", "norm": "norm", "out": "out"}
POST_IS_MLP = {"post_attention_norm": "mlp_norm"}
# attn_qkv and attn_gate of Qwen3-Next become ssm_in (`gguf_delta_net`), so that their roles have no use.
JOINED = {"attn_qkv": "delta_qkv", "attn_gate": "delta_gates"}
DELTA_ROLES = {f"ssm_{part}": f"delta_{role}" for part, role in DELTA_PARTS.items()} | JOINED

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
            "num_local_experts": of_mixtral(size("expert_count")),
            "num_experts_per_tok": of_mixtral(size("expert_used_count")),
        },
        paired=True,
        modules=MODULES | MIXTRAL_MODULES,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", modules=MODULES),
    "qwen3": Architecture("Qwen3ForCausalLM", BIASED, modules=MODULES),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", QWEN2_MOE, modules=MODULES),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", BIASED | QWEN_EXPERTS | {"norm_topk_prob": True}, modules=MODULES),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", QWEN3_NEXT, POST_IS_MLP | DELTA_ROLES, shifted=True, recurrent=True
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
        {"attn_q_a_norm": "q_norm"},
        latent=True,
        scaling={"mscale": mscale, "mscale_all_dim": mscale},
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
    "granite": Architecture("GraniteForCausalLM", GRANITE | BIASES, paired=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", GRANITE | LOCAL_EXPERTS, paired=True),
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
        BIASED | {"layer_types": of_olmo3(layer_types(4)), "sliding_window": of_olmo3(window())},
        scaling={"attention_factor": stored("rope.scaling.yarn_attn_factor"), "attn_factor": None},
    ),
    "glm4": Architecture("Glm4ForCausalLM", BIASED | {"partial_rotary_factor": turned_part}, GATE_UP),
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

# The architectures of those rows of the table whose name depends on the file.
_SEVERAL = {
    "llama": ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    "mistral3": ("MistralForCausalLM", "Ministral3ForCausalLM"),
    "deepseek2": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
}


def gguf_names(architecture: str) -> list[str]:
    """The names in GGUF files of one of config.json's architectures."""
    return [name for name, row in ARCHITECTURES.items() if architecture in _SEVERAL.get(name, (row.name,))]
