"""NanoChat: norms without scales, also of embeddings, and of queries and keys behind the rotation, which turns the
other way; squared ReLUs; capped logits."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
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
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig, QKNormSpec

NANOCHAT_NAMES = NAMES | {
    "up.weight": "model.layers.{i}.mlp.fc1.weight",
    "down.weight": "model.layers.{i}.mlp.fc2.weight",
}


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, scale=False)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, qk_norm=QKNormSpec(norm=norm, after_rope=True), qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(hf, gated=False, activation=read_activation(hf, "relu2"))
    rope = read_rope(hf, read_max_position(hf), backwards=True)
    usual = None if "final_logit_softcapping" in hf.values else 15.0
    return ModelConfig(
        family="nanochat",
        layers=uniform_layers(hf, attention, mlp, norm=norm),
        embed_norm=norm,
        logit_softcap=hf.take("final_logit_softcapping", usual),
        **read_shared(hf, norm=norm, ropes={"default": rope}),
    )


FAMILY = Family("nanochat", ("NanoChatForCausalLM",), _read, NANOCHAT_NAMES, IGNORED)
