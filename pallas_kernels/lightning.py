"""Lightning attention (Qin et al. 2024, arXiv:2405.17381) in plain XLA, on every device.

A head keeps a matrix S. A token with query q, key k and value v first changes S and then reads it; a < 0 is fixed:

  S <- exp(a) S + v k'        its result is S q

This is Mamba-2's recurrence with steps of 1 in the place of learned ones, keys in the place of B, queries in the place
of C, and no convolution before it. So its chunks are those of `mamba2.reference`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.mamba2.reference import Tokens, chunks_of, update
from jaxserve.pallas_kernels.operands import LightningHeads
from jaxserve.pallas_kernels.state_rows import StateRows, in_chunks, read, write
from jaxserve.pallas_kernels.types import LightningState


def lightning(
    heads: LightningHeads,
    state: LightningState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, LightningState]:
    """Computes the batch's tokens and writes the rows' new states. The arguments are those of `mamba2`.

    Returns the results, float32 [tokens, heads, dim], and the states.
    """
    before = read(state, rows, first).matrix[:, :, None]  # each head is a group by itself
    q, k, v = jnp.split(heads.qkv.astype(jnp.float32), 3, axis=-1)
    decay = jnp.broadcast_to(heads.decay, q.shape[:2])
    tokens = Tokens(v[:, :, None], decay[..., None], k, q)
    if decode_only:
        out, after = update(tokens, before)
    else:
        out, after = in_chunks(tokens, before, rows, update, chunks_of(static))
    return out[:, :, 0], write(state, LightningState(after[:, :, 0]), rows, first)
