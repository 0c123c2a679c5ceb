"""LFM3: as LFM2, with norms before and after attention, convolution and MLP, gates of the results of attention's heads,
and windows on some layers of attention."""

from __future__ import annotations

from typing import Any

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.lfm2 import LAYER, LFM2_NAMES
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_max_position, read_shared
from jaxserve.models.families.shared import named, read_ropes
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec, QKNormSpec, ShortConvSpec

LFM3_NAMES = (
    LFM2_NAMES
    | {role: name for role, name in NAMES.items() if role.partition(".")[0] in ("o", "q_norm", "k_norm")}
    | named(
        attention_out_norm=f"{LAYER}.post_operator_norm",
        mlp_out_norm=f"{LAYER}.post_ffn_norm",
        out_gate=f"{LAYER}.self_attn.gate_proj",
    )
)
KINDS = ("conv", "full_attention", "sliding_attention")
ROPES: dict[str, Any] = {  # assumed if the config has no rope_parameters
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _kinds(hf: HFConfig) -> list[str]:
    """The kind of each layer: by `layer_types`; without it every fourth layer has attention, and every fourth one with
    a window."""
    count = hf.take("num_hidden_layers")
    kinds = hf.take("layer_types", None)
    if kinds is None:
        kinds = [{0: "sliding_attention", 2: "full_attention"}.get(i % 4 if i else 1, "conv") for i in range(count)]
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"{hf.source}: layer_types {sorted(unknown)} are not supported (only {', '.join(KINDS)})")
    if len(kinds) != count:
        raise ConfigError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {count}")
    if set(kinds) == {"conv"}:
        raise ConfigError(f"{hf.source}: models without any layer of attention are not supported")
    return kinds


def _specs(hf: HFConfig, norm: NormSpec) -> dict[str, AttentionSpec | ShortConvSpec]:
    """The attention, or the convolution in its place, of each kind of layer."""
    bias = bool(hf.take("attention_bias", False))
    gate: Any = "sigmoid" if hf.take("use_attention_gate", True) else None

    def attention(rope: str, window: int | None) -> AttentionSpec:
        return read_attention(
            hf, head_dim=128, kv_heads=4, window=window, rope=rope, qkv_bias=bias, out_bias=bias,
            qk_norm=QKNormSpec(norm=norm), out_gate=gate, gate_per_head=True,
        )  # fmt: skip

    width = hf.take("conv_L_cache", 7)
    conv = ShortConvSpec(channels=hf.take("hidden_size"), width=width, bias=bool(hf.take("conv_bias", False)))
    window = hf.take("sliding_window", None if "sliding_window" in hf.values else 256)
    full = attention("full", None)
    return {"conv": conv, "full_attention": full, "sliding_attention": attention("sliding", window)}


def _read(hf: HFConfig) -> ModelConfig:
    norm = NormSpec(eps=float(hf.take("norm_eps", 1e-5)))
    specs = _specs(hf, norm)
    mlp = MLPSpec(size=hf.take("intermediate_size", 7680))
    residual: Any = "sandwich" if hf.take("use_sandwich_norm", True) else "pre"
    kinds = _kinds(hf)
    layers = tuple(LayerSpec(attention=specs[kind], mlp=mlp, norm=norm, residual=residual) for kind in kinds)
    max_position = read_max_position(hf, 128000)
    hf.values.setdefault("rope_parameters", ROPES)
    ropes = read_ropes(hf, max_position, theta=1e6)
    shared = read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=ropes)
    return ModelConfig(family="lfm3", layers=layers, **shared)


FAMILY = Family("lfm3", ("Lfm3ForCausalLM",), _read, LFM3_NAMES, IGNORED)
