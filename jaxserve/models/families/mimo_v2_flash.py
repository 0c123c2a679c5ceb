"""MiMo-V2-Flash: values are smaller than keys, and scaled. Most layers have a window and sinks, and twice as many heads
of keys and values as the others. Behind the first layer come experts with DeepSeek-V3's router.
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families import Family
from jaxserve.models.families.deepseek import read_dense
from jaxserve.models.families.glm4_moe import DEEPSEEK_MOE_NAMES, read_deepseek_experts, with_mixture
from jaxserve.models.families.llama import (
    IGNORED,
    NAMES,
    read_attention,
    read_max_position,
    read_mlp,
    read_norm,
    read_shared,
    uniform_layers,
)
from jaxserve.models.families.shared import read_ropes, read_sliding, windows_of
from jaxserve.models.spec import AttentionSpec, LayerSpec, ModelConfig, RopeConfig

FULL_THETA = 5e6
WINDOW_THETA = 1e4
TURNED = 0.334  # of a head's channels
MIMO_NAMES = NAMES | DEEPSEEK_MOE_NAMES | {"sinks": "model.layers.{i}.self_attn.attention_sink_bias"}


def _with_sinks(layer: LayerSpec) -> LayerSpec:
    """The layer, as those with a window are."""
    attention = layer.attention
    assert isinstance(attention, AttentionSpec)
    return replace(layer, attention=replace(attention, sinks=True, num_kv_heads=2 * attention.num_kv_heads))


def _ropes(hf: HFConfig, max_position: int) -> dict[str, RopeConfig]:
    hf.expect("rope_theta", FULL_THETA)
    hf.expect("partial_rotary_factor", TURNED)
    return read_ropes(hf, max_position, head_dim=192, theta=FULL_THETA, local_theta=WINDOW_THETA, partial=TURNED)


def _check_written(hf: HFConfig, attention: AttentionSpec, sliding: list[bool], dense: list[bool]) -> None:
    """Published configs say again, in keys that transformers does not read, what follows from others."""
    written = {
        "swa_num_attention_heads": attention.num_heads,
        "swa_num_key_value_heads": 2 * attention.num_kv_heads,
        "swa_head_dim": attention.head_dim,
        "swa_v_head_dim": attention.v_dim,
        "swa_rope_theta": WINDOW_THETA,
        "hybrid_layer_pattern": [int(slides) for slides in sliding],
        "moe_layer_freq": [int(not is_dense) for is_dense in dense],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": hf.take("rms_norm_eps", 1e-5),
    }
    for key, only in written.items():
        hf.expect(key, only)
    hf.ignore("attention_chunk_size", "hybrid_block_size")


def _read(hf: HFConfig) -> ModelConfig:
    norm = read_norm(hf, 1e-5)
    attention = read_attention(
        hf,
        head_dim=192,
        kv_heads=4,
        qkv_bias=bool(hf.take("attention_bias", False)),
        v_dim=hf.take("v_head_dim", 128),
        value_scale=float(hf.take("attention_value_scale", 1.0 if "attention_value_scale" in hf.values else 0.707)),
    )
    sliding = read_sliding(hf, 6)
    if hf.take("layer_types", None) is None:
        sliding[0] = False
    before = hf.take("sliding_window_size", None)
    window = hf.take("sliding_window", 129)
    windows = windows_of(sliding, window if before is None else before + 1)
    ropes = ["sliding" if slides else "full" for slides in sliding]
    mlp = read_mlp(hf)
    dense = read_dense(hf, 1)
    _check_written(hf, attention, sliding, dense)
    mixture = read_deepseek_experts(hf, mlp.activation, top_k=8)
    layers = with_mixture(uniform_layers(hf, attention, mlp, windows, ropes, norm=norm), mixture, dense)
    max_position = read_max_position(hf, 131072)
    return ModelConfig(
        family="mimo_v2_flash",
        layers=tuple(_with_sinks(layer) if slides else layer for layer, slides in zip(layers, sliding, strict=True)),
        **read_shared(hf, norm=norm, max_position=max_position, ropes=_ropes(hf, max_position)),
    )


# Files hold further layers that predict more tokens; they are not read.
FAMILY = Family("mimo_v2_flash", ("MiMoV2FlashForCausalLM",), _read, MIMO_NAMES, IGNORED, unread=("model.mtp.",))
