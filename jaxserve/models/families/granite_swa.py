"""Granite with windows: sinks, a window on three of four layers, and a rotary base for each layer."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.granite import read_granite
from jaxserve.models.families.llama import IGNORED, NAMES
from jaxserve.models.families.shared import KINDS, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import AttentionSpec, LayerSpec, ModelConfig

SINKS = {"sinks": "model.layers.{i}.self_attn.sinks"}


def _read(hf: HFConfig) -> ModelConfig:
    for key, usual in (("tie_word_embeddings", True), ("num_key_value_heads", 4), ("rms_norm_eps", 1e-5),
                       ("max_position_embeddings", 8192)):  # fmt: skip
        hf.values.setdefault(key, usual)
    plain = read_granite(hf, "granite_swa")
    count = plain.num_layers
    if hf.take("layer_types", None) is None:
        hf.values["layer_types"] = [KINDS[i % 4 != 0] for i in range(count)]
    windows = windows_of(read_sliding(hf, 4), hf.take("sliding_window", 128))
    rope = plain.ropes["default"]
    thetas = hf.take("layer_rope_theta", None) or [rope.theta] * count
    if len(thetas) != count:
        raise ConfigError(f"{hf.source}: layer_rope_theta has {len(thetas)} entries, num_hidden_layers is {count}")
    ropes = {str(theta): replace(rope, theta=float(theta)) if theta else UNTURNED for theta in thetas}

    def of_layer(layer: LayerSpec, window: int | None, theta: float | None) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        return replace(layer, attention=replace(layer.attention, sinks=True, window=window, rope=str(theta)))

    return replace(plain, layers=tuple(map(of_layer, plain.layers, windows, thetas)), ropes=ropes)


FAMILY = Family("granite_swa", ("GraniteSWAForCausalLM",), _read, NAMES | SINKS, IGNORED)
