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
        rows = len(ends)
        most = len(tokens)
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


class DeferredDraws(NamedTuple):
    """Draws of deferred rows, row by row, int32 [draws] each; those of a row follow each other.

    slot: of the row; the padding slot for padding.
    number: which of its row's draws it is.
    position: how many tokens the token sees behind which it is, itself included.
    proposed: the token that follows, if it is a proposal; -1 behind the last one, and where the row must end.
    """

    slot: jax.Array
    number: jax.Array
    position: jax.Array
    proposed: jax.Array

    def before(self, proposals: int) -> jax.Array:
        """The proposals before each draw, int32 [draws, proposals]; -1 where there are fewer."""
        back = jnp.arange(proposals)
        index = jnp.arange(len(self.slot))[:, None] - 1 - back
        return jnp.where(back < self.number[:, None], self.proposed[jnp.maximum(index, 0)], -1)

    def kept(self, tokens: jax.Array, stopped: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which draws count, as in `Draws.kept`, and which of them are the last of their rows; bool [draws] each."""
        index = jnp.arange(len(self.slot))
        ends = jnp.cumsum((tokens != self.proposed) | stopped)
        before_row = jnp.where(index > self.number, ends[jnp.maximum(index - self.number - 1, 0)], 0)
        before = jnp.where(index > 0, ends[jnp.maximum(index - 1, 0)], 0)
        kept = before == before_row
        return kept, kept & (ends > before_row)


DEFERRED_WORDS = len(DeferredDraws._fields)
