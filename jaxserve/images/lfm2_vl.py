"""How LFM2-VL processes pictures: whole where they are not too large, else in square tiles, and behind them the whole
picture with a shape of its own. transformers has this for torch only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as PILImage

from jaxserve.config import ConfigError
from jaxserve.images.patches import Processed, patches_of, resized
from jaxserve.images.reading import MAX_RATIO

if TYPE_CHECKING:
    from jaxserve.images.processing import ImageProcessor

TYPES = ("Lfm2VlImageProcessor",)
# Where the settings do not say.
DEFAULTS: dict[str, Any] = {
    "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True, "min_image_tokens": 64,
    "max_image_tokens": 256, "tile_size": 512, "max_pixels_tolerance": 2.0, "resample": PILImage.Resampling.BILINEAR,
}  # fmt: skip


def most_pixels(source: ImageProcessor) -> int:
    """Most pixels of all tiles of a picture, or of a picture that is not cut. Raises ConfigError for tiles that the
    model does not read."""
    given = {**DEFAULTS, **source.settings}
    square = source.kind.patch * source.kind.side
    if given["tile_size"] % square:
        raise ConfigError(f"tile_size={given['tile_size']} of the image processor must be a multiple of {square}")
    tiles = given["max_tiles"] if given["do_image_splitting"] else 0
    least, most = given["min_image_tokens"], given["max_image_tokens"]
    # A narrow picture has more features than are allowed: its shorter side does not get below one.
    most = max(most, math.isqrt(MAX_RATIO * most) + 1, least + math.isqrt(MAX_RATIO * least) + 3)
    return int(max(tiles * given["tile_size"] ** 2, most * square**2))


def process(source: ImageProcessor, picture: PILImage.Image, most_pixels: int | None) -> Processed:
    """See `ImageProcessor.__call__`. A picture of fewer pixels than its own limit is not cut."""
    given = {**DEFAULTS, **source.settings}
    square = source.kind.patch * source.kind.side
    cuts = given["do_image_splitting"] and given["max_tiles"] > 1
    if most_pixels is not None:
        most = min(given["max_image_tokens"], max(most_pixels // square**2, 1))
        given |= {"max_image_tokens": most, "min_image_tokens": min(given["min_image_tokens"], most)}
        cuts = False

    def frames(width: int, height: int) -> np.ndarray:
        """The picture in this size, [1, colours, height, width]."""
        return resized(picture, width, height, given["resample"])[None]

    whole = frames(*_whole_size(picture.width, picture.height, square, given))
    if not cuts or not _is_large(picture.width, picture.height, source.kind.patch, square, given):
        return Processed.of(*patches_of(whole, source.kind))
    tile = given["tile_size"]
    columns, rows = _tiles(picture.width, picture.height, given)
    cut = frames(columns * tile, rows * tile).reshape(3, rows, tile, columns, tile).transpose(1, 3, 0, 2, 4)
    thumbnail = None
    if given["use_thumbnail"] and rows * columns > 1:
        thumbnail = Processed.of(*patches_of(whole, source.kind))
    return Processed.of(*patches_of(cut.reshape(-1, 3, tile, tile), source.kind), (rows, columns), thumbnail)


def _whole_size(width: int, height: int, square: int, given: dict[str, Any]) -> tuple[int, int]:
    """Width and height of a whole picture: multiples of `square`, with a number of features that is allowed."""
    least, most = (given[f"{which}_image_tokens"] * square**2 for which in ("min", "max"))
    made = [max(square, round(size / square) * square) for size in (width, height)]
    if made[0] * made[1] > most:
        shrink = math.sqrt(height * width / most)
        made = [max(square, math.floor(size / shrink / square) * square) for size in (width, height)]
    elif made[0] * made[1] < least:
        grow = math.sqrt(least / (height * width))
        made = [math.ceil(size * grow / square) * square for size in (width, height)]
    return made[0], made[1]


def _is_large(width: int, height: int, patch: int, square: int, given: dict[str, Any]) -> bool:
    rounded = [max(patch, round(size / square) * square) for size in (width, height)]
    return bool(rounded[0] * rounded[1] > given["max_image_tokens"] * square**2 * given["max_pixels_tolerance"])


def _tiles(width: int, height: int, given: dict[str, Any]) -> tuple[int, int]:
    """Columns and rows of tiles, whose ratio is the nearest to the picture's. Of several, the ones with more tiles are
    taken where the picture has more than half of their pixels."""
    most = given["max_tiles"]
    sides = range(1, most + 1)
    grids = [(x, y) for x in sides for y in sides if given["min_tiles"] <= x * y <= most]
    best = (1, 1)
    nearest = math.inf
    for columns, rows in sorted(set(grids), key=lambda grid: grid[0] * grid[1]):
        far = abs(width / height - columns / rows)
        pixels = given["tile_size"] ** 2 * columns * rows
        if far < nearest or (far == nearest and width * height > 0.5 * pixels):
            nearest = far
            best = columns, rows
    return best
