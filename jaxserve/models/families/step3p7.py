"""The language model of Step 3.7: gates of the results of attention's heads, and windows on most layers, which have
another number of heads; behind the first layers experts with a sigmoid router and a correction bias, beside a shared
one. Some layers limit the gates and ups of their MLPs.

Lists of published configs have an entry for each layer, and for layers behind the last one that predict further tokens.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.laguna import with_heads
from jaxserve.models.families.llama import (
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import KINDS, read_ropes, windows_of
from jaxserve.models.families.within import Text, by_whole, family_within
from jaxserve.models.spec import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelConfig, QKNormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
STEP_NAMES = NAMES | {
    "out_gate.weight": f"{LAYER}.self_attn.g_proj.weight",
    "router.weight": f"{LAYER}.moe.gate.weight",
    "correction": f"{LAYER}.moe.router_bias",
    **{f"expert_{role}.weight": f"{LAYER}.moe.{{e}}.{role}_proj.weight" for role in ("gate", "up", "down")},
    **{f"shared_{role}.weight": f"{LAYER}.share_expert.{role}_proj.weight" for role in ("gate", "up", "down")},
}
# The values that transformers assumes for keys that a text_config does not have.
STEP = {
    "vocab_size": 128815, "hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 45,
    "num_attention_heads": 64, "head_dim": 128, "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
# Keys in published configs that transformers does not read, and the values that agree with what is computed.
WRITTEN = {
    "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True, "moe_router_activation": "sigmoid",
    "norm_expert_weight": True, "use_qk_norm": True, "zero_centered": True, "yarn_only_types": ["full_attention"],
}  # fmt: skip
OF_MTP = ("mtp_layer_types", "mtp_mlp_layer_types", "mtp_per_layer_config")


def _cut(hf: HFConfig) -> None:
    """Drops the entries of lists for layers that are not read."""
    count = hf.take("num_hidden_layers")
    more = hf.take("num_nextn_predict_layers", 0)
    lists = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "layer_rope_theta")
    for key in (*lists, "partial_rotary_factors"):
        given = hf.values.get(key)
        if isinstance(given, list):
            if len(given) not in (count, count + more):
                raise ConfigError(f"{hf.source}: {key} has {len(given)} entries, num_hidden_layers is {count}")
            hf.values[key] = given[:count]


def _sparse(hf: HFConfig) -> list[bool]:
    """For each layer, whether it has experts."""
    count = hf.take("num_hidden_layers")
    types = hf.take("mlp_layer_types", None)
    listed = hf.take("moe_layers_enum", None)
    if types is not None:
        if set(types) - {"dense", "sparse"}:
            raise ConfigError(f"{hf.source}: mlp_layer_types must be 'dense' or 'sparse', got {types!r:.80}")
        return [kind == "sparse" for kind in types]
    if listed is None:
        return [i >= 3 for i in range(count)]
    try:
        numbers = {int(i) for i in (listed.split(",") if isinstance(listed, str) else listed) if str(i).strip()}
    except (TypeError, ValueError):
        raise ConfigError(f"{hf.source}: moe_layers_enum must list numbers of layers, got {listed!r:.80}") from None
    return [i in numbers for i in range(count)]


def _heads(hf: HFConfig, attention: AttentionSpec, kinds: list[str]) -> list[int]:
    """The number of query heads of each layer. Without a window it is that of `attention`."""
    usual = attention.num_heads
    other = hf.take("attention_other_setting", None) or {}
    same = {"num_attention_groups": attention.num_kv_heads, "head_dim": attention.head_dim}
    if differs := {key: other[key] for key in same if key in other and other[key] != same[key]}:
        raise ConfigError(f"{hf.source}: attention_other_setting must have {same}, got {differs}")
    sliding = hf.take("num_sliding_attention_heads", other.get("num_attention_heads", usual))
    heads = [sliding if kind == "sliding_attention" else usual for kind in kinds]
    given = hf.take("per_layer_config", None)
    if given is None:
        return heads
    if {key for changes in given.values() for key in changes} - {"num_attention_heads"}:
        raise ConfigError(f"{hf.source}: per_layer_config can change num_attention_heads only, got {given!r:.200}")
    return [given.get(str(i), {}).get("num_attention_heads", usual) for i in range(len(kinds))]


def _rope_objects(hf: HFConfig, kinds: list[str]) -> None:
    """Brings the rotary settings of published configs, lists by layer, into the objects of transformers 5."""
    theta = hf.values.pop("rope_theta", None) or 10000.0
    thetas = hf.take("layer_rope_theta", None) or [theta] * len(kinds)
    shares = hf.take("partial_rotary_factors", None)
    scaling = hf.values.pop("rope_scaling", None)
    if all(isinstance((hf.values.get("rope_parameters") or {}).get(kind), dict) for kind in kinds):
        return
    nested = {}
    for kind in sorted(set(kinds)):
        i = kinds.index(kind)
        nested[kind] = {"rope_type": "default", "rope_theta": thetas[i]}
        nested[kind] |= {"partial_rotary_factor": shares[i]} if shares else {}
        nested[kind] |= scaling if scaling and kind == "full_attention" else {}
    hf.values["rope_parameters"] = nested


def _read(hf: HFConfig) -> ModelConfig:
    for key, only in WRITTEN.items():
        hf.expect(key, only)
    hf.ignore("need_fp32_gate", *OF_MTP)
    hf.rename(
        num_attention_groups="num_key_value_heads", moe_num_experts="n_routed_experts",
        num_local_experts="n_routed_experts", moe_top_k="num_experts_per_tok", share_expert_dims="share_expert_dim",
        num_mtp_layers="num_nextn_predict_layers",
    )  # fmt: skip
    hf.expect("mlp_bias", False)
    _cut(hf)
    kinds = hf.take("layer_types", None) or ["full_attention"] * hf.take("num_hidden_layers")
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {sorted(KINDS)})")
    norm = read_norm(hf, offset=1.0)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(
        hf,
        kv_heads=8,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNormSpec(norm=norm),
        scale=hf.take("query_pre_attn_scalar", hf.take("head_dim")) ** -0.5,
        out_gate="sigmoid",
        gate_per_head=True,
    )
    sliding = [kind == "sliding_attention" for kind in kinds]
    windows = windows_of(sliding, hf.take("sliding_window", None))
    ropes = ["sliding" if slides else "full" for slides in sliding]
    layers = with_heads(
        uniform_layers(hf, attention, read_mlp(hf), windows, ropes, norm=norm), _heads(hf, attention, kinds)
    )
    _rope_objects(hf, kinds)
    max_position = read_max_position(hf)
    return ModelConfig(
        family="step3p7 with images",
        layers=_with_mlps(hf, layers),
        **read_shared(
            hf, norm=norm, max_position=max_position, ropes=read_ropes(hf, max_position, theta=1e4, partial=1.0)
        ),
    )


def _with_mlps(hf: HFConfig, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers with their mixtures, or with their own bound of the dense MLP."""
    router = Router(
        top_k=hf.take("num_experts_per_tok", 8),
        score="sigmoid",
        scale=float(hf.take("moe_router_scaling_factor", 1.0)),
        corrected=True,
    )
    count = hf.take("n_routed_experts", 288)
    size = hf.take("moe_intermediate_size", 1280)
    shared = hf.take("share_expert_dim", 1280)
    none = [None] * len(layers)
    bounds = hf.take("swiglu_limits", None) or none
    of_shared = hf.take("swiglu_limits_shared", None) or none

    def changed(layer: LayerSpec, sparse: bool, bound: float | None, shared_bound: float | None) -> LayerSpec:
        assert layer.mlp is not None
        if not sparse:
            return replace(layer, mlp=replace(layer.mlp, bound=shared_bound or None))
        experts = ExpertsSpec(count=count, router=router, shared_size=shared, shared_bound=shared_bound or None)
        return replace(
            layer, mlp=MLPSpec(size=size, activation=layer.mlp.activation, bound=bound or None, experts=experts)
        )

    return tuple(map(changed, layers, _sparse(hf), bounds, of_shared))


WITHIN = family_within(
    "step3p7",
    "Step3p7ForConditionalGeneration",
    {"step3p5": Text(_read, STEP)},
    STEP_NAMES,
    by_whole,
    more_layers=True,
)


def _read_whole(hf: HFConfig) -> ModelConfig:
    text = dict(hf.values.get("text_config") or {}) | {"model_type": "step3p5"}  # whatever the file says
    if isinstance(text.get("rope_theta"), list):
        text["layer_rope_theta"] = text.pop("rope_theta")
    hf.values["text_config"] = text
    return WITHIN.read_config(hf)


FAMILY = replace(WITHIN, read_config=_read_whole)
