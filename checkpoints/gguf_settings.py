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


def share_of(keys: Keys, turned: int, head_dim: int) -> float:
    """The share of a head's channels that turn, of which there are `turned`."""
    if turned > head_dim or turned % 2:
        raise keys.refuse(f"{keys.architecture}.rope.dimension_count={turned} is not supported")
    share = turned / head_dim
    return share if int(head_dim * share) == turned else math.nextafter(share, 1.0)


def turned_part(keys: Keys, config: Config) -> float:
    head_dim = config["head_dim"]
    return share_of(keys, keys.size("rope.dimension_count", head_dim), head_dim)


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


def depth_scale(keys: Keys, config: Config) -> float:
    """MiniCPM's scale_depth. The file has the scale of a layer's results; the first ones have none, and mean 1.4."""
    root = config["num_hidden_layers"] ** 0.5
    return keys.real("residual_scale", 1.4 / root) * root


def width_base(keys: Keys, config: Config) -> float:
    """MiniCPM's dim_model_base. The file has the model's width divided by it; the first ones have nothing, and mean
    256."""
    hidden = config["hidden_size"]
    return hidden / keys.real("logit_scale", hidden / 256)


def by_layer(keys: Keys, config: Config, key: str, default: int | None = None) -> list[int]:
    """A number of each layer: by the file's array, or the same for all."""
    count = config["num_hidden_layers"]
    given = keys.file.metadata.get(f"{keys.architecture}.{key}", default)
    if type(given) is int:
        return [given] * count
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iub" or len(given) < count:
        raise keys.refuse(f"{keys.architecture}.{key}={given!r:.80} has no number for each of {count} layers")
    return [int(number) for number in given[:count]]


def of_kind(key: str, kind: str) -> Setting:
    """A number that all layers of a kind have, by the array of the layers' numbers. None: there are no such layers."""

    def read(keys: Keys, config: Config) -> int | None:
        numbers = by_layer(keys, config, key, config["num_key_value_heads"])
        found = {number for number, own in zip(numbers, config["layer_types"], strict=True) if own == kind}
        if len(found) > 1 or found & {0}:
            raise keys.refuse(f"{keys.architecture}.{key} has the numbers {sorted(found)} for layers with {kind}")
        return next(iter(found), None)

    return read


def rows_of(name: str) -> Setting:
    """The rows of a matrix, of the first layer that has it. None: there is no such matrix."""

    def read(keys: Keys, config: Config) -> int | None:
        found = (tensor for tensor in keys.file.tensors.values() if f".{tensor.name}".endswith(f".{name}.weight"))
        return next((tensor.shape[0] for tensor in found if len(tensor.shape) == 2), None)

    return read


def mlp_kinds(keys: Keys, config: Config) -> list[str]:
    """Whether each layer has experts, or one MLP."""
    routers = (keys.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(config["num_hidden_layers"]))
    return ["sparse" if has_router else "dense" for has_router in routers]


def four_times(keys: Keys, config: Config) -> None:
    """MLPs of some architectures are four times as wide as the model, and config.json does not say it."""
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        raise keys.refuse(f"{keys.architecture}.feed_forward_length={config['intermediate_size']} is not supported")


def indexer_types(keys: Keys, config: Config) -> list[str]:
    """Whether each layer has an indexer, or sees what the last one before it has chosen. Files without the array are of
    GLM-5, whose layers all have one, or of GLM-5.2 and later, whose texts are longer."""
    count = config["num_hidden_layers"]
    given = keys.left.pop("attention.indexer.types", None)
    if given is None:
        later = config["max_position_embeddings"] >= 2**20
        has = [not later or i < 2 or (i - 2) % 4 == 0 for i in range(count)]
    elif isinstance(given, np.ndarray) and len(given) >= count:
        has = [bool(x) for x in given[:count]]
    else:
        raise keys.refuse(f"{keys.architecture}.attention.indexer.types={given!r:.80} is not supported")
    return ["full" if own else "shared" for own in has]


def mpt_attention(keys: Keys, config: Config) -> dict[str, Any]:
    """MPT's attn_config, of models with biases by distance."""
    keys.take("attention.max_alibi_bias", lambda value: value == 8)
    return {"alibi": True, "clip_qkv": optional("attention.clamp_kqv")(keys, config)}


def dbrx_attention(keys: Keys, config: Config) -> dict[str, Any]:
    """DBRX's attn_config."""
    return {"kv_n_heads": config["num_key_value_heads"], "clip_qkv": optional("attention.clamp_kqv")(keys, config)}


def dbrx_experts(keys: Keys, config: Config) -> dict[str, Any]:
    """DBRX's ffn_config."""
    return {
        "ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": keys.size("expert_count"),
        "moe_top_k": keys.size("expert_used_count"),
    }


def mimo_heads(keys: Keys, config: Config) -> int:
    """Heads of keys of MiMo's layers without a window, which have half as many as the others."""
    full, sliding = (
        of_kind("attention.head_count_kv", kind)(keys, config) for kind in ("full_attention", "sliding_attention")
    )
    if full is None and sliding % 2 == 0:
        return sliding // 2
    if full is None or sliding not in (None, 2 * full):
        raise keys.refuse(f"{keys.architecture}.attention.head_count_kv: {full} and {sliding} are not supported")
    return full


def mimo_window(keys: Keys, config: Config) -> int:
    """The published config says 128 and means 128 tokens beside the token itself. Files have this number, or that of
    transformers, which is 129."""
    given = keys.size("attention.sliding_window")
    return 129 if given == 128 else given


def clamps(key: str) -> Setting:
    """Limits of each layer's MLP; 0 stands for none."""

    def read(keys: Keys, config: Config) -> list[float] | None:
        given = keys.left.pop(key, None)
        if given is None:
            return None
        count = config["num_hidden_layers"]
        if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or len(given) < count:
            raise keys.refuse(f"{keys.architecture}.{key}={given!r:.80} is not supported")
        return [shortest(x) for x in given[:count]]

    return read


def layers_from_full(keys: Keys, config: Config) -> list[str]:
    """Which layers have a window: by the file's array, or all but the first one of every period."""
    if isinstance(keys.left.get("attention.sliding_window_pattern"), np.ndarray):
        kinds: list[str] = layer_types(4)(keys, config)
        return kinds
    period = keys.size("attention.sliding_window_pattern", 4)
    slides = [config["sliding_window"] is not None and i % period != 0 for i in range(config["num_hidden_layers"])]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def laguna_gates(keys: Keys, config: Config) -> str:
    rows = rows_of("blk.0.attn_gate")(keys, config)
    return "per-head" if rows == config["num_attention_heads"] else "per-element"


def mellum_layers(keys: Keys, config: Config) -> list[str]:
    if config["sliding_window"] is None:
        return ["full_attention"] * config["num_hidden_layers"]
    kinds: list[str] = layer_types(4)(keys, config)
    return kinds


def sigmoids(keys: Keys, config: Config) -> None:
    """Checks that routers take sigmoids."""
    keys.expect("expert_gating_func", 2)


# Settings that several architectures have.
BIASED = {"attention_bias": somewhere("attn_q.bias")}
BIASES = BIASED | {"mlp_bias": somewhere("ffn_up.bias")}
SHARED_MLP = {"shared_intermediate_size": size("expert_shared_feed_forward_length")}
GRANITE = BIASED | {
    "attention_multiplier": real("attention.scale", 1.0),
    "embedding_multiplier": real("embedding_scale", 1.0),
    "residual_multiplier": real("residual_scale", 1.0),
    "logits_scaling": real("logit_scale", 1.0),
}
ONE_GROUP = {"n_group": size("expert_group_count", 1), "topk_group": size("expert_group_used_count", 1)}
SIGMOIDS = {"scoring_func": sigmoids}
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
QWEN3_MOE = QWEN_EXPERTS | BIASED | {"norm_topk_prob": True}
QWEN2_MOE = QWEN_EXPERTS | {
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": size_or("expert_shared_feed_forward_length", inputs_of("ffn_down_shexp")),
}
