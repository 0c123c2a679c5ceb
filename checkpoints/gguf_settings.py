"""Settings of `gguf_architectures`: functions that compute a setting of config.json from those of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.checkpoints.gguf_keys import Keys, shortest

# A constant, or a function of the file's settings and of the part of the config that is known already: sizes, head_dim,
# num_hidden_layers and what stands above it in the table. None: the config does not have the key.
Setting = Any
Config = dict[str, Any]


def real(key: str, default: float | None = None) -> Setting:
    return lambda keys, config: keys.real(key, default)


def size(key: str, default: int | None = None) -> Setting:
    return lambda keys, config: keys.size(key, default)


def flag(key: str, default: bool) -> Setting:
    return lambda keys, config: keys.flag(key, default)


def optional(key: str) -> Setting:
    """A number that may be absent or 0."""
    return lambda keys, config: keys.real(key) if keys.left.get(key) else keys.left.pop(key, None) and None


def number(key: str) -> Setting:
    """A size that may be 0 or absent."""
    return lambda keys, config: keys.count(key)


def has(tensor: str) -> Setting:
    return lambda keys, config: keys.has(tensor)


def somewhere(part: str) -> Setting:
    """Whether any layer has a tensor."""
    return lambda keys, config: any(name.endswith(f".{part}") for name in keys.file.tensors)


def same_as(key: str) -> Setting:
    return lambda keys, config: config[key]


def stored(key: str) -> Setting:
    """A number that was read before for another purpose; None if it is absent."""

    def read(keys: Keys, config: Config) -> float | None:
        value = keys.file.metadata.get(f"{keys.architecture}.{key}")
        return shortest(value) if type(value) is float else None

    return read


def window(default: int | None = None) -> Setting:
    """The window, or None if there is none."""

    def read(keys: Keys, config: Config) -> int | None:
        if "attention.sliding_window" not in keys.left:
            return default
        return keys.count("attention.sliding_window") or None

    return read


def layer_types(period: int) -> Setting:
    """Which layers have a window: the file's array or period; without either, all but every `period`-th."""

    def read(keys: Keys, config: Config) -> list[str]:
        given = keys.left.pop("attention.sliding_window_pattern", period)
        count = config["num_hidden_layers"]
        if isinstance(given, np.ndarray) and given.size >= count:
            slides = [bool(x) for x in given[:count]]
        elif type(given) is int and given > 0:
            slides = [(i + 1) % given != 0 for i in range(count)]
        else:
            raise keys.refuse(f"{keys.architecture}.attention.sliding_window_pattern={given!r:.80} is not supported")
        return ["sliding_attention" if slide else "full_attention" for slide in slides]

    return read


def turned_part(keys: Keys, config: Config) -> float | None:
    """The share of a head's channels that turn."""
    head_dim = config["head_dim"]
    turned = keys.size("rope.dimension_count", head_dim)
    if turned > head_dim or turned % 2:
        raise keys.refuse(f"{keys.architecture}.rope.dimension_count={turned} is not supported")
    share = turned / head_dim
    return share if int(head_dim * share) == turned else math.nextafter(share, 1.0)


def gemma_scale(layers: int) -> Setting:
    """Scores are divided by the root of this: in the model with so many layers (27B) of hidden_size / heads, in others
    of a head's size. llama.cpp's code says so; the file does not."""

    def read(keys: Keys, config: Config) -> float:
        largest = config["num_hidden_layers"] == layers
        return config["hidden_size"] / config["num_attention_heads"] if largest else config["head_dim"]

    return read


def deepseek(keys: Keys, config: Config) -> str:
    """V3's routers take sigmoids. Files of V3 from before the key have its correction bias. Youtu has no experts."""
    if not keys.left.get("expert_count"):
        return "YoutuForCausalLM"
    kind = keys.take("expert_gating_func", lambda value: value in (1, 2), 2 if _corrected(keys) else 1)
    return "DeepseekV3ForCausalLM" if kind == 2 else "DeepseekV2ForCausalLM"


def _corrected(keys: Keys) -> bool:
    return any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors)


def groups(key: str, of_v3: int, of_v2: int) -> Setting:
    """Older files of DeepSeek V3 (256 experts) and V2 (160) lack the groups of experts."""
    usual = {256: of_v3, 160: of_v2}
    return lambda keys, config: keys.size(key, usual.get(config["n_routed_experts"], 1))


def mscale(keys: Keys, config: Config) -> float | None:
    """mscale_all_dim, of which the file has a tenth. In all models mscale is the same."""
    key = "rope.scaling.yarn_log_multiplier"
    value = keys.file.metadata.get(f"{keys.architecture}.{key}")
    keys.left.pop(key, None)
    return None if value is None else round(shortest(value) * 10, 6)


def last_layer(part: str) -> Setting:
    """The index of the last layer that has a tensor."""

    def read(keys: Keys, config: Config) -> int | None:
        layers = [i for i in range(config["num_hidden_layers"]) if keys.has(f"blk.{i}.{part}.weight")]
        return max(layers, default=None)

    return read


def llama(keys: Keys, config: Config) -> str:
    """Llama, Mistral and Mixtral have one architecture."""
    if keys.left.get("expert_count"):
        return "MixtralForCausalLM"
    return "MistralForCausalLM" if keys.left.get("attention.sliding_window") else "LlamaForCausalLM"


def mistral(keys: Keys, config: Config) -> str:
    """Ministral 3 scales queries by their positions."""
    return "Ministral3ForCausalLM" if keys.left.get("attention.temperature_scale") else "MistralForCausalLM"


def only(architecture: str, setting: Setting) -> Setting:
    """A setting of one of the architectures that a row is for."""
    return lambda keys, config: setting(keys, config) if config["architectures"] == [architecture] else None


def but(architecture: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings of all architectures that a row is for, except one."""

    def wrapped(setting: Setting) -> Setting:
        return lambda keys, config: (
            None if config["architectures"] == [architecture] else resolve(setting, keys, config)
        )

    return {key: wrapped(setting) for key, setting in settings.items()}


def of_experts(setting: Setting) -> Setting:
    """A setting of models with experts only."""
    return lambda keys, config: (
        resolve(setting, keys, config) if keys.file.metadata.get(f"{keys.architecture}.expert_count") else None
    )


def resolve(setting: Setting, keys: Keys, config: Config) -> Any:
    return setting(keys, config) if callable(setting) else setting


def unused(*starts: str) -> Setting:
    """Settings that have no effect, by the beginnings of their keys."""

    def drop(keys: Keys, config: Config) -> None:
        for key in [key for key in keys.left if key.startswith(starts)]:
            del keys.left[key]

    return drop


def inputs_of(part: str) -> Setting:
    """The number of inputs of a tensor of the first layer, which older files have in the place of a key."""

    def read(keys: Keys, config: Config) -> int:
        tensor = keys.file.tensors.get(f"blk.0.{part}.weight")
        if tensor is None or len(tensor.shape) < 2:
            raise keys.refuse(f"there is no tensor blk.0.{part}.weight")
        return tensor.shape[-1]

    return read


def size_or(key: str, other: Setting) -> Setting:
    return lambda keys, config: keys.size(key) if key in keys.left else other(keys, config)


def olmo(keys: Keys, config: Config) -> str:
    return "Olmo3ForCausalLM" if keys.left.get("attention.sliding_window") else "Olmo2ForCausalLM"


def granite_moe(keys: Keys, config: Config) -> str:
    shared = keys.left.get("expert_shared_feed_forward_length")
    return "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"


def granite_hybrid(keys: Keys, config: Config) -> str:
    """Of the models with Mamba-2 only Bamba has rotary positions."""
    return "BambaForCausalLM" if keys.left.get("rope.scaling.finetuned") else "GraniteMoeHybridForCausalLM"


def depth_scale(keys: Keys, config: Config) -> float:
    """MiniCPM's scale_depth. The file has the scale of a layer's results; the first ones have none, and mean 1.4."""
    root = config["num_hidden_layers"] ** 0.5
    return keys.real("residual_scale", 1.4 / root) * root


def width_base(keys: Keys, config: Config) -> float:
    """MiniCPM's dim_model_base. The file has the model's width divided by it; the first ones have nothing, and mean
    256."""
    hidden = config["hidden_size"]
    return hidden / keys.real("logit_scale", hidden / 256)


def value_width(keys: Keys, config: Config) -> int:
    """Qwen3-Next's linear_value_head_dim; the file has the width of all heads."""
    return keys.size("ssm.inner_size") // config["linear_num_value_heads"]


def in_layers(keys: Keys, config: Config, key: str) -> list[bool]:
    """Which layers have a part, by the array of its sizes."""
    count = config["num_hidden_layers"]
    given = keys.file.metadata.get(f"{keys.architecture}.{key}", 0)
    if not isinstance(given, np.ndarray):
        return [bool(given)] * count
    if len(given) < count:
        raise keys.refuse(f"{keys.architecture}.{key} has {len(given)} numbers, there are {count} layers")
    return [bool(size) for size in given[:count]]


def kinds_by_attention(other: str, attention: str = "full_attention") -> Setting:
    """The kind of each layer: attention where there are heads of keys, else `other`."""
    return lambda keys, config: [
        attention if has_heads else other for has_heads in in_layers(keys, config, "attention.head_count_kv")
    ]


def attention_layers(keys: Keys, config: Config) -> list[int]:
    return [i for i, has_heads in enumerate(in_layers(keys, config, "attention.head_count_kv")) if has_heads]


def nemotron_kinds(keys: Keys, config: Config) -> list[str]:
    """Each layer of Nemotron-H is an MLP or a mixture where its size is given, attention where there are heads of keys,
    or Mamba-2."""

    def kind(i: int, attention: bool, mlp: bool) -> str:
        if mlp:
            return "moe" if keys.has(f"blk.{i}.ffn_gate_inp.weight") else "mlp"
        return "full_attention" if attention else "linear_attention"

    parts = (in_layers(keys, config, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    return [kind(i, attention, mlp) for i, (attention, mlp) in enumerate(zip(*parts, strict=True))]


def of_heads(key: str) -> Setting:
    """Channels of a head of Mamba-2, by the number of heads; the file has those of all heads."""

    def read(keys: Keys, config: Config) -> int:
        heads = config[key]
        inner = keys.size("ssm.inner_size")
        if inner % heads:
            raise keys.refuse(f"{keys.architecture}.ssm.inner_size={inner} are no {heads} equal heads")
        return inner // heads

    return read


def delta_layers(keys: Keys, config: Config) -> list[str]:
    """Which layers are gated delta nets: by an array, else all but every `full_attention_interval`-th."""
    given = keys.left.pop("attention.recurrent_layers", None)
    interval = keys.size("full_attention_interval", 4)
    count = config["num_hidden_layers"]
    recurrent = [(i + 1) % interval != 0 for i in range(count)] if given is None else [bool(x) for x in given[:count]]
    return ["linear_attention" if one else "full_attention" for one in recurrent]


# Settings that several architectures have.
EXPERTS = {"num_experts_per_tok": size("expert_used_count")}
LOCAL_EXPERTS = EXPERTS | {"num_local_experts": size("expert_count")}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": size("expert_count"),
    **EXPERTS,
    "moe_intermediate_size": size("expert_feed_forward_length"),
    "n_shared_experts": number("expert_shared_count"),
    "first_k_dense_replace": number("leading_dense_block_count"),
    "routed_scaling_factor": real("expert_weights_scale", 1.0),
    "norm_topk_prob": flag("expert_weights_norm", False),
}
QWEN_EXPERTS = EXPERTS | {
    "num_experts": size("expert_count"),
    "moe_intermediate_size": size_or("expert_feed_forward_length", inputs_of("ffn_down_exps")),
}
QWEN3_MOE = QWEN_EXPERTS | {"attention_bias": somewhere("attn_q.bias"), "norm_topk_prob": True}
QWEN2_MOE = QWEN_EXPERTS | {
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": size_or("expert_shared_feed_forward_length", inputs_of("ffn_down_shexp")),
}
DELTA = {
    "partial_rotary_factor": turned_part,
    "linear_conv_kernel_dim": size("ssm.conv_kernel"),
    "linear_key_head_dim": size("ssm.state_size"),
    "linear_num_key_heads": size("ssm.group_count"),
    "linear_num_value_heads": size("ssm.time_step_rank"),
    "linear_value_head_dim": value_width,
    "layer_types": delta_layers,
}
QWEN3_NEXT = DELTA | QWEN2_MOE | {"norm_topk_prob": flag("expert_weights_norm", True)}
BAMBA = {
    "mamba_n_heads": size("ssm.time_step_rank"),
    "mamba_d_head": of_heads("mamba_n_heads"),
    "mamba_expand": lambda keys, config: config["mamba_n_heads"] * config["mamba_d_head"] / config["hidden_size"],
    "mamba_n_groups": size("ssm.group_count"),
    "mamba_d_state": size("ssm.state_size"),
    "mamba_d_conv": size("ssm.conv_kernel"),
    "mamba_conv_bias": somewhere("ssm_conv1d.bias"),
    "mamba_proj_bias": somewhere("ssm_in.bias"),
}
NEMOTRON_H = {
    "mamba_num_heads": size("ssm.time_step_rank"),
    "mamba_head_dim": of_heads("mamba_num_heads"),
    "n_groups": size("ssm.group_count"),
    "ssm_state_size": size("ssm.state_size"),
    "conv_kernel": size("ssm.conv_kernel"),
    "use_conv_bias": somewhere("ssm_conv1d.bias"),
    "use_bias": somewhere("ssm_in.bias"),
    "mlp_bias": somewhere("ffn_up.bias"),
    "layers_block_type": nemotron_kinds,
    "mlp_hidden_act": "relu2",
    "hidden_act": None,
    "layer_norm_epsilon": lambda keys, config: keys.real("attention.layer_norm_epsilon", config["rms_norm_eps"]),
}
LFM2 = {
    "norm_eps": same_as("rms_norm_eps"),
    "rms_norm_eps": None,
    "hidden_act": None,
    "conv_L_cache": size("shortconv.l_cache"),
    "conv_bias": somewhere("shortconv.conv.bias"),
    "layer_types": kinds_by_attention("conv"),
}
