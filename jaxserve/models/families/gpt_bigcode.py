"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 whose query heads share one head of keys and values."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.gpt2 import NAMES, read_gpt2_sizes
from jaxserve.models.families.llama import read_attention, read_layer_norm, read_mlp, read_shared, uniform_layers
from jaxserve.models.families.shared import read_activation
from jaxserve.models.rope import UNTURNED
from jaxserve.models.sources import Names
from jaxserve.models.spec import LearnedPositions, ModelConfig

PLAIN = {role.removesuffix(".T"): name for role, name in NAMES.items()}  # matrices are [out, in], other than GPT-2's
FUSED = {kind: PLAIN.pop(f"qkv.{kind}") for kind in ("weight", "bias")}


def _read(hf: HFConfig) -> ModelConfig:
    max_position, size = read_gpt2_sizes(hf, 1024)
    hf.expect("add_cross_attention", False)
    # Of transformers' own code: how it computes, not what.
    hf.ignore("inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
    mlp = read_mlp(hf, size=size, gated=False, bias=True, activation=read_activation(hf, "gelu_pytorch_tanh"))
    norm = read_layer_norm(hf, "layer_norm_epsilon")
    heads = hf.take("num_attention_heads")
    hf.values["num_key_value_heads"] = 1 if hf.take("multi_query", True) else heads
    scale = None if hf.take("scale_attn_weights", True) else 1.0
    attention = read_attention(hf, scale=scale, qkv_bias=True, out_bias=True)
    return ModelConfig(
        family="gpt_bigcode",
        layers=uniform_layers(hf, attention, mlp, norm=norm),
        learned_positions=LearnedPositions(rows=max_position),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": UNTURNED}),
    )


def _variant(config: ModelConfig) -> Names:
    """Without shared keys and values, the fused projection has them for each head beside its query."""
    role = "qkv" if config.num_kv_heads == 1 else "qkv_grouped"
    return {f"{role}.{kind}": name for kind, name in FUSED.items()}


FAMILY = Family(
    "gpt_bigcode",
    ("GPTBigCodeForCausalLM",),
    _read,
    PLAIN,
    (".attn.bias", ".attn.masked_bias"),
    variant=_variant,
)
