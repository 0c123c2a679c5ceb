"""The short convolution of LFM2 in plain XLA: each channel is a weighted sum of its last few inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.operands import ConvInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows, convolve, read, write
from jaxserve.pallas_kernels.types import ConvState


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """Returns None: plain XLA runs every problem on every device."""
    return None


def short_conv(
    inputs: ConvInputs,
    state: ConvState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, ConvState]:
    """Computes the batch's tokens and writes the rows' new states.

    Args:
      state: donated by the caller, and returned updated.
      first: int32 scalar, the index of the layer's first state, to which slots are added.
      decode_only, static: as for other recurrent layers; they change nothing here.

    Returns the results, float32 [tokens, channels], and the states.
    """
    before = read(state, rows, first).inputs
    mixed, after = convolve_flat(inputs.x, inputs.conv, inputs.bias, before, rows)
    return mixed, write(state, ConvState(after), rows, first)


def convolve_flat(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, before: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """`convolve` for x [tokens, channels], w [channels, width] and before [rows, width - 1, channels], plus a bias
    [channels]."""
    flat = before.reshape(len(before), 1, -1)
    mixed, after = convolve(x.astype(jnp.float32)[:, None], w.astype(jnp.float32)[None], flat, rows)
    mixed = mixed[:, 0]
    if bias is not None:
        mixed += bias.astype(jnp.float32)
    return mixed, after.reshape(before.shape)
