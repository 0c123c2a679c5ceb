"""Runs an operation of recurrent layers over sequences that are cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.state_rows import StateRows

SLOTS = 9


class Steps:
    """Steps over sequences, sequence i in slot `slot[i]` of the second of two layers.

    Args:
      given: for each array of a token's inputs one array per sequence, [tokens, ...] each.
      shapes: a NamedTuple of the shapes of a sequence's states.
      operation: (inputs [tokens, ...] each, state, rows, first, decode_only) -> results and states.
    """

    def __init__(
        self, given: Sequence[Sequence[np.ndarray]], slot: list[int], shapes: Any, operation: Callable[..., Any]
    ):
        self.given = given
        self.slot = slot
        self.done = [0] * len(slot)
        self.first = SLOTS + 1
        rng = np.random.default_rng(99)  # slots hold what sequences before left there
        parts = [jnp.asarray(rng.normal(size=(2 * (SLOTS + 1), *shape)), jnp.float32) for shape in shapes]
        self.state: Any = type(shapes)(*parts)
        self.run = jax.jit(
            lambda inputs, state, rows, decode_only: operation(inputs, state, rows, self.first, decode_only),
            static_argnums=3,
        )
        self.out: list[list[np.ndarray]] = [[] for _ in slot]

    def step(self, counts: dict[int, int], tokens: int, rows: int, *, keeps: bool = True, decode_only=False) -> None:
        """The next `counts[i]` tokens of sequences, rows of one token first, in a bucket of `tokens` and `rows`. The
        inputs of padding are no numbers: nothing may depend on them."""
        order = sorted(counts, key=lambda i: counts[i] > 1)
        starts = np.cumsum([0, *(counts[i] for i in order)])
        q_start = np.full(rows + 1, starts[-1], np.int32)
        q_start[: len(starts)] = starts
        source = np.full(rows, SLOTS, np.int32)
        source[: len(order)] = [self.slot[i] for i in order]
        fresh = np.ones(rows, bool)
        fresh[: len(order)] = [self.done[i] == 0 for i in order]
        of_token = np.minimum(np.searchsorted(q_start, np.arange(tokens), side="right") - 1, rows - 1)
        packed = []
        for values in self.given:
            whole = np.concatenate([values[i][self.done[i] : self.done[i] + counts[i]] for i in order])
            padding = np.full((tokens - len(whole), *whole.shape[1:]), np.nan)
            packed.append(jnp.asarray(np.concatenate([whole, padding]), jnp.float32))
        decodes = sum(counts[i] == 1 for i in order)
        where = StateRows(*map(jnp.asarray, (source, source if keeps else np.full_like(source, SLOTS), fresh, q_start)),
                          jnp.int32(decodes), jnp.asarray(of_token, jnp.int32))  # fmt: skip
        before = self.state
        out, self.state = self.run(packed, self.state, where, decode_only)
        changed = {self.first + SLOTS} | ({self.first + self.slot[i] for i in order} if keeps else set())
        kept = [i for i in range(2 * (SLOTS + 1)) if i not in changed]
        for old, new in zip(before, self.state, strict=True):
            np.testing.assert_array_equal(old[jnp.asarray(kept)], new[jnp.asarray(kept)])
        if keeps:
            for at, i in enumerate(order):
                self.out[i].append(np.asarray(out[starts[at] : starts[at + 1]]))
                self.done[i] += counts[i]

    def compare(self, oracle: Callable[[int], tuple[np.ndarray, ...]], rtol: float = 1e-5) -> None:
        """Compares with `oracle(i)`, the results and the last states of sequence i."""
        for i, slot in enumerate(self.slot):
            ours = np.concatenate(self.out[i]), *(x[self.first + slot] for x in self.state)
            for own, theirs in zip(ours, oracle(i), strict=True):
                np.testing.assert_allclose(own, theirs, rtol=0, atol=rtol * np.abs(theirs).max())


def state_rows(counts: Sequence[int], source: Sequence[int], fresh: Sequence[bool]) -> StateRows:
    """Rows of these numbers of tokens, those of one token first, which write the states from which they continue."""
    starts = np.cumsum([0, *counts])
    slots = jnp.asarray(source, jnp.int32)
    of_token = jnp.asarray(np.repeat(np.arange(len(counts)), counts), jnp.int32)
    decodes = jnp.int32(sum(count == 1 for count in counts))
    return StateRows(slots, slots, jnp.asarray(fresh), jnp.asarray(starts, jnp.int32), decodes, of_token)


def compare_forms(
    ours: Callable[..., Any], plain: Callable[..., Any], inputs: Any, state: Any, rows: StateRows, **options: Any
) -> None:
    """Compares the results and the states of two forms of an operation, for the second of three layers."""
    made, expected = (
        jax.tree.leaves(jax.jit(partial(form, **options))(inputs, state, rows, 2)) for form in (ours, plain)
    )
    for own, theirs in zip(made, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
