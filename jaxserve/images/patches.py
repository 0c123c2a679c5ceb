"""Processed pictures, as squares of patches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image as PILImage

from jaxserve.types import Area, ImageTokens


class Processed(NamedTuple):
    """A picture as patches.

    patches: uint8 [patches, numbers of a patch].
    grid: frames, rows and columns. The frames of a picture that was cut into tiles are its tiles.
    digest: of the patches, the grid and the area, 32 bytes.
    tiles: rows and columns of tiles.
    thumbnail: the whole picture behind its tiles, where it has a grid of its own.
    area: see `area.area_of`.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    digest: bytes
    tiles: tuple[int, int] = (1, 1)
    thumbnail: Processed | None = None
    area: Area | None = None

    @classmethod
    def of(
        cls,
        patches: np.ndarray,
        grid: tuple[int, int, int],
        tiles: tuple[int, int] = (1, 1),
        thumbnail: Processed | None = None,
        area: Area | None = None,
    ) -> Processed:
        shape = repr((patches.shape, grid) if area is None else (patches.shape, grid, *area))
        digest = hashlib.sha256(shape.encode())
        digest.update(np.ascontiguousarray(patches).data)
        return cls(patches, grid, digest.digest(), tiles, thumbnail, area)

    @property
    def parts(self) -> Iterator[Processed]:
        """What the encoder reads apart from each other, in the order of the prompt."""
        yield self
        if self.thumbnail is not None:
            yield self.thumbnail

    @property
    def nbytes(self) -> int:
        return sum(part.patches.nbytes for part in self.parts)

    def features(self, kind: ImageTokens) -> int:
        """Tokens in whose place the features of `patches` stand."""
        frames, rows, columns = self.grid
        if self.area is not None:  # those of the tile that shows all of the picture, then the area, one behind each row
            return rows * columns + self.area.rows * (self.area.columns + 1)
        return frames * rows * columns // kind.side**2


def resized(picture: PILImage.Image, width: int, height: int, resample: int) -> np.ndarray:
    """A picture in RGB in this size, uint8 [colours, height, width]. As PyTorch does it: whole numbers between the
    axes, of which Pillow chooses the first, if it is to resize both."""
    across = picture.resize((width, picture.height), PILImage.Resampling(resample))
    return np.asarray(across.resize((width, height), PILImage.Resampling(resample))).transpose(2, 0, 1)


def patches_of(frames: np.ndarray, kind: ImageTokens) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The patches of frames [frames, colours, height, width] in the order of `image_packing.Frame`, and their grid.
    What is left of a frame behind its last whole square is not in them."""
    count, colours, height, width = frames.shape
    square = kind.patch * kind.side
    down, across = height // square, width // square
    frames = frames[:, :, : down * square, : across * square]
    squares = count, colours, down, kind.side, kind.patch, across, kind.side, kind.patch
    patches = frames.reshape(squares).transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, colours * kind.patch**2)
    return patches, (count, down * kind.side, across * kind.side)


def picture_of(patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The picture [colours, height, width] of patches that have the three colours of a pixel, then those of the
    next."""
    side = math.isqrt(patches.shape[1] // 3)
    split = patches[: rows * columns].reshape(rows, columns, side, side, -1)
    return split.transpose(4, 0, 2, 1, 3).reshape(-1, rows * side, columns * side)


def patchify(
    image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[np.ndarray, int, int]:
    """The patches of a picture [colours, height, width] in the order of `image_packing.Frame`, each with so many equal
    frames, and the numbers of rows and columns. In the place of the method of transformers' processors."""
    colours, height, width = image.shape
    square = patch_size * merge_size
    squares = colours, height // square, merge_size, patch_size, width // square, merge_size, patch_size
    patches = image.reshape(squares).transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    patches = np.broadcast_to(patches, (*patches.shape[:5], temporal_patch_size, *patches.shape[6:]))
    return patches.reshape(-1, colours * temporal_patch_size * patch_size**2), height // patch_size, width // patch_size
