"""MiniCPM 1, 2 and 4, dense: Llama with scaled embeddings, results of layers, and logits (arXiv:2404.06395). MiniCPM 3
has DeepSeek's latent attention."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import LATENT_NAMES, read_latent_attention
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.spec import LayerSpec, ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("sparse_config")  # sparse attention for long prompts is not built
    hf.ignore("mup_denominator")  # for training only
    norm = read_norm(hf)
    bias = bool(hf.take("attention_bias", False))
    depth = hf.take("scale_depth", 1.0) / hf.take("num_hidden_layers") ** 0.5
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    return ModelConfig(
        family="minicpm",
        layers=uniform_layers(hf, attention, read_mlp(hf), norm=norm, residual_scale=depth),
        embed_scale=hf.take("scale_emb", 1.0),
        logit_scale=hf.take("dim_model_base", hf.take("hidden_size")) / hf.take("hidden_size"),
        **read_shared(hf, tied=True, norm=norm),
    )


def _read_third(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    count = hf.take("num_hidden_layers")
    hidden = hf.take("hidden_size")
    depth = hf.take("scale_depth", count**0.5 if "scale_depth" in hf.values else 1.4) / count**0.5
    base = hf.take("dim_model_base", hidden if "dim_model_base" in hf.values else 256)
    sizes = SIZES | {"v_head_dim": hidden // hf.take("num_attention_heads")}
    attention = read_latent_attention(hf, sizes)
    mlp = read_mlp(hf, bias=bool(hf.take("mlp_bias", False)))
    max_position = read_max_position(hf, 32768)
    return ModelConfig(
        family="minicpm3",
        layers=(LayerSpec(attention=attention, mlp=mlp, norm=norm, residual_scale=depth),) * count,
        embed_scale=hf.take("scale_emb", 12),
        logit_scale=base / hidden,
        **read_shared(hf, tied=True, norm=norm, max_position=max_position),
    )


SIZES = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
FAMILIES = (
    Family("minicpm", ("MiniCPMForCausalLM",), _read, NAMES, IGNORED),
    Family("minicpm3", ("MiniCPM3ForCausalLM",), _read_third, NAMES | LATENT_NAMES, IGNORED),
)
