"""Command-R: attention and MLP in parallel on one LayerNorm without bias, interleaved rotation, scaled logits.
Command-R7B and Command-A also have windows on three of four layers, and no positions on the fourth. In Command Compass
the rotation is not interleaved, and each kind of layer has its own, or none."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_layer_norm,
    read_max_position,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import read_activation, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ModelConfig, QKNormSpec

THETA = 500000.0


def _read(hf: HFConfig) -> ModelConfig:
    bias = bool(hf.take("attention_bias", False))
    norm = read_layer_norm(hf, bias=False)
    qk_norm = QKNormSpec(norm=norm, over="each_head") if hf.take("use_qk_norm", False) else None
    attention = read_attention(hf, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    # Command-R's config has max_position_embeddings for fine-tuning, and model_max_length for use.
    max_position = max(hf.take("model_max_length", 0), read_max_position(hf, 8192))
    rope = read_rope(hf, max_position, theta=THETA, interleaved=True)
    mlp = read_mlp(hf, activation=read_activation(hf, "silu"))
    return ModelConfig(
        family="cohere",
        layers=uniform_layers(hf, attention, mlp, norm=norm, residual="parallel"),
        logit_scale=hf.take("logit_scale", 0.0625),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes={"default": rope}),
    )


FIRST = Family("cohere", ("CohereForCausalLM",), _read, NAMES, IGNORED)


def _read_second(hf: HFConfig) -> ModelConfig:
    for key, only in WRITTEN.items():
        hf.expect(key, only)
    hf.ignore("order_of_interleaved_layers", "layer_switch", "rotary_pct", "use_parallel_embedding")
    bias = bool(hf.take("attention_bias", False))
    norm = read_layer_norm(hf, bias=False)
    sliding = read_sliding(hf, 4)
    rope = read_rope(hf, read_max_position(hf, 8192), interleaved=True)
    return ModelConfig(
        family="cohere2",
        layers=uniform_layers(
            hf,
            read_attention(hf, qkv_bias=bias, out_bias=bias),
            read_mlp(hf, activation=read_activation(hf, "silu")),
            windows_of(sliding, hf.take("sliding_window", 4096)),
            ["sliding" if slides else "full" for slides in sliding],
            norm=norm,
            residual="parallel",
        ),
        logit_scale=hf.take("logit_scale", 0.0625),
        **read_shared(hf, tied=True, longest=8192, norm=norm, ropes={"sliding": rope, "full": UNTURNED}),
    )


# Keys in published configs that transformers does not read, and the values that agree with what is computed.
WRITTEN = {
    "position_embedding_type": "rope_gptj",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def read_compass(hf: HFConfig) -> ModelConfig:
    hf.ignore("pooling", "head_dim")  # the former is for embeddings
    count = hf.take("num_hidden_layers")
    hf.values["layer_types"] = hf.take("layer_types", None) or ["full_attention"] * count
    sliding = read_sliding(hf, 4)
    max_position = read_max_position(hf, 8192)
    of_kinds = hf.take("rope_parameters", None) or {}
    ropes = {}
    for kind in set(hf.values["layer_types"]):
        if kind not in of_kinds:
            raise ConfigError(f"{hf.source}: rope_parameters lacks {kind!r}, which layer_types has")
        own = of_kinds[kind]
        ropes[kind] = UNTURNED if own is None else read_rope(hf, max_position, parameters=own)
    bias = bool(hf.take("attention_bias", False))
    norm = read_layer_norm(hf, bias=False)
    return ModelConfig(
        family="cohere_compass",
        layers=uniform_layers(
            hf,
            read_attention(hf, qkv_bias=bias, out_bias=bias),
            read_mlp(hf, activation=read_activation(hf, "silu")),
            windows_of(sliding, hf.take("sliding_window", 4096)),
            hf.values["layer_types"],
            norm=norm,
            residual="parallel",
        ),
        logit_scale=hf.take("logit_scale", 1.0),
        **read_shared(hf, tied=True, norm=norm, max_position=max_position, ropes=ropes),
    )


FAMILIES = (
    FIRST,
    Family("cohere2", ("Cohere2ForCausalLM",), _read_second, NAMES, IGNORED),
    Family("cohere_compass", ("CohereCompassForCausalLM",), read_compass, NAMES, IGNORED),
)
