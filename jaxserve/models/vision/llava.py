"""The image encoder of LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326), which is SigLIP's and reads tiles. Their
features are put together as those of one picture, with a learned vector behind each row."""

from __future__ import annotations

import re
from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, NormSpec
from jaxserve.models.vision.settings import head_dim_of, square_side
from jaxserve.models.vision.spec import EncoderConfig, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 151646
_LAYER = "vision_tower.encoder.layers.{i}"
_NAMES = named(
    patch="vision_tower.embeddings.patch_embedding",
    table="vision_tower.embeddings.position_embedding",
    attention_norm=f"{_LAYER}.layer_norm1",
    q=f"{_LAYER}.self_attn.q_proj",
    k=f"{_LAYER}.self_attn.k_proj",
    v=f"{_LAYER}.self_attn.v_proj",
    o=f"{_LAYER}.self_attn.out_proj",
    mlp_norm=f"{_LAYER}.layer_norm2",
    up=f"{_LAYER}.mlp.fc1",
    down=f"{_LAYER}.mlp.fc2",
    fc1="multi_modal_projector.linear_1",
    fc2="multi_modal_projector.linear_2",
) | {"newline": "image_newline"}


def eyes_onevision(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    hf.expect("vision_feature_select_strategy", "full")
    form = hf.take("vision_aspect_ratio", "anyres_max_9")
    most = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", str(form))
    if most is None:
        raise ConfigError(f"{hf.source}: vision_aspect_ratio={form!r} is not supported (only 'anyres_max_N')")
    encoder = _read(vision, hf.take("vision_feature_layer", -1))
    out = config.hidden_size
    bias = hf.take("multimodal_projector_bias", True)
    activation = read_activation(hf, "gelu", "projector_hidden_act")
    projector = (
        Projected(name="fc1", inputs=encoder.hidden_size, outputs=out, bias=bias, activation=activation),
        Projected(name="fc2", inputs=out, outputs=out, bias=bias),
    )
    token = hf.take("image_token_index", None) or hf.take("image_token_id", IMAGE_TOKEN)
    tokens = ImageTokens(token, encoder.patch_shape[-1], 1, most_tiles=int(most[1]))
    encoder = replace(encoder, projector=projector, newline=True, out_size=out)
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=_NAMES))


def _read(hf: HFConfig, read_layer: int) -> EncoderConfig:
    """The encoder up to its layer `read_layer`, without its projector."""
    hf.expect("model_type", "siglip_vision_model")
    hf.expect("num_channels", 3)
    hf.ignore("vision_use_head", "projection_dim")  # of what is not read
    hidden = hf.take("hidden_size", 1152)
    heads = hf.take("num_attention_heads", 16)
    patch = hf.take("patch_size", 14)
    count = hf.take("num_hidden_layers", 26)
    if type(read_layer) is not int or not -count - 1 <= read_layer <= count:
        raise ConfigError(f"{hf.source}: vision_feature_layer={read_layer!r} must be one of {count} layers")
    norm = NormSpec(kind="layer", eps=hf.take("layer_norm_eps", 1e-6), bias=True)
    mlp = MLPSpec(
        size=hf.take("intermediate_size", 4304), activation=read_activation(hf, "gelu_pytorch_tanh"), gated=False,
        bias=True,
    )  # fmt: skip
    dim = head_dim_of(hf, hidden, heads, "num_attention_heads")
    attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=dim, qkv_bias=True, out_bias=True)
    layer = LayerSpec(attention=attention, mlp=mlp, norm=norm)
    return EncoderConfig(
        hidden_size=hidden,
        patch_shape=(3, patch, patch),
        patch_bias=True,
        layers=(layer,) * (read_layer if read_layer >= 0 else count + 1 + read_layer),
        table=square_side(hf, "image_size", 384) // patch,
        side=1,
        projector=(),
        out_size=hidden,
    )
