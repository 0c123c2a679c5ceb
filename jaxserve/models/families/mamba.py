"""Mamba and Falcon-Mamba: every layer is Mamba, and nothing else. Falcon-Mamba's has norms without scales."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import IGNORED, read_shared
from jaxserve.models.families.mamba2 import BACKBONE, LAYER, LAYOUTS, LONGEST, UNREAD
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import LayerSpec, MambaSpec, ModelConfig, NormSpec


def scan_names(module: str) -> dict[str, str]:
    """Role -> name of the tensors of a layer's Mamba module."""
    modules = {"in": "in_proj", "conv": "conv1d", "x": "x_proj", "dt": "dt_proj", "out": "out_proj"}
    return named(**{f"mamba_{role}": f"{module}.{name}" for role, name in modules.items()}) | {
        "mamba_a_log": f"{module}.A_log",
        "mamba_d": f"{module}.D",
    }


def rank_of(hf: HFConfig, key: str) -> int:
    """The size of the latent of steps."""
    rank = hf.take(key, "auto")
    return -(-hf.take("hidden_size") // 16) if rank == "auto" else rank


def _read(hf: HFConfig, family: str, eps: float | None = None) -> ModelConfig:
    """eps: the default of `mixer_rms_eps`; None: the family has no norms within Mamba."""
    hf.ignore(*UNREAD, "expand", "use_mambapy", "use_falcon_mambapy", "use_associative_scan", "use_mamba_kernels")
    norm = NormSpec(eps=float(hf.take("layer_norm_epsilon", 1e-5)))
    mixer: dict[str, Any] = {}
    if eps is not None:
        mixer["norm"] = NormSpec(eps=float(hf.take("mixer_rms_eps", eps)), scale=False)
    mamba = MambaSpec(
        channels=hf.take("intermediate_size", None) or hf.take("expand", 2) * hf.take("hidden_size"),
        state_dim=hf.take("state_size", 16),
        rank=rank_of(hf, "time_step_rank"),
        conv_width=hf.take("conv_kernel", 4),
        conv_bias=bool(hf.take("use_conv_bias", True)),
        bias=bool(hf.take("use_bias", False)),
        activation=read_activation(hf, "silu"),
        **mixer,
    )
    layers = (LayerSpec(attention=mamba, mlp=None, norm=norm),) * hf.take("num_hidden_layers")
    shared = read_shared(hf, tied=True, longest=LONGEST, norm=norm, ropes={})
    return ModelConfig(family=family, layers=layers, **shared)


NAMES = BACKBONE | scan_names(f"{LAYER}.mixer")
FAMILIES = [
    Family("mamba", ("MambaForCausalLM",), partial(_read, family="mamba"), NAMES, IGNORED, layouts=LAYOUTS),
    Family(
        "falcon_mamba",
        ("FalconMambaForCausalLM",),
        partial(_read, family="falcon_mamba", eps=1e-6),
        NAMES,
        IGNORED,
        layouts=LAYOUTS,
    ),
]
