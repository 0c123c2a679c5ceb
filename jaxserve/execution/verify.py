"""Speculative decoding on the device: one pass of the model checks tokens that were proposed for the rows of a batch
(Leviathan et al. 2023, arXiv:2211.17192).

A token is a function of its logits, parameters, seed and position (`sampling`). So a row draws behind each proposal as
if the proposal were its own token, and keeps it while the draw before gave the same token. The tokens are those of
decoding one by one, at any temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Draws(NamedTuple):
    """The draws of a pass, one after the other, row by row. Draw 0 of a row is behind its last token that is no
    proposal, and each other one is behind a proposal. Padding follows the last draw.

    row: int32 [draws], the row of each.
    number: int32 [draws], which of its row's draws it is.
    token: int32 [draws], the index of the token behind which it is.
    position: int32 [draws], how many tokens this token sees, itself included.
    proposed: int32 [draws], the token that follows, if it is a proposal.
    before: int32 [draws, proposals], the proposals before it; -1 where there are fewer.
    places: int32 [rows, proposals + 1], where each row's draws are; behind its last one, the place has no meaning.
    """

    row: jax.Array
    number: jax.Array
    token: jax.Array
    position: jax.Array
    proposed: jax.Array
    before: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, ends: jax.Array, kv_len: jax.Array, num_new: jax.Array, proposals: int) -> Draws:
        """tokens: int32 [tokens]. For each row, [rows]: its end there, how many tokens its last one sees, its draws."""
        rows, most = len(ends), len(tokens)
        draws = min(most, rows * (proposals + 1))
        first = jnp.cumsum(num_new) - num_new
        row = jnp.repeat(jnp.arange(rows), num_new, total_repeat_length=draws)
        number = jnp.clip(jnp.arange(draws) - first[row], 0, proposals)
        token = jnp.clip((ends - num_new)[row] + number, 0, most - 1)
        position = (kv_len - num_new + 1)[row] + number
        back = jnp.arange(proposals)
        before = jnp.where(back < number[:, None], tokens[jnp.maximum(token[:, None] - back, 0)], -1)
        places = jnp.minimum(first[:, None] + jnp.arange(proposals + 1), draws - 1)
        return cls(row, number, token, position, tokens[jnp.minimum(token + 1, most - 1)], before, places)

    def kept(self, tokens: jax.Array, stopped: jax.Array, num_new: jax.Array) -> jax.Array:
        """Which draws of each row count, bool [rows, proposals + 1]: the first, and each behind a proposal that equals
        the draw before, if that draw counts and does not stop the row. tokens, stopped: of all draws, [draws]."""
        goes_on = ((tokens == self.proposed) & ~stopped)[self.places]
        first = jnp.ones_like(goes_on[:, :1])
        reached = jnp.cumprod(jnp.concatenate([first, goes_on[:, :-1]], axis=1), axis=1)
        return (jnp.arange(goes_on.shape[1]) < num_new[:, None]) & (reached > 0)
