"""The gated delta rule on TPUs, in Mosaic, in steps that only decode: one kernel for the convolution and the rule.
Steps with prompts are plain XLA. Not yet run on a TPU.

Grid: (rows,). A step has all of a row's states of the layer. They come from the row's slot and go back there.
Traffic: each matrix is read and written once, in place; the convolution's weights once for the batch.
Pipeline: pallas_call's double buffering, so that the next row's states come and the last row's go meanwhile.
Arithmetic: on the vector unit, in float32. A key becomes a column by a sum over a masked square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels import states_tpu
from jaxserve.pallas_kernels.delta_net import reference
from jaxserve.pallas_kernels.delta_net.reference import EPS
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.tpu_dma import LANES, block
from jaxserve.pallas_kernels.types import DeltaState

VMEM_LIMIT = 64 << 20


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if problem.rows % LANES or problem.columns % LANES:
        return f"a matrix must have multiples of {LANES} rows and columns, not {problem.rows} x {problem.columns}"
    each = problem.group * problem.rows * problem.columns + (problem.width - 1) * problem.channels
    return states_tpu.why_not(device, problem, 4 * problem.heads * each)


def delta_net(
    heads: DeltaHeads,
    state: DeltaState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    key_dim: int,
    activation: Callable[[jax.Array], jax.Array],
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, DeltaState]:
    """As `reference.delta_net`, for problems that `why_not` allows. Padding is zeros, or what plain XLA makes of it."""
    if not decode_only:
        options: dict[str, Any] = {"key_dim": key_dim, "activation": activation, "static": static}
        return reference.delta_net(heads, state, rows, first, **options)
    tokens, key_heads, channels = heads.qkv.shape
    group, _, value = state.matrix.shape[2:]
    kept = heads.conv.shape[-1] - 1
    of_rows = states_tpu.sources(rows), rows.target, rows.fresh.astype(jnp.int32), jnp.asarray(first, jnp.int32)[None]
    of_head = (1, 1, key_heads * group)
    keep, rate = (x.reshape(-1, *of_head[1:]) for x in (jnp.exp(heads.decay), heads.rate))
    scalars = pl.BlockSpec(of_head, lambda r, *_: (r, 0, 0), memory_space=pltpu.SMEM)
    weights = jnp.moveaxis(heads.conv, -1, 0)
    out = jax.ShapeDtypeStruct((tokens, key_heads, group * value), jnp.float32)
    matrix = (None, key_heads, group, key_dim, value)
    inputs = (None, key_heads, kept * channels)

    def read(r, source, target, fresh, first):
        return first[0] + source[r]

    def written(r, source, target, fresh, first):
        return first[0] + target[r]

    made, *after = pl.pallas_call(
        partial(_kernel, key_dim, group, value),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(of_rows),
            grid=(tokens,),
            in_specs=[
                block(heads.qkv, (None, key_heads, channels), lambda r, *_: (r, 0, 0)),
                scalars,
                scalars,
                block(weights, weights.shape, lambda r, *_: (0, 0, 0)),
                block(state.matrix, matrix, lambda r, *s: (read(r, *s), 0, 0, 0, 0)),
                block(state.inputs, inputs, lambda r, *s: (read(r, *s), 0, 0)),
            ],
            out_specs=[
                block(out, (None, key_heads, group * value), lambda r, *_: (r, 0, 0)),
                block(state.matrix, matrix, lambda r, *s: (written(r, *s), 0, 0, 0, 0)),
                block(state.inputs, inputs, lambda r, *s: (written(r, *s), 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM((key_heads, channels), jnp.float32)],
        ),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)],
        input_output_aliases={len(of_rows) + 4: 1, len(of_rows) + 5: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        name="delta_net_decode",
    )(*of_rows, heads.qkv, keep, rate, weights, *state)
    return made.reshape(tokens, key_heads, group, value), DeltaState(*after)


def _kernel(key: int, group: int, value: int, *refs) -> None:
    """Of a row: qkv [key_heads, channels], keep and rate in SMEM [1, key_heads * group], weights [width, key_heads,
    channels], and states. `mixed` [key_heads, channels] is for the convolution's results."""
    _, _, fresh, _, qkv, keep, rate, weights, before, last, out, after, kept, mixed = refs
    begun = fresh[pl.program_id(0)] == 0
    channels = qkv.shape[-1]
    width = weights.shape[0]
    own = qkv[...].astype(jnp.float32)
    total = own * weights[width - 1].astype(jnp.float32)
    for tap in range(width - 1):
        old = jnp.where(begun, last[:, tap * channels : (tap + 1) * channels], 0.0)
        total += old * weights[tap].astype(jnp.float32)
        if tap:
            kept[:, (tap - 1) * channels : tap * channels] = old
    kept[:, (width - 2) * channels :] = own
    total = states_tpu.silu(total)
    q, k = (_unit(total[:, i * key : (i + 1) * key]) for i in range(2))
    mixed[:, :key] = q * key**-0.5
    mixed[:, key : 2 * key] = k
    mixed[:, 2 * key :] = total[:, 2 * key :]

    for head in range(qkv.shape[0]):  # Mosaic loads no row whose place it does not know
        here = slice(head, head + 1)
        q = mixed[here, :key]
        k = mixed[here, key : 2 * key]
        both = jnp.sum(q * k, axis=1, keepdims=True)
        q_column = states_tpu.column(q)
        k_column = states_tpu.column(k)
        for g in range(group):
            at = head * group + g
            columns = slice(g * value, (g + 1) * value)
            s = jnp.where(begun, before[head, g], 0.0) * keep[0, 0, at]
            v = mixed[here, 2 * key + g * value : 2 * key + (g + 1) * value]
            added = rate[0, 0, at] * (v - jnp.sum(s * k_column, axis=0, keepdims=True))
            out[here, columns] = jnp.sum(s * q_column, axis=0, keepdims=True) + both * added
            after[head, g] = s + k_column * added


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=1, keepdims=True) + EPS)
