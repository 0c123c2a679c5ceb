"""Apertus: Llama with norms of queries and keys, and an MLP without a gate, whose activation has learned numbers."""

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
from jaxserve.models.layers import XIELU_SHAPES
from jaxserve.models.rope import read_rope
from jaxserve.models.spec import ModelConfig, QKNormSpec

LAYER = "model.layers.{i}"
APERTUS_NAMES = NAMES | {
    "attention_norm.weight": f"{LAYER}.attention_layernorm.weight",
    "mlp_norm.weight": f"{LAYER}.feedforward_layernorm.weight",
    **{name: f"{LAYER}.mlp.act_fn.{name}" for name in XIELU_SHAPES},
}
ROPE = {  # assumed if the config has no rope_scaling
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("qk_norm", True)  # published configs have it; transformers does not read it
    norm = read_norm(hf, 1e-5)
    bias = bool(hf.take("attention_bias", False))
    attention = read_attention(hf, qk_norm=QKNormSpec(norm=norm), qkv_bias=bias, out_bias=bias)
    learned = hf.take("hidden_act", "xielu") == "xielu"
    mlp = read_mlp(hf, gated=False, activation="xielu" if learned else read_activation(hf, "silu"))
    max_position = read_max_position(hf, 65536)
    rope = read_rope(hf, max_position, absent=ROPE, theta=12000000.0)
    return ModelConfig(
        family="apertus",
        layers=uniform_layers(hf, attention, mlp, norm=norm),
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FAMILY = Family("apertus", ("ApertusForCausalLM",), _read, APERTUS_NAMES, IGNORED)
