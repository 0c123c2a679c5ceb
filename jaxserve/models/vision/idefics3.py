"""The image encoder of Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) and SmolVLM (Marafioti et al. 2025,
arXiv:2504.05299): SigLIP (Zhai et al. 2023, arXiv:2303.15343), and a product over squares of its patches."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.siglip import read_siglip, siglip_names
from jaxserve.models.vision.spec import EncoderConfig, Joined, Normed, Projected, VisionConfig
from jaxserve.types import ImageTokens

IMAGE_TOKEN = 128257
# Of the processing of pictures, whose own settings count, and of older code.
_UNUSED = ("max_image_size", "size", "use_base_siglip", "tie_word_embeddings", "model_type")


def eyes(hf: HFConfig, vision: HFConfig, config: ModelConfig) -> ModelConfig:
    """The language model with the encoder of a `vision_config`."""
    side = hf.take("scale_factor", 2)
    vision.ignore(*_UNUSED)
    fields = read_siglip(vision, hidden=1152, heads=16, patch=32, intermediate=3072)
    hidden = fields["hidden_size"]
    patch = fields["patch_shape"][-1]
    encoder = EncoderConfig(
        **fields,
        table=vision.take("image_size", 224) // patch,
        interpolation="nearest",
        side=side,
        projector=(
            Normed(name="norm", norm=fields["layers"][0].norm, size=hidden),
            Joined(count=side**2),
            Projected(name="fc", inputs=hidden * side**2, outputs=config.hidden_size, bias=False),
        ),
        out_size=config.hidden_size,
    )
    tokens = ImageTokens(hf.take("image_token_id", IMAGE_TOKEN), patch, side, layout="numbered_tiles")
    names = siglip_names("vision_model.") | {"fc.weight": "connector.modality_projection.proj.weight"}
    return replace(config, vision=VisionConfig(encoder=encoder, tokens=tokens, names=names))
