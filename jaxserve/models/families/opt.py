"""OPT: learned positions, LayerNorms and biases. One size has its norms after the residual sums, and embeddings smaller
than the hidden size."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import read_attention, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import LearnedPositions, ModelConfig, NormSpec

LAYER = "model.decoder.layers.{i}"
NAMES = {
    "embed.weight": "model.decoder.embed_tokens.weight",
    "positions.weight": "model.decoder.embed_positions.weight",
    "project_in.weight": "model.decoder.project_in.weight",
    "project_out.weight": "model.decoder.project_out.weight",
    "head.weight": "lm_head.weight",
} | named(
    attention_norm=f"{LAYER}.self_attn_layer_norm",
    mlp_norm=f"{LAYER}.final_layer_norm",
    **{role: f"{LAYER}.self_attn.{role}_proj" for role in "qkv"},
    o=f"{LAYER}.self_attn.out_proj",
    up=f"{LAYER}.fc1",
    down=f"{LAYER}.fc2",
    norm="model.decoder.final_layer_norm",
)
OFFSET = 2  # unused rows before that of position 0 in the table of positions


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(ffn_dim="intermediate_size", activation_function="hidden_act")
    bias = bool(hf.take("enable_bias", True))
    affine = bool(hf.take("layer_norm_elementwise_affine", True))
    before = hf.take("do_layer_norm_before", True)
    size = hf.take("word_embed_proj_dim", None)
    norm = NormSpec(kind="layer", eps=1e-5, scale=affine, bias=affine)
    last = norm if before and not hf.take("_remove_final_layer_norm", False) else None
    max_position = hf.take("max_position_embeddings", 2048)
    hidden = hf.take("hidden_size")
    mlp = read_mlp(hf, gated=False, bias=bias, activation=read_activation(hf, "relu"))
    attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
    return ModelConfig(
        family="opt",
        layers=uniform_layers(hf, attention, mlp, norm=norm, residual="pre" if before else "post_ln"),
        embed_size=None if size in (None, hidden) else size,
        learned_positions=LearnedPositions(rows=max_position + OFFSET, offset=OFFSET),
        **read_shared(hf, tied=True, norm=last, max_position=max_position, ropes={"default": UNTURNED}),
    )


FAMILY = Family("opt", ("OPTForCausalLM",), _read, NAMES, layouts=({"model.decoder.": "decoder."},))
