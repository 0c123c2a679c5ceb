"""Prompts with pictures for the checkpoints of `tiny_models` that see. Nothing here needs torch."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
from image_models import PINPOINTS

from jaxserve.types import InvalidRequestError

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2], "do_rescale": True, "do_normalize": True,
    "do_resize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255, "resample": 3,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 40},
}  # fmt: skip
GLM = QWEN | {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 128, "longest_edge": 64 * 80}}
PIXTRAL = {
    "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 4, "width": 4},
    "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2], "do_rescale": True, "do_normalize": True,
    "do_resize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255, "resample": 3, "size": {"longest_edge": 56},
}  # fmt: skip
GEMMA3 = {
    "image_processor_type": "Gemma3ImageProcessor", "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2],
    "do_rescale": True, "do_normalize": True, "do_resize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255,
    "resample": 2, "size": {"height": 32, "width": 32}, "do_pan_and_scan": None,
}  # fmt: skip
GEMMA4 = {
    "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70,
    "do_rescale": True, "do_normalize": False, "do_resize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255,
    "resample": 3, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0],
}  # fmt: skip
# Twice the pixels of a tile, or more, are split into up to seven.
TILES = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 16, "width": 16}, "crop_to_patches": False,
    "min_patches": 1, "max_patches": 6, "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2],
    "do_rescale": True, "do_normalize": True, "do_resize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255,
    "resample": 3,
}  # fmt: skip
LLAMA4 = TILES | {"image_processor_type": "Llama4ImageProcessorFast", "resample": 2, "resize_to_max_canvas": False}
ONEVISION = TILES | {
    "image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": PINPOINTS, "do_pad": True,
}  # fmt: skip
IDEFICS3 = {
    "image_processor_type": "Idefics3ImageProcessor", "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2],
    "do_rescale": True, "do_normalize": True, "do_resize": True, "do_convert_rgb": True, "do_pad": True,
    "do_image_splitting": True, "rescale_factor": 1 / 255, "resample": 1, "size": {"longest_edge": 32},
    "max_image_size": {"longest_edge": 16},
}  # fmt: skip
# A tile is no whole number of patches.
SMOLVLM = IDEFICS3 | {
    "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 52},
    "max_image_size": {"longest_edge": 26},
}  # fmt: skip
# Whole where there are no more than nine features, else up to four tiles.
LFM2 = {
    "image_processor_type": "Lfm2VlImageProcessorFast", "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2],
    "do_rescale": True, "do_normalize": True, "do_resize": True, "do_pad": True, "do_image_splitting": True,
    "rescale_factor": 1 / 255, "resample": 2, "size": {"height": 16, "width": 16}, "downsample_factor": 2,
    "encoder_patch_size": 4, "tile_size": 16, "min_tiles": 2, "max_tiles": 4, "use_thumbnail": True,
    "min_image_tokens": 2, "max_image_tokens": 6, "max_pixels_tolerance": 1.5,
}  # fmt: skip
KIMI = {
    "image_processor_type": "Kimi_K25ImageProcessor", "image_mean": [0.4, 0.5, 0.45], "image_std": [0.3, 0.25, 0.2],
    "do_rescale": True, "do_normalize": True, "do_resize": True, "do_convert_rgb": True, "rescale_factor": 1 / 255,
    "resample": 3, "patch_size": 4, "merge_size": 2, "max_patches": 94, "size": {"max_height": 20, "max_width": 20},
}  # fmt: skip
# Case -> the settings of its image processor.
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl_flat": QWEN,
    "qwen2_vl_whole": QWEN,
    "qwen2_5_vl_flat": QWEN,
    "qwen2_5_vl_yarn": QWEN,
    "qwen3_vl_tied": QWEN,
    "qwen3_vl_wide": QWEN,
    "qwen3_vl_moe_steps": QWEN,
    "qwen3_vl_moe_wide": QWEN,
    "qwen3_5_whole": QWEN,
    "qwen3_5_moe_whole": QWEN,
    "lighton_ocr_tied": PIXTRAL,
    "lighton_ocr_hub": PIXTRAL | {"patch_size": 3, "size": {"longest_edge": 70}},
    "llava_pixtral": PIXTRAL,
    "llava_pixtral_saved": PIXTRAL | {"patch_size": {"height": 5, "width": 5}, "resample": 2},
    "mistral3_seeing": PIXTRAL,
    "mistral3_saved": PIXTRAL | {"patch_size": 3, "size": {"longest_edge": 80}},
    "glm4v_half": GLM,
    "glm4v_whole": GLM,
    "glm4v_moe_groups": GLM,
    "glm4v_moe_plain": GLM,
    "glm46v_dense": GLM | {"image_processor_type": "Glm46VImageProcessor"},
    "glm46v_experts": GLM | {"image_processor_type": "Glm46VImageProcessor"},
    "gemma3_seeing": GEMMA3,
    "gemma3_wide": GEMMA3 | {"size": {"height": 40, "width": 40}},
    "gemma4_clipped": GEMMA4,
    "gemma4_joint": GEMMA4
    | {"pooling_kernel_size": 2, "do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.8, 0.7]},
    "gemma4_unified_wide": GEMMA4 | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    "gemma4_unified_older": GEMMA4 | {"image_processor_type": "Gemma4UnifiedImageProcessor", "pooling_kernel_size": 2},
    "internvl_qwen2": TILES,
    "internvl_qwen3_moe": TILES,
    "llava_onevision_tied": ONEVISION,
    "llava_onevision_saved": ONEVISION | {"image_grid_pinpoints": PINPOINTS[:4]},
    "llama4_seeing": LLAMA4,
    "llama4_seeing_saved": LLAMA4 | {"resize_to_max_canvas": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "idefics3_hub": IDEFICS3,
    "idefics3_saved": IDEFICS3 | {"size": {"longest_edge": 54}, "max_image_size": {"longest_edge": 18}, "resample": 3},
    "smolvlm_tied": SMOLVLM,
    "smolvlm_hub": SMOLVLM | {"size": {"longest_edge": 60}, "max_image_size": {"longest_edge": 20}},
    "kimi_k25_hub": KIMI,
    "kimi_k25_groups": KIMI | {"max_patches": 400, "size": {"max_height": 30, "max_width": 30}},
    "lfm2_vl_hub": LFM2,
    "lfm2_vl_saved": LFM2 | {"use_thumbnail": False, "resample": 3},
}
# Each prompt as lengths of text, and (height, width) of pictures. No patch divides some of them.
PROMPTS = (
    (5, (16, 24), 4),
    ((33, 21), 7, (8, 8), 1, (40, 17), 9),
    (21, (90, 70), 2, (30, 50), 30),
)


# Ids of the texts around pictures, of which no case has more than one kind.
# What the case's tokenizer has beside features' tokens, by the beginning of a case's name.
TEXTS = {
    "gemma3": {"\n": 503, "\n\n": 504, "\n\n\n": 508, "\n\n\n\n": 509},
    "idefics3": {"<image>": 505, "<fake_token_around_image>": 506, "<global-img>": 507, "\n": 20, "\n\n": 21},
    "internvl": {"<img>": 506, "</img>": 507},
    "lfm2_vl": {"<image>": 505, "<|image_start|>": 506, "<|image_end|>": 507, "<|img_thumbnail|>": 509},
    "llama4": {
        "<|image|>": 506, "<|image_start|>": 507, "<|image_end|>": 508, "<|tile_x_separator|>": 509,
        "<|tile_y_separator|>": 510,
    },
    "llava_pixtral": {"[IMG_BREAK]": 506, "[IMG_END]": 507},
    "mistral3": {"[IMG_BREAK]": 506, "[IMG_END]": 507},
    "smolvlm": {"<image>": 505, "<fake_token_around_image>": 506, "<global-img>": 507, "\n": 20, "\n\n": 21},
}  # fmt: skip


class Texts:
    """What a case's tokenizer would tell of the texts around pictures."""

    def __init__(self, case: str, ids: dict[str, int] | None = None):
        self.ids = ids or next((own for name, own in TEXTS.items() if case.startswith(name)), {})

    def token_of(self, text: str) -> int:
        if text not in self.ids:
            raise InvalidRequestError(f"no token {text!r}")
        return self.ids[text]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Texts without an id are several tokens."""
        parts = re.findall(r"\n+|<[^>]*>|\[[^]]*\]", text)
        assert "".join(parts) == text
        return [one for part in parts for one in ([self.ids[part]] if part in self.ids else self._number(part))]

    def _number(self, part: str) -> list[int]:
        row, column = map(int, re.findall(r"\d+", part))
        return [508, 30 + 10 * row + column]


def build(name: str, folder: Path) -> Path:
    """The case's checkpoint with the settings of its image processor."""
    tiny_models.build(name, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return folder


def image_token_of(config: dict[str, Any]) -> int:
    """The token that stands for pictures."""
    return next(config[key] for key in ("image_token_id", "image_token_index") if key in config)


def picture(name: str, slot: int, place: int, size: tuple[int, int]) -> np.ndarray:
    """Coloured squares, uint8 [height, width, 3]."""
    height, width = size
    raw = tiny_models.stream(name, "picture", slot, place).random_raw(-(-height // 5) * -(-width // 5) * 3)
    squares = (raw % np.uint64(256)).astype(np.uint8).reshape(-(-height // 5), -(-width // 5), 3)
    return squares.repeat(5, axis=0).repeat(5, axis=1)[:height, :width]


def place_of(config: dict[str, Any]) -> int:
    """The token that stands for a picture in a prompt."""
    if config["model_type"] == "gemma3":
        return config["boi_token_index"]
    return TEXTS["llama4"]["<|image|>"] if config["model_type"] == "llama4" else image_token_of(config)


def prompt_of(name: str, slot: int, seed: int) -> tuple[list[int], list[np.ndarray]]:
    """The tokens of a prompt, with one for each picture, and the pictures."""
    case = tiny_models.CASES[name]
    low = len(tiny_models.SPECIAL_TOKENS)
    high = 500  # behind which the cases have their special tokens
    tokens: list[int] = []
    pictures = []
    for place, part in enumerate(PROMPTS[slot]):
        if isinstance(part, tuple):
            pictures.append(picture(name, slot, place, part))
            tokens.append(place_of(case.config))
        else:
            raw = tiny_models.stream(name, "text", slot, place, seed).random_raw(part)
            tokens += (low + raw % np.uint64(high - low)).astype(int).tolist()
    return tokens, pictures


# Of the cases with Qwen's tokens, whose ids are the last of the vocabulary.
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<m1>", "<m2>", "<m3>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_whole(name: str, folder: Path) -> Path:
    """`build`, with a tokenizer and a chat template."""
    build(name, folder)
    return tiny_models.build_tokenizer(folder, 512, marks=MARKS, chat_template=TEMPLATE)


# Videos. Case -> the settings of its processor of them.
_CLIPS = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.4, 0.5, 0.45],
    "image_std": [0.3, 0.25, 0.2], "do_rescale": True, "do_normalize": True, "do_resize": True, "do_convert_rgb": True,
    "rescale_factor": 1 / 255, "resample": 3,
}  # fmt: skip
_OF_FRAMES = {"size": {"shortest_edge": 64, "longest_edge": 64 * 12}}
_OF_ALL = {"size": {"shortest_edge": 64, "longest_edge": 64 * 40}}
VIDEOS: dict[str, dict[str, Any]] = {
    "qwen2_vl_whole": _CLIPS | _OF_FRAMES | {"video_processor_type": "Qwen2VLVideoProcessor"},
    "qwen2_5_vl_yarn": _CLIPS | _OF_FRAMES
    | {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2, "do_sample_frames": True, "min_frames": 2},
    "qwen3_vl_wide": _CLIPS | _OF_ALL | {"video_processor_type": "Qwen3VLVideoProcessor", "fps": 2, "min_frames": 3},
    "qwen3_5_whole": _CLIPS | _OF_ALL | {"video_processor_type": "Qwen3VLVideoProcessor", "max_frames": 6},
    "glm4v_whole": _CLIPS | _OF_ALL | {"video_processor_type": "Glm4vVideoProcessor", "fps": 1, "max_duration": 30},
    "glm46v_dense": _CLIPS | _OF_ALL | {"video_processor_type": "Glm46VVideoProcessor"},
}  # fmt: skip
MARKS_OF_VIDEOS = {
    "<|image_pad|>": 505, "<|video_pad|>": 506, "<|vision_start|>": 507, "<|vision_end|>": 508, "<|image|>": 505,
    "<|video|>": 506, "<|begin_of_image|>": 507, "<|end_of_image|>": 508,
}  # fmt: skip
CLIP = 11, (30, 42), 3.0  # frames, their height and width, and how many there are in a second


class Letters:
    """A tokenizer with a token for each letter."""

    def token_of(self, text: str) -> int:
        return MARKS_OF_VIDEOS[text]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        parts = re.findall(r"<\|\w+\|>|.", text)
        return [MARKS_OF_VIDEOS[one] if one in MARKS_OF_VIDEOS else 40 + ord(one) % 128 for one in parts]


def build_for_videos(name: str, folder: Path) -> Path:
    build(name, folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS[name]))
    return folder


def video_of(name: str) -> np.ndarray:
    count, size, _ = CLIP
    return np.stack([picture(name, 9, i, size) for i in range(count)])


def prompt_with_video(name: str, seed: int) -> list[int]:
    """Text, a picture's marks with a video between them, as templates have it, and text."""
    raw = tiny_models.stream(name, "video text", seed).random_raw(20)
    low = len(tiny_models.SPECIAL_TOKENS)
    text = (low + raw % np.uint64(500 - low)).astype(int).tolist()
    marks = [506] if name.startswith("glm") else [507, 506, 508]
    return [*text[:7], *marks, *text[7:]]
