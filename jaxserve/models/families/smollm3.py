"""SmolLM3: Llama without positions on every fourth layer."""

from __future__ import annotations

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    alike,
    read_attention,
    read_max_position,
    read_mlp,
    read_shared,
)
from jaxserve.models.families.shared import KINDS, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED, read_rope
from jaxserve.models.spec import ModelConfig


def _read(hf: HFConfig) -> ModelConfig:
    count, interval = hf.take("num_hidden_layers"), hf.take("no_rope_layer_interval", 4)
    turned = hf.take("no_rope_layers", None) or [int((i + 1) % interval != 0) for i in range(count)]
    if len(turned) != count:
        raise ConfigError(f"no_rope_layers has {len(turned)} entries, num_hidden_layers is {count}")
    hf.take("max_window_layers", None)  # has no effect beside layer_types
    window = hf.take("sliding_window", None) if hf.take("use_sliding_window", False) else None
    hf.values.setdefault("layer_types", [KINDS[0 if turns else 1] for turns in turned])
    hf.take("sliding_window", None)
    bias = bool(hf.take("attention_bias", False))
    ropes = {"default": read_rope(hf, read_max_position(hf, 32768), theta=2e6), "none": UNTURNED}
    layers = alike(
        hf,
        read_attention(hf, qkv_bias=bias, out_bias=bias),
        read_mlp(hf, bias=bool(hf.take("mlp_bias", False))),
        windows_of(read_sliding(hf, 1), window),
        ["default" if turns else "none" for turns in turned],
    )
    return ModelConfig(family="smollm3", layers=layers, **read_shared(hf, tied=True, ropes=ropes))


FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), _read, NAMES, IGNORED)
