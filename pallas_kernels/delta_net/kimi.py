"""Kimi delta attention (Kimi Team 2025, arXiv:2510.26692) in plain XLA, on every device.

It is the gated delta rule of `reference` with a decay g for each channel of a head's keys:

  S <- diag(exp(g)) S,  then  S <- S + b k (v - S'k)'        its result is S'q / sqrt(key_dim)

Within a chunk, the product of a query or key i with an earlier key j sums q_c k_c exp(g_j+1,c + … + g_i,c) over the
channels c. A chunk has blocks of BLOCK tokens. For keys of an earlier block, the sum over tokens ends and begins where
the block of i begins. Both factors exp(…) are then at most 1, and products of matrices give all sums. Within a block,
each pair of tokens is computed by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.delta_net.reference import CHUNK, einsum, unit
from jaxserve.pallas_kernels.operands import DeltaHeads
from jaxserve.pallas_kernels.state_rows import Chunks, StateRows, convolve, in_chunks, read, write
from jaxserve.pallas_kernels.types import DeltaState

BLOCK = 16


class Tokens(NamedTuple):
    """Tokens after the convolution, in float32: q, k, v and decay [tokens, heads, dim], rate [tokens, heads]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    rate: jax.Array


def kimi_delta(
    heads: DeltaHeads,
    state: DeltaState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    activation: Callable[[jax.Array], jax.Array],
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, DeltaState]:
    """Computes the batch's tokens and writes the rows' new states. The arguments are those of `reference.delta_net`;
    states have no axis of groups.

    Returns the results, float32 [tokens, heads, dim], and the states.
    """
    before, inputs = read(state, rows, first)
    mixed, inputs = convolve(heads.qkv.astype(jnp.float32), heads.conv.astype(jnp.float32), inputs, rows)
    q, k, v = jnp.split(activation(mixed), 3, axis=-1)
    tokens = Tokens(unit(q) * q.shape[-1] ** -0.5, unit(k), v, heads.decay, heads.rate)
    if decode_only:
        out, after = update(tokens, before)
    else:
        out, after = in_chunks(tokens, before, rows, update, Chunks(CHUNK, _terms, _advance, static))
    return out, write(state, DeltaState(after, inputs), rows, first)


def update(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each row: results [rows, heads, dim] and new states [rows, heads, dim, dim]."""
    q, k, v, decay, rate = tokens
    shrunk = jnp.exp(decay)
    read = einsum("rhxk,rhkv->rhxv", jnp.stack([k, q], axis=2) * shrunk[:, :, None], state)
    new = rate[..., None] * (v - read[:, :, 0])
    after = state * shrunk[..., None] + k[..., None] * new[:, :, None]
    return read[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * new, after


class Terms(NamedTuple):
    """The terms of a chunk that do not depend on the state before it; see `_terms`."""

    values: jax.Array  # [heads, CHUNK, dim], what tokens would write into an empty state
    reads: jax.Array  # [heads, CHUNK, dim], the keys through which these values depend on the state
    queries: jax.Array  # [heads, CHUNK, dim], queries decayed since the chunk began
    scores: jax.Array  # [heads, CHUNK, CHUNK], products of queries and keys, decayed since the key
    keys: jax.Array  # [heads, CHUNK, dim], keys decayed until the chunk ends
    decay: jax.Array  # [heads, dim], decay over the whole chunk


def _terms(chunk: Tokens, valid: jax.Array) -> Terms:
    """The terms of CHUNK tokens, of which `valid`, bool [CHUNK], count. The triangular system is that of
    `reference._terms`."""
    own = (jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0) for x in chunk)
    q, k, v, decay, rate = (jnp.moveaxis(x, 0, 1) for x in own)
    alike, scores = _decayed_products(jnp.stack([k, q]), k, decay)
    decayed = jnp.exp(jnp.cumsum(decay, axis=1))
    right = rate[..., None] * jnp.concatenate([v, k * decayed], axis=-1)
    alike = alike * rate[..., None]
    solved = lax.linalg.triangular_solve(alike, right, left_side=True, lower=True, unit_diagonal=True)
    values, reads = jnp.split(solved, 2, axis=-1)
    return Terms(values, reads, q * decayed, scores, k * jnp.exp(_sums_behind(decay, 1)), decayed[:, -1])


def _sums_behind(x: jax.Array, axis: int) -> jax.Array:
    """For each entry along an axis, the sum of those behind it."""
    behind = jnp.roll(x, -1, axis).at[(slice(None),) * axis + (-1,)].set(0.0)
    return lax.cumsum(behind, axis, reverse=True)


def _decayed_products(these: jax.Array, keys: jax.Array, decay: jax.Array) -> jax.Array:
    """Products of `these` [n, heads, CHUNK, dim] with keys [heads, CHUNK, dim] of the same token and those before it,
    decayed since the key: [n, heads, CHUNK, CHUNK], with zeros above the diagonal."""
    count = CHUNK // BLOCK
    shape = (*keys.shape[:-2], count, BLOCK, keys.shape[-1])
    these = these.reshape(len(these), *shape)
    keys = keys.reshape(shape)
    decay = decay.reshape(shape)
    since = jnp.cumsum(decay, axis=2)  # the block began
    order = jnp.arange(BLOCK)
    apart = since[:, :, :, None] - since[:, :, None]
    apart = jnp.exp(jnp.where((order[:, None] >= order)[..., None], apart, -jnp.inf))
    within = jnp.sum(these[..., None, :] * keys[:, :, None] * apart, axis=-1)
    # Decay from behind key j of block J to the beginning of block I: the rest of J, and the blocks between.
    order = jnp.arange(count)
    between = (order > order[:, None]) & (order < order[:, None, None])
    between = einsum("ijb,hbk->hijk", between.astype(jnp.float32), since[:, :, -1])
    until = _sums_behind(decay, 2)[:, None] + between[:, :, :, None]
    earlier = (order < order[:, None])[:, :, None, None]
    far = keys[:, None] * jnp.exp(jnp.where(earlier, until, -jnp.inf))
    products = einsum("nhisk,hijtk->nhisjt", these * jnp.exp(since), far)
    products += within[..., None, :] * jnp.eye(count)[:, None, :, None]
    return products.reshape(*products.shape[:2], CHUNK, CHUNK)


def _advance(terms: Terms, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk's results [CHUNK, heads, dim], and the state after it [heads, dim, dim]."""
    new = terms.values - einsum("hik,hkv->hiv", terms.reads, state)
    out = einsum("hik,hkv->hiv", terms.queries, state) + einsum("hij,hjv->hiv", terms.scores, new)
    after = state * terms.decay[..., None] + einsum("hik,hiv->hkv", terms.keys, new)
    return jnp.moveaxis(out, 1, 0), after
