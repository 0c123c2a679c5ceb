"""The gated delta rule on CPU in C++ (`cpu_recurrent.cc`), with the convolution before it. States are changed in place.

Grid: a row and one key head, with its group of value heads. Threads take the next piece when they are free; rows at the
  end of the batch, which are long, come first. Of a row of one token a piece has several heads, as they lie in memory.
Traffic: a row of one token reads and writes each matrix once, with AVX-512 whole rows of 128 columns from front to
  back, else in strips of 32 columns. The products and the update are two passes, of which the second one finds the
  matrix in the cache. Rows of several tokens read and write each matrix once for all their tokens.
Arithmetic: chunks of 32 tokens, by products in strips of 6 rows x 16 numbers (AVX2), or x 64 (AVX-512). The chunk's
  triangular system is solved for the values behind the state, so it has value_dim right sides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxserve.pallas_kernels import cpu
from jaxserve.pallas_kernels.cpu_build import RECURRENT
from jaxserve.pallas_kernels.delta_net import reference
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.pallas_kernels.types import DeltaState


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """The reason why it cannot be used, or None."""
    return cpu.why_not_recurrent(device, problem)


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
    """As `reference.delta_net`. Its activation is silu. Rows without tokens leave their states alone."""
    if not cpu.available(RECURRENT):
        options: dict[str, Any] = {
            "key_dim": key_dim,
            "activation": activation,
            "decode_only": decode_only,
            "static": static,
        }
        return reference.delta_net(heads, state, rows, first, **options)
    out = (*heads.decay.shape, state.matrix.shape[-1])
    arrays = heads.qkv, heads.decay, heads.rate, heads.conv
    made, *after = cpu.advance_states("jaxserve_delta_net", out, arrays, state, rows, first)
    return made, DeltaState(*after)
