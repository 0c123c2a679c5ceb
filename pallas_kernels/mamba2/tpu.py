"""Mamba-2 on TPUs, in Mosaic, in steps that only decode: one kernel for the convolutions and the recurrence. Steps with
prompts are plain XLA. Not yet run on a TPU.

Grid: (rows,). A step has all of a row's states of the layer. They come from the row's slot and go back there.
Traffic: each matrix is read and written once, in place; the convolutions' weights once for the batch.
Pipeline: pallas_call's double buffering, so that the next row's states come and the last row's go meanwhile.
Arithmetic: on the vector unit, in float32. Vectors become columns, and results rows, by sums over a masked square.
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
from jaxserve.pallas_kernels.mamba2 import reference
from jaxserve.pallas_kernels.operands import MambaInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.tpu_dma import LANES, block
from jaxserve.pallas_kernels.types import MambaState

VMEM_LIMIT = 64 << 20


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    if problem.columns % LANES:
        return f"a matrix must have a multiple of {LANES} columns, not {problem.columns}"
    if (LANES % problem.rows and problem.rows % LANES) or problem.heads * problem.rows % LANES:
        return f"{problem.heads} heads of {problem.rows} numbers do not divide into vectors of {LANES}"
    matrices = problem.heads * problem.rows * problem.columns
    return states_tpu.why_not(device, problem, 4 * (matrices + 2 * (problem.width - 1) * problem.channels))


def mamba2(
    inputs: MambaInputs,
    state: MambaState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    groups: int,
    per_group: int,
    activation: Callable[[jax.Array], jax.Array],
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, MambaState]:
    """As `reference.mamba2`, for problems that `why_not` allows."""
    if not decode_only:
        options: dict[str, Any] = {"groups": groups, "per_group": per_group, "activation": activation, "static": static}
        return reference.mamba2(inputs, state, rows, first, **options)
    tokens, channels = inputs.x.shape
    heads, dim, size = state.matrix.shape[1:]
    shared = inputs.bc.shape[1]
    where = states_tpu.sources(rows), rows.target, rows.fresh.astype(jnp.int32), jnp.asarray(first, jnp.int32)[None]
    prefetched = *where, inputs.group
    keep, step = (x.reshape(tokens, 1, heads) for x in (jnp.exp(inputs.step * inputs.a), inputs.step))
    share = jnp.repeat(inputs.d, dim)[None]
    scalars = pl.BlockSpec((1, 1, heads), lambda r, *_: (r, 0, 0), memory_space=pltpu.SMEM)

    def of_token(x: Any) -> pl.BlockSpec:
        return block(x, (None, 1, x.shape[-1]), lambda r, *_: (r, 0, 0))

    def whole(x: jax.Array) -> pl.BlockSpec:
        return block(x, x.shape, lambda r, *_: (0, 0))

    def of_states(x: jax.Array, slots: int) -> pl.BlockSpec:
        rest = (0,) * (x.ndim - 1)
        return block(x, (None, *x.shape[1:]), lambda r, *s: (s[3][0] + s[slots][r], *rest))

    x, bc = inputs.x[:, None], inputs.bc[:, None]
    taps = [w.T.astype(jnp.float32) for w in (inputs.conv, inputs.conv_bc)]
    biases = [
        jnp.zeros((1, count), jnp.float32) if bias is None else bias[None].astype(jnp.float32)
        for bias, count in ((inputs.conv_bias, channels), (inputs.conv_bc_bias, shared))
    ]
    out = jax.ShapeDtypeStruct((tokens, 1, channels), jnp.float32)
    weights = [taps[0], biases[0], taps[1], biases[1], share]
    made, *after = pl.pallas_call(
        partial(_kernel, dim, size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(tokens,),
            in_specs=[
                of_token(x), of_token(bc), scalars, scalars, *map(whole, weights), *(of_states(x, 0) for x in state),
            ],
            out_specs=[of_token(out), *(of_states(x, 1) for x in state)],
            scratch_shapes=[pltpu.VMEM((1, channels), jnp.float32), pltpu.VMEM((1, shared), jnp.float32)],
        ),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)],
        input_output_aliases={len(prefetched) + 9 + i: 1 + i for i in range(3)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT),
        name="mamba2_decode",
    )(*prefetched, x, bc, keep, step, *weights, *state)  # fmt: skip
    return made.reshape(tokens, heads, dim), MambaState(*after)


def _kernel(dim: int, size: int, *refs) -> None:
    """Of a row: x [1, heads * dim] and bc [1, shared], keep and step in SMEM [1, heads], the convolutions' weights
    [width, channels] and biases [1, channels], D for each of x, and states. `own` and `mixed` are for the
    convolutions' results."""
    _, _, fresh, _, group, x, bc, keep, step, w, bias, w_bc, bias_bc, share, *states, own, mixed = refs
    before, last, last_shared, out, after, kept, kept_shared = states
    begun = fresh[pl.program_id(0)] == 0
    own[...] = _convolve(x, w, bias, last, kept, begun)
    mixed[...] = _convolve(bc, w_bc, bias_bc, last_shared, kept_shared, begun)
    wide = max(dim, LANES)
    some = wide // dim  # heads of a vector

    def some_heads(i, _):
        lanes = pl.ds(pl.multiple_of(i * wide, LANES), wide)
        mine = own[:, lanes]
        made = []
        for j in range(some):
            head = i * some + j
            start = pl.multiple_of(group[head] * size, LANES)
            b = mixed[:, pl.ds(start, size)]
            c = mixed[:, pl.ds(pl.multiple_of(mixed.shape[1] // 2 + start, LANES), size)]
            scaled = states_tpu.column(mine[:, j * dim : (j + 1) * dim] * step[0, 0, head])
            s = jnp.where(begun, before[head], 0.0) * keep[0, 0, head] + scaled * b
            after[head] = s
            made.append(states_tpu.row(jnp.sum(s * c, axis=1, keepdims=True)))
        out[:, lanes] = jnp.concatenate(made, axis=1) + share[:, lanes] * mine

    lax.fori_loop(0, own.shape[1] // wide, some_heads, None)


def _convolve(x, weights, bias, last, kept, begun) -> jax.Array:
    """silu of the convolution of a token's x [1, channels]; `kept` gets the last inputs behind it."""
    width = weights.shape[0]
    own = x[...].astype(jnp.float32)
    total = own * weights[width - 1 :] + bias[...]
    for tap in range(width - 1):
        old = jnp.where(begun, last[tap : tap + 1], 0.0)
        total += old * weights[tap : tap + 1]
        if tap:
            kept[tap - 1 : tap] = old
    kept[width - 2 :] = own
    return states_tpu.silu(total)
