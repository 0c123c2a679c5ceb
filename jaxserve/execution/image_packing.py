"""Lays the patches of several pictures out in one of a few fixed sizes, so that no picture compiles anything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxserve.models.vision.encoder import Patches
from jaxserve.models.vision.spec import EncoderConfig

PADDING = -1  # the number of the picture of patches that belong to none
CUBIC = -0.75  # as in PyTorch


class Frame(NamedTuple):
    """A frame of a processed picture on its way to the encoder. Frames do not see one another, nor do tiles.

    patches: uint8 [rows * columns, numbers of a patch], squares of `EncoderConfig.side` patches one after the other.
    shape: rows and columns.
    targets: int32 [embeddings], where the features of each embedding are written.
    """

    patches: np.ndarray
    shape: tuple[int, int]
    targets: np.ndarray


class Layout(NamedTuple):
    """What the encoder is told of each row of a frame; see `Patches`."""

    place: np.ndarray
    window: np.ndarray  # numbers from 0 on
    corner: np.ndarray
    share: np.ndarray

    def with_class_token(self, config: EncoderConfig) -> Layout:
        """A square more: the row of the class token, whose place is 0 and which has the last entry of the table, then
        padding. Places of patches then begin with 1."""
        count = len(self.window)
        more = (0, config.further)
        window = np.pad(self.window, more, constant_values=PADDING)
        window[count] = self.window[-1]
        corner, share = (np.pad(x, (more, (0, 0))) for x in (self.corner, self.share))
        corner[count, 0] = config.entries - 1
        share[count, 0] = 1
        return Layout(np.pad(self.place + 1, (more, (0, 0))), window, corner, share)


@lru_cache(maxsize=256)
def layout_of(config: EncoderConfig, rows: int, columns: int) -> Layout:
    """The layout of a frame of so many rows and columns of patches, each a multiple of `side`."""
    side = config.side
    squares = rows // side, side, columns // side, side
    row, column = (index.reshape(squares).swapaxes(1, 2).ravel() for index in np.indices((rows, columns)))
    count = rows * columns
    window = np.zeros(count, np.int32)
    if config.windowed:
        across = -(-columns // config.window)
        window = row // config.window * across + column // config.window
    corner = np.zeros((count, config.corners), np.int32)
    share = np.zeros((count, config.shares), np.float32)
    if config.interpolation == "sum":
        corner = np.stack([column, (config.table or 0) + row], axis=1)
        share = np.ones((count, 2), np.float32)
    elif config.table is not None and not config.corners:
        share = np.concatenate([_spread(row, rows, config.table), _spread(column, columns, config.table)], axis=1)
    elif config.table is not None:
        between = {"bilinear": _between, "bicubic": _among, "nearest": _before}[config.interpolation]
        row_at, row_share = between(row, rows, config.table)
        column_at, column_share = between(column, columns, config.table)
        corner = (row_at[:, :, None] * config.table + column_at[:, None, :]).reshape(count, -1)
        share = (row_share[:, :, None] * column_share[:, None, :]).reshape(count, -1)
    layout = Layout(np.stack([row, column], axis=1), window, corner, share)
    return layout if config.class_token is None else layout.with_class_token(config)


def _between(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two of `side` entries between which an index of an axis of `size` lies, int [indices, 2], and their shares.
    The first and the last indices lie on the first and the last entries."""
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(at)
    first = floor.astype(np.int64)
    share = at - floor
    return np.stack([first, np.minimum(first + 1, side - 1)], axis=1), np.stack([1 - share, share], axis=1)


def _among(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_between`, of the four entries around an index, with the shares of bicubic convolution (Keys 1981,
    doi:10.1109/TASSP.1981.1163711) with a slope of CUBIC. The edges of the axis are those of the entries, which go on
    beyond as at the edge."""
    at = (index.astype(np.float32) + np.float32(0.5)) / np.float32(size) * np.float32(side) - np.float32(0.5)
    floor = np.floor(at)
    steps = np.arange(-1, 3)
    far = np.abs(at[:, None] - floor[:, None] - steps)
    near = ((CUBIC + 2) * far - (CUBIC + 3)) * far * far + 1
    share = np.where(far <= 1, near, CUBIC * (((far - 5) * far + 8) * far - 4)).astype(np.float32)
    return np.clip(floor[:, None].astype(np.int64) + steps, 0, side - 1), share


def _spread(index: np.ndarray, size: int, side: int) -> np.ndarray:
    """The shares of all of `side` entries at an index of an axis of `size`, [indices, side]: a triangle that is as wide
    as two entries, or as two indices where these are further apart."""
    scale = np.float32(side / size)
    center = (index.astype(np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    far = np.abs(np.arange(side, dtype=np.float32) - center[:, None]) / max(scale, np.float32(1))
    share = np.maximum(1 - far, 0)
    return share / share.sum(axis=1, keepdims=True)


def _before(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_between`, of the last entry that begins before an index or with it. Of some sizes that no published model
    has, such as 19 or 25, transformers finds the entry before that one for a few indices, by rounding."""
    return (index * side // size)[:, None], np.ones((len(index), 1), np.float32)


def pack(config: EncoderConfig, frames: Sequence[Frame], size: int, nowhere: int) -> tuple[Patches, np.ndarray]:
    """The frames' rows with padding up to `size`, and where the features of each embedding are written, int32
    [size / joined]; what belongs to no embedding is written to `nowhere`."""
    values = np.zeros((size, config.patch), np.uint8)
    place = np.zeros((size, 2), np.int32)
    picture = np.full(size, PADDING, np.int32)
    window = np.full(size, PADDING, np.int32)
    corner = np.zeros((size, config.corners), np.int32)
    share = np.zeros((size, config.shares), np.float32)
    targets = np.full(size // config.joined, nowhere, np.int32)
    at = 0
    windows = 0
    for number, one in enumerate(frames):
        layout = layout_of(config, *one.shape)
        values[at : at + len(one.patches)] = one.patches
        targets[at // config.joined :][: len(one.targets)] = one.targets
        some = slice(at, at := at + len(layout.window))
        inside = layout.window >= 0
        place[some] = layout.place
        picture[some] = np.where(inside, number, PADDING)
        window[some] = np.where(inside, windows + layout.window, PADDING)
        corner[some] = layout.corner
        share[some] = layout.share
        windows += int(layout.window.max()) + 1
    return Patches(values, place, picture, window, corner, share), targets
