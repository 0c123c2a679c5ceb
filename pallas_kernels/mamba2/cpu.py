"""Mamba-2 on CPU in C++ (`cpu_recurrent.cc`), with the convolutions before it. States are changed in place.

Grid: a row and four heads of a group. Threads take the next piece when they are free; rows at the end of the batch,
  which are long, come first. Of a row of one token a thread takes several pieces, as they lie in memory. B and C go
  through their convolution before, in pieces of 16 tokens.
Traffic: a row of one token reads and writes each matrix once, in one pass. Rows of several tokens do so once for all
  their tokens.
Arithmetic: chunks of 32 tokens, by products in strips of 6 rows x 16 numbers (AVX2), or x 64 (AVX-512). The heads of a
  piece share the products of B and C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.cpu_build import RECURRENT
from jaxserve.pallas_kernels.mamba2 import reference
from jaxserve.pallas_kernels.operands import MambaInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import MambaState


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    return cpu.why_not_recurrent(device, problem)


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
    """As `reference.mamba2`. Its activation is silu. Rows without tokens leave their states alone."""
    if not cpu.available(RECURRENT):
        options: dict[str, Any] = {"activation": activation, "decode_only": decode_only, "static": static}
        return reference.mamba2(inputs, state, rows, first, groups=groups, per_group=per_group, **options)
    out = (len(inputs.x), *state.matrix.shape[1:3])
    made, *after = cpu.advance_states("jaxserve_mamba2", out, inputs, state, rows, first)
    return made, MambaState(*after)
