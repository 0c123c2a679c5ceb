"""The short convolution on NVIDIA GPUs, in Triton: one launch of `states_triton.convolve`. Not yet run on a GPU."""

from __future__ import annotations

import jax

from jaxserve.pallas_kernels import states_triton
from jaxserve.pallas_kernels.operands import ConvInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ConvState


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    return states_triton.why_not(device, problem, 0)


def short_conv(
    inputs: ConvInputs,
    state: ConvState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, ConvState]:
    """As `reference.short_conv`. Rows without tokens leave their states alone. Padding is zeros."""
    mixed, after = states_triton.convolve(
        inputs.x, inputs.conv, inputs.bias, state.inputs, rows, first, silu=False, decode_only=decode_only
    )
    return mixed, ConvState(after)
