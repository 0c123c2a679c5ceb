"""Settings of `gguf_architectures`: functions that compute a setting of config.json from those of a GGUF file."""

from __future__ import annotations

import math
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
    """V3's routers take sigmoids. Files of V3 from before the key have its correction bias."""
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


def of_mixtral(setting: Setting) -> Setting:
    return lambda keys, config: setting(keys, config) if config["architectures"] == ["MixtralForCausalLM"] else None


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


def of_olmo3(setting: Setting) -> Setting:
    return lambda keys, config: setting(keys, config) if config["architectures"] == ["Olmo3ForCausalLM"] else None


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
QWEN2_MOE = QWEN_EXPERTS | {
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": size_or("expert_shared_feed_forward_length", inputs_of("ffn_down_shexp")),
}
QWEN3_NEXT = QWEN_EXPERTS | {
    "norm_topk_prob": flag("expert_weights_norm", True),
    "shared_expert_intermediate_size": size_or("expert_shared_feed_forward_length", inputs_of("ffn_down_shexp")),
    "partial_rotary_factor": turned_part,
    "linear_conv_kernel_dim": size("ssm.conv_kernel"),
    "linear_key_head_dim": size("ssm.state_size"),
    "linear_num_key_heads": size("ssm.group_count"),
    "linear_num_value_heads": size("ssm.time_step_rank"),
    "linear_value_head_dim": value_width,
    "layer_types": delta_layers,
}
