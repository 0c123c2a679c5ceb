"""Kimi Linear: Kimi delta attention in three of four layers, latent attention without rotary positions in the others,
and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import LATENT_NAMES, SIZES, read_layers, read_router
from jaxserve.models.families.llama import IGNORED, NAMES, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.families.qwen3_next import read_recurrent
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import KimiDeltaSpec, LayerSpec, ModelConfig

ATTENTION = "model.layers.{i}.self_attn"
MOE = "model.layers.{i}.block_sparse_moe"
EXPERT = f"{MOE}.experts.{{e}}"
KIMI_NAMES = LATENT_NAMES | {
    **{f"kimi_qkv_{kind}.weight": f"{ATTENTION}.{kind}_proj.weight" for kind in "qkv"},
    **{f"kimi_conv_{kind}.weight": f"{ATTENTION}.{kind}_conv1d.weight" for kind in "qkv"},
    "kimi_rate.weight": f"{ATTENTION}.b_proj.weight",
    "kimi_dt_bias": f"{ATTENTION}.dt_bias",
    "kimi_norm.weight": f"{ATTENTION}.o_norm.weight",
    "kimi_out.weight": f"{ATTENTION}.o_proj.weight",
}
NAMES_OF_KIMI = (
    NAMES
    | KIMI_NAMES
    | {
        "kimi_a_log_row": f"{ATTENTION}.A_log",
        "kimi_decay_down.weight": f"{ATTENTION}.f_a_proj.weight",
        "kimi_decay.weight": f"{ATTENTION}.f_b_proj.weight",
        "kimi_gate_down.weight": f"{ATTENTION}.g_a_proj.weight",
        "kimi_gate.weight": f"{ATTENTION}.g_b_proj.weight",
        "router.weight": f"{MOE}.gate.weight",
        "correction": f"{MOE}.gate.e_score_correction_bias",
        "expert_gate.weight": f"{EXPERT}.w1.weight",
        "expert_up.weight": f"{EXPERT}.w3.weight",
        "expert_down.weight": f"{EXPERT}.w2.weight",
        **{f"shared_{role}.weight": f"{MOE}.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")},
    }
)


def rename(hf: HFConfig) -> None:
    """Lets settings be taken under DeepSeek's names."""
    hf.rename(
        model_max_length="max_position_embeddings",
        moe_renormalize="norm_topk_prob",
        num_expert_group="n_group",
        num_experts="n_routed_experts",
        num_local_experts="n_routed_experts",
        num_experts_per_token="num_experts_per_tok",
        num_shared_experts="n_shared_experts",
    )


def with_kimi_delta(
    hf: HFConfig, layers: tuple[LayerSpec, ...], delta: KimiDeltaSpec, usual: Callable[[HFConfig], list[bool]]
) -> tuple[LayerSpec, ...]:
    """The layers with Kimi delta attention in the place of the attention of those that do not have full attention: by
    `layer_types`; without this key by `usual`."""
    if not hf.take("layer_types", None):
        hf.values["layer_types"] = ["full_attention" if is_full else "linear_attention" for is_full in usual(hf)]
    return tuple(
        replace(layer, attention=delta) if recurrent else layer
        for layer, recurrent in zip(layers, read_recurrent(hf), strict=True)
    )


def _full(hf: HFConfig) -> list[bool]:
    """Whether each layer has latent attention, by lists of layers that count from 1; without these, every fourth from
    the fifth on."""
    count = hf.take("num_hidden_layers")
    given = hf.take("linear_attn_config", None) or {}
    if "full_attn_layers" not in given or "kda_layers" not in given:
        return [i > 0 and i % 4 == 0 for i in range(count)]
    full = given["full_attn_layers"]
    if sorted([*full, *given["kda_layers"]]) != list(range(1, count + 1)):
        raise ConfigError(
            f"{hf.source}: full_attn_layers and kda_layers of linear_attn_config must have each of the layers 1 to "
            f"{count} once"
        )
    return [i + 1 in full for i in range(count)]


def _read(hf: HFConfig) -> ModelConfig:
    rename(hf)
    # Nothing turns by a position. Groups of experts are used wherever there are several.
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        hf.values.pop(key, None)
    hf.ignore("use_grouped_topk", "num_nextn_predict_layers", "tie_word_embeddings")
    hf.expect("mla_use_nope", True)
    hf.expect("moe_router_activation_func", "sigmoid")
    hf.values = {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 1024} | hf.values
    norm = read_norm(hf, 1e-5)
    router = read_router(hf, top_k=8, scale=2.446)
    layers = read_layers(hf, router, norm, 1, SIZES | {"q_lora_rank": None})
    given = hf.take("linear_attn_config", None) or {}
    if unknown := set(given) - {"full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size"}:
        raise ConfigError(f"{hf.source}: linear_attn_config has settings that are not understood: {sorted(unknown)}")
    dim = given.get("head_dim") or hf.take("linear_head_dim", 128)
    hf.ignore("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    delta = KimiDeltaSpec(
        heads=given.get("num_heads") or hf.take("linear_num_heads", 32),
        dim=dim,
        conv_width=given.get("short_conv_kernel_size") or hf.take("linear_conv_kernel_dim", 4),
        activation=read_mlp(hf).activation,
        norm=norm,
        rank=dim,
    )
    layers = with_kimi_delta(hf, layers, delta, _full)
    max_position = read_max_position(hf, 1048576)
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes={"default": UNTURNED}, tie_embeddings=False)
    return ModelConfig(family="kimi_linear", layers=layers, **shared)


# transformers writes the MLP of layers without experts under this name, too.
LAYOUTS = ({"model.layers.{i}.mlp.": f"{MOE}."},)
FAMILY = Family(
    "kimi_linear", ("KimiLinearForCausalLM",), _read, NAMES_OF_KIMI, IGNORED, layouts=LAYOUTS, told_by="gate.weight"
)
