"""LoRA adapters on TPUs, in Mosaic: two kernels for a product. Compiled for v5e and v6e, not yet run on one.

Shrink. Grid: (tiles of tokens, adapters). A step multiplies the tokens of a tile with the matrix A of one of the
  adapters that they use, and keeps the result for the tokens of this adapter.
Expand. Grid: (tiles of tokens, blocks of outputs, adapters). A step multiplies these results with a block of B, and
  adds the products to y.

Tokens need not be sorted. The adapters of each tile are listed in SMEM, and the last axis of both grids ends, at run
time, with the most adapters that a tile has.

Traffic: the matrices of an adapter, padded with zeros to the pool's rank, once for each tile with one of its tokens. A
  decode step has one tile, so it reads the adapters in the batch once, however many are in the pool. x is read once, y
  is read and written once, the low-rank results are written once and read once for each block of outputs.
Pipeline: pallas_call's double buffering. A tile with fewer adapters than another stays on its last one, so that nothing
  is fetched for the steps that it sits out.

Many adapters in one batch were described by Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.lora import reference
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.tpu_dma import LANES, TILE_ROWS, block

TOKENS = 256  # most tokens of a tile
TILE_BYTES = 8 << 20  # most bytes of x in a tile, and of an adapter's matrix A
OUTPUTS = 1 << 19  # most numbers of y in a block
VMEM_LIMIT = 48 << 20
DTYPES = (jnp.bfloat16, jnp.float32)


def why_not(device: Device) -> str | None:
    """Returns the reason why `device` cannot use the kernels, or None where it can."""
    if device.platform != "tpu" or any(old in device.kind for old in ("v2", "v3", "v4")):
        return "they are for TPUs v5e, v5p and newer, whose VMEM holds their tiles"
    return None


def add_adapters(
    y: jax.Array,
    x: jax.Array,
    stack: AdapterStack,
    place: jax.Array,
    count: jax.Array | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """See `reference.add_adapters`, which is called for what the kernels do not support. The matrices become the dtype
    of x where they are multiplied."""
    (tokens, inputs), rank = x.shape, stack.rank
    wide = max(x.dtype.itemsize, stack.a.dtype.itemsize) * inputs
    odd = rank % TILE_ROWS or stack.parts * rank * wide > TILE_BYTES
    if odd or any(array.dtype not in DTYPES for array in (y, x, stack.a)):
        return reference.add_adapters(y, x, stack, place, count, axes)
    tile = min(TOKENS, TILE_BYTES // wide // 16 * 16)
    if tokens <= tile:
        tile = tokens  # the whole axis
    tiles = pl.cdiv(tokens, tile)
    real = tokens if count is None else count
    place = jnp.where(jnp.arange(tokens) < real, place, -1)
    place = jnp.pad(place, (0, tiles * tile - tokens), constant_values=-1)
    listed = _adapters_of(place.reshape(tiles, tile), len(stack.a))
    low = _shrink(x, stack, place[:, None], listed, tile)
    added = _expand(y[:tokens], low, stack, place[:, None], listed, tile, x.dtype)
    return added if len(y) == tokens else y.at[:tokens].set(added)


def _adapters_of(place: jax.Array, places: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The adapters that each tile of tokens uses, int32 [tiles, places], with the last one repeated; how many they are,
    int32 [tiles]; and the most of a tile, at least 1."""
    before = jnp.cumsum(jnp.any(place[:, :, None] == jnp.arange(places), axis=1), axis=1, dtype=jnp.int32)
    number = before[:, -1]
    turn = jnp.minimum(jnp.arange(places), jnp.maximum(number - 1, 0)[:, None])
    found = jnp.sum(before[:, None, :] <= turn[:, :, None], axis=2, dtype=jnp.int32)
    return jnp.minimum(found, places - 1), number, jnp.maximum(jnp.max(number), 1)


def _shrink(
    x: jax.Array, stack: AdapterStack, place: jax.Array, listed: tuple[jax.Array, jax.Array, jax.Array], tile: int
) -> jax.Array:
    """x [tokens, in] times the matrix A of each token's adapter, float32 [tokens, parts * rank]."""
    (tokens, inputs), width = x.shape, stack.a.shape[1]
    adapters, number, most = listed
    result = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    return pl.pallas_call(
        _shrink_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(tokens, tile), most),
            in_specs=[
                block(place, (tile, 1), lambda i, u, *_: (i, 0)),
                block(x, (tile, inputs), lambda i, u, *_: (i, 0)),
                block(stack.a, (None, width, inputs), lambda i, u, adapters, _: (adapters[i, u], 0, 0)),
            ],
            out_specs=block(result, (tile, width), lambda i, u, *_: (i, 0)),
        ),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="shrink_to_adapters",
    )(adapters, number, place, x, stack.a)


def _shrink_kernel(adapters, number, place, x, a, low):
    i = pl.program_id(0)
    u = pl.program_id(1)

    @pl.when(u == 0)
    def _():
        low[...] = jnp.zeros_like(low)

    @pl.when(u < number[i])
    def _():
        mine = place[...] == adapters[i, u]
        low[...] = jnp.where(mine, _dot(x[...], a[...].astype(x.dtype), 1), low[...])


def _expand(
    y: jax.Array,
    low: jax.Array,
    stack: AdapterStack,
    place: jax.Array,
    listed: tuple[jax.Array, jax.Array, jax.Array],
    tile: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """y [tokens, out] plus the product of `low` with the matrix B of each token's adapter, multiplied in this dtype."""
    (tokens, outputs), rank, width = y.shape, stack.rank, low.shape[1]
    adapters, number, most = listed
    size = outputs if outputs % LANES else min(outputs, OUTPUTS // max(tile, 16) // LANES * LANES)
    return pl.pallas_call(
        partial(_expand_kernel, stack.widths, size, dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(tokens, tile), pl.cdiv(outputs, size), most),
            in_specs=[
                block(place, (tile, 1), lambda i, j, u, *_: (i, 0)),
                block(low, (tile, width), lambda i, j, u, *_: (i, 0)),
                block(stack.b, (None, rank, size), lambda i, j, u, adapters, _: (adapters[i, u], 0, j)),
                block(y, (tile, size), lambda i, j, u, *_: (i, j)),
            ],
            out_specs=block(y, (tile, size), lambda i, j, u, *_: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="expand_from_adapters",
    )(adapters, number, place, low, stack.b, y)


def _expand_kernel(widths: tuple[int, ...], size: int, dtype, adapters, number, place, low, b, y, out):
    i, j, u = (pl.program_id(axis) for axis in range(3))

    @pl.when(u == 0)
    def _():
        out[...] = y[...]

    @pl.when(u < number[i])
    def _():
        # The rows of b, once for each part, with zeros for the outputs of others: one product serves all parts.
        mine = place[...] == adapters[i, u]
        right = b[...].astype(jnp.float32)
        turn = (j * size + lax.broadcasted_iota(jnp.int32, right.shape, 1)) % sum(widths)
        ends = [sum(widths[: part + 1]) for part in range(len(widths))]
        owned = [(turn >= end - width) & (turn < end) for end, width in zip(ends, widths, strict=True)]
        right = jnp.concatenate([jnp.where(one, right, 0.0) for one in owned]).astype(dtype)
        made = _dot(low[...].astype(dtype), right, 0)
        out[...] = jnp.where(mine, (out[...].astype(jnp.float32) + made).astype(out.dtype), out[...])


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """The product over the last axis of x and this axis of w, in float32."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, w, (((1,), (axis,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
