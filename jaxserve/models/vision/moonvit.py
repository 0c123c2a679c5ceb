"""MoonViT (Kimi Team 2025, arXiv:2504.07491), the image encoder of Kimi K2.5."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import axial_theta, head_dim_of
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 163605
_LAYER = "vision_tower.encoder.blocks.{i}"
_NAMES = named(
    patch="vision_tower.patch_embed.proj",
    table="vision_tower.patch_embed.pos_emb",
    attention_norm=f"{_LAYER}.norm0",
    qkv=f"{_LAYER}.wqkv",
    o=f"{_LAYER}.wo",
    mlp_norm=f"{_LAYER}.norm1",
    up=f"{_LAYER}.mlp.fc0",
    down=f"{_LAYER}.mlp.fc1",
    norm="vision_tower.encoder.final_layernorm",
    fc_norm="mm_projector.pre_norm",
    fc1="mm_projector.proj.0",
    fc2="mm_projector.proj.2",
)
# The names of settings in the published file.
_OWN_NAMES = {
    "init_pos_emb_height": "pos_emb_height", "init_pos_emb_width": "pos_emb_width", "vt_hidden_size": "hidden_size",
    "init_pos_emb_time": "pos_emb_time", "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads", "vt_num_hidden_layers": "num_hidden_layers",
}  # fmt: skip


def eyes(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    vision.rename(**_OWN_NAMES)
    vision.ignore("pos_emb_time", "video_attn_type", "model_type")  # of videos
    vision.expect("merge_type", "sd2_tpool")
    vision.expect("mm_projector_type", "patchmerger")
    vision.expect("pos_emb_type", "divided_fixed")
    vision.expect("projector_hidden_act", "gelu")
    hidden = vision.take("hidden_size", 1152)
    vision.expect("mm_hidden_size", hidden)
    vision.expect("text_hidden_size", config.hidden_size)
    heads = vision.take("num_attention_heads", 16)
    patch = vision.take("patch_size", 14)
    table = vision.take("pos_emb_height", 64)
    vision.expect("pos_emb_width", table)
    side, across = vision.take("merge_kernel_size", (2, 2))
    if side != across:
        raise ConfigError(f"{vision.source}: merge_kernel_size={[side, across]} is no square")
    norm = NormSpec(kind="layer", eps=1e-5, bias=True)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim_of(vision, hidden, heads, "num_attention_heads"),
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MLPSpec(
            size=vision.take("intermediate_size", 4304),
            activation=read_activation(vision, "gelu_pytorch_tanh"),
            gated=False,
            bias=True,
        ),
        norm=norm,
    )
    eps = float(vision.take("projector_ln_eps", hf.take("projection_layer_norm_eps", 1e-5)))
    wide = hidden * side**2
    encoder = EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        patch_bias=True,
        layers=(layer,) * vision.take("num_hidden_layers", 27),
        rope_theta=axial_theta(vision) or 10000.0,
        columns_alternate=True,
        table=table,
        table_is_grid=True,
        interpolation="bicubic",
        side=side,
        projector=(
            Normed(name="norm", norm=norm, size=hidden),
            Normed(name="fc_norm", norm=replace(norm, eps=eps), size=hidden),
            Joined(count=side**2),
            Projected(name="fc1", inputs=wide, outputs=wide, activation="gelu"),
            Projected(name="fc2", inputs=wide, outputs=config.hidden_size),
        ),
        out_size=config.hidden_size,
    )
    token = hf.take("media_placeholder_token_id", None) or hf.take("image_token_id", IMAGE_TOKEN)
    tokens = ImageTokens(token, patch, side)
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=_NAMES))
