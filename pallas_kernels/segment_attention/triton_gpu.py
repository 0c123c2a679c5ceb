"""Attention within segments on NVIDIA GPUs, in Triton. Not yet run on a GPU.

Grid: a program for each block of QUERIES rows and each head. It reads the blocks of keys that `reference.spans` names.
Traffic: keys and values of a picture are read once for each of its blocks of queries, from the second-level cache.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.registry import Device, SegmentProblem
from jaxserve.pallas_kernels.segment_attention.reference import padded, spans
from jaxserve.pallas_kernels.triton_compat import pad

FLOATS = ("bfloat16", "float16", "float32")
QUERIES = 128  # of a program; half as many in float32
KEYS = 64  # of a block; likewise
MOST = 128  # channels of a head
LOG2E = tl.constexpr(1.4426950408889634)


def why_not(device: Device, problem: SegmentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if device.platform != "gpu" or (device.capability or (0, 0)) < (8, 0):
        return "it is for NVIDIA GPUs of compute capability 8.0 or newer"
    if problem.dtype.name not in FLOATS:
        return f"queries must be one of {', '.join(FLOATS)}, not {problem.dtype}"
    if problem.head_dim > MOST:
        return f"head_dim must be at most {MOST}, not {problem.head_dim}"
    return None


@triton.jit
def _attend(
    q, k, v, segment, begin, end, out,
    SCALE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    real = (dim < DIM)[None, :]
    offset = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    query = tl.load(q + offset, mask=real, other=0.0)
    own = tl.load(segment + row)
    peak = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    values = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for block in range(tl.load(begin + tile), tl.load(end + tile)):
        other = block * KEYS + tl.arange(0, KEYS)
        theirs = tl.load(segment + other)
        inside = real & (theirs >= 0)[:, None]
        at = (other.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        value = tl.load(v + at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (SCALE * LOG2E)
        seen = own[:, None] == theirs[None, :]
        scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(peak, tl.max(scores, 1))
        keep = tl.exp2(peak - higher)
        share = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        total = total * keep + tl.sum(share, 1)
        values = tl.dot(share.to(query.dtype), value, values * keep[:, None], input_precision="ieee")
        peak = higher
    values = values / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + offset, values.to(query.dtype), mask=real)


def segment_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, scale: float) -> jax.Array:
    """As `reference.segment_attention`."""
    rows, heads, dim = q.shape
    narrow = 2 if q.dtype.itemsize > 2 else 1
    queries = QUERIES // narrow
    keys = KEYS // narrow
    q, k, v, segment = padded(q, k, v, segment, queries)
    begin, end = spans(segment, queries, keys)
    return triton_compat.call(
        _attend, q, k, v, segment, begin, end, out=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(len(q) // queries, heads), num_warps=8 if queries >= 128 else 4, num_stages=2, SCALE=scale, HEADS=heads,
        DIM=dim, DIM_PAD=pad(dim, 16), QUERIES=queries, KEYS=keys,
    )[0][:rows]  # fmt: skip
