"""Qwen3-Next: most layers have gated delta nets, the others have attention with gated results. All have experts as in
Qwen2-MoE. Norms multiply by 1 + w, except the norms of the delta nets' results, which multiply by w."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_attention, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.families.qwen2_moe import QWEN2_MOE_NAMES, read_experts, with_experts
from jaxserve.models.rope import read_rope
from jaxserve.models.sources import Names
from jaxserve.models.spec import GatedDeltaSpec, LayerSpec, MLPSpec, ModelConfig, QKNormSpec

DELTA = "model.layers.{i}.linear_attn"
HYBRID_NAMES = QWEN2_MOE_NAMES | {
    "delta_conv.weight": f"{DELTA}.conv1d.weight",
    "delta_a_log": f"{DELTA}.A_log",
    "delta_dt_bias": f"{DELTA}.dt_bias",
    "delta_norm.weight": f"{DELTA}.norm.weight",
    "delta_out.weight": f"{DELTA}.out_proj.weight",
}
NAMES = HYBRID_NAMES | {
    "delta_qkvz.weight": f"{DELTA}.in_proj_qkvz.weight",
    "delta_ba.weight": f"{DELTA}.in_proj_ba.weight",
}


def of_mtp(names: Names) -> dict[str, str]:
    """The names of a layer's tensors, for a layer that predicts more tokens."""
    usual = "model.layers.{i}."
    return {role: name.replace(usual, "mtp.layers.0.") for role, name in names.items() if name.startswith(usual)}


# The tensors of a further layer, which has attention and predicts more tokens.
MTP = {
    "fc.weight": "mtp.fc.weight",
    "embed_norm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
    "norm.weight": "mtp.norm.weight",
    **of_mtp(QWEN2_MOE_NAMES),
}


def read_recurrent(hf: HFConfig) -> list[bool]:
    """For each layer, whether it is a gated delta net: by `layer_types`; without this key every layer except every
    `full_attention_interval`-th."""
    count = hf.take("num_hidden_layers")
    types = hf.take("layer_types", None)
    hf.ignore("full_attention_interval")
    if not types:
        interval = hf.take("full_attention_interval", 4)
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if unknown := set(types) - {"linear_attention", "full_attention"}:
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported")
    if len(types) != count:
        raise ConfigError(f"layer_types has {len(types)} entries, num_hidden_layers is {count}")
    if "full_attention" not in types:
        raise ConfigError(f"{hf.source}: models without any layer of attention are not supported")
    return [kind == "linear_attention" for kind in types]


def read_hybrid(hf: HFConfig, mlp: MLPSpec, kv_heads: int, partial: float = 0.25) -> dict[str, Any]:
    """The fields of ModelConfig for a model with this MLP in every layer. `kv_heads` and `partial` are the defaults of
    num_key_value_heads and of partial_rotary_factor."""
    bias = bool(hf.take("attention_bias", False))
    norm = read_norm(hf, offset=1.0)
    qk_norm = QKNormSpec(norm=norm)
    attention = read_attention(
        hf,
        head_dim=256,
        kv_heads=kv_heads,
        qk_norm=qk_norm,
        qkv_bias=bias,
        out_bias=bias,
        out_gate="sigmoid",
        gate_bias=bias,
    )
    delta = GatedDeltaSpec(
        key_heads=hf.take("linear_num_key_heads", 16),
        value_heads=hf.take("linear_num_value_heads", 32),
        key_dim=hf.take("linear_key_head_dim", 128),
        value_dim=hf.take("linear_value_head_dim", 128),
        conv_width=hf.take("linear_conv_kernel_dim", 4),
        activation=mlp.activation,
        norm=replace(norm, offset=0.0),
    )
    layers = tuple(
        LayerSpec(attention=delta if recurrent else attention, mlp=mlp, norm=norm) for recurrent in read_recurrent(hf)
    )
    max_position = read_max_position(hf, 32768)
    ropes = {"default": read_rope(hf, max_position, partial=partial, head_dim=attention.head_dim)}
    return {"layers": layers, **read_shared(hf, norm=norm, max_position=max_position, ropes=ropes)}


def _read(hf: HFConfig) -> ModelConfig:
    hf.values.setdefault("norm_topk_prob", True)
    mixture = read_experts(hf, shared_size=hf.take("shared_expert_intermediate_size"), shared_gate=True)
    fields = read_hybrid(hf, read_mlp(hf), kv_heads=2)
    layers = with_experts(hf, fields.pop("layers"), mixture)
    return ModelConfig(family="qwen3_next", layers=layers, **fields)


FAMILY = Family(
    "qwen3_next", ("Qwen3NextForCausalLM",), _read, NAMES, IGNORED, mtp=MTP, mtp_normed=True, unread=("mtp.",)
)
