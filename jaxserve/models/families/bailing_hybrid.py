"""Ling 3: Kimi delta attention in most layers, whose decays may have a lower bound; latent attention with a gate for
each head in the others; DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import EXPERTS, SIZES, read_layers, read_router
from jaxserve.models.families.kimi_linear import KIMI_NAMES, rename, with_kimi_delta
from jaxserve.models.families.llama import IGNORED, NAMES, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import KimiDeltaSpec, LatentAttentionSpec, ModelConfig

ATTENTION = "model.layers.{i}.attention"
OF_ATTENTION = {
    role: name.replace(".self_attn.", ".attention.").replace(".o_proj.", ".dense.")
    for role, name in (NAMES | KIMI_NAMES).items()
}
OWN_NAMES = (
    OF_ATTENTION
    | EXPERTS
    | {
        "embed.weight": "model.word_embeddings.weight",
        "kimi_a_log": f"{ATTENTION}.A_log",
        "kimi_decay.weight": f"{ATTENTION}.f_proj.weight",
        "kimi_gate.weight": f"{ATTENTION}.g_proj.weight",
        "head_gate.weight": f"{ATTENTION}.g_proj.weight",
        "correction": "model.layers.{i}.mlp.gate.expert_bias",
    }
)


def _full(hf: HFConfig) -> list[bool]:
    """Whether each layer has latent attention: every n-th, where n is `layer_group_size`."""
    size = hf.take("layer_group_size", 6)
    return [(i + 1) % size == 0 for i in range(hf.take("num_hidden_layers"))]


def _read(hf: HFConfig) -> ModelConfig:
    rename(hf)
    hf.ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor", "tie_word_embeddings")
    hf.values = {"n_routed_experts": 512, "n_shared_experts": 1, "moe_intermediate_size": 768} | hf.values
    norm = read_norm(hf, 1e-6)
    router = read_router(hf, top_k=8, scale=2.5, groups=8, top_groups=4)
    layers = read_layers(hf, router, norm, 2, SIZES | {"q_lora_rank": None})
    attention = layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    layers = tuple(replace(layer, attention=replace(attention, head_gate=True)) for layer in layers)
    least = float(hf.take("kda_lower_bound", -5.0))
    # transformers writes the size of the rotated part as head_dim, beside the heads' size under the other name.
    delta = KimiDeltaSpec(
        heads=hf.take("linear_num_heads", None) or attention.num_heads,
        dim=hf.take("linear_head_dim", None) or hf.take("head_dim", 128),
        conv_width=hf.take("linear_conv_kernel_dim", None) or hf.take("short_conv_kernel_size", 4),
        activation=read_mlp(hf).activation,
        norm=norm,
        least_decay=least if hf.take("kda_safe_gate", True) else None,
    )
    hf.ignore("short_conv_kernel_size", "layer_group_size")
    layers = with_kimi_delta(hf, layers, delta, _full)
    max_position = read_max_position(hf, 262144)
    ropes = {"default": read_rope(hf, max_position, theta=6e6, interleaved=True)}
    shared = read_shared(hf, norm=norm, max_position=max_position, ropes=ropes, tie_embeddings=False)
    return ModelConfig(family="bailing_hybrid", layers=layers, **shared)


FAMILY = Family("bailing_hybrid", ("BailingHybridForCausalLM",), _read, OWN_NAMES, IGNORED, more_layers=True)
