"""The image encoder of GLM-4.1V, GLM-4.5V and GLM-4.6V (GLM-V Team 2025, arXiv:2507.01006)."""

from __future__ import annotations

from typing import Any

from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.qwen import on_grid
from jaxserve.models.vision.settings import axial_theta, head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Gated, Joined, Normed, Projected

_DEFAULTS: dict[str, Any] = {
    "depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "out_hidden_size": 4096,
    "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "rms_norm_eps": 1e-5, "attention_bias": False,
}  # fmt: skip
_NAMES = named(
    patch="visual.patch_embed.proj",
    before="visual.post_conv_layernorm",
    table="visual.embeddings.position_embedding",
    attention_norm="visual.blocks.{i}.norm1",
    qkv="visual.blocks.{i}.attn.qkv",
    o="visual.blocks.{i}.attn.proj",
    mlp_norm="visual.blocks.{i}.norm2",
    gate="visual.blocks.{i}.mlp.gate_proj",
    up="visual.blocks.{i}.mlp.up_proj",
    down="visual.blocks.{i}.mlp.down_proj",
    norm="visual.post_layernorm",
    join="visual.downsample",
    fc="visual.merger.proj",
    fc_norm="visual.merger.post_projection_norm",
    out_gate="visual.merger.gate_proj",
    out_up="visual.merger.up_proj",
    out_down="visual.merger.down_proj",
)
_SECTIONS = (8, 12, 12), False


def _read(hf: HFConfig) -> EncoderConfig:
    """The encoder of a `vision_config`."""
    given = {key: hf.take(key, default) for key, default in _DEFAULTS.items()}
    hf.expect("in_channels", 3)
    hf.expect("temporal_patch_size", 2)
    hidden, heads, out, side = (
        given[key] for key in ("hidden_size", "num_heads", "out_hidden_size", "spatial_merge_size")
    )
    dim = head_dim_of(hf, hidden, heads)
    activation = read_activation(hf, "silu")
    norm = NormSpec(eps=given["rms_norm_eps"])
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim, qkv_bias=given["attention_bias"]),
        mlp=MLPSpec(size=out, activation=activation),
        norm=norm,
    )
    wide = given["intermediate_size"]
    projector = (
        Normed(name="norm", norm=norm, size=hidden),
        Joined(count=side**2),
        Projected(name="join", inputs=hidden * side**2, outputs=out, alternating=side**2, convolved=True),
        Projected(name="fc", inputs=out, outputs=out, bias=False),
        Normed(name="fc_norm", norm=NormSpec(kind="layer", eps=1e-5, bias=True), size=out, activation="gelu"),
        Gated(gate="out_gate", up="out_up", inputs=out, outputs=wide, activation=activation),
        Projected(name="out_down", inputs=wide, outputs=out, bias=False),
    )
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, 2, given["patch_size"], given["patch_size"]),
        patch_bias=True,
        layers=(layer,) * given["depth"],
        rope_theta=axial_theta(hf) or 10000.0,
        table=given["image_size"] // given["patch_size"],
        interpolation="bicubic",
        before=norm,
        table_last=True,
        side=side,
        projector=projector,
        out_size=out,
    )


def _video(hf: HFConfig) -> str:
    return "Glm46VVideoProcessor" if hf.values.get("model_type") == "glm46v" else "Glm4vVideoProcessor"


def eyes_dense(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    return on_grid(hf, config, _read(vision), _NAMES, _SECTIONS, _video(hf), token=151343)


def eyes_mixture(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    return on_grid(hf, config, _read(vision), _NAMES, _SECTIONS, _video(hf), token=151363)
