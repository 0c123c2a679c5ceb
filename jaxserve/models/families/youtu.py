"""Youtu-LLM: DeepSeek's latent attention with one MLP a layer."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import LATENT_NAMES, read_latent_attention
from jaxserve.models.families.llama import IGNORED, NAMES, read_max_position, read_mlp, read_norm, read_shared
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import LayerSpec, ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf)
    layer = LayerSpec(attention=read_latent_attention(hf), mlp=read_mlp(hf), norm=norm)
    max_position = read_max_position(hf, 131072)
    rope = read_rope(hf, max_position, interleaved=bool(hf.take("rope_interleave", True)))
    return ModelConfig(
        family="youtu",
        layers=(layer,) * hf.take("num_hidden_layers"),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILY = Family("youtu", ("YoutuForCausalLM",), _read, NAMES | LATENT_NAMES, IGNORED)
