"""StarCoder2: LayerNorms, biases, an MLP without a gate, and a window on every layer."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_layer_norm,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import ModelConfig

LAYER = "model.layers.{i}"
STARCODER_NAMES = NAMES | named(
    attention_norm=f"{LAYER}.input_layernorm",
    mlp_norm=f"{LAYER}.post_attention_layernorm",
    up=f"{LAYER}.mlp.c_fc",
    down=f"{LAYER}.mlp.c_proj",
    norm="model.norm",
)


def _read(hf: HFConfig) -> ModelConfig:
    hf.expect("mlp_type", "default")
    hf.expect("norm_type", "layer_norm")
    # The first configs have these; transformers does not read them.
    hf.ignore("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    hf.expect("scale_attn_weights", True)
    norm = read_layer_norm(hf, "norm_epsilon")
    hf.expect("layer_norm_epsilon", norm.eps)
    bias = bool(hf.take("use_bias", True))
    window = hf.take("sliding_window", None)
    if not hf.take("use_sliding_window", True):
        window = None
    mlp = read_mlp(hf, gated=False, bias=bias, activation=read_activation(hf, "gelu_pytorch_tanh"))
    attention = read_attention(hf, kv_heads=2, qkv_bias=bias, out_bias=bias)
    layers = uniform_layers(hf, attention, mlp, [window] * hf.take("num_hidden_layers"), norm=norm)
    return ModelConfig(family="starcoder2", layers=layers, **read_shared(hf, tied=True, longest=4096, norm=norm))


FAMILY = Family("starcoder2", ("Starcoder2ForCausalLM",), _read, STARCODER_NAMES, IGNORED)
