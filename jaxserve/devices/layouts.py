"""The order in which a TPU's memory holds weights.

XLA lays out each parameter of a program in the order that needs the least padding: a TPU pads the last axis of an array
to 128 numbers, and the axis before it to 8. Kernels read matrices row by row. XLA would therefore copy a matrix in each
step whose inputs on a device are no multiple of 128, such as 2,880 or 192. So large weights get the kernels' order when
they are loaded, and programs are compiled for this order. It costs the padding: 192 inputs take the memory of 256.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, Sharding

from jaxserve.pallas_kernels.types import BlockArray, PanelArray, QuantArray

PLATFORMS = ("tpu",)
LARGE = 1 << 20  # bytes on a device; smaller arrays stay as XLA lays them out
LANES = 128
SUBLANES = 8
_KINDS = QuantArray | BlockArray | PanelArray


def in_order_of_kernels(params: Any) -> Any:
    """The parameters, a pytree of sharded arrays or of their shapes, in the order that kernels read. Arrays whose order
    changes are deleted."""
    return jax.tree.map(_one, params, is_leaf=lambda x: isinstance(x, _KINDS))


def _one(w: Any) -> Any:
    if not isinstance(w, QuantArray):
        return w if isinstance(w, _KINDS) else _ordered(w, by_rows(w.ndim))
    changed = {"codes": _ordered(w.codes, by_rows(w.codes.ndim))}
    if w.block[0] == 1:
        for name in ("scale", "zero", "bias"):
            if (array := getattr(w, name)) is not None:
                changed[name] = _ordered(array, order_of_scales(array.sharding.shard_shape(array.shape)))
    return dataclasses.replace(w, **changed)


def by_rows(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def order_of_scales(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The order of a device's scales [..., out, groups]: as `quant_matmul.tpu_plan.Plan.outs_first` says."""
    rank = len(shape)
    return by_rows(rank) if shape[-1] % LANES == 0 else (*range(rank - 2), rank - 1, rank - 2)


def _ordered(x: Any, order: tuple[int, ...]) -> Any:
    """The array, or its shape, in this order, if that is to be chosen for it."""
    if not is_ours(x) or _order(x) == order:
        return x
    place = Format(Layout(order), x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    made = jax.block_until_ready(jax.device_put(x, place))  # one at a time: there may be no memory for more copies
    x.delete()
    return made


def is_ours(x: Any) -> bool:
    """Whether an array, or its shape, is a large matrix on devices whose order is chosen here."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.devices.flat[0].platform not in PLATFORMS:
        return False
    shape = sharding.shard_shape(x.shape)
    return len(shape) in (2, 3) and math.prod(shape) * jax.dtypes.itemsize_bits(x.dtype) >= 8 * LARGE


def place_of(x: Any) -> Format | Sharding:
    """The sharding of an array or of its shape, with its order where that is chosen here; for compiling programs."""
    order = _order(x) if is_ours(x) else None
    return x.sharding if order is None else Format(Layout(order), x.sharding)


def device_bytes(x: Any) -> int:
    """Bytes of an array, or of its shape, on each device, with padding where its order is chosen here."""
    shape = list(x.sharding.shard_shape(x.shape))
    order = _order(x) if is_ours(x) else None
    if order is not None:
        last = order[-1]
        before = order[-2]
        shape[last] = -(-shape[last] // LANES) * LANES
        rows = min(SUBLANES, 1 << (shape[before] - 1).bit_length())
        shape[before] = -(-shape[before] // rows) * rows
    return math.ceil(math.prod(shape) * jax.dtypes.itemsize_bits(x.dtype) / 8)


def _order(x: Any) -> tuple[int, ...] | None:
    """The order of an array's axes in memory, the slowest first. None: the order of a shape is left to XLA."""
    layout = x.format.layout
    return layout.major_to_minor if isinstance(layout, Layout) else None
