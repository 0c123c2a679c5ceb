"""Splits pictures into tiles as Llama 4's own processor does, which needs PyTorch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from PIL import Image as PILImage

Size = tuple[int, int]  # height and width


class Llama4Tiles:
    """A processor like those of transformers. It leaves numbers of pixels as they are.

    A picture becomes as large as one of several canvases of whole tiles allows, without being distorted, and what is
    left of the canvas is black. If it has several tiles, another one shows all of the picture, distorted.
    """

    def __init__(self, settings: Mapping[str, Any], tile: int, most: int):
        """`tile`: its side. `most`: tiles of the largest canvas."""
        self._tile = tile
        self._most = most
        self._fills = bool(settings.get("resize_to_max_canvas"))
        self._resample = PILImage.Resampling(settings.get("resample", PILImage.Resampling.BILINEAR))

    def __call__(self, picture: PILImage.Image, max_patches: int | None = None, **others: Any) -> dict[str, np.ndarray]:
        """pixel_values: uint8 [tiles, colours, height, width]. aspect_ratios: rows and columns of tiles, [1, 2]."""
        tile = self._tile
        size = picture.height, picture.width
        canvas = canvas_for(size, canvases(min(max_patches or self._most, self._most), tile), fills=self._fills)
        target = canvas
        if not self._fills:  # a picture that is smaller than a tile becomes as large as one at most
            target = min(max(size[0], tile), canvas[0]), min(max(size[1], tile), canvas[1])
        height, width = within(size, target)
        filled = np.zeros((*canvas, 3), np.uint8)
        filled[:height, :width] = np.asarray(picture.resize((width, height), self._resample))
        rows, columns = canvas[0] // tile, canvas[1] // tile
        tiles = filled.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        if len(tiles) > 1:
            whole = np.asarray(picture.resize((tile, tile), self._resample))
            tiles = np.concatenate([tiles, whole[None]])
        return {"pixel_values": tiles.transpose(0, 3, 1, 2), "aspect_ratios": np.array([[rows, columns]])}


@cache
def canvases(most: int, tile: int) -> np.ndarray:
    """The sizes of canvases of up to `most` tiles, int64 [canvases, 2]. Those of one shape follow each other."""
    shapes = defaultdict(list)
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                shapes[rows / (count // rows)].append((rows, count // rows))
    return np.array([shape for same in shapes.values() for shape in same]) * tile


def canvas_for(size: Size, sizes: np.ndarray, *, fills: bool) -> Size:
    """The canvas on which a picture grows the least, or else shrinks the least; of several the smallest. `fills`: it
    grows the most."""
    scales = (sizes.astype(np.float32) / np.array(size, np.float32)).min(axis=1)
    growing = scales[scales >= 1]
    if len(growing):
        chosen = growing.max() if fills else growing.min()
    else:
        chosen = scales.max()
    left = sizes[scales == chosen]
    height, width = left[left.prod(axis=1).argmin()].tolist()
    return height, width


def within(size: Size, target: Size) -> Size:
    """The largest size of this shape within another one."""
    by_height, by_width = target[0] / size[0], target[1] / size[1]
    if by_width < by_height:
        height, width = min(math.floor(size[0] * by_width), target[0]), target[1]
    else:
        height, width = target[0], min(math.floor(size[1] * by_height), target[1])
    return max(height, 1), max(width, 1)
