"""LFM2-VL, whose language model is LFM2."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families.lfm2 import FAMILY as LFM2
from jaxserve.models.families.within import Text, by_whole_or_tied, family_within
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.lfm2_vl import eyes

# The values that transformers assumes for keys that a text_config does not have.
DEFAULTS = {
    "vocab_size": 65536, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
# Of the processing of pictures, whose own settings count.
OF_PROCESSING = (
    "do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches", "max_pixels_tolerance",
    "max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_image_special_tokens", "use_thumbnail",
    "vision_feature_layer",
)  # fmt: skip
_FAMILY = family_within(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    {"lfm2": Text(LFM2.read_config, DEFAULTS)},
    LFM2.names,
    by_whole_or_tied,
    sees=eyes,
)


def _read(hf: HFConfig) -> ModelConfig:
    hf.rename(tie_embedding="tie_word_embeddings")
    hf.ignore(*OF_PROCESSING)
    return _FAMILY.read_config(hf)


FAMILY = replace(_FAMILY, read_config=_read)
