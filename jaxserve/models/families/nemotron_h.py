"""Nemotron-H and Nemotron 3: each layer is either Mamba-2, attention without positions, or an MLP without a gate, or a
mixture of such MLPs.

transformers keeps the steps of Mamba-2 at `time_step_min` or more in prompts, but not in decodes. Here this holds for
all tokens, so that an answer does not depend on how it was cut into steps.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family, last_attention
from jaxserve.models.families.bamba import mamba_names
from jaxserve.models.families.llama import IGNORED, NAMES, read_attention, read_max_position, read_shared
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import Activation, ExpertsSpec, LayerSpec, Mamba2Spec, MLPSpec, ModelConfig, NormSpec
from jaxserve.pallas_kernels.expert_routing import Router

LAYER = "model.layers.{i}"
MIXER = f"{LAYER}.mixer"
NEMOTRON_NAMES = (
    NAMES
    | mamba_names(MIXER)
    | named(
        embed="model.embeddings", norm="model.norm_f", attention_norm=f"{LAYER}.norm", mlp_norm=f"{LAYER}.norm",
        up=f"{MIXER}.up_proj", down=f"{MIXER}.down_proj",
    )
    | named(**{role: f"{MIXER}.{role}_proj" for role in "qkvo"})
    | {
        "router.weight": f"{MIXER}.gate.weight",
        "correction": f"{MIXER}.gate.e_score_correction_bias",
        "latent_in.weight": f"{MIXER}.fc1_latent_proj.weight",
        "latent_out.weight": f"{MIXER}.fc2_latent_proj.weight",
        **{f"expert_{role}.weight": f"{MIXER}.experts.{{e}}.{role}_proj.weight" for role in ("up", "down")},
        **{f"shared_{role}.weight": f"{MIXER}.shared_experts.{role}_proj.weight" for role in ("up", "down")},
    }
)  # fmt: skip
# Two further layers, attention and a mixture, predict more tokens.
MTP = (
    {f"{role}.weight": f"mtp.layers.0.mixer.{role}_proj.weight" for role in "qkvo"}
    | {
        role: name.replace(MIXER, "mtp.layers.1.mixer")
        for role, name in NEMOTRON_NAMES.items()
        if role.startswith(("router", "correction", "expert_", "shared_"))
    }
    | named(
        fc="mtp.layers.0.eh_proj", embed_norm="mtp.layers.0.enorm", hidden_norm="mtp.layers.0.hnorm",
        attention_norm="mtp.layers.0.norm", mlp_norm="mtp.layers.1.norm", norm="mtp.layers.1.final_layernorm",
    )
)  # fmt: skip
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# What transformers does not read where it computes.
UNREAD = (
    "attention_bias", "attention_head_dim", "chunk_size", "expand", "mamba_chunk_size", "mamba_expand",
    "mamba_proj_bias", "mamba_ssm_cache_dtype", "mtp_hybrid_override_pattern", "mtp_layers_block_type",
    "num_logits_to_keep", "num_nextn_predict_layers", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps",
    "sliding_window", "time_step_floor", "time_step_limit", "time_step_max", "time_step_rank", "use_mamba_kernels",
    "mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor",
)  # fmt: skip
OF_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
    "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok",
    "routed_scaling_factor", "topk_group",
)  # fmt: skip
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds(hf: HFConfig) -> list[str]:
    """The kind of each layer: by a list, else by a pattern of letters."""
    hf.rename(layer_types="layers_block_type")
    hf.ignore("num_hidden_layers", "hybrid_override_pattern")
    kinds = hf.take("layers_block_type", None)
    if kinds is None:
        pattern = hf.take("hybrid_override_pattern", "ME*-")
        kinds = [KINDS.get(letter, letter) for letter in pattern]
    kinds = [OLDER.get(kind, kind) for kind in kinds]
    if unknown := set(kinds) - set(KINDS.values()):
        raise ConfigError(
            f"{hf.source}: layers_block_type {sorted(unknown)} are not supported (only {sorted(KINDS.values())})"
        )
    if "full_attention" not in kinds:
        raise ConfigError(f"{hf.source}: models without any layer of attention are not supported")
    return kinds


def _mamba(hf: HFConfig, norm: NormSpec) -> Mamba2Spec:
    hf.rename(mamba_n_groups="n_groups", mamba_d_conv="conv_kernel", mamba_conv_bias="use_conv_bias")
    hf.rename(mamba_dt_min="time_step_min")
    return Mamba2Spec(
        heads=hf.take("mamba_num_heads", 128),
        head_dim=hf.take("mamba_head_dim", 64),
        groups=hf.take("n_groups", 8),
        state_dim=hf.take("ssm_state_size", 128),
        conv_width=hf.take("conv_kernel", 4),
        conv_bias=bool(hf.take("use_conv_bias", True)),
        bias=bool(hf.take("use_bias", False)),
        out_bias=bool(hf.take("use_bias", False)),
        activation=read_activation(hf, "silu", "mamba_hidden_act"),
        norm=norm,
        least_step=float(hf.take("time_step_min", 0.001)),
    )


def _mixture(hf: HFConfig, activation: Activation) -> MLPSpec:
    hf.expect("mlp_bias", False)
    router = Router(
        top_k=hf.take("num_experts_per_tok", 2),
        score="sigmoid",
        normalized=bool(hf.take("norm_topk_prob", True)),
        scale=float(hf.take("routed_scaling_factor", 1.0)),
        corrected=True,
        groups=hf.take("n_group", 1),
        top_groups=hf.take("topk_group", 1),
        group_score="top2",
    )
    shared = hf.take("moe_shared_expert_intermediate_size", 7688)
    latent = hf.take("moe_latent_size", None)
    experts = ExpertsSpec(count=hf.take("n_routed_experts", 8), router=router, latent_size=latent, shared_size=shared)
    size = hf.take("moe_intermediate_size", 7688)
    return MLPSpec(size=size, gated=False, activation=activation, experts=experts)


def _read(hf: HFConfig) -> ModelConfig:
    hf.ignore(*UNREAD)
    hf.rename(num_local_experts="n_routed_experts")
    norm = NormSpec(eps=float(hf.take("layer_norm_epsilon", 1e-5)))
    activation = read_activation(hf, "relu2", "mlp_hidden_act")
    mlp = MLPSpec(
        size=hf.take("intermediate_size", 21504),
        gated=False,
        bias=bool(hf.take("mlp_bias", False)),
        activation=activation,
    )
    of_kind = {
        "linear_attention": LayerSpec(attention=_mamba(hf, norm), mlp=None, norm=norm),
        "full_attention": LayerSpec(attention=read_attention(hf, head_dim=128, kv_heads=8), mlp=None, norm=norm),
        "mlp": LayerSpec(attention=None, mlp=mlp, norm=norm),
    }
    kinds = _kinds(hf)
    if "moe" in kinds:
        of_kind["moe"] = LayerSpec(attention=None, mlp=_mixture(hf, activation), norm=norm)
    hf.ignore(*OF_EXPERTS)
    shared = read_shared(hf, norm=norm, max_position=read_max_position(hf, 4096), ropes={"default": UNTURNED})
    return ModelConfig(family="nemotron_h", layers=tuple(of_kind[kind] for kind in kinds), **shared)


def _mtp_layer(config: ModelConfig, hf: HFConfig) -> LayerSpec:
    """The two layers that predict more tokens, as one."""
    pattern = hf.take("mtp_hybrid_override_pattern", None) or "*E"
    kinds = hf.take("mtp_layers_block_type", None) or [KINDS.get(letter, letter) for letter in pattern]
    if [OLDER.get(kind, kind) for kind in kinds] != ["full_attention", "moe"]:
        raise ConfigError(f"{hf.source}: mtp_layers_block_type {kinds} are not supported, only full_attention and moe")
    mixture = next((layer for layer in config.layers if layer.experts is not None), None)
    if mixture is None:
        raise ConfigError(f"{hf.source}: mtp_layers_block_type has a mixture, and no layer of the model has one")
    return replace(last_attention(config, hf), mlp=mixture.mlp)


FAMILY = Family(
    "nemotron_h", ("NemotronHForCausalLM",), _read, NEMOTRON_NAMES, IGNORED, layouts=({"model.": "backbone."},),
    mtp=MTP, mtp_layer=_mtp_layer, mtp_normed=True, unread=("mtp.",),
)  # fmt: skip
