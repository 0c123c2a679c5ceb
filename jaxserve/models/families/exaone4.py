"""EXAONE 4: norms after attention and MLP, and norms of queries and keys. In models with windows on some layers, the
other layers have no positions."""

from __future__ import annotations

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.olmo import POST_NAMES
from jaxserve.models.families.shared import KINDS, read_activation, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ModelConfig, QKNormSpec


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    count = hf.take("num_hidden_layers")
    window = hf.take("sliding_window", None if "sliding_window" in hf.values else 4096)
    pattern = hf.values.get("sliding_window_pattern")
    if isinstance(pattern, str):  # for example "LLLG": three local layers, then a global one
        hf.values.setdefault("layer_types", [KINDS[pattern[i % len(pattern)] == "L"] for i in range(count)])
    # Without windows these have no effect. transformers writes a pattern of 0 then.
    hf.ignore("layer_types", "sliding_window_pattern")
    sliding = read_sliding(hf, 4) if window else [False] * count
    attention = read_attention(hf, qk_norm=QKNormSpec(norm=norm))
    ropes = {"default": read_rope(hf, read_max_position(hf)), "none": UNTURNED}
    layers = uniform_layers(
        hf,
        attention,
        read_mlp(hf, activation=read_activation(hf, "silu")),
        windows_of(sliding, window),
        ["default" if slides or not window else "none" for slides in sliding],
        norm=norm,
        residual="post",
    )
    return ModelConfig(family="exaone4", layers=layers, **read_shared(hf, norm=norm, ropes=ropes))


FAMILY = Family("exaone4", ("Exaone4ForCausalLM",), _read, POST_NAMES, IGNORED)
