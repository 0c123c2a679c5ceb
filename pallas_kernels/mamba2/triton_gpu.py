"""Mamba-2 on NVIDIA GPUs, in Triton, with the convolutions before it. Not yet run on a GPU.

B and C, which heads share, go through their convolution in a launch of its own (`states_triton`).

decode   Grid: a program for each row and head, which also computes the convolution of the head's x. Two launches.
         Traffic: each matrix is read and written once, in place.
mixed    The convolution of x is a launch of its own, too. Then a program for each row, head and block of a matrix's
           rows goes over the row's tokens in chunks of 16, with its part of the matrix in registers. Three launches.
         Arithmetic: products of matrices on tensor cores, each in three of TF32 for the precision of float32.
Padding is zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from jaxserve.pallas_kernels import states_triton, triton_compat
from jaxserve.pallas_kernels.operands import MambaInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.states_triton import dot, mixed_token, silu
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import MambaState

MOST = 1 << 15  # numbers of a matrix: 64 in each of 512 threads
CHUNK = 16
DIMS = 64  # rows of a matrix, which a program of a mixed step has


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    return states_triton.why_not(device, problem, MOST)


@triton.jit
def _decode(
    x, bc, step, a, d, group, conv, conv_bias, source, target, first, before, inputs_before, out, matrix, inputs,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, DIMS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """`matrix` and `inputs` alias `before` and `inputs_before`. Row i is token i. bc [tokens, SHARED], after the
    convolution."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = HEADS * DIM
    of_dim = tl.arange(0, DIMS)
    of_state = tl.arange(0, STATES)
    is_dim = of_dim < DIM
    is_state = of_state < STATE
    to = tl.load(target + row).to(tl.int64)
    into = out + (row * HEADS + head) * DIM + of_dim
    if to < 0:
        tl.store(into, tl.zeros([DIMS], tl.float32), mask=is_dim)
    else:
        at = tl.load(source + row).to(tl.int64)
        known = of_dim < tl.where(at >= 0, DIM, 0)  # blocks: the interpreter takes no scalars in masks
        at = tl.load(first).to(tl.int64) + tl.maximum(at, 0)
        to = tl.load(first).to(tl.int64) + to
        KEPT: tl.constexpr = (WIDTH - 1) * CHANNELS
        channel = head * DIM + of_dim
        own = mixed_token(x + row * CHANNELS, conv, inputs + at * KEPT, inputs + to * KEPT, channel, is_dim,
                          known, CHANNELS, WIDTH)  # fmt: skip
        if HAS_BIAS:
            own += tl.load(conv_bias + channel, mask=is_dim, other=0.0).to(tl.float32)
        own = silu(own)
        by = tl.load(step + row * HEADS + head)
        place = bc + row * SHARED + tl.load(group + head) * STATE + of_state
        b = tl.load(place, mask=is_state, other=0.0)
        c = tl.load(place + SHARED // 2, mask=is_state, other=0.0)
        real = is_dim[:, None] & is_state[None, :]
        within = of_dim[:, None] * STATE + of_state[None, :]
        s = tl.load(matrix + (at * HEADS + head) * (DIM * STATE) + within, mask=real & known[:, None], other=0.0)
        s = s * tl.exp(by * tl.load(a + head)) + (by * own)[:, None] * b[None, :]
        tl.store(matrix + (to * HEADS + head) * (DIM * STATE) + within, s, mask=real)
        tl.store(into, tl.sum(s * c[None, :], 1) + tl.load(d + head) * own, mask=is_dim)


@triton.jit
def _mixed(
    x, bc, step, a, d, group, source, target, q_start, first, before, out, matrix,
    ROWS, TOKENS, HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    DIMS: tl.constexpr, STATES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`matrix` aliases `before`. x [tokens, HEADS * DIM] and bc [tokens, SHARED], after the convolutions. The program
    behind those of the rows clears padding."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    of_dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    of_state = tl.arange(0, STATES)
    is_dim = of_dim < DIM
    is_state = of_state < STATE
    order = tl.arange(0, CHUNK)
    start = tl.load(q_start + tl.minimum(row, ROWS)).to(tl.int64)
    end = tl.load(q_start + tl.minimum(row + 1, ROWS)).to(tl.int64)
    if row == ROWS:
        for t in range(end, TOKENS):
            tl.store(out + (t * HEADS + head) * DIM + of_dim, tl.zeros([DIMS], tl.float32), mask=is_dim)
    elif end > start:
        at = tl.load(source + row).to(tl.int64)
        known = (of_dim < tl.where(at >= 0, DIM, 0))[None, :]
        at = (tl.load(first).to(tl.int64) + tl.maximum(at, 0)) * HEADS + head
        to = (tl.load(first).to(tl.int64) + tl.load(target + row)) * HEADS + head
        # The matrix, transposed.
        within = of_dim[None, :] * STATE + of_state[:, None]
        real = is_dim[None, :] & is_state[:, None]
        s = tl.load(matrix + at * (DIM * STATE) + within, mask=real & known, other=0.0)
        of_group = tl.load(group + head) * STATE
        decay = tl.load(a + head)
        share = tl.load(d + head)
        for begin in range(start, end, CHUNK):
            token = begin + order
            valid = token < end
            some = valid[:, None] & is_state[None, :]
            place = bc + token[:, None] * SHARED + of_group + of_state[None, :]
            b = tl.load(place, mask=some, other=0.0)
            c = tl.load(place + SHARED // 2, mask=some, other=0.0)
            at_x = (token * HEADS + head)[:, None] * DIM + of_dim[None, :]
            is_x = valid[:, None] & is_dim[None, :]
            own = tl.load(x + at_x, mask=is_x, other=0.0)
            by = tl.load(step + token * HEADS + head, mask=valid, other=0.0)
            g = by * decay
            # sums[i, j]: of g from j + 1 to i, each by itself: differences of sums would lose digits.
            sums = tl.cumsum(tl.where(order[:, None] > order[None, :], g[:, None], 0.0), 0)
            since = tl.where(order[:, None] >= order[None, :], tl.exp(sums), 0.0)
            until = tl.sum(tl.where(order[:, None] == CHUNK - 1, since, 0.0), 0)
            scaled = by[:, None] * own
            result = tl.exp(tl.cumsum(g, 0))[:, None] * dot(c, s) + dot(dot(c, tl.trans(b)) * since, scaled)
            tl.store(out + at_x, result + share * own, mask=is_x)
            s = s * tl.exp(tl.sum(g, 0)) + dot(tl.trans(b), scaled * until[:, None])
        tl.store(matrix + to * (DIM * STATE) + within, s, mask=real)


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
    """As `reference.mamba2`, for problems that `why_not` allows. Rows without tokens leave their states alone."""
    del groups, per_group, activation, static  # `inputs.group` tells; silu; and without a loop on the host
    tokens, shared = inputs.bc.shape
    heads, dim, size = state.matrix.shape[1:]
    source, target = states_triton.slots_of(rows)
    start = jnp.asarray(first, jnp.int32).reshape(1)
    convolve = states_triton.convolve
    bc, of_shared = convolve(
        inputs.bc, inputs.conv_bc, inputs.conv_bc_bias, state.shared, rows, first, silu=True, decode_only=decode_only
    )
    sizes: dict[str, Any] = {"HEADS": heads, "SHARED": shared, "DIM": dim, "STATE": size}
    of_heads = inputs.step, inputs.a, inputs.d, inputs.group
    out, of_matrix, of_inputs = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, heads, dim), *(x.shape for x in state[:2]))
    )
    if decode_only:
        bias = inputs.conv if inputs.conv_bias is None else inputs.conv_bias
        made, matrix, last = triton_compat.call(
            _decode, inputs.x, bc, *of_heads, inputs.conv, bias, source, target, start, state.matrix, state.inputs,
            out=[out, of_matrix, of_inputs], grid=(tokens, heads), aliases={11: 1, 12: 2},
            num_warps=int(np.clip(pad(dim) * pad(size) // 1024, 1, 16)),
            WIDTH=inputs.conv.shape[-1], HAS_BIAS=inputs.conv_bias is not None, DIMS=pad(dim), STATES=pad(size),
            **sizes,
        )  # fmt: skip
        return made, MambaState(matrix, last, of_shared)
    x, last = convolve(inputs.x, inputs.conv, inputs.conv_bias, state.inputs, rows, first, silu=True)
    dims = min(DIMS, pad(dim, 16))
    made, matrix = triton_compat.call(
        _mixed, x, bc, *of_heads, source, target, rows.q_start, start, state.matrix,
        out=[out, of_matrix], grid=(len(rows.source) + 1, heads, -(-dim // dims)), aliases={10: 1},
        num_warps=4 if dims * pad(size) <= 4096 else 8, num_stages=1,
        ROWS=len(rows.source), TOKENS=tokens, DIMS=dims, STATES=pad(size, 16), CHUNK=CHUNK, **sizes,
    )  # fmt: skip
    return made, MambaState(matrix, last, of_shared)
