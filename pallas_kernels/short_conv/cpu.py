"""The short convolution on CPU in C++ (`cpu_recurrent.cc`). Threads take 16 tokens of a row at a time. States are
changed in place, when all rows are done."""

from __future__ import annotations

import jax

from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.cpu_build import RECURRENT
from jaxserve.pallas_kernels.operands import ConvInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.short_conv import reference
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import ConvState


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    return cpu.why_not_recurrent(device, problem)


def short_conv(
    inputs: ConvInputs,
    state: ConvState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, ConvState]:
    """As `reference.short_conv`. Rows without tokens leave their states alone."""
    if not cpu.available(RECURRENT):
        return reference.short_conv(inputs, state, rows, first, decode_only=decode_only, static=static)
    made, *after = cpu.advance_states("jaxserve_short_conv", inputs.x.shape, inputs, state, rows, first)
    return made, ConvState(*after)
