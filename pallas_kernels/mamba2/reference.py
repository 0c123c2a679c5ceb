"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) in plain XLA, on every device.

A head keeps a matrix S [head_dim, state_dim]. A token with input x, step d, and the vectors B and C of the head's group
first changes S and then reads it; a < 0 and D are learned numbers of the head:

  S <- exp(d a) S + d x B'        its result is S C + D x

Before that, x, B and C go through a causal convolution over the last few tokens of their sequence. Both continue from
the state in the sequence's slot (`MambaState`), so a prompt may be cut into steps at any token.

Rows of one token take one update. Longer rows are cut into chunks of CHUNK tokens. Within a chunk, products of matrices
give what its tokens add to each other's results and to the state after it (the paper's section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.operands import MambaInputs
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.short_conv.reference import convolve_flat
from jaxserve.pallas_kernels.state_rows import Chunks, StateRows, in_chunks, read, write
from jaxserve.pallas_kernels.types import MambaState

CHUNK = 64
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """Tokens after the convolution, in float32: scaled, d x, [tokens, groups, heads of a group, head_dim]; decay, d a,
    [tokens, groups, heads of a group]; b and c [tokens, groups, state_dim]."""

    scaled: jax.Array
    decay: jax.Array
    b: jax.Array
    c: jax.Array


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """Returns None: plain XLA runs every problem on every device."""
    return None


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
    """Computes the batch's tokens and writes the rows' new states.

    Args:
      state: donated by the caller, and returned updated.
      first: int32 scalar, the index of the layer's first state, to which slots are added.
      groups: of all devices together. A device that has some of the heads takes the groups of these.
      per_group: heads of a group, on all devices together.
      activation: applied to the results of the convolution.
      decode_only: all rows have at most one token.
      static: as in `Chunks`.

    Returns the results, float32 [tokens, heads, head_dim], and the states.
    """
    before = read(state, rows, first)
    x, last = convolve_flat(inputs.x, inputs.conv, inputs.conv_bias, before.inputs, rows)
    bc, last_shared = convolve_flat(inputs.bc, inputs.conv_bc, inputs.conv_bc_bias, before.shared, rows)
    count = len(x)
    heads = len(inputs.a)
    x = activation(x).reshape(count, heads, -1)
    b, c = jnp.moveaxis(activation(bc).reshape(count, 2, groups, -1), 1, 0)
    own = max(1, heads // per_group)
    if own != groups:
        b, c = (lax.dynamic_slice_in_dim(part, inputs.group[0], own, axis=1) for part in (b, c))
    decay = inputs.step * inputs.a
    scaled = inputs.step[..., None] * x
    tokens = Tokens(scaled.reshape(count, own, heads // own, -1), decay.reshape(count, own, heads // own), b, c)
    matrix = before.matrix.reshape(len(before.matrix), own, heads // own, *before.matrix.shape[2:])
    if decode_only:
        out, after = update(tokens, matrix)
    else:
        out, after = in_chunks(tokens, matrix, rows, update, chunks_of(static))
    out = out.reshape(x.shape) + inputs.d[:, None] * x
    return out, write(state, MambaState(after.reshape(before.matrix.shape), last, last_shared), rows, first)


def chunks_of(static: bool) -> Chunks:
    return Chunks(CHUNK, _terms, _advance, static)


def update(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each row: results [rows, groups, heads of a group, head_dim] and new states [rows, groups, heads of
    a group, head_dim, state_dim]."""
    added = tokens.scaled[..., None] * tokens.b[:, :, None, None]
    after = state * jnp.exp(tokens.decay)[..., None, None] + added
    return einsum("rghpn,rgn->rghp", after, tokens.c), after


class Terms(NamedTuple):
    """The terms of a chunk that do not depend on the state before it; see `_terms`."""

    within: jax.Array  # [groups, heads, CHUNK, head_dim], what the chunk's tokens add to each other's results
    c: jax.Array  # [groups, CHUNK, state_dim]
    decayed: jax.Array  # [groups, heads, CHUNK], decay from the chunk's beginning to each token
    added: jax.Array  # [groups, heads, head_dim, state_dim], what the tokens add to the state after the chunk
    decay: jax.Array  # [groups, heads], decay over the whole chunk


def _terms(chunk: Tokens, valid: jax.Array) -> Terms:
    """The terms of CHUNK tokens, of which `valid`, bool [CHUNK], count. Nothing is known of the others' numbers."""
    own = Tokens(*(jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0) for x in chunk))
    scaled, decay = (jnp.moveaxis(x, 0, 2) for x in (own.scaled, own.decay))
    b, c = (jnp.moveaxis(x, 0, 1) for x in (own.b, own.c))
    order = jnp.arange(CHUNK)
    # Each sum from token j + 1 to i is computed by itself: differences of sums from the beginning would lose digits.
    sums = jnp.cumsum(jnp.where(order[:, None] > order, decay[..., None], 0.0), axis=-2)
    since = jnp.where(order[:, None] >= order, jnp.exp(sums), 0.0)
    total = jnp.cumsum(decay, axis=-1)
    scores = einsum("gin,gjn->gij", c, b)[:, None] * since
    within = einsum("ghij,ghjp->ghip", scores, scaled)
    added = einsum("ghjp,gjn->ghpn", scaled * since[..., -1, :, None], b)
    return Terms(within, c, jnp.exp(total), added, jnp.exp(total[..., -1]))


def _advance(terms: Terms, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk's results [CHUNK, groups, heads of a group, head_dim], and the state after it."""
    out = terms.within + terms.decayed[..., None] * einsum("gin,ghpn->ghip", terms.c, state)
    return jnp.moveaxis(out, 2, 0), state * terms.decay[..., None, None] + terms.added
