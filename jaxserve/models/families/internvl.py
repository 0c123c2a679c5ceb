"""InternVL in transformers' form, and 2.5 and 3 as their authors publish them, with other names of settings and
tensors."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.models.config import HFConfig
from jaxserve.models.families.llama import FAMILY as LLAMA
from jaxserve.models.families.qwen2 import FAMILY as QWEN2_FAMILY
from jaxserve.models.families.qwen3 import FAMILY as QWEN3
from jaxserve.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from jaxserve.models.families.within import QWEN2, UNREAD, Text, by_text, family_within
from jaxserve.models.spec import ModelConfig
from jaxserve.models.vision.internvl import CHAT, eyes_internvl

# In the authors' form: of training, of conversations, and of the processing of pictures (`images.internvl_chat`).
_UNUSED = (
    "dynamic_image_size", "force_image_size", "hidden_size", "max_dynamic_patch", "min_dynamic_patch", "pad2square",
    "ps_version", "select_layer", "system_message", "template", "use_backbone_lora", "use_llm_lora", "use_thumbnail",
    "vocab_size",
)  # fmt: skip
_FAMILY = family_within(
    "internvl",
    ("InternVLForConditionalGeneration", CHAT),
    {
        "qwen2": Text(QWEN2_FAMILY.read_config, QWEN2),
        "qwen3": Text(QWEN3.read_config, QWEN2),
        "qwen3_moe": Text(QWEN3_MOE.read_config),
        "llama": Text(LLAMA.read_config),
    },
    QWEN3_MOE.names,
    by_text(False),
    sees=eyes_internvl,
)


def _read(hf: HFConfig) -> ModelConfig:
    if CHAT in hf.values.get("architectures", ()):
        hf.rename(llm_config="text_config")
        hf.ignore(*_UNUSED)
    return _FAMILY.read_config(hf)


FAMILY = replace(_FAMILY, read_config=_read, unread=(*UNREAD, "mlp1."))
