"""Families built like OPT. BioGPT has learned positions, XGLM sines and cosines of positions. Both scale embeddings."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import read_attention, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.opt import OFFSET
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import LearnedPositions, ModelConfig, NormSpec


def _names(model: str, head: str) -> dict[str, str]:
    layer = f"{model}.layers.{{i}}"
    return {
        "embed.weight": f"{model}.embed_tokens.weight",
        "positions.weight": f"{model}.embed_positions.weight",
        "head.weight": head,
    } | named(
        attention_norm=f"{layer}.self_attn_layer_norm",
        mlp_norm=f"{layer}.final_layer_norm",
        **{role: f"{layer}.self_attn.{role}_proj" for role in "qkv"},
        o=f"{layer}.self_attn.out_proj",
        up=f"{layer}.fc1",
        down=f"{layer}.fc2",
        norm=f"{model}.layer_norm",
    )


def _read(hf: HFConfig, family: str, longest: int, *, learned: bool) -> ModelConfig:
    scaled = hf.take("scale_embedding", None) is not False
    norm = NormSpec(kind="layer", eps=1e-5, bias=True)
    max_position = hf.take("max_position_embeddings", longest)
    mlp = read_mlp(hf, gated=False, bias=True, activation=read_activation(hf, "gelu"))
    attention = read_attention(hf, qkv_bias=True, out_bias=True)
    return ModelConfig(
        family=family,
        layers=uniform_layers(hf, attention, mlp, norm=norm),
        embed_scale=hf.take("hidden_size") ** 0.5 if scaled else 1.0,
        learned_positions=LearnedPositions(rows=max_position + OFFSET if learned else 0, offset=OFFSET),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": UNTURNED}),
    )


def _read_biogpt(hf: HFConfig) -> ModelConfig:
    hf.ignore("layer_norm_eps")  # LayerNorms have that of torch
    return _read(hf, "biogpt", 1024, learned=True)


def _read_xglm(hf: HFConfig) -> ModelConfig:
    hf.expect("add_cross_attention", False)
    hf.rename(
        d_model="hidden_size", ffn_dim="intermediate_size", num_layers="num_hidden_layers",
        attention_heads="num_attention_heads", activation_function="hidden_act",
    )  # fmt: skip
    return _read(hf, "xglm", 2048, learned=False)


FAMILIES = (
    Family("biogpt", ("BioGptForCausalLM",), _read_biogpt, _names("biogpt", "output_projection.weight")),
    Family("xglm", ("XGLMForCausalLM",), _read_xglm, _names("model", "lm_head.weight")),
)
