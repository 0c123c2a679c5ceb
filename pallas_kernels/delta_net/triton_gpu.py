"""The gated delta rule on NVIDIA GPUs, in Triton, with the convolution before it. Not yet run on a GPU.

decode   Grid: a program for each row and key head, which computes the convolution of the head's channels, replaces
           their last inputs, and updates the matrices of the head's group one after the other. One launch.
         Traffic: each matrix is read and written once, in place. It is in registers in between: 128 x 128 numbers are
           32 in each of 512 threads.
mixed    The convolution of all tokens is a launch of its own (`states_triton`). Then a program for each row, value head
           and block of columns goes over the row's tokens in chunks of 16, with its part of the matrix in registers.
         Arithmetic: within a chunk the triangular system is inverted row by row; all else are products of matrices on
           tensor cores, each in three of TF32 for the precision of float32.
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
from jaxserve.pallas_kernels.delta_net.reference import EPS
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.states_triton import dot, mixed_token, silu
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import DeltaState

MOST = 1 << 15  # numbers of a matrix: 64 in each of 512 threads
CHUNK = 16
COLUMNS = 64  # of a matrix, which a program of a mixed step has


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    return states_triton.why_not(device, problem, MOST)


@triton.jit
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _decode(
    qkv, decay, rate, conv, source, target, first, before, inputs_before, out, matrix, inputs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """`matrix` and `inputs` alias `before` and `inputs_before`. Row i is token i."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    of_key = tl.arange(0, KEYS)
    of_value = tl.arange(0, VALUES)
    is_key = of_key < KEY
    is_value = of_value < VALUE
    token = row * HEADS + head
    to = tl.load(target + row).to(tl.int64)
    if to < 0:
        for g in tl.static_range(GROUP):
            tl.store(out + (token * GROUP + g) * VALUE + of_value, tl.zeros([VALUES], tl.float32), mask=is_value)
    else:
        at = tl.load(source + row).to(tl.int64)
        begun = at >= 0
        at = (tl.load(first).to(tl.int64) + tl.maximum(at, 0)) * HEADS + head
        to = (tl.load(first).to(tl.int64) + to) * HEADS + head
        x = qkv + token * CHANNELS
        w = conv + head * CHANNELS * WIDTH
        old = inputs + at * ((WIDTH - 1) * CHANNELS)
        new = inputs + to * ((WIDTH - 1) * CHANNELS)
        known = of_key < tl.where(begun, KEY, 0)  # blocks: the interpreter takes no scalars in masks
        known_value = of_value < tl.where(begun, VALUE, 0)
        q = _unit(silu(mixed_token(x, w, old, new, of_key, is_key, known, CHANNELS, WIDTH)), EPS) * SCALE
        k = _unit(silu(mixed_token(x, w, old, new, KEY + of_key, is_key, known, CHANNELS, WIDTH)), EPS)
        both = tl.sum(q * k, 0)
        real = is_key[:, None] & is_value[None, :]
        within = of_key[:, None] * VALUE + of_value[None, :]
        for g in tl.static_range(GROUP):
            channel = 2 * KEY + g * VALUE + of_value
            v = silu(mixed_token(x, w, old, new, channel, is_value, known_value, CHANNELS, WIDTH))
            shrunk = tl.exp(tl.load(decay + token * GROUP + g))
            s = tl.load(matrix + (at * GROUP + g) * (KEY * VALUE) + within, mask=real & known[:, None], other=0.0)
            s = s * shrunk
            added = tl.load(rate + token * GROUP + g) * (v - tl.sum(s * k[:, None], 0))
            result = tl.sum(s * q[:, None], 0) + both * added
            tl.store(out + (token * GROUP + g) * VALUE + of_value, result, mask=is_value)
            s += k[:, None] * added[None, :]
            tl.store(matrix + (to * GROUP + g) * (KEY * VALUE) + within, s, mask=real)


@triton.jit
def _mixed(
    mixed, decay, rate, source, target, q_start, first, before, out, matrix,
    ROWS, TOKENS, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    EPS: tl.constexpr, SCALE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`matrix` aliases `before`. mixed [tokens, HEADS, CHANNELS], after the convolution. The program behind those of
    the rows clears padding."""
    row = tl.program_id(0)
    value_head = tl.program_id(1)
    head = value_head // GROUP
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    CHANNELS: tl.constexpr = 2 * KEY + GROUP * VALUE
    of_key = tl.arange(0, KEYS)
    is_key = of_key < KEY
    is_column = column < VALUE
    order = tl.arange(0, CHUNK)
    start = tl.load(q_start + tl.minimum(row, ROWS)).to(tl.int64)
    end = tl.load(q_start + tl.minimum(row + 1, ROWS)).to(tl.int64)
    if row == ROWS:
        for t in range(end, TOKENS):
            padding = (t * HEADS * GROUP + value_head) * VALUE + column
            tl.store(out + padding, tl.zeros([COLUMNS], tl.float32), mask=is_column)
    elif end > start:
        at = tl.load(source + row).to(tl.int64)
        begun = at >= 0
        at = (tl.load(first).to(tl.int64) + tl.maximum(at, 0)) * (HEADS * GROUP) + value_head
        to = (tl.load(first).to(tl.int64) + tl.load(target + row)) * (HEADS * GROUP) + value_head
        within = of_key[:, None] * VALUE + column[None, :]
        real = is_key[:, None] & is_column[None, :]
        known = (of_key < tl.where(begun, KEY, 0))[:, None]
        s = tl.load(matrix + at * (KEY * VALUE) + within, mask=real & known, other=0.0)
        for begin in range(start, end, CHUNK):
            token = begin + order
            valid = token < end
            x = mixed + (token * HEADS + head)[:, None] * CHANNELS
            some = valid[:, None] & is_key[None, :]
            q = tl.load(x + of_key[None, :], mask=some, other=0.0)
            k = tl.load(x + KEY + of_key[None, :], mask=some, other=0.0)
            q = q * (tl.rsqrt(tl.sum(q * q, 1) + EPS) * SCALE)[:, None]
            k = k * tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
            of_v = 2 * KEY + (value_head % GROUP) * VALUE + column
            v = tl.load(x + of_v[None, :], mask=valid[:, None] & is_column[None, :], other=0.0)
            g = tl.load(decay + token * (HEADS * GROUP) + value_head, mask=valid, other=0.0)
            b = tl.load(rate + token * (HEADS * GROUP) + value_head, mask=valid, other=0.0)
            # sums[i, j]: of g from j + 1 to i, each by itself: differences of sums would lose digits.
            sums = tl.cumsum(tl.where(order[:, None] > order[None, :], g[:, None], 0.0), 0)
            since = tl.where(order[:, None] >= order[None, :], tl.exp(sums), 0.0)
            total = tl.exp(tl.cumsum(g, 0))
            whole = tl.exp(tl.sum(g, 0))
            until = tl.sum(tl.where(order[:, None] == CHUNK - 1, since, 0.0), 0)
            turned = tl.trans(k)
            lower = tl.where(order[:, None] > order[None, :], dot(k, turned) * since * b[:, None], 0.0)
            inverse = tl.where(order[:, None] == order[None, :], 1.0, 0.0)
            for i in range(1, CHUNK):
                of_row = tl.sum(tl.where(order[:, None] == i, lower, 0.0), 0)
                new = tl.where(order == i, 1.0, 0.0) - tl.sum(of_row[:, None] * inverse, 0)
                inverse = tl.where(order[:, None] == i, new[None, :], inverse)
            added = dot(inverse, b[:, None] * (v - total[:, None] * dot(k, s)))
            result = total[:, None] * dot(q, s) + dot(dot(q, turned) * since, added)
            into = out + (token * (HEADS * GROUP) + value_head)[:, None] * VALUE + column[None, :]
            tl.store(into, result, mask=valid[:, None] & is_column[None, :])
            s = s * whole + dot(turned, added * until[:, None])
        tl.store(matrix + to * (KEY * VALUE) + within, s, mask=real)


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
    """As `reference.delta_net`, for problems that `why_not` allows. Rows without tokens leave their states alone."""
    del activation, static  # silu, and without a loop on the host
    tokens, key_heads, _ = heads.qkv.shape
    group, _, value = state.matrix.shape[2:]
    width = heads.conv.shape[-1]
    source, target = states_triton.slots_of(rows)
    start = jnp.asarray(first, jnp.int32).reshape(1)
    sizes: dict[str, Any] = {
        "HEADS": key_heads, "GROUP": group, "KEY": key_dim, "VALUE": value, "EPS": EPS, "SCALE": key_dim**-0.5,
    }  # fmt: skip
    out = jax.ShapeDtypeStruct((tokens, key_heads, group, value), jnp.float32)
    of_matrix, of_inputs = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state)
    if decode_only:
        numbers = pad(key_dim) * pad(value)
        made, *after = triton_compat.call(
            _decode, heads.qkv, heads.decay, heads.rate, heads.conv, source, target, start, *state,
            out=[out, of_matrix, of_inputs], grid=(tokens, key_heads), aliases={7: 1, 8: 2},
            num_warps=int(np.clip(numbers // 1024, 1, 16)),
            WIDTH=width, KEYS=pad(key_dim), VALUES=pad(value), **sizes,
        )  # fmt: skip
        return made, DeltaState(*after)
    mixed, inputs = states_triton.convolve(heads.qkv, heads.conv, None, state.inputs, rows, first, silu=True)
    columns = min(COLUMNS, pad(value, 16))
    made, matrix = triton_compat.call(
        _mixed, mixed, heads.decay, heads.rate, source, target, rows.q_start, start, state.matrix,
        out=[out, of_matrix], grid=(len(rows.source) + 1, key_heads * group, -(-value // columns)), aliases={7: 1},
        num_warps=4 if pad(key_dim) * columns <= 4096 else 8, num_stages=1,
        ROWS=len(rows.source), TOKENS=tokens, KEYS=pad(key_dim, 16), COLUMNS=columns, CHUNK=CHUNK, **sizes,
    )  # fmt: skip
    return made, DeltaState(matrix, inputs)
