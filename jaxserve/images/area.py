"""Which features of a picture's tiles show the picture (LLaVA-OneVision, Li et al. 2024, arXiv:2408.03326).

The tiles lie on a grid that is larger than the picture, and so do their features. What is left is padding.
"""

from __future__ import annotations

import math

from jaxserve.types import Area

SLACK = 1.1  # by how much more features a side there may be than `most_tiles` have


def area_of(size: tuple[int, int], tiles: tuple[int, int], side: int, most_tiles: int) -> Area:
    """The area of a picture of this height and width on a grid of `tiles`, rows and columns, with `side` rows of
    features each. It has about as many features as `most_tiles` at most."""
    height, width = tiles[0] * side, tiles[1] * side
    top = left = 0
    if size[1] / size[0] > width / height:
        top = (height - int(round(size[0] * (width / size[1]), 7))) // 2
    else:
        left = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    height -= 2 * top
    width -= 2 * left
    ratio = math.sqrt(height * width / (most_tiles * side**2))
    if ratio <= SLACK:
        return Area(tiles[1], top, left, height, width, height, width)
    return Area(tiles[1], top, left, height, width, int(height // ratio), int(width // ratio))


def most_features(side: int, most_tiles: int, most_parts: int) -> int:
    """Features of a picture at most: those of the tile that shows all of it, and of its area of up to `most_parts`
    tiles with a feature behind each row."""
    rows = most_parts * side
    of_area = min(most_parts, int(SLACK**2 * most_tiles) + 1) * side**2
    return side**2 + of_area + rows
