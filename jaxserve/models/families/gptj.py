"""GPT-J: attention and MLP in parallel on one LayerNorm, part of each head rotated in neighbouring pairs. CodeGen's
files have its projections of queries, values and keys in quarters."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.gpt2 import read_gpt2_sizes
from jaxserve.models.families.llama import read_attention, read_layer_norm, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import ModelConfig, RopeConfig

LAYER = "transformer.h.{i}"
NAMES = {"embed.weight": "transformer.wte.weight"} | named(
    attention_norm=f"{LAYER}.ln_1",
    **{role: f"{LAYER}.attn.{role}_proj" for role in "qkv"},
    o=f"{LAYER}.attn.out_proj",
    up=f"{LAYER}.mlp.fc_in",
    down=f"{LAYER}.mlp.fc_out",
    norm="transformer.ln_f",
    head="lm_head",
)


def _read(hf: HFConfig) -> ModelConfig:
    max_position, size = read_gpt2_sizes(hf, 2048)
    hf.expect("rotary", True)
    hf.expect("scale_attn_weights", True)
    norm = read_layer_norm(hf, "layer_norm_epsilon")
    mlp = read_mlp(hf, size=size, gated=False, bias=True, activation=read_activation(hf, "gelu_new"))
    rope = RopeConfig(rotary_dim=hf.take("rotary_dim", 64), interleaved=True)
    return ModelConfig(
        family="gptj",
        layers=uniform_layers(hf, read_attention(hf), mlp, norm=norm, residual="parallel"),
        head_bias=True,
        **read_shared(hf, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


def _read_codegen(hf: HFConfig) -> ModelConfig:
    hf.values.pop("n_ctx", None)  # which transformers does not read
    return replace(_read(hf), family="codegen")


BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.causal_mask")
CODEGEN_NAMES = {role: name for role, name in NAMES.items() if role[:2] not in ("q.", "k.", "v.")} | {
    "qkv_quarters.weight": f"{LAYER}.attn.qkv_proj.weight"
}
FAMILIES = (
    Family("gptj", ("GPTJForCausalLM",), _read, NAMES, BUFFERS),
    Family("codegen", ("CodeGenForCausalLM",), _read_codegen, CODEGEN_NAMES, BUFFERS),
)
