"""The image encoder of Llama 4, which reads tiles."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import axial_theta, head_dim_of, joined_side, square_side
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, Scaling, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 200092
TEXTS = {
    "begin": "<|image_start|>", "beside": "<|tile_x_separator|>", "below": "<|tile_y_separator|>",
    "end": "<|image_end|>",
}  # fmt: skip
_LAYER = "vision_model.model.layers.{i}"
_NAMES = named(
    patch="vision_model.patch_embedding.linear",
    before="vision_model.layernorm_pre",
    attention_norm=f"{_LAYER}.input_layernorm",
    q=f"{_LAYER}.self_attn.q_proj",
    k=f"{_LAYER}.self_attn.k_proj",
    v=f"{_LAYER}.self_attn.v_proj",
    o=f"{_LAYER}.self_attn.o_proj",
    mlp_norm=f"{_LAYER}.post_attention_layernorm",
    up=f"{_LAYER}.mlp.fc1",
    down=f"{_LAYER}.mlp.fc2",
    last="vision_model.layernorm_post",
    fc1="vision_model.vision_adapter.mlp.fc1",
    fc2="vision_model.vision_adapter.mlp.fc2",
    out="multi_modal_projector.linear_1",
) | {
    "table.weight": "vision_model.positional_embedding_vlm",
    "class_token": "vision_model.class_embedding",
}


def eyes_llama4(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    encoder = _read(vision, config.hidden_size)
    token = hf.take("image_token_index", None) or hf.take("image_token_id", IMAGE_TOKEN)
    tokens = ImageTokens(
        token, encoder.patch_shape[-1], encoder.side, layout="tiles", texts=TEXTS, placeholder="<|image|>"
    )
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=_NAMES))


def _read(hf: HFConfig, out_size: int) -> EncoderConfig:
    hf.expect("model_type", "llama4_vision_model")
    hf.expect("num_channels", 3)
    # What transformers does not read.
    hf.ignore("hidden_act", "norm_eps", "vision_feature_layer", "vision_feature_select_strategy", "projector_dropout")
    hf.ignore("multi_modal_projector_bias")
    hidden = hf.take("hidden_size", 768)
    heads = hf.take("num_attention_heads", 16)
    patch = hf.take("patch_size", 14)
    size = hf.take("intermediate_size", 5632)
    wide = hf.take("projector_output_dim", 4096)
    side = joined_side(hf, "pixel_shuffle_ratio")
    if size != hidden * side**2:
        raise ConfigError(f"{hf.source}: intermediate_size={size} must be {side**2} times hidden_size={hidden}")
    for key, usual in (("projector_input_dim", 4096), ("vision_output_dim", 7680)):
        if (given := hf.take(key, usual)) != wide:
            raise ConfigError(f"{hf.source}: {key}={given} must be projector_output_dim={wide}")
    norm = NormSpec(kind="layer", eps=1e-5, bias=True)
    dim = head_dim_of(hf, hidden, heads, "num_attention_heads")
    layer = LayerSpec(
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim, qkv_bias=True, out_bias=True),
        mlp=MLPSpec(size=size, activation="gelu", gated=False, bias=True),
        norm=norm,
    )
    projector = (
        Normed(name="last", norm=norm, size=hidden),
        Joined(count=side**2),
        Projected(name="fc1", inputs=size, outputs=wide, bias=False, activation="gelu"),
        Projected(name="fc2", inputs=wide, outputs=wide, bias=False, activation="gelu"),
        Projected(name="out", inputs=wide, outputs=out_size, bias=False),
    )
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        patch_matrix=True,
        scaling=Scaling(rounds=True),
        layers=(layer,) * hf.take("num_hidden_layers", 34),
        rope_theta=axial_theta(hf) or float(hf.take("rope_theta", 10000.0)),
        columns_first=True,
        interleaved=True,
        table=square_side(hf, "image_size", 448) // patch,
        class_token="last",
        before=norm,
        side=side,
        projector=projector,
        out_size=out_size,
    )
