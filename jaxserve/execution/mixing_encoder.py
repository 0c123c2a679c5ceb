"""The encoder of models that put the features of a picture's tiles together as those of one picture (`images.area`).

The features of tiles are written to an array of their own. From there a further program mixes those of the picture:
first those of the tile that shows all of it, then row by row those of the area, each row with a learned vector behind
it. Where the area has fewer rows and columns than its tiles, each feature lies between four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.devices.mesh import replicated
from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.execution.signatures import Signature
from jaxserve.models.vision.encoder import ImageEncoder
from jaxserve.pallas_kernels.operands import value_of
from jaxserve.scheduling.image_prompts import EncoderJob
from jaxserve.types import Area

FEATURES = 1024  # that the program mixes at a time
MIXING = 0  # stands for it among the numbers of rows of the encoder's programs
NEWLINE = -1  # in the place of a tile's feature: the vector behind a row


class MixingEncoder(EncoderRunner):
    """`EncoderRunner`, for pictures of up to `tiles` tiles."""

    def __init__(
        self, encoder: ImageEncoder, params: Any, mesh: Mesh, *, fewest: int, most: int, rows: int, tiles: int
    ):
        super().__init__(encoder, params, mesh, fewest=fewest, most=most, rows=rows)
        assert encoder.config.table is not None
        self._side = encoder.config.table
        self._of_tiles = tiles * self._side**2
        self._tiles: jax.Array | None = None

    @property
    def written_shape(self) -> tuple[int, int]:
        return self._of_tiles, self.encoder.config.width

    @property
    def programs(self) -> list[int]:
        return [MIXING, *self.sizes]

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + math.prod(self.written_shape) * np.dtype(self.encoder.dtype).itemsize

    def encode(self, images: jax.Array, jobs: Sequence[EncoderJob]) -> jax.Array:
        if self._tiles is None:
            zeros = partial(jnp.zeros, self.written_shape, self.encoder.dtype)
            self._tiles = jax.jit(zeros, out_shardings=replicated(self.mesh))()
        for job in jobs:
            area = job.image.area
            assert area is not None
            rows = np.arange(job.image.num_patches, dtype=np.int32)
            self._tiles = super().encode(self._tiles, [EncoderJob(job.image, rows)])
            sources, shares = mixture(area, self._side)
            for first in range(0, len(sources), FEATURES):
                some = slice(first, first + FEATURES)
                given = filled(sources[some], NEWLINE), filled(shares[some], 0), filled(job.rows[some], self.rows)
                images = self._get(MIXING)(self.params, images, self._tiles, *given)
        return images

    def signature(self, size: int) -> Signature:
        if size != MIXING:
            return super().signature(size)
        everywhere = replicated(self.mesh)
        dtype = self.encoder.dtype

        def mix(
            params: Any, images: jax.Array, tiles: jax.Array, sources: jax.Array, shares: jax.Array, targets: jax.Array
        ) -> jax.Array:
            mixed = (tiles[sources].astype(jnp.float32) * shares[:, :, None]).sum(axis=1).astype(dtype)
            mixed = jnp.where(sources[:, :1] == NEWLINE, value_of(params["newline"]), mixed)
            return images.at[targets].set(mixed.astype(images.dtype), mode="drop")

        def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.params)
        arrays = like(self.rows_shape, dtype), like(self.written_shape, dtype)
        given = like((FEATURES, 4), jnp.int32), like((FEATURES, 4), jnp.float32), like((FEATURES,), jnp.int32)
        return Signature(mix, (1,), (params, *arrays, *given), everywhere)


def filled(x: np.ndarray, value: int) -> np.ndarray:
    """With further rows of `value`, up to FEATURES."""
    return np.pad(x, ((0, FEATURES - len(x)), *[(0, 0)] * (x.ndim - 1)), constant_values=value)


def mixture(area: Area, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four features of tiles between which each of a picture's features lies, int32 [features, 4], and their
    shares, float32. NEWLINE: the feature is the vector behind a row. `side`: rows of a tile's features."""
    row, row_share = between(area.rows, area.height, area.top)
    column, column_share = between(area.columns, area.width, area.left)
    row, column = row[:, None, :, None], column[None, :, None, :]
    tile = 1 + row // side * area.across + column // side
    of_area = (tile * side + row % side) * side + column % side
    share = row_share[:, None, :, None] * column_share[None, :, None, :]
    shape = area.rows, area.columns, 4
    behind = ((0, 0), (0, 1), (0, 0))
    sources = np.pad(of_area.reshape(shape), behind, constant_values=NEWLINE).reshape(-1, 4)
    shares = np.pad(share.reshape(shape), behind).reshape(-1, 4)
    whole = np.arange(side**2)[:, None].repeat(4, axis=1)
    return (
        np.concatenate([whole, sources]).astype(np.int32),
        np.concatenate([np.eye(1, 4).repeat(len(whole), axis=0), shares]).astype(np.float32),
    )


def between(count: int, size: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """As `count` indices spread over `size` entries from `first` on: the two entries between which each lies, int
    [count, 2], and their shares. The edges are those of the entries."""
    at = np.float32(size / max(count, 1)) * (np.arange(count, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    at = np.maximum(at, 0)
    floor = at.astype(np.int64)
    share = at - floor.astype(np.float32)
    return first + np.stack([floor, np.minimum(floor + 1, size - 1)], axis=1), np.stack([1 - share, share], axis=1)
