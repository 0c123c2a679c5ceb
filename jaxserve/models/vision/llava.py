"""The image encoder of LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326), which is SigLIP's and reads tiles. Their
features are put together as those of one picture, with a learned vector behind each row."""

from __future__ import annotations

import re
from dataclasses import replace

from jaxserve.config import ConfigError
from jaxserve.models.config import HFConfig
from jaxserve.models.families.shared import named, read_activation
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.settings import square_side
from jaxserve.models.vision.siglip import read_siglip, siglip_names
from jaxserve.models.vision.spec import EncoderConfig, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 151646
_NAMES = (
    siglip_names("vision_tower.")
    | named(fc1="multi_modal_projector.linear_1", fc2="multi_modal_projector.linear_2")
    | {"newline": "image_newline"}
)


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
    hf.ignore("vision_use_head", "projection_dim")  # of what is not read
    fields = read_siglip(hf, hidden=1152, heads=16, patch=14, intermediate=4304, layers=26)
    layers = fields.pop("layers")
    count = len(layers)
    if type(read_layer) is not int or not -count - 1 <= read_layer <= count:
        raise ConfigError(f"{hf.source}: vision_feature_layer={read_layer!r} must be one of {count} layers")
    return EncoderConfig(
        **fields,
        layers=layers[: read_layer if read_layer >= 0 else count + 1 + read_layer],
        table=square_side(hf, "image_size", 384) // fields["patch_shape"][-1],
        side=1,
        projector=(),
        out_size=fields["hidden_size"],
    )
