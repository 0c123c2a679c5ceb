"""The gated delta rule (Yang et al. 2025, arXiv:2412.06464) in plain XLA, on every device.

A value head keeps a matrix S [key_dim, value_dim]. A token with query q and key k, both of length 1, value v, decay g
and rate b first changes S and then reads it:

  S <- exp(g) S + b k (v - exp(g) S'k)'        its result is S'q / sqrt(key_dim)

Before that, queries, keys and values go through a causal convolution over the last few tokens of their sequence. The
convolution and the rule continue from the state in the sequence's slot (`DeltaState`), so a prompt may be cut into
steps at any token.

Rows of one token take one update. Longer rows are cut into chunks of CHUNK tokens, which are computed one after the
other. Within a chunk one triangular system gives all updates, as in the WY form of Yang et al. 2024 (arXiv:2406.06484).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.registry import Device, RecurrentProblem
from jaxserve.pallas_kernels.state_rows import Chunks, StateRows, convolve, in_chunks, read, write
from jaxserve.pallas_kernels.types import DeltaState

CHUNK = 64
EPS = 1e-6  # added to the squared lengths of queries and keys
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """Tokens after the convolution, in float32: q and k [tokens, key_heads, key_dim], v [tokens, key_heads, group,
    value_dim], decay and rate [tokens, key_heads, group]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    rate: jax.Array


def why_not(device: Device, problem: RecurrentProblem) -> str | None:
    """Returns None: plain XLA runs every problem on every device."""
    return None


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
    """Computes the batch's tokens and writes the rows' new states.

    Args:
      state: donated by the caller, and returned updated.
      first: int32 scalar, the index of the layer's first state, to which slots are added.
      activation: applied to the results of the convolution.
      decode_only: all rows have at most one token.
      static: the loop over chunks has a length that the compiler knows: the most chunks that a batch can have. Terms
        that do not depend on the state are computed for all chunks at once. Otherwise the loop ends with the batch's
        last chunk.

    Returns the results, float32 [tokens, key_heads, group, value_dim], and the states.
    """
    before, inputs = read(state, rows, first)
    mixed, inputs = convolve(heads.qkv.astype(jnp.float32), heads.conv.astype(jnp.float32), inputs, rows)
    tokens = _tokens(activation(mixed), heads, key_dim, before.shape[2:])
    if decode_only:
        out, after = update(tokens, before)
    else:
        out, after = in_chunks(tokens, before, rows, update, Chunks(CHUNK, _terms, _advance, static))
    return out, write(state, DeltaState(after, inputs), rows, first)


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1, if they are not much shorter than that."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def _tokens(mixed: jax.Array, heads: DeltaHeads, key_dim: int, shape: tuple[int, ...]) -> Tokens:
    """`shape`: (group, key_dim, value_dim)."""
    q, k, v = jnp.split(mixed, [key_dim, 2 * key_dim], axis=-1)
    v = v.reshape(*v.shape[:2], shape[0], shape[2])
    return Tokens(unit(q) * key_dim**-0.5, unit(k), v, heads.decay, heads.rate)


def update(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each row: results [rows, key_heads, group, value_dim] and new states [rows, key_heads, group,
    key_dim, value_dim]."""
    q, k, v, decay, rate = tokens
    shrunk = jnp.exp(decay)[..., None]
    read = einsum("rhxk,rhgkv->rhgxv", jnp.stack([k, q], axis=2), state) * shrunk[..., None]
    new = rate[..., None] * (v - read[..., 0, :])
    after = state * shrunk[..., None] + k[:, :, None, :, None] * new[..., None, :]
    return read[..., 1, :] + jnp.sum(q * k, axis=-1)[..., None, None] * new, after


class Terms(NamedTuple):
    """The terms of a chunk that do not depend on the state before it; see `_terms`."""

    values: jax.Array  # [key_heads, group, CHUNK, value_dim], what tokens would write into an empty state
    reads: jax.Array  # [key_heads, group, CHUNK, key_dim], the keys through which these values depend on the state
    queries: jax.Array  # [key_heads, group, CHUNK, key_dim], queries decayed since the chunk began
    scores: jax.Array  # [key_heads, group, CHUNK, CHUNK], products of queries and keys, decayed since the key
    keys: jax.Array  # [key_heads, group, CHUNK, key_dim], keys decayed until the chunk ends
    decay: jax.Array  # [key_heads, group], decay over the whole chunk


def _terms(chunk: Tokens, valid: jax.Array) -> Terms:
    """The terms of CHUNK tokens, of which `valid`, bool [CHUNK], count. Let L be the strictly lower triangular part of
    b_i k_i'k_j exp(g_j+1 + … + g_i), and S the state before the chunk. The new values U solve (I + L) U = b (V -
    exp(g_1 + … + g_i) K S)."""

    def heads_first(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0), 0, -2)

    q = heads_first(chunk.q)
    k = heads_first(chunk.k)
    v = heads_first(chunk.v)
    decay, rate = (jnp.moveaxis(jnp.where(valid[:, None, None], x, 0.0), 0, -1) for x in (chunk.decay, chunk.rate))
    order = jnp.arange(CHUNK)
    # Each sum from token j + 1 to i is computed by itself: differences of sums from the beginning would lose digits.
    sums = jnp.cumsum(jnp.where(order[:, None] > order, decay[..., None], 0.0), axis=-2)
    since = jnp.where(order[:, None] >= order, jnp.exp(sums), 0.0)
    total = jnp.cumsum(decay, axis=-1)  # [key_heads, group, CHUNK]
    alike = einsum("hik,hjk->hij", k, k)[:, None] * since * rate[..., None]
    decayed = jnp.exp(total)[..., None]
    keys = jnp.broadcast_to(k[:, None], (*decay.shape, k.shape[-1]))
    right = rate[..., None] * jnp.concatenate([v, keys * decayed], axis=-1)
    solved = lax.linalg.triangular_solve(alike, right, left_side=True, lower=True, unit_diagonal=True)
    values, reads = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = einsum("hik,hjk->hij", q, k)[:, None] * since
    until = since[..., -1, :, None]
    return Terms(values, reads, q[:, None] * decayed, scores, keys * until, jnp.exp(total[..., -1]))


def _advance(terms: Terms, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk's results [CHUNK, key_heads, group, value_dim], and the state after it [key_heads, group, key_dim,
    value_dim]."""
    new = terms.values - einsum("hgik,hgkv->hgiv", terms.reads, state)
    out = einsum("hgik,hgkv->hgiv", terms.queries, state) + einsum("hgij,hgjv->hgiv", terms.scores, new)
    after = state * terms.decay[..., None, None] + einsum("hgik,hgiv->hgkv", terms.keys, new)
    return jnp.moveaxis(out, 2, 0), after
