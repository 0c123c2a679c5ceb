"""Mamba-2 models: every layer is Mamba-2, and nothing else."""

from __future__ import annotations

from math import inf

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.bamba import mamba_names
from jaxserve.models.families.llama import IGNORED, read_shared
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import LayerSpec, Mamba2Spec, ModelConfig, NormSpec

LAYER = "backbone.layers.{i}"
BACKBONE = named(embed="backbone.embeddings", norm="backbone.norm_f", head="lm_head", attention_norm=f"{LAYER}.norm")
# The first files have this name.
LAYOUTS = ({"backbone.embeddings.": "backbone.embedding."},)
LONGEST = 32768  # tokens of a sequence, unless the config says more: nothing in the model limits it
# What transformers does not read where it computes, but for the dtype in which residuals are added.
UNREAD = (
    "chunk_size", "intermediate_size", "norm_before_gate", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm",
    "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_rank", "time_step_scale",
)  # fmt: skip


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*UNREAD)
    hf.expect("time_step_limit", [0.0, inf], [0.0, {"__float__": "Infinity"}])
    norm = NormSpec(eps=float(hf.take("layer_norm_epsilon", 1e-5)))
    heads = hf.take("num_heads", 128)
    head_dim = hf.take("head_dim", 64)
    width = hf.take("expand", 2) * hf.take("hidden_size")
    if heads * head_dim != width:
        raise ConfigError(
            f"{hf.source}: num_heads={heads} heads of head_dim={head_dim} are not expand times hidden_size, {width}"
        )
    bias = bool(hf.take("use_bias", False))
    mamba = Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=hf.take("n_groups", 8),
        state_dim=hf.take("state_size", 128),
        conv_width=hf.take("conv_kernel", 4),
        conv_bias=bool(hf.take("use_conv_bias", True)),
        bias=bias,
        out_bias=bias,
        activation=read_activation(hf, "silu"),
        norm=norm,
    )
    layers = (LayerSpec(attention=mamba, mlp=None, norm=norm),) * hf.take("num_hidden_layers")
    return ModelConfig(family="mamba2", layers=layers, **read_shared(hf, longest=LONGEST, norm=norm, ropes={}))


NAMES = BACKBONE | mamba_names(f"{LAYER}.mixer")
FAMILY = Family("mamba2", ("Mamba2ForCausalLM",), _read, NAMES, IGNORED, layouts=LAYOUTS)
