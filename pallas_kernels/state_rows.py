"""What the operations of recurrent layers share: the rows of a batch and the slots of their states, the convolution
before a recurrence, and the order in which chunks of prompts are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax


class StateRows(NamedTuple):
    """The rows of a batch, and the slots whose states they read and write. No row writes what another one reads.

    Attributes:
      source: int32 [rows], the slot whose state a row continues from.
      target: int32 [rows], the slot that gets the row's new state; the padding slot for rows that keep nothing.
      fresh: bool [rows], whether the row begins its sequence. Its state is then zero, whatever the slot holds.
      q_start: int32 [rows + 1], the index of each row's first token.
      num_decodes: int32 scalar, the number of leading rows with one token. Token i belongs to row i there.
      row: int32 [tokens], the row of each token.
    """

    source: jax.Array
    target: jax.Array
    fresh: jax.Array
    q_start: jax.Array
    num_decodes: jax.Array
    row: jax.Array


T = TypeVar("T")


def read(state: T, rows: StateRows, first: jax.Array | int) -> T:
    """The states from which the rows continue, with an entry per row in the place of one per state. They are read once,
    before they are overwritten. Otherwise XLA reads them for each use, and copies all states first.

    first: int32 scalar, the index of the layer's first state, to which slots are added.
    """

    def of_rows(x: jax.Array) -> jax.Array:
        return jnp.where(_beside(rows.fresh, x), jnp.zeros((), x.dtype), x[first + rows.source])

    return lax.optimization_barrier(jax.tree.map(of_rows, state))


def write(state: T, after: T, rows: StateRows, first: jax.Array | int) -> T:
    """The states with those of the rows replaced."""
    return jax.tree.map(lambda x, new: x.at[first + rows.target].set(new), state, after)


def _beside(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags [n], to be used beside an array [n, ...]."""
    return flags.reshape(-1, *(1,) * (x.ndim - 1))


def convolve(
    x: jax.Array, w: jax.Array, before: jax.Array, rows: StateRows, spacing: int = 1
) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of each channel over its row's tokens and those before them.

    Args:
      x: float32 [tokens, heads, channels].
      w: float32 [heads, channels, width].
      before: float32 [rows, heads, (width - 1) * spacing * channels], the last inputs before each row, the oldest
        first.
      spacing: how far apart the tokens are that a token sees.

    Returns the results, as x, and the last inputs at the end of each row, as `before`.
    """
    width = w.shape[-1]
    shape = before.shape
    before = before.reshape(*shape[:2], (width - 1) * spacing, -1)
    mixed = x * w[..., width - 1]
    for step in range(1, width):
        mixed += earlier(x, before, rows, step * spacing) * w[..., width - 1 - step]
    return mixed, last_inputs(x, before, rows).reshape(shape)


def earlier(x: jax.Array, before: jax.Array, rows: StateRows, back: int) -> jax.Array:
    """For each token the input `back` tokens before it, as x [tokens, heads, channels], from its row's tokens or from
    the last inputs before the row, [rows, heads, at least `back`, channels]."""
    kept = before.shape[2]
    place = jnp.maximum(jnp.arange(len(x)) - rows.q_start[rows.row], 0)  # a token's index in its row
    older = before[rows.row, :, jnp.clip(kept + place - back, 0, kept - 1)]
    return jnp.where((place >= back)[:, None, None], jnp.roll(x, back, axis=0), older)


def last_inputs(x: jax.Array, before: jax.Array, rows: StateRows) -> jax.Array:
    """The last inputs at the end of each row, as `before`; see `earlier`."""
    kept = before.shape[2]
    count = rows.q_start[1:] - rows.q_start[:-1]
    each = jnp.arange(len(count))
    last = []
    for i in range(kept):
        from_row = count - kept + i  # index of the row's token; below 0: index of an input before the row
        own = x[jnp.clip(rows.q_start[:-1] + from_row, 0, len(x) - 1)]
        older = before[each, :, jnp.clip(count + i, 0, kept - 1)]
        last.append(jnp.where((from_row >= 0)[:, None, None], own, older))
    return jnp.stack(last, axis=2)


class Chunks(NamedTuple):
    """How the tokens of longer rows are computed, in chunks of `size` tokens.

    Attributes:
      terms: of a chunk's tokens, and bool [size] which of them count -> the chunk's terms that do not depend on the
        state before it.
      advance: of the terms and the state before the chunk -> the results [size, ...] and the state after it.
      static: the loop over chunks has a length that the compiler knows: the most chunks that a batch can have. The
        terms are computed for all chunks at once. Otherwise the loop ends with the batch's last chunk.
    """

    size: int
    terms: Callable[[Any, jax.Array], Any]
    advance: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    static: bool


def in_chunks(
    tokens: Any,
    states: jax.Array,
    rows: StateRows,
    update: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]],
    chunks: Chunks,
) -> tuple[jax.Array, jax.Array]:
    """Computes rows of one token by `update`, which advances each of `states` [rows, ...] by one token, and longer rows
    chunk by chunk.

    tokens: a tree of arrays [tokens, ...].

    Returns the results [tokens, ...], and the states after the rows.
    """
    length = len(jax.tree.leaves(tokens)[0])
    first = jnp.minimum(rows.q_start[:-1], length - 1)
    out, after = update(jax.tree.map(lambda x: x[first], tokens), states)
    decodes = jnp.arange(len(states)) < rows.num_decodes
    states = jnp.where(_beside(decodes, states), after, states)
    out = _padded(out, max(length - len(out), 0))[:length]
    return _longer_rows(tokens, out, states, rows, chunks)


def _padded(x: jax.Array, count: int) -> jax.Array:
    """x [n, ...] with `count` further entries of zeros."""
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1)))


def _longer_rows(
    tokens: Any, out: jax.Array, states: jax.Array, rows: StateRows, chunks: Chunks
) -> tuple[jax.Array, jax.Array]:
    """Computes the chunks of all rows except decodes. `out` has the results of decodes, and `states` the states of all
    rows before the chunks. Returns both with the results and the states of the other rows."""
    size = chunks.size
    count = rows.q_start[1:] - rows.q_start[:-1]
    count = jnp.where(jnp.arange(len(count)) < rows.num_decodes, 0, count)
    ends = jnp.cumsum(-(-count // size))  # for each row, the number of chunks up to its last one
    most = len(out) // size + len(count)
    padded = jax.tree.map(lambda x: _padded(x, size), tokens)
    out = _padded(out, size)

    def place(chunk: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(row of a chunk, its first token, which of its tokens count). Chunks behind the last one have no tokens."""
        row = jnp.minimum(jnp.sum(ends <= chunk), len(count) - 1)
        before = size * (chunk - (ends[row] - (-(-count[row] // size))))
        start = jnp.minimum(rows.q_start[row] + before, len(out) - size)
        return row, start, (jnp.arange(size) < count[row] - before) & (chunk < ends[-1])

    def terms(chunk: jax.Array) -> Any:
        _, start, valid = place(chunk)
        return chunks.terms(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), padded), valid)

    every = jax.vmap(terms)(jnp.arange(most)) if chunks.static else None

    def one(chunk: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carry
        row, start, valid = place(chunk)
        ours = terms(chunk) if every is None else jax.tree.map(lambda x: x[chunk], every)
        new, state = chunks.advance(ours, states[row])
        old = lax.dynamic_slice_in_dim(out, start, size)
        new = jnp.where(_beside(valid, new), new, old)
        return lax.dynamic_update_slice_in_dim(out, new, start, 0), states.at[row].set(state)

    out, states = lax.fori_loop(0, most if chunks.static else ends[-1], one, (out, states))
    return out[:-size], states
