"""llama.cpp's architectures of the Gemma models; a part of the table `gguf_architectures`."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from jaxserve.checkpoints.gguf_adapted import of_gemma3n
from jaxserve.checkpoints.gguf_keys import ROPE_FACTORS, Keys, read_divisors
from jaxserve.checkpoints.gguf_row import Architecture
from jaxserve.checkpoints.gguf_settings import (
    BIASED,
    Config,
    by_layer,
    gemma_scale,
    layer_types,
    number,
    of_experts,
    of_kind,
    optional,
    real,
    rows_of,
    share_of,
    size,
    window,
)

PER_LAYER_TOP = {
    "per_layer_token_embd": "per_layer_embed",
    "per_layer_model_proj": "per_layer_model",
    "per_layer_proj_norm": "per_layer_model_norm",
}
PER_LAYER_ROLES = {"inp_gate": "per_layer_gate", "proj": "per_layer_projection", "post_norm": "per_layer_norm"}
GEMMA3N_ROLES = PER_LAYER_ROLES | {
    "altup_router": "altup_router",
    "altup_router_norm": "altup_norm",
    "altup_predict_coef": "altup_prediction",
    "altup_correct_coef": "altup_correction",
    "altup_correct_scale": "altup_scale",
    "laurel_l": "laurel_left",
    "laurel_r": "laurel_right",
    "laurel_post_norm": "laurel_norm",
}
GEMMA4_ROLES = PER_LAYER_ROLES | {
    "layer_output_scale": "layer_scale",
    "ffn_gate_inp.scale": "router_norm",
    "ffn_down_exps.scale": "expert_scales",
    "pre_ffw_norm_2": "experts_norm",
    "post_ffw_norm_1": "shared_out_norm",
    "post_ffw_norm_2": "experts_out_norm",
}


def sparsity(keys: Keys, config: Config) -> list[float] | None:
    """The share of inner channels that are not active, of each layer. The file has the normal distribution's quantiles
    at these."""
    given = keys.left.pop("activation_sparsity_scale", None)
    if given is None:
        return None
    count = config["num_hidden_layers"]
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or len(given) < count:
        raise keys.refuse(f"{keys.architecture}.activation_sparsity_scale={given!r:.80} is not supported")
    return [round(NormalDist().cdf(float(quantile)), 6) for quantile in given[:count]]


def keys_are_values(keys: Keys, config: Config) -> bool:
    """Whether layers without a window compute their values with the matrix of their keys."""
    own = config["layer_types"][: max(config["num_hidden_layers"] - config["num_kv_shared_layers"], 0)]
    return any(kind == "full_attention" and not keys.has(f"blk.{i}.attn_v.weight") for i, kind in enumerate(own))


def full_layers(keys: Keys, config: Config) -> dict[str, dict[str, int]]:
    """What layers without a window have in the place of head_dim and num_key_value_heads, by their numbers."""
    heads = by_layer(keys, config, "attention.head_count_kv", config["num_key_value_heads"])
    return {
        str(i): {"head_dim": config["head_dim"], "num_key_value_heads": heads[i]}
        for i, kind in enumerate(config["layer_types"])
        if kind == "full_attention"
    }


def sliding_head_dim(keys: Keys, config: Config) -> int:
    """Channels of a head of layers with a window; the key for all layers has those of the others."""
    head_dim = keys.size("attention.key_length_swa", config["head_dim"])
    keys.expect("attention.value_length_swa", head_dim)
    return head_dim


def wide_mlps(keys: Keys, config: Config) -> bool:
    """Whether the MLPs of layers that share keys and values are twice as wide as the others."""
    sizes = by_layer(keys, config, "feed_forward_length")
    shared = min(config["num_kv_shared_layers"], len(sizes))
    usual = config["intermediate_size"]
    own = [usual] * (len(sizes) - shared)
    if sizes not in (own + [usual] * shared, own + [2 * usual] * shared):
        raise keys.refuse(f"{keys.architecture}.feed_forward_length={sizes!r:.80} is not supported")
    return shared > 0 and sizes[-1] == 2 * usual


def gemma4_positions(keys: Keys, config: Config) -> dict[str, Any]:
    """In layers without a window some channels do not turn: their frequencies are divided by a huge number."""
    head_dim = config["head_dim"]
    of_full = next((own["head_dim"] for own in config["per_layer_config"].values()), head_dim)
    keys.expect("rope.dimension_count", of_full)
    keys.expect("rope.dimension_count_swa", head_dim)
    full: dict[str, Any] = {"rope_type": "proportional", "rope_theta": keys.real("rope.freq_base", 10000.0)}
    if keys.has(ROPE_FACTORS):
        factors = read_divisors(keys, ROPE_FACTORS, of_full)
        turning = int((factors == 1).sum())
        if (factors[:turning] != 1).any() or (factors[turning:] < 1e29).any():
            raise keys.refuse(f"{ROPE_FACTORS} has numbers other than 1 and then 1e30: {factors.tolist()!r:.80}")
        full["partial_rotary_factor"] = share_of(keys, 2 * turning, of_full)
    sliding = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10000.0)}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


GEMMA = BIASED | {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
# The order matters: the first settings are those of layers without a window.
GEMMA4 = GEMMA | {
    "final_logit_softcapping": optional("final_logit_softcapping"),
    "sliding_window": window(),
    "layer_types": layer_types(6),
    "num_kv_shared_layers": number("attention.shared_kv_layers"),
    "attention_k_eq_v": keys_are_values,
    "per_layer_config": full_layers,
    "num_key_value_heads": lambda keys, config: (
        of_kind("attention.head_count_kv", "sliding_attention")(keys, config) or config["num_key_value_heads"]
    ),
    "head_dim": sliding_head_dim,
    "use_double_wide_mlp": wide_mlps,
    "hidden_size_per_layer_input": number("embedding_length_per_layer_input"),
    "vocab_size_per_layer_input": rows_of("per_layer_token_embd"),
    "enable_moe_block": of_experts(True),
    "num_experts": of_experts(size("expert_count")),
    "top_k_experts": of_experts(size("expert_used_count")),
    "moe_intermediate_size": of_experts(size("expert_feed_forward_length")),
}

GEMMAS: dict[str, Architecture] = {
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
        holds=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        GEMMA
        | {
            "final_logit_softcapping": optional("final_logit_softcapping"),
            "rope_local_base_freq": real("rope.freq_base_swa", 10000.0),
            "sliding_window": window(),
            "layer_types": layer_types(5),
            "intermediate_size": lambda keys, config: by_layer(keys, config, "feed_forward_length"),
            "activation_sparsity_pattern": sparsity,
            "num_kv_shared_layers": number("attention.shared_kv_layers"),
            "hidden_size_per_layer_input": size("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": rows_of("per_layer_token_embd"),
            "altup_num_inputs": size("altup.num_inputs"),
            "altup_active_idx": number("altup.active_idx"),
            "altup_correct_scale": True,
            "laurel_rank": rows_of("laurel_l"),
        },
        GEMMA3N_ROLES,
        varied=("feed_forward_length",),
        top=PER_LAYER_TOP | {"altup_proj": "spread", "altup_unembd_proj": "join"},
        adapt=of_gemma3n,
        holds=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        GEMMA4,
        GEMMA4_ROLES,
        varied=("feed_forward_length", "attention.head_count_kv"),
        positions=gemma4_positions,
        top=PER_LAYER_TOP,
        same={f"shared_{part}": part for part in ("gate", "up", "down")},
        holds=(
            "Gemma4ForCausalLM",
            "Gemma4UnifiedForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
        ),
    ),
}
