"""Granite with windows: sinks, a window on three of four layers, and a rotary base for each layer. Granite-MoE with
windows: the same with experts, beside a shared MLP if there is one."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.granite import read_granite
from jaxserve.models.families.granite_moe import MOE, SHARED, read_mixture
from jaxserve.models.families.llama import IGNORED, NAMES
from jaxserve.models.families.shared import KINDS, read_sliding, windows_of
from jaxserve.models.rope import UNTURNED
from jaxserve.models.spec import AttentionSpec, LayerSpec, ModelConfig

MOE_NAMES = {
    "router.weight": f"{MOE}.router.weight",
    "expert_gate_up.weight": f"{MOE}.experts.{{e}}.gate_up_proj",
    "expert_fused_down.weight": f"{MOE}.experts.{{e}}.down_proj",
}
SINKS = {"sinks": "model.layers.{i}.self_attn.sinks"}


def _with_windows(hf: HFConfig, plain: ModelConfig) -> ModelConfig:
    """The model with sinks and windows, and with the rotary bases of its layers."""
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


def _read(hf: HFConfig) -> ModelConfig:
    for key, usual in (("tie_word_embeddings", True), ("num_key_value_heads", 4), ("rms_norm_eps", 1e-5),
                       ("max_position_embeddings", 8192)):  # fmt: skip
        hf.values.setdefault(key, usual)
    return _with_windows(hf, read_granite(hf, "granite_swa"))


def _read_moe(hf: HFConfig) -> ModelConfig:
    return _with_windows(hf, read_mixture(hf, "granite_moe_swa", hf.take("shared_intermediate_size", 0)))


FAMILIES = (
    Family("granite_swa", ("GraniteSWAForCausalLM",), _read, NAMES | SINKS, IGNORED),
    Family("granite_moe_swa", ("GraniteMoeSWAForCausalLM",), _read_moe, NAMES | MOE_NAMES | SHARED | SINKS, IGNORED),
)
