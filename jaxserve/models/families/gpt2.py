"""GPT-2: learned positions, LayerNorms, biases, and matrices that the files hold as [in, out]."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import read_attention, read_layer_norm, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import AttentionSpec, LayerSpec, LearnedPositions, ModelConfig

LAYER = "transformer.h.{i}"
MATRICES = {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
NAMES = {
    "embed.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "head.weight": "lm_head.weight",
    **{f"{role}.weight.T": f"{LAYER}.{name}.weight" for role, name in MATRICES.items()},
    **{f"{role}.bias": f"{LAYER}.{name}.bias" for role, name in MATRICES.items()},
    **named(attention_norm=f"{LAYER}.ln_1", mlp_norm=f"{LAYER}.ln_2", norm="transformer.ln_f"),
}


def read_gpt2_sizes(hf: HFConfig, longest: int) -> tuple[int, int]:
    """The longest sequence, by default `longest`, and the inner size of MLPs. Settings get their usual names."""
    hf.rename(
        n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads", n_inner="intermediate_size"
    )
    hf.rename(n_positions="max_position_embeddings", activation_function="hidden_act")
    max_position = hf.take("max_position_embeddings", longest)
    hf.expect("n_ctx", max_position)
    return max_position, hf.take("intermediate_size", None) or 4 * hf.take("hidden_size")


def _read(hf: HFConfig) -> ModelConfig:
    max_position, size = read_gpt2_sizes(hf, 1024)
    hf.expect("add_cross_attention", False)
    mlp = read_mlp(hf, size=size, gated=False, bias=True, activation=read_activation(hf, "gelu_new"))
    norm = read_layer_norm(hf, "layer_norm_epsilon")
    attention = read_attention(hf, qkv_bias=True, out_bias=True)
    scale = attention.softmax_scale if hf.take("scale_attn_weights", True) else 1.0
    layers = uniform_layers(hf, replace(attention, scale=scale), mlp, norm=norm)
    if hf.take("scale_attn_by_inverse_layer_idx", False):
        layers = tuple(_scaled(layer, scale / (i + 1)) for i, layer in enumerate(layers))
    return ModelConfig(
        family="gpt2",
        layers=layers,
        learned_positions=LearnedPositions(rows=max_position),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": UNTURNED}),
    )


def _scaled(layer: LayerSpec, scale: float) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    return replace(layer, attention=replace(layer.attention, scale=scale))


FAMILY = Family(
    "gpt2", ("GPT2LMHeadModel",), _read, NAMES, (".attn.bias", ".attn.masked_bias"), layouts=({"transformer.": ""},)
)
