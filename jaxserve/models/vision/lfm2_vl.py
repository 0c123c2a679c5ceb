"""The image encoder of LFM2-VL (Liquid AI 2025, arXiv:2511.23404): SigLIP 2 for pictures of any shape (Tschannen et al.
2025, arXiv:2502.14786), and two products over squares of its patches."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import ModelConfig, NormSpec
from jaxserve.models.vision.siglip import read_siglip, siglip_names
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 396
_NAMES = siglip_names("vision_tower.") | named(
    fc_norm="multi_modal_projector.layer_norm",
    fc1="multi_modal_projector.linear_1",
    fc2="multi_modal_projector.linear_2",
)


def eyes(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    vision.expect("model_type", "siglip2_vision_model")
    vision.ignore("vision_use_head")  # the features are those before the head
    fields = read_siglip(vision)
    hidden = fields["hidden_size"]
    count = vision.take("num_patches", 256)
    if isqrt(count) ** 2 != count:
        raise ConfigError(f"{vision.source}: num_patches={count} is no square")
    side = hf.take("downsample_factor", 2)
    wide = hidden * side**2
    middle = hf.take("projector_hidden_size", 2560)
    bias = bool(hf.take("projector_bias", True))
    normed = (Normed(name="fc_norm", norm=NormSpec(kind="layer", eps=1e-5, bias=True), size=wide),)
    encoder = EncoderConfig(
        **fields,
        colours_last=True,
        table=isqrt(count),
        interpolation="antialiased",
        side=side,
        projector=(
            Normed(name="norm", norm=fields["layers"][0].norm, size=hidden),
            Joined(count=side**2),
            *(normed if hf.take("projector_use_layernorm", True) else ()),
            Projected(
                name="fc1",
                inputs=wide,
                outputs=middle,
                bias=bias,
                activation=read_activation(hf, "gelu", "projector_hidden_act"),
            ),
            Projected(name="fc2", inputs=middle, outputs=config.hidden_size, bias=bias),
        ),
        out_size=config.hidden_size,
    )
    tokens = ImageTokens(hf.take("image_token_id", IMAGE_TOKEN), encoder.patch_shape[-1], side, layout="marked_tiles")
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=_NAMES))
