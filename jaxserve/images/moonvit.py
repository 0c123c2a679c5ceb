"""How Kimi K2.5 processes pictures: they keep their shape, are made smaller where they are too large, and are filled up
to whole squares of patches. transformers has this for torch only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PILImage

from jaxserve.images.patches import Processed, patches_of, resized

if TYPE_CHECKING:
    from jaxserve.images.processing import ImageProcessor

TYPES = ("Kimi_K25ImageProcessor",)
PATCHES = 16384  # most patches of a picture, where the settings do not say
EDGE = 512  # most patches of an edge
BICUBIC = 3  # as Pillow numbers it


def settings_of(published: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Moonshot AI's own file (`media_proc_cfg`), as transformers calls them."""
    edge = published.get("patch_limit_on_one_side", EDGE)
    return {
        "image_processor_type": TYPES[0],
        "image_mean": published.get("image_mean"),
        "image_std": published.get("image_std"),
        "max_patches": published.get("in_patch_limit", PATCHES),
        "size": {"max_height": edge, "max_width": edge},
    }


def _limits(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Most patches of a picture, and of an edge, before it is filled up."""
    return int(settings.get("max_patches", PATCHES)), int((settings.get("size") or {}).get("max_height", EDGE))


def most_pixels(source: ImageProcessor) -> int:
    """Most pixels of a picture that is filled up. Of so many rows there are at most as many columns as rounding whole
    patches down, when the picture is made smaller, and squares up allow."""
    patches, edge = _limits(source.settings)
    side = source.kind.side
    most = 0
    for rows in range(side, edge + side, side):
        least = max(rows - side, 1)
        columns = min(edge, patches * (1 + 1 / least) / least + 1)
        most = max(most, rows * math.ceil(columns / side) * side)
    return most * source.kind.patch**2


def process(source: ImageProcessor, picture: PILImage.Image, most_pixels: int | None) -> Processed:
    """See `ImageProcessor.__call__`."""
    patch = source.kind.patch
    square = patch * source.kind.side
    patches, edge = _limits(source.settings)
    if most_pixels is not None:
        patches = min(patches, max(most_pixels // patch**2, 1))
    size = picture.width, picture.height
    count = math.prod(max(1, one // patch) for one in size)
    scale = min(1.0, math.sqrt(patches / count), *(edge * patch / one for one in size))
    width, height = (min(max(1, int(one * scale)), edge * patch) for one in size)
    filled = np.zeros((1, 3, -(-height // square) * square, -(-width // square) * square), np.uint8)
    filled[0, :, :height, :width] = resized(picture, width, height, source.settings.get("resample", BICUBIC))
    return Processed.of(*patches_of(filled, source.kind))
