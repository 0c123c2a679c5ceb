"""How Idefics3 and SmolVLM process pictures: square tiles, and behind them the whole picture as one more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    """See `ImageProcessor.__call__`. A picture of fewer pixels than its own limit is not cut. As transformers does it,
    but on Pillow's pictures, of which there are no copies between the steps."""
    settings, kind = source.settings, source.kind
    tile = int((settings.get("max_image_size") or {}).get("longest_edge", TILE))
    given = settings.get("resample")
    resample = PILImage.Resampling.LANCZOS if given is None else PILImage.Resampling(given)
    if settings.get("do_resize", True):
        picture = picture.resize(_size(picture.width, picture.height, settings.get("size") or {}), resample)
    if most_pixels is not None or not settings.get("do_image_splitting", True):
        return Processed.of(*patches_of(_frames(picture.resize((tile, tile), resample), 1), kind))
    picture = picture.resize(_whole_tiles(picture.width, picture.height, tile), resample)
    columns, rows = picture.width // tile, picture.height // tile
    if columns == rows == 1:
        return Processed.of(*patches_of(_frames(picture, 1), kind))
    parts = [picture.crop((0, y, picture.width, y + tile)) for y in range(0, picture.height, tile)]
    cut = [patches_of(_frames(part, columns), kind) for part in parts]
    whole, (_, down, across) = patches_of(_frames(picture.resize((tile, tile), resample), 1), kind)
    patches = np.concatenate([*(part for part, _ in cut), whole])
    return Processed.of(patches, (rows * columns + 1, down, across), (rows, columns))


def _frames(picture: PILImage.Image, columns: int) -> np.ndarray:
    """So many parts of a picture that are side by side, [columns, colours, height, width]."""
    values = np.asarray(picture).reshape(picture.height, columns, -1, 3)
    return values.transpose(1, 3, 0, 2)


def _size(width: int, height: int, size: Mapping[str, Any]) -> tuple[int, int]:
    """Width and height of a picture whose longer edge is as `size` says, and whose shorter one is even; or the width
    and height in `size`."""
    if size.get("height") and size.get("width"):
        return int(size["width"]), int(size["height"])
    longest = int(size.get("longest_edge") or 4 * TILE)
    ratio = width / height
    if width >= height:
        made = longest, int(longest / ratio)
        made = longest, max(made[1] + made[1] % 2, 1)
    else:
        made = int(longest * ratio), longest
        made = max(made[0] + made[0] % 2, 1), longest
    if max(made) <= LARGEST:
        return made
    ratio = made[0] / made[1]
    return (LARGEST, max(int(LARGEST / ratio), 1)) if ratio >= 1 else (max(int(LARGEST * ratio), 1), LARGEST)


def _whole_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Width and height of whole tiles for a picture."""
    ratio = width / height
    if width >= height:
        width = -(-width // tile) * tile
        return width, -(-int(width / ratio) // tile) * tile
    height = -(-height // tile) * tile
    return -(-int(height * ratio) // tile) * tile, height
