"""SmolLM3: Llama without positions on every fourth layer."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import KINDS, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    count = hf.take("num_hidden_layers")
    turned = hf.take("no_rope_layers", None)
    # transformers does not read max_window_layers. The other two are taken below where they have an effect.
    hf.ignore("max_window_layers", "no_rope_layer_interval", "sliding_window")
    if not turned:
        interval = hf.take("no_rope_layer_interval", 4)
        turned = [int((i + 1) % interval != 0) for i in range(count)]
    if len(turned) != count:
        raise ConfigError(f"no_rope_layers has {len(turned)} entries, num_hidden_layers is {count}")
    window = hf.take("sliding_window", None) if hf.take("use_sliding_window", False) else None
    hf.values.setdefault("layer_types", [KINDS[0 if turns else 1] for turns in turned])
    bias = bool(hf.take("attention_bias", False))
    max_position = read_max_position(hf, 32768)
    ropes = {"default": read_rope(hf, max_position, theta=2e6), "none": UNTURNED}
    layers = uniform_layers(
        hf,
        read_attention(hf, kv_heads=4, qkv_bias=bias, out_bias=bias),
        read_mlp(hf, bias=bool(hf.take("mlp_bias", False))),
        windows_of(read_sliding(hf, 1), window),
        ["default" if turns else "none" for turns in turned],
    )
    shared = read_shared(hf, tied=True, max_position=max_position, ropes=ropes)
    return ModelConfig(family="smollm3", layers=layers, **shared)


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), _read, NAMES, IGNORED)
