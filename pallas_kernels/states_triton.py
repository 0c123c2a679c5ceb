"""What the Triton kernels of recurrent layers share, and the convolution before a recurrence as a kernel of its own.
For NVIDIA GPUs, on which nobody has run it yet.

convolve   Grid: a program for each row, which computes the row's first tokens and replaces its last inputs, and one for
             each token, which computes it if it is not among these; by blocks of channels. Only a row's first tokens
             read its state, so that no program reads what another one writes.
           In steps that only decode, row i is token i, and rows without tokens are zeros.
           Traffic: each input is read once for each tap (the others from the second-level cache), each result is
             written once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.triton_compat import pad

FLOATS = ("bfloat16", "float16", "float32")
WIDTHS = (2, 3, 4)
BLOCK = 512  # channels of a program


def why_not(device: Device, problem: RecurrentProblem, most: int) -> str | None:
    """The reason why these kernels cannot be used, or None. most: of the numbers of a matrix, with sizes rounded up to
    powers of two."""
    if device.platform != "gpu" or (device.capability or (0, 0)) < (8, 0):
        return "it is for NVIDIA GPUs of compute capability 8.0 or newer"
    if problem.dtype.name not in FLOATS:
        return f"inputs must be one of {', '.join(FLOATS)}, not {problem.dtype}"
    if problem.width not in WIDTHS:
        return f"the convolution's width must be one of {', '.join(map(str, WIDTHS))}, not {problem.width}"
    if not problem.silu:
        return "the convolution must be followed by silu"
    if problem.rows and pad(problem.rows, 16) * pad(problem.columns, 16) > most:
        return f"a head's matrix may have at most {most} numbers, not {problem.rows} x {problem.columns}"
    return None


def slots_of(rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """(source, target), int32 [rows]: as in StateRows, but -1 for rows that begin their sequence or have no tokens."""
    count = rows.q_start[1:] - rows.q_start[:-1]
    return jnp.where(rows.fresh, -1, rows.source), jnp.where(count > 0, rows.target, -1)


@triton.jit
def dot(a, b):
    """The product of float32 matrices, with nearly their precision."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def taps(weights, channel, real, WIDTH: tl.constexpr):
    """Of weights [channels, WIDTH] those of an input itself and of the three before it; 0 for those beyond WIDTH."""
    at = weights + channel * WIDTH + WIDTH - 1
    own = tl.load(at, mask=real, other=0.0).to(tl.float32)
    one = tl.load(at - 1, mask=real, other=0.0).to(tl.float32)
    two = tl.zeros_like(one)
    three = tl.zeros_like(one)
    if WIDTH > 2:
        two = tl.load(at - 2, mask=real, other=0.0).to(tl.float32)
    if WIDTH > 3:
        three = tl.load(at - 3, mask=real, other=0.0).to(tl.float32)
    return own, one, two, three


@triton.jit
def last_inputs(state, channel, real, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Of a state [WIDTH - 1, STRIDE] the last three inputs, the latest first; 0 for those beyond WIDTH."""
    at = state + (WIDTH - 2) * STRIDE + channel
    one = tl.load(at, mask=real, other=0.0)
    two = tl.zeros_like(one)
    three = tl.zeros_like(one)
    if WIDTH > 2:
        two = tl.load(at - STRIDE, mask=real, other=0.0)
    if WIDTH > 3:
        three = tl.load(at - 2 * STRIDE, mask=real, other=0.0)
    return one, two, three


@triton.jit
def keep_inputs(state, channel, real, one, two, three, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Writes a state of the last three inputs. A state that was read before must be the same or another row's."""
    tl.debug_barrier()  # other threads may still read it
    at = state + (WIDTH - 2) * STRIDE + channel
    tl.store(at, one, mask=real)
    if WIDTH > 2:
        tl.store(at - STRIDE, two, mask=real)
    if WIDTH > 3:
        tl.store(at - 2 * STRIDE, three, mask=real)


@triton.jit
def mixed_token(
    x, weights, before, after, channel, real, known, STRIDE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The convolution for a row's only token, whose inputs are x [channels]. The inputs before are zeros where `known`
    does not hold. Replaces the last inputs."""
    own = tl.load(x + channel, mask=real, other=0.0).to(tl.float32)
    one, two, three = last_inputs(before, channel, known, STRIDE, WIDTH)
    w, w1, w2, w3 = taps(weights, channel, real, WIDTH)
    keep_inputs(after, channel, real, own, one, two, STRIDE, WIDTH)
    return own * w + one * w1 + two * w2 + three * w3


@triton.jit
def _finished(mixed, bias, channel, real, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        mixed += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    if SILU:
        mixed = silu(mixed)
    return mixed


@triton.jit
def _convolve(
    x, weights, bias, source, target, q_start, row_of, first, before, out, states,
    TOKENS, ROWS, HEADS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, DECODE_ONLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`states` [states, HEADS, WIDTH - 1, CHANNELS] alias `before`."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = channel < CHANNELS
    KEPT: tl.constexpr = (WIDTH - 1) * CHANNELS
    STEP: tl.constexpr = HEADS * CHANNELS  # from a token to the next
    w, w1, w2, w3 = taps(weights + head * CHANNELS * WIDTH, channel, real, WIDTH)
    bias += head * CHANNELS
    x += head * CHANNELS
    out += head * CHANNELS
    if item < ROWS:
        to = tl.load(target + item).to(tl.int64)
        start = tl.load(q_start + item).to(tl.int64)
        count = tl.load(q_start + item + 1).to(tl.int64) - start
        if to >= 0:
            at = tl.load(source + item).to(tl.int64)
            known = channel < tl.where(at >= 0, CHANNELS, 0)  # blocks: the interpreter takes no scalars in masks
            second_is_new = channel < tl.where(count > 1, CHANNELS, 0)
            third_is_new = channel < tl.where(count > 2, CHANNELS, 0)
            at = tl.load(first).to(tl.int64) + tl.maximum(at, 0)
            one, two, three = last_inputs(states + (at * HEADS + head) * KEPT, channel, known, CHANNELS, WIDTH)
            place = x + start * STEP + channel
            a = tl.load(place, mask=real, other=0.0).to(tl.float32)
            b = tl.load(place + STEP, mask=second_is_new, other=0.0).to(tl.float32)
            c = tl.load(place + 2 * STEP, mask=third_is_new, other=0.0).to(tl.float32)
            into = out + start * STEP + channel
            mixed = _finished(a * w + one * w1 + two * w2 + three * w3, bias, channel, real, HAS_BIAS, SILU)
            tl.store(into, mixed, mask=real)
            if WIDTH > 2:
                mixed = _finished(b * w + a * w1 + one * w2 + two * w3, bias, channel, real, HAS_BIAS, SILU)
                tl.store(into + STEP, mixed, mask=second_is_new)
            if WIDTH > 3:
                mixed = _finished(c * w + b * w1 + a * w2 + one * w3, bias, channel, real, HAS_BIAS, SILU)
                tl.store(into + 2 * STEP, mixed, mask=third_is_new)
            newest = x + (start + count - 1) * STEP + channel
            last = tl.load(newest, mask=real, other=0.0).to(tl.float32)
            second = tl.load(newest - STEP, mask=second_is_new, other=0.0).to(tl.float32)
            third = tl.load(newest - 2 * STEP, mask=third_is_new, other=0.0).to(tl.float32)
            second = tl.where(second_is_new, second, one)
            third = tl.where(third_is_new, third, tl.where(second_is_new, one, two))
            to = tl.load(first).to(tl.int64) + to
            keep_inputs(states + (to * HEADS + head) * KEPT, channel, real, last, second, third, CHANNELS, WIDTH)
        elif DECODE_ONLY:
            tl.store(out + item.to(tl.int64) * STEP + channel, tl.zeros([BLOCK], tl.float32), mask=real)
    else:
        token = (item - ROWS).to(tl.int64)
        row = tl.load(row_of + token)
        index = token - tl.load(q_start + row)  # within the row
        padding = token >= tl.load(q_start + ROWS)
        if padding:
            tl.store(out + token * STEP + channel, tl.zeros([BLOCK], tl.float32), mask=real)
        elif index >= WIDTH - 1:
            own = x + token * STEP + channel
            mixed = tl.load(own, mask=real, other=0.0).to(tl.float32) * w
            mixed += tl.load(own - STEP, mask=real, other=0.0).to(tl.float32) * w1
            if WIDTH > 2:
                mixed += tl.load(own - 2 * STEP, mask=real, other=0.0).to(tl.float32) * w2
            if WIDTH > 3:
                mixed += tl.load(own - 3 * STEP, mask=real, other=0.0).to(tl.float32) * w3
            mixed = _finished(mixed, bias, channel, real, HAS_BIAS, SILU)
            tl.store(out + token * STEP + channel, mixed, mask=real)


def convolve(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    rows: StateRows,
    first: jax.Array | int,
    *,
    silu: bool,
    decode_only: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The convolution of x [tokens, channels] with weights [channels, width] and a bias [channels], then silu if
    wanted, in float32. Replaces the last inputs [states, width - 1, channels] in place. Or x is [tokens, heads,
    channels], and the weights and the last inputs, [states, heads, (width - 1) * channels], are those of each head."""
    heads, channels = x.shape[1:] if x.ndim == 3 else (1, x.shape[1])
    tokens = len(x)
    count = len(rows.source)
    source, target = slots_of(rows)
    block = min(BLOCK, pad(channels))
    mixed, after = triton_compat.call(
        _convolve, x, weights, weights if bias is None else bias, source, target, rows.q_start, rows.row,
        jnp.asarray(first, jnp.int32).reshape(1), states,
        out=[jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct(states.shape, states.dtype)],
        grid=(count if decode_only else count + tokens, heads, -(-channels // block)), aliases={8: 1}, num_warps=4,
        TOKENS=tokens, ROWS=count, HEADS=heads, CHANNELS=channels, WIDTH=weights.shape[-1],
        HAS_BIAS=bias is not None, SILU=silu, DECODE_ONLY=decode_only, BLOCK=block,
    )  # fmt: skip
    return mixed, after
