"""The selective scan of Mamba (Gu & Dao 2023, arXiv:2312.00752) in plain XLA, on every device.

A channel keeps a vector h [state_dim]. A token with input x, step d, and the vectors B and C that all channels share,
or those of a head, first changes h and then reads it; a < 0 is a learned vector and D a learned number of the channel:

  h <- exp(d a) h + d x B        its result is h'C + D x

x, B and C come from a short convolution, whose last inputs are a part of the state (`ScanState`). The layer computes
the two operations one after the other, with a projection between them.

Rows of one token take one update. Longer rows are cut into chunks of CHUNK tokens. Every number of a state decays at a
rate of its own, so that no product of matrices gives a chunk's results: an associative scan does, whose depth is the
logarithm of CHUNK.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.operands import ConvInputs, ScanInputs
from jaxserve.pallas_kernels.short_conv.reference import short_conv
from jaxserve.pallas_kernels.state_rows import Chunks, StateRows, in_chunks, read, write
from jaxserve.pallas_kernels.types import ConvState, ScanState

CHUNK = 32


class Tokens(NamedTuple):
    """Tokens in float32: step, and scaled, d x, [tokens, channels]; b and c as in `ScanInputs`."""

    step: jax.Array
    scaled: jax.Array
    b: jax.Array
    c: jax.Array


def selective_scan(
    inputs: ScanInputs | ConvInputs,
    state: ScanState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, ScanState]:
    """Computes the batch's tokens and writes the rows' new states: of the convolution if the inputs are its, and of the
    scan otherwise.

    Args:
      state: donated by the caller, and returned updated.
      first: int32 scalar, the index of the layer's first state, to which slots are added.
      decode_only: all rows have at most one token.
      static: as in `Chunks`. The terms of all chunks at once would be too large; each chunk computes its own.

    Returns the results, float32 [tokens, channels], and the states.
    """
    if isinstance(inputs, ConvInputs):
        mixed, after = short_conv(inputs, ConvState(state.inputs), rows, first)
        return mixed, state._replace(inputs=after.inputs)
    before = read(state.vectors, rows, first)
    tokens = Tokens(inputs.step, inputs.step * inputs.x, inputs.b, inputs.c)
    one = partial(update, a=inputs.a)
    if decode_only:
        out, vectors = one(tokens, before)
    else:
        chunks = Chunks(CHUNK, _own, partial(_advance, a=inputs.a), static)
        out, vectors = in_chunks(tokens, before, rows, one, chunks)
    return out + inputs.d * inputs.x, state._replace(vectors=write(state.vectors, vectors, rows, first))


def update(tokens: Tokens, state: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each row: results [rows, channels] and new states [rows, channels, state_dim]."""
    after = state * jnp.exp(tokens.step[..., None] * a) + tokens.scaled[..., None] * _each(tokens.b, a)
    return jnp.sum(after * _each(tokens.c, a), axis=-1), after


def _own(chunk: Tokens, valid: jax.Array) -> Tokens:
    """A chunk's tokens, of which `valid`, bool [CHUNK], count. The others change nothing."""
    return Tokens(*(jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0) for x in chunk))


def _each(vectors: jax.Array, a: jax.Array) -> jax.Array:
    """B or C as it multiplies all channels' vectors [tokens, channels, state_dim]."""
    return vectors[:, None] if vectors.ndim == 2 else jnp.repeat(vectors, len(a) // vectors.shape[1], axis=1)


def _advance(chunk: Tokens, state: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk's results [CHUNK, channels], and the state after it [channels, state_dim]."""

    def joined(earlier: Any, later: Any) -> Any:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    each = jnp.exp(chunk.step[..., None] * a), chunk.scaled[..., None] * _each(chunk.b, a)
    decay, added = lax.associative_scan(joined, each)
    states = decay * state + added
    return jnp.sum(states * _each(chunk.c, a), axis=-1), states[-1]
