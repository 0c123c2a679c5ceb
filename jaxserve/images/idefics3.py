"""How Idefics3 and SmolVLM process pictures: square tiles, and behind them the whole picture as one more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image as PILImage

from jaxserve.config import ConfigError
from jaxserve.images.patches import Processed, patches_of

if TYPE_CHECKING:
    from jaxserve.images.processing import ImageProcessor

TYPES = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
TILE = 364  # pixels of an edge, where the settings do not say
LARGEST = 4096  # edge of a picture before it is cut


def most_pixels(source: ImageProcessor) -> int:
    """Most pixels of all tiles of a picture. Raises ConfigError for tiles that the model does not read."""
    settings, kind = source.settings, source.kind
    tile = int((settings.get("max_image_size") or {}).get("longest_edge", TILE))
    if not tile // kind.patch or tile // kind.patch % kind.side:
        raise ConfigError(
            f"max_image_size={tile} of the image processor must have a multiple of {kind.side} patches of "
            f"{kind.patch} pixels"
        )
    if not settings.get("do_image_splitting", True):
        return tile**2
    if not settings.get("do_resize", True):
        raise ConfigError("do_resize=false of the image processor is not supported: a picture could have any size")
    size = settings.get("size") or {"longest_edge": 4 * TILE}
    edge = min(max(int(one) for one in size.values() if one), LARGEST)
    across = -(-(edge + edge % 2) // tile)  # the shorter edge is made even
    return (across**2 + 1) * tile**2


def process(source: ImageProcessor, picture: PILImage.Image, most_pixels: int | None) -> Processed:
    """See `ImageProcessor.__call__`. A picture of fewer pixels than its own limit is not cut."""
    options = {} if most_pixels is None else {"do_image_splitting": False}
    made = source.processor(
        picture, do_rescale=False, do_normalize=False, return_row_col_info=True, return_tensors="np", **options
    )
    patches, grid = patches_of(made["pixel_values"][0].astype(np.uint8), source.kind)
    tiles = made["rows"][0][0], made["cols"][0][0]
    return Processed.of(patches, grid, tiles if grid[0] > 1 else (1, 1))
