"""What llama.cpp's converter does for single architectures, beside what `gguf_families` does for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any

import numpy as np

SLIDING = "sliding_attention"
FULL = "full_attention"
Tensors = Iterator[tuple[str, np.ndarray]]
# Architectures that are newer than the package, and others whose tensors have the same names.
STAND_INS = {"deepseek32": "glm-dsa", "mellum": "qwen3moe", "laguna": "step35", "cohere2moe": "glm4moe"}
WITHOUT_ATTENTION = ("mamba", "mamba2")


def add_mamba(file: Any) -> None:
    config = file.config
    writer = file.writer
    inner = config.get("intermediate_size") if file.arch == "mamba" else None
    inner = inner or config.get("expand", 2) * file.hidden
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.get("conv_kernel", 4))
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config.get("layer_norm_epsilon", 1e-5))
    if file.arch == "mamba2":
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
        return
    rank = config.get("time_step_rank", "auto")
    writer.add_ssm_time_step_rank(-(-file.hidden // 16) if rank == "auto" else rank)
    writer.add_ssm_dt_b_c_rms(file.family == "FalconMamba")


def _add_jamba(file: Any) -> None:
    config = file.config
    writer = file.writer
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", 4))
    writer.add_ssm_inner_size(config["mamba_expand"] * file.hidden)
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config.get("mamba_dt_rank") or -(-file.hidden // 16))


def _add_falcon_h1(file: Any) -> None:
    config = file.config
    writer = file.writer
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", 4))
    writer.add_ssm_inner_size(config.get("mamba_d_ssm") or config["mamba_expand"] * file.hidden)
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(config["mamba_n_groups"])


def _add_kimi_linear(file: Any) -> None:
    config = file.config
    writer = file.writer
    linear = config["linear_attn_config"]
    writer.add_head_count_kv([int(i + 1 in linear["full_attn_layers"]) for i in range(file.layers)])
    writer.add_ssm_conv_kernel(linear["short_conv_kernel_size"])
    writer.add_kda_head_dim(linear["head_dim"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_group_count(config["num_expert_group"])


def _add_indexer(file: Any) -> None:
    config = file.config
    writer = file.writer
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    if types := config.get("indexer_types"):
        writer.add_array(f"{file.arch}.attention.indexer.types", [kind == "full" for kind in types])


def _add_gemma3n(file: Any) -> None:
    config = file.config
    writer = file.writer
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    quantiles = [NormalDist().inv_cdf(share) if share else -np.inf for share in config["activation_sparsity_pattern"]]
    writer.add_activation_sparsity_scale(quantiles)


def _add_gemma4(file: Any) -> None:
    config = file.config
    writer = file.writer
    types = [*config["layer_types"][:-1], FULL]
    of_layers = config.get("per_layer_config") or {}
    full = of_layers.get(str(types.index(FULL)), {})
    dim = full.get("head_dim") or config.get("global_head_dim") or 512
    heads = full.get("num_key_value_heads") or file.kv_heads
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        heads = config["num_global_key_value_heads"]
    if heads != file.kv_heads:
        writer.add_head_count_kv([heads if kind == FULL else file.kv_heads for kind in types])
    shared = config.get("num_kv_shared_layers") or 0
    if config.get("use_double_wide_mlp"):
        size = config["intermediate_size"]
        writer.add_feed_forward_length([size * (1 + (i >= file.layers - shared)) for i in range(file.layers)])
    writer.add_pad_token_id(config.get("pad_token_id") or 0)
    usual = 0 if file.family == "Gemma4Unified" else 256
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", usual))
    writer.add_shared_kv_layers(shared)
    writer.add_sliding_window_pattern([kind == SLIDING for kind in types])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_key_length_swa(file.head_dim)
    writer.add_value_length_swa(file.head_dim)
    if config.get("top_k_experts"):
        writer.add_expert_used_count(config["top_k_experts"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes[FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes[SLIDING]["rope_theta"])
    writer.add_rope_dimension_count(dim)
    writer.add_rope_dimension_count_swa(file.head_dim)
    turning = int(dim * ropes[FULL]["partial_rotary_factor"] / 2)
    divisors = np.where(np.arange(dim // 2) < turning, 1.0, 1e30)
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def _add_mpt(file: Any) -> None:
    attention = file.config["attn_config"]
    file.writer.add_max_alibi_bias(float(attention["alibi_bias_max"]))
    if attention.get("clip_qkv") is not None:
        file.writer.add_clamp_kqv(attention["clip_qkv"])
    file.writer.add_layer_norm_eps(1e-5)


def _add_dbrx(file: Any) -> None:
    file.writer.add_expert_used_count(file.config["moe_top_k"])


def _add_mimo2(file: Any) -> None:
    config = file.config
    writer = file.writer
    slides = config.get("hybrid_layer_pattern") or [kind == SLIDING for kind in config["layer_types"]]
    writer.add_head_count_kv([file.kv_heads * (2 if slide else 1) for slide in slides])
    writer.add_sliding_window_pattern([int(slide) for slide in slides])
    before = config.get("sliding_window_size")
    writer.add_sliding_window(config["sliding_window"] if before is None else before + 1)
    writer.add_value_length(config["v_head_dim"])
    if "layernorm_epsilon" in config:
        writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    if "swa_rope_theta" in config:
        writer.add_rope_freq_base_swa(config["swa_rope_theta"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])


def _add_step35(file: Any) -> None:
    config = file.config
    writer = file.writer
    types = config["layer_types"]
    more = config.get("num_nextn_predict_layers") or 0
    other = config.get("attention_other_setting") or {}
    sliding = config.get("num_sliding_attention_heads") or other.get("num_attention_heads") or file.heads
    writer.add_head_count([sliding if kind == SLIDING else file.heads for kind in types])
    writer.add_head_count_kv([file.kv_heads] * len(types))
    writer.add_expert_used_count(config.get("moe_top_k") or config["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config.get("moe_router_scaling_factor", 1.0))
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(1)
    writer.add_moe_every_n_layers(1)
    for key, add in (
        ("swiglu_limits", writer.add_swiglu_clamp_exp),
        ("swiglu_limits_shared", writer.add_swiglu_clamp_shexp),
    ):
        if limits := config.get(key):
            add([limit or 0.0 for limit in limits] + [0.0] * (file.layers + more - len(limits)))


def _add_cohere2moe(file: Any) -> None:
    file.writer.add_expert_feed_forward_length(file.config["intermediate_size"])
    file.writer.add_sliding_window_pattern(3)


def _add_laguna(file: Any) -> None:
    config = file.config
    writer = file.writer
    writer.add_head_count(config.get("num_attention_heads_per_layer") or [file.heads] * file.layers)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    ropes = config["rope_parameters"]
    for kind, end in ((FULL, ""), (SLIDING, "_swa")):
        getattr(writer, f"add_rope_freq_base{end}")(ropes[kind]["rope_theta"])
        turned = int(file.head_dim * ropes[kind].get("partial_rotary_factor", 1.0))
        getattr(writer, f"add_rope_dimension_count{end}")(turned)


# Adds settings to a file, behind those of all architectures.
ADDED: dict[str, Callable[[Any], None]] = {
    "jamba": _add_jamba, "falcon-h1": _add_falcon_h1, "kimi-linear": _add_kimi_linear, "glm-dsa": _add_indexer,
    "deepseek32": _add_indexer, "gemma3n": _add_gemma3n, "gemma4": _add_gemma4, "mpt": _add_mpt, "mimo2": _add_mimo2,
    "dbrx": _add_dbrx, "step35": _add_step35, "laguna": _add_laguna, "cohere2moe": _add_cohere2moe,
}  # fmt: skip
OWN_POSITIONS = ("gemma4", "laguna")  # which their functions above add


def unchanged(file: Any, name: str, values: np.ndarray) -> Tensors:
    yield name, values


def _gemma4(file: Any, name: str, values: np.ndarray) -> Tensors:
    before = ".".join(["blk", *name.split(".")[2:3]])
    if name.endswith("router.scale"):
        name = f"{before}.ffn_gate_inp.scale"
    elif name.endswith("per_expert_scale"):
        name = f"{before}.ffn_down_exps.scale"
    elif name.endswith("layer_scalar") or ".experts." in name:
        name += ".weight"
    yield name, values


def _gemma3n(file: Any, name: str, values: np.ndarray) -> Tensors:
    for part in ("altup_projections", "altup_unembed_projections"):
        if f".{part}." in name:
            name = f"model.{part}.weight"  # of the stack
    yield (f"{name}.weight" if name.endswith("_scale") else name), values


def _mamba(file: Any, name: str, values: np.ndarray) -> Tensors:
    name = name.replace(".feed_forward.experts.", ".mlp.experts.")
    if "conv1d.weight" in name:
        values = values.squeeze()
    yield name, -np.exp(values) if name.endswith(".A_log") else values


def _dbrx(file: Any, name: str, values: np.ndarray) -> Tensors:
    """The rows of all experts become a stack."""
    if ".experts.mlp." in name:
        values = values.reshape(file.config["moe_num_experts"], -1, file.hidden)
        values = values.swapaxes(1, 2) if name.endswith("w2") else values
        name += ".weight"
    yield name, values


def _falcon_h1(file: Any, name: str, values: np.ndarray) -> Tensors:
    """The model's multipliers become part of its weights."""
    config = file.config
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    first = config.get("attention_in_multiplier", 1.0)
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": first * config.get("key_multiplier", 1.0),
        "q_proj": first,
        "v_proj": first,
        "o_proj": config.get("attention_out_multiplier", 1.0),
        "out_proj": config.get("ssm_out_multiplier", 1.0),
        "lm_head": config.get("lm_head_multiplier", 1.0),
        "embed_tokens": config.get("embedding_multiplier", 1.0),
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        inner = config.get("mamba_d_ssm") or config["mamba_expand"] * file.hidden
        shared = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, shared, shared, config["mamba_n_heads"])
        of_rows = np.repeat(config.get("ssm_multipliers") or [1.0] * 5, sizes)
        values = values * (config.get("ssm_in_multiplier", 1.0) * of_rows)[:, None].astype(np.float32)
    yield name, (values * np.float32(factors.get(part, 1.0))).astype(np.float32)


def _kimi_linear(file: Any, name: str, values: np.ndarray) -> Tensors:
    for part in ("gate", "up", "down"):  # of layers without experts, as published
        name = name.replace(f".block_sparse_moe.{part}_proj", f".mlp.{part}_proj")
    if "_conv1d" in name:
        values = values.reshape(1, len(values), 1, -1)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    yield name, values


def _bloom(file: Any, name: str, values: np.ndarray) -> Tensors:
    yield name.removeprefix("transformer."), values


def _mimo2(file: Any, name: str, values: np.ndarray) -> Tensors:
    yield (f"{name}.weight" if name.endswith("attention_sink_bias") else name), values


def _step35(file: Any, name: str, values: np.ndarray) -> Tensors:
    yield (f"{name}.bias" if name.endswith(".router_bias") else name), values


def _laguna(file: Any, name: str, values: np.ndarray) -> Tensors:
    yield name.replace(".experts.e_score_correction_bias", ".gate.e_score_correction_bias"), values


# Changes a tensor before it is changed as in all architectures.
CHANGED: dict[str, Callable[[Any, str, np.ndarray], Tensors]] = {
    "dbrx": _dbrx,
    "gemma3n": _gemma3n, "gemma4": _gemma4, "mamba": _mamba, "jamba": _mamba, "falcon-h1": _falcon_h1,
    "kimi-linear": _kimi_linear, "bloom": _bloom, "mimo2": _mimo2, "step35": _step35, "laguna": _laguna,
}  # fmt: skip
