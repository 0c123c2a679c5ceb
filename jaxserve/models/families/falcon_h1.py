"""Falcon-H1: each layer has attention and Mamba-2 side by side. Multipliers are everywhere."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.bamba import BAMBA_NAMES, read_mamba
from jaxserve.models.families.llama import IGNORED, read_attention, read_mlp, read_norm, read_shared, uniform_layers
from jaxserve.models.families.shared import read_activation
from jaxserve.models.spec import BesideSpec, ModelConfig

# What transformers does not read where it computes.
UNREAD = (
    "attn_layer_indices", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep", "time_step_floor",
    "time_step_max", "time_step_min", "time_step_rank", "layer_types", "layers_block_type",
)  # fmt: skip


def _numbers(hf: HFConfig, key: str, count: int) -> list[float]:
    """The multipliers under `key`, by default 1."""
    found = hf.take(key, None) or [1.0] * count
    if len(found) != count:
        raise ConfigError(f"{hf.source}: {key} must be a list of {count} numbers, got {found!r:.80}")
    return [float(x) for x in found]


def _number(hf: HFConfig, key: str) -> float:
    return float(hf.take(key, 1.0))


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*UNREAD)
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, kv_heads=8, qkv_bias=bias, out_bias=bias)
    scale = attention.head_dim**-0.5 * _number(hf, "key_multiplier")
    gate_scale, out_scale = _numbers(hf, "mlp_multipliers", 2)
    activation = read_activation(hf, "silu")
    mlp = read_mlp(
        hf,
        activation=activation,
        bias=bool(hf.take("mlp_bias", False)),
        gate_scale=gate_scale,
        out_scale=out_scale,
    )
    width = None
    if "mamba_d_ssm" not in hf.values or hf.values["mamba_d_ssm"] is not None:
        width = hf.take("mamba_d_ssm", 1024)
    gate, x, b, c, step = _numbers(hf, "ssm_multipliers", 5)
    has_norm = hf.take("mamba_rms_norm", False)
    mamba = read_mamba(
        hf,
        norm if has_norm else None,
        activation,
        width,
        out_bias=bool(hf.take("projectors_bias", False)),
        norm_first=bool(hf.take("mamba_norm_before_gate", True)) if has_norm else False,
        scales=(gate, x, b, c, step),
    )
    hf.ignore("mamba_norm_before_gate", "mamba_expand", "mamba_d_ssm")
    beside = BesideSpec(
        recurrent=mamba,
        attention_in=_number(hf, "attention_in_multiplier"),
        attention_out=_number(hf, "attention_out_multiplier"),
        recurrent_in=_number(hf, "ssm_in_multiplier"),
        recurrent_out=_number(hf, "ssm_out_multiplier"),
    )
    layers = uniform_layers(hf, replace(attention, scale=scale), mlp, norm=norm, beside=beside)
    return ModelConfig(
        family="falcon_h1",
        layers=layers,
        embed_scale=_number(hf, "embedding_multiplier"),
        logit_scale=_number(hf, "lm_head_multiplier"),
        **read_shared(hf, longest=8192, norm=norm),
    )


FAMILY = Family("falcon_h1", ("FalconH1ForCausalLM",), _read, BAMBA_NAMES, IGNORED)
