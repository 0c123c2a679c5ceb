"""Gemma 4, text: Gemma 3 with larger and fewer heads in its global layers, keys that may also be values, layers that
share the keys and values of earlier ones, inputs of each layer's own, and experts beside the dense MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.gemma2 import SANDWICH_NAMES
from jaxserve.models.families.llama import IGNORED, read_attention, read_max_position, read_norm, read_shared
from jaxserve.models.families.shared import read_activation, read_ropes, read_sliding, windows_of
from jaxserve.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    PerLayerInputs,
    QKNormSpec,
)
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
PER_LAYER_NAMES = {
    "per_layer_embed.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model.weight": "model.per_layer_model_projection.weight",
    "per_layer_model_norm.weight": "model.per_layer_projection_norm.weight",
    "per_layer_gate.weight": f"{LAYER}.per_layer_input_gate.weight",
    "per_layer_projection.weight": f"{LAYER}.per_layer_projection.weight",
    "per_layer_norm.weight": f"{LAYER}.post_per_layer_input_norm.weight",
}
GEMMA4_NAMES = (
    SANDWICH_NAMES
    | PER_LAYER_NAMES
    | {
        "layer_scale": f"{LAYER}.layer_scalar",
        "router.weight": f"{LAYER}.router.proj.weight",
        "router_norm.weight": f"{LAYER}.router.scale",
        "expert_scales": f"{LAYER}.router.per_expert_scale",
        "experts_norm.weight": f"{LAYER}.pre_feedforward_layernorm_2.weight",
        "experts_out_norm.weight": f"{LAYER}.post_feedforward_layernorm_2.weight",
        "shared_out_norm.weight": f"{LAYER}.post_feedforward_layernorm_1.weight",
        "expert_gate_up.weight": f"{LAYER}.experts.{{e}}.gate_up_proj",
        "expert_fused_down.weight": f"{LAYER}.experts.{{e}}.down_proj",
        **{f"shared_{role}.weight": f"{LAYER}.mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
)
# What transformers assumes for keys that a config does not have.
DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "eos_token_id": 1,
}  # fmt: skip
UNIFIED = DEFAULTS | {
    "sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GLOBAL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
PER_LAYER_KEYS = ("head_dim", "num_key_value_heads")
MOE_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")


def with_defaults(hf: HFConfig, defaults: dict[str, Any]) -> None:
    """Adds what the config lacks, and drops what transformers drops."""
    types = hf.values.get("layer_types")
    if isinstance(types, list) and len(types) != defaults["num_hidden_layers"]:
        defaults = {key: value for key, value in defaults.items() if key != "num_hidden_layers"}
    hf.values.update({key: value for key, value in defaults.items() if key not in hf.values})
    hf.values.pop("sliding_window_pattern", None)  # which these models do not read


def first_sharing(hf: HFConfig, sliding: list[bool], shared: int) -> int:
    """The number of the first of the `shared` last layers, which share the keys and values of earlier layers. Raises
    ConfigError if some have no earlier layer like them."""
    first = len(sliding) - shared
    if first < 0 or set(sliding[first:]) - set(sliding[: max(first, 0)]):
        raise ConfigError(
            f"{hf.source}: num_kv_shared_layers={shared} leaves no layer of each kind of which the last layers could "
            "share the keys and values"
        )
    return first


def _heads(hf: HFConfig, sliding: list[bool]) -> list[dict[str, int]]:
    """What each layer has in the place of head_dim and num_key_value_heads. transformers 5.24 writes it for each layer;
    published configs have settings for global layers."""
    of_global = {"head_dim": hf.take("global_head_dim", 512)}
    heads = hf.take("num_global_key_value_heads", None)
    if heads is not None and hf.take("attention_k_eq_v", False):
        of_global["num_key_value_heads"] = heads
    if "per_layer_config" not in hf.values:
        return [{} if slides else of_global for slides in sliding]
    given = hf.take("per_layer_config", None) or {}
    found: list[dict[str, int]] = [{} for _ in sliding]
    for number, values in given.items():
        if not number.isdecimal() or int(number) >= len(sliding) or not isinstance(values, dict):
            raise ConfigError(f"{hf.source}: per_layer_config has {number!r}, which is no layer with settings")
        if unknown := values.keys() - set(PER_LAYER_KEYS):
            raise ConfigError(
                f"{hf.source}: per_layer_config of layer {number} has {sorted(unknown)}; supported are "
                f"{', '.join(PER_LAYER_KEYS)}"
            )
        found[int(number)] = {key: value for key, value in values.items() if value is not None}
    return found


def _mlp(hf: HFConfig) -> MLPSpec:
    activation = read_activation(hf, "gelu_pytorch_tanh", "hidden_activation")
    dense = MLPSpec(size=hf.take("intermediate_size"), activation=activation)
    if not hf.take("enable_moe_block", False):
        hf.ignore(*MOE_KEYS)
        return dense
    count, top_k, size = (hf.take(key, None) for key in MOE_KEYS)
    if None in (count, top_k, size):
        raise ConfigError(f"{hf.source}: enable_moe_block needs {', '.join(MOE_KEYS)}")
    experts = ExpertsSpec(count=count, router=Router(top_k=top_k), shared_size=dense.size, own_norms=True, scaled=True)
    return replace(dense, size=size, experts=experts)


def _wide(mlp: MLPSpec) -> MLPSpec:
    """The MLP with twice the inner size, if it is dense, or of the dense one beside experts."""
    if mlp.experts is None:
        return replace(mlp, size=2 * mlp.size)
    return replace(mlp, experts=replace(mlp.experts, shared_size=2 * mlp.experts.shared_size))


def read_gemma4(hf: HFConfig, family: str = "gemma4", defaults: dict[str, Any] = DEFAULTS) -> ModelConfig:
    with_defaults(hf, defaults)
    hf.expect("use_bidirectional_attention", "vision")  # which has no effect on text
    hf.ignore("hidden_act")
    max_position = read_max_position(hf)
    norm = read_norm(hf)
    sliding = read_sliding(hf, 6)
    sliding[-1] = False
    windows = windows_of(sliding, hf.take("sliding_window"))
    shared = hf.take("num_kv_shared_layers", 0)
    sharing = first_sharing(hf, sliding, shared)
    bias = bool(hf.take("attention_bias", False))
    k_eq_v = bool(hf.take("attention_k_eq_v", False))
    common = read_attention(hf, scale=1.0, qk_norm=QKNormSpec(norm=norm), qkv_bias=bias, out_bias=bias)
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    mlp = _mlp(hf)
    wide = _wide(mlp) if hf.take("use_double_wide_mlp", False) else mlp

    def layer(i: int, own: dict[str, Any]) -> LayerSpec:
        attention: AttentionSpec = replace(
            common,
            window=windows[i],
            rope="sliding" if sliding[i] else "full",
            v_norm=norm if i < sharing else None,
            v_is_k=k_eq_v and not sliding[i] and i < sharing,
            shares_kv=i >= sharing,
            **{names[key]: value for key, value in own.items()},
        )
        of_layer = wide if i >= sharing else mlp
        return LayerSpec(attention=attention, mlp=of_layer, norm=norm, residual="scaled_sandwich")

    layers = tuple(layer(i, own) for i, own in enumerate(_heads(hf, sliding)))
    own = PerLayerInputs(
        size=hf.take("hidden_size_per_layer_input", 0),
        layers=len(layers),
        rows=hf.take("vocab_size_per_layer_input", 1),
        norm=norm,
        activation=mlp.activation,
    )
    return ModelConfig(
        family=family,
        layers=layers,
        per_layer=own if own.size else None,
        embed_scale=hf.take("hidden_size") ** 0.5,
        logit_softcap=hf.take("final_logit_softcapping", None),
        **read_shared(hf, norm=norm, max_position=max_position, ropes=_ropes(hf, max_position)),
    )


def _ropes(hf: HFConfig, max_position: int) -> dict[str, Any]:
    """The rotary embeddings of global and of local layers. Without settings, a quarter of a global head turns."""
    if hf.take("rope_parameters", None) is None:
        hf.values["rope_parameters"] = {"full_attention": GLOBAL_ROPE, "sliding_attention": {"rope_theta": 1e4}}
    return read_ropes(hf, max_position)


def read_unified(hf: HFConfig) -> ModelConfig:
    return read_gemma4(hf, "gemma4_unified", UNIFIED)


FAMILIES = (
    Family("gemma4", ("Gemma4ForCausalLM",), read_gemma4, GEMMA4_NAMES, IGNORED),
    Family("gemma4_unified", ("Gemma4UnifiedForCausalLM",), read_unified, GEMMA4_NAMES, IGNORED),
)
