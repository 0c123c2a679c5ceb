"""Exact answers of products with quantized weights, by NumPy on the host, which compiles nothing.

Weights are QuantArrays and BlockArrays of NumPy arrays. They become float32 a few rows at a time, and are multiplied in
float32, whose sums of thousands of products are right to about 1e-6.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxserve.pallas_kernels.quant_matmul import blocks, fragments
from jaxserve.pallas_kernels.quant_matmul.w8a8 import TINY, TOPS
from jaxserve.pallas_kernels.types import BlockArray, QuantArray

STEP = 1024  # outputs whose weights are floats at a time


def product(x: np.ndarray, w: QuantArray | BlockArray) -> np.ndarray:
    """x [tokens, in] times the transposed weight [out, in] -> float32 [tokens, out]. x is rounded first if the weight
    says so."""
    if isinstance(w, QuantArray) and w.activations is not None:
        wide = rounded(x, w)
    else:
        wide = x.astype(np.float32)
    y = np.empty((len(x), w.shape[0]), np.float32)
    for begin in range(0, w.shape[0], STEP):
        y[:, begin : begin + STEP] = wide @ values(w, begin, min(begin + STEP, w.shape[0])).T
    return y


def grouped_product(x: np.ndarray, w: QuantArray | BlockArray, group_sizes: np.ndarray) -> np.ndarray:
    """As `reference.grouped_quant_matmul`: each expert's rows of x times its weight, and 0 for rows of no expert. x is
    not rounded."""
    w = replace(w, activations=None) if isinstance(w, QuantArray) else w
    y = np.zeros((len(x), w.shape[-2]), np.float32)
    end = np.cumsum(group_sizes)
    for expert, size in enumerate(group_sizes):
        if size:
            mine = slice(end[expert] - size, end[expert])
            y[mine] = product(x[mine], jax.tree.map(lambda array, expert=expert: array[expert], w))
    return y


def exact_gate(activation: str, gate_up: np.ndarray) -> np.ndarray:
    """`ops.gate` by an activation of `ops.FUSED_ACTIVATIONS`: gates and ups in turn [tokens, 2 * size] -> [tokens,
    size]."""
    gate = gate_up[:, ::2]
    up = gate_up[:, 1::2]
    if activation == "gelu":
        return 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))).astype(gate.dtype) * up
    rate = gate if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(-np.clip(rate, -80, None))) * up


def values(w: QuantArray | BlockArray, begin: int, end: int) -> np.ndarray:
    """Rows [begin, end) of the weight [out, in], in float32."""
    if isinstance(w, BlockArray):
        of_blocks: Any = blocks.dequantize(jax.tree.map(lambda array: array[begin:end], w))
        return of_blocks
    block_of_row = np.arange(begin, end) // w.block[0]

    def spread(of_blocks: np.ndarray) -> np.ndarray:
        of_rows = of_blocks[block_of_row].astype(np.float32)
        return of_rows if of_rows.shape[1] == 1 else np.repeat(of_rows, w.block[1], axis=1)[:, : w.shape[1]]

    made = _floats(fragments.in_order(replace(w, codes=w.codes[begin:end])).codes)
    if w.zero is not None:
        made -= spread(w.zero)
    made *= spread(w.scale)
    if w.bias is not None:
        made += spread(w.bias)
    return made if w.gain is None else made * w.gain[begin:end]


def _floats(codes: np.ndarray) -> np.ndarray:
    """Codes as float32. Those of one byte are looked up: ml_dtypes converts one number after the other."""
    if codes.dtype.itemsize > 1:
        return codes.astype(np.float32)
    return np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)[codes.view(np.uint8)]


def rounded(x: np.ndarray, w: QuantArray) -> np.ndarray:
    """x [tokens, in], rounded as the weight's `activations` say; see `w8a8.quantize`."""
    wanted = w.activations
    inputs = x.shape[1]
    wide = x.astype(np.float32)
    assert wanted is not None
    group = wanted.group or inputs
    top = TOPS[wanted.dtype]
    if wanted.static:
        spread = w.input_scale
    else:
        size = np.pad(np.abs(wide), ((0, 0), (0, -inputs % group))).reshape(len(x), -1, group).max(-1)
        size = size if wanted.ceiling is None else np.minimum(size, np.float32(wanted.ceiling))
        scale = np.where(size > TINY, size * np.float32(1 / top), np.float32(1))
        spread = np.repeat(scale, group, axis=1)[:, :inputs]
    codes = np.clip(wide / spread, -top, top)
    if wanted.dtype == "int8":
        return np.round(codes) * spread
    return codes.astype(wanted.dtype).astype(np.float32) * spread
