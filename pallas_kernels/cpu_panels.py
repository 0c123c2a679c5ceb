"""Weights in panels for the CPU: packing on the host, products, and single rows (`cpu_panel_matmul.cc`).

Grid: pieces of 64 outputs. XLA's threads take the next piece when they are free. Tiles within it have up to 6 rows of
x. Traffic: the weight once, in the file's width; x once per piece, from the CPU's cache.
Pipeline: memory is read from front to back, which suits the processor's own prefetching. Long rows of bfloat16
are taken in chunks that stay in the second-level cache (`short_panels` in `cpu_panel_product.h`).

A row's results do not depend on the number of rows, as every sum is in the order of the inputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import chain

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.pallas_kernels import cpu, cpu_build
from jaxserve.pallas_kernels.experts import ExpertWeights
from jaxserve.pallas_kernels.ops import Gate
from jaxserve.pallas_kernels.types import PanelArray, QuantArray

ROWS = 16  # rows of a panel
BLOCK = 32  # inputs of x that share a scale
UNIT = 64  # bytes that are a unit of offsets

# The arithmetic of products.
#   float32: everything. Results are bitwise those of the dequantized weight in float32.
#   int8: for quantized panels x is rounded to signed bytes in blocks of 32 inputs. Sums within a block are exact.
#   bfloat16: for bfloat16 panels x is rounded to bfloat16 if the processor multiplies pairs of them; else float32.
ARITHMETIC = {"float32": 0, "int8": 1, "bfloat16": 2}


class PanelType(IntEnum):
    """The contents of a panel, with the values of `cpu_panels.h`. Rows of the first types are packed as in files."""

    F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, GROUPED_8, GROUPED_4, MXFP4, NVFP4 = range(15)
    Q2_K, Q3_K, IQ4_NL, IQ4_XS = range(15, 19)


FLOATS = {
    np.dtype(np.float32): PanelType.F32,
    np.dtype(np.float16): PanelType.F16,
    np.dtype(ml_dtypes.bfloat16): PanelType.BF16,
}
GGUF_TYPES = {kind.name: kind for kind in PanelType if kind.name.startswith(("Q", "IQ"))}


@dataclass(frozen=True)
class Rows:
    """Rows of a weight in one type: bytes [rows, bytes of a row], contiguous. `blocks`: for a grouped type, how many
    blocks of 32 inputs share a scale."""

    type: PanelType
    data: np.ndarray
    blocks: int = 0


@cache
def _library() -> ctypes.CDLL:
    library = cpu_build.load(cpu_build.PANELS)
    library.jaxserve_panel_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64, ctypes.c_int64]
    library.jaxserve_panel_bytes.restype = ctypes.c_int64
    library.jaxserve_pack_panels.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 4
    library.jaxserve_pack_panels.restype = None
    return library


def available() -> bool:
    """Whether this machine has kernels for weights in panels."""
    return cpu.available(cpu_build.PANELS)


def pack(parts: Sequence[Rows], source: np.ndarray, inputs: int, arithmetic: str) -> PanelArray | None:
    """Packs a weight [len(source), inputs] on the host from rows of `parts`.

    `source` int64 has the index of each row among the rows of all parts, or -1 for a row of zeros. Returns None if
    rows of one panel have different types.
    """
    out = len(source)
    types = np.concatenate([np.full(len(part.data), part.type, np.int32) for part in parts])
    addresses = np.concatenate(
        [part.data.ctypes.data + np.arange(len(part.data)) * part.data.strides[0] for part in parts]
    )
    count = -(-out // ROWS)
    source = np.pad(source, (0, count * ROWS - out), constant_values=-1).reshape(count, ROWS)
    found = np.where(source < 0, -1, types[source])
    kinds = found.max(axis=1)
    if ((found != kinds[:, None]) & (found >= 0)).any():
        return None
    kinds = np.where(kinds < 0, types[0], kinds).astype(np.int32)
    blocks = max(part.blocks for part in parts)
    library = _library()
    known = {kind: library.jaxserve_panel_bytes(int(kind), inputs, blocks) for kind in set(kinds.tolist())}
    sizes = np.array([known[kind] for kind in kinds.tolist()], np.int64)
    offsets = np.cumsum(sizes) - sizes
    data = _aligned(int(sizes.sum()))
    rows = np.where(source < 0, 0, addresses[source])
    pointers = (array.ctypes.data for array in (kinds, offsets, rows, data))
    library.jaxserve_pack_panels(count, inputs, blocks, *pointers)
    table = np.stack([offsets // UNIT, kinds, np.full(count, blocks)], axis=1).astype(np.int32)
    return PanelArray(data.reshape(-1, UNIT), table, (out, inputs), arithmetic)


def pack_floats(values: np.ndarray, arithmetic: str) -> PanelArray:
    """Packs a matrix of one of the dtypes in FLOATS."""
    assert values.ndim == 2
    values = np.ascontiguousarray(values)
    packed = pack([Rows(FLOATS[values.dtype], values)], np.arange(len(values)), values.shape[1], arithmetic)
    assert packed is not None
    return packed


def type_of(w: QuantArray) -> PanelType | None:
    """Returns the panel type for a quantized weight, given as arrays or as their shapes, or None if there is none."""
    if w.order is not None:
        return None
    if w.codes.dtype == ml_dtypes.float4_e2m1fn:
        wanted = {(np.dtype(ml_dtypes.float8_e8m0fnu), 32): PanelType.MXFP4}
        wanted[np.dtype(ml_dtypes.float8_e4m3fn), 16] = PanelType.NVFP4
        found = wanted.get((np.dtype(w.scale.dtype), w.block[1]))
        plain = w.block[0] == 1 and w.zero is None and w.bias is None
        return found if plain and (w.gain is None or found == PanelType.NVFP4) else None
    if w.block[1] < w.shape[-1] and w.block[1] % BLOCK:
        return None
    return {np.dtype(ml_dtypes.int4): PanelType.GROUPED_4, np.dtype(np.int8): PanelType.GROUPED_8}.get(w.codes.dtype)


def pack_quantized(w: QuantArray, arithmetic: str) -> PanelArray:
    """Packs a quantized weight of NumPy arrays, which must have a panel type."""
    kind, (out, inputs) = type_of(w), w.shape
    assert kind is not None
    floats = kind in (PanelType.MXFP4, PanelType.NVFP4)
    group = min(w.block[1], inputs)
    data, blocks = (_float4_rows(w, kind), 0) if floats else (_grouped_rows(w, kind), -(-group // BLOCK))
    packed = pack([Rows(kind, data, blocks)], np.arange(out), inputs, arithmetic)
    assert packed is not None
    return packed


def _float4_rows(w: QuantArray, kind: PanelType) -> np.ndarray:
    """Codes, scales and gains of rows in the form that packing expects, bytes [out, bytes of a row]."""
    parts = [np.asarray(w.codes).view(np.uint8), np.asarray(w.scale).view(np.uint8)]
    if kind == PanelType.NVFP4:
        gain = np.ones((w.shape[0], 1), np.float32) if w.gain is None else np.asarray(w.gain, np.float32)
        parts.append(np.ascontiguousarray(gain).view(np.uint8))
    return np.concatenate(parts, axis=1)


def _grouped_rows(w: QuantArray, kind: PanelType) -> np.ndarray:
    """Codes from 0 on, scales and shifts of rows in the form that packing expects, bytes [out, bytes of a row]."""
    codes = np.asarray(w.codes)
    out = w.shape[0]
    offset = 8 if kind == PanelType.GROUPED_4 else 128

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(values).astype(np.float32), w.block[0], axis=0)[:out]

    scale = spread(w.scale)
    shift = -scale * (offset + (0 if w.zero is None else spread(w.zero)))
    if w.bias is not None:
        shift = shift + spread(w.bias)
    unsigned = (codes.astype(np.int16) + offset).astype(np.uint8)
    return np.concatenate([unsigned, scale.view(np.uint8), np.ascontiguousarray(shift).view(np.uint8)], axis=1)


def abstract(shape: tuple[int, ...], kind: PanelType, arithmetic: str, group: int = 0) -> PanelArray:
    """The shapes of a weight in panels of one type. `group`: inputs that share a scale of a grouped type."""
    out, inputs = shape
    count = -(-out // ROWS)
    blocks = -(-min(group, inputs) // BLOCK)
    size = count * _library().jaxserve_panel_bytes(int(kind), inputs, blocks)
    data = jax.ShapeDtypeStruct((size // UNIT, UNIT), np.uint8)
    table = jax.ShapeDtypeStruct((count, 3), np.int32)
    return PanelArray(data, table, (out, inputs), arithmetic)


def stack(members: Iterable[PanelArray | None], count: int) -> PanelArray | None:
    """Stacks `count` weights in panels on the host. None if one is not in panels, or its panels differ in form."""
    members = iter(members)
    first = next(members)
    if first is None:
        return None
    size = len(first.data)
    panels = len(first.table)
    data = _aligned(count * size * UNIT).reshape(-1, UNIT)
    table = np.empty((count * panels, 3), np.int32)
    for number, member in enumerate(chain([first], members)):
        if member is None or member.data.shape != first.data.shape or (member.table != first.table).any():
            return None
        data[number * size : (number + 1) * size] = member.data
        table[number * panels : (number + 1) * panels] = member.table + np.array([number * size, 0, 0], np.int32)
    return PanelArray(data, table, (count, *first.shape), first.arithmetic)


def abstract_stack(one: PanelArray, count: int) -> PanelArray:
    """The shapes of a stack of `count` weights like `one`, which has arrays or shapes."""
    data, table = (
        jax.ShapeDtypeStruct((count * array.shape[0], array.shape[1]), array.dtype) for array in (one.data, one.table)
    )
    return PanelArray(data, table, (count, *one.shape), one.arithmetic)


def matmul(x: jax.Array, w: PanelArray, count: jax.Array | None = None) -> jax.Array:
    """See `ops.panel_matmul`."""
    assert x.dtype == jnp.float32, f"x must be float32, not {x.dtype}"
    assert available()
    count = jnp.int32(len(x)) if count is None else count
    call = jax.ffi.ffi_call("jaxserve_panel_matmul", jax.ShapeDtypeStruct((len(x), w.shape[0]), jnp.float32))
    arithmetic = np.int64(ARITHMETIC[w.arithmetic])
    return call(x, w.data, w.table, count, out=np.int64(w.shape[0]), inputs=np.int64(w.shape[1]), arithmetic=arithmetic)


def grouped_matmul(x: jax.Array, w: PanelArray, group_sizes: jax.Array) -> jax.Array:
    """`experts.grouped_matmul` for float32 x and a stack in panels."""
    assert x.dtype == jnp.float32, f"x must be float32, not {x.dtype}"
    assert available()
    call = jax.ffi.ffi_call("jaxserve_panel_grouped_matmul", jax.ShapeDtypeStruct((len(x), w.shape[1]), jnp.float32))
    return call(x, w.data, w.table, group_sizes.astype(jnp.int32), arithmetic=np.int64(ARITHMETIC[w.arithmetic]))


# The operations between the products of a gated MLP, with the values of `cpu_panel_experts.h`.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped": 3}


def mixture(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    w: ExpertWeights,
    *,
    gate: Gate,
    count: jax.Array | None = None,
    weighs_inputs: bool = False,
) -> jax.Array:
    """`experts.mixture` for float32 x and stacks in panels. Weights of experts that no token uses are not read."""
    assert x.dtype == jnp.float32, f"x must be float32, not {x.dtype}"
    assert available()
    first = w.gate_up
    second = w.down
    number, out, size = second.shape
    bias = jnp.zeros((0, 0), jnp.float32) if w.gate_up_bias is None else w.gate_up_bias.astype(jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_panel_experts", jax.ShapeDtypeStruct((len(x), out), jnp.float32))
    panels = first.data, first.table, second.data, second.table
    return call(
        x,
        chosen,
        weights,
        *panels,
        bias,
        jnp.int32(len(x)) if count is None else count,
        experts=np.int64(number),
        size=np.int64(size),
        activation=np.int64(ACTIVATIONS["clamped" if gate.limit is not None else gate.activation]),
        limit=np.float32(gate.limit or 0.0),
        weighs_inputs=np.int64(weighs_inputs),
        first=np.int64(ARITHMETIC[first.arithmetic]),
        second=np.int64(ARITHMETIC[second.arithmetic]),
    )


def rows(w: PanelArray, ids: jax.Array) -> jax.Array:
    """Rows ids int32 [n] of a weight in panels -> float32 [n, in]. ids are clamped to its rows."""
    assert available()
    call = jax.ffi.ffi_call("jaxserve_panel_rows", jax.ShapeDtypeStruct((len(ids), w.shape[1]), jnp.float32))
    return call(ids, w.data, w.table, out=np.int64(w.shape[0]), inputs=np.int64(w.shape[1]))


def _aligned(size: int) -> np.ndarray:
    """Zeros at an address whose alignment lets JAX use the array without a copy."""
    raw = np.zeros(size + UNIT, np.uint8)
    start = -raw.ctypes.data % UNIT
    return raw[start : start + size]
