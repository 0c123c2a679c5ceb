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
    """Where rows draw in a pass that checks up to `proposals` tokens of each. Draw 0 of a row is behind its last token
    that is no proposal.

    index: int32 [rows, proposals + 1], of the token behind which the row draws.
    position: int32 [rows, proposals + 1], how many tokens this token sees, itself included.
    wanted: bool [rows, proposals + 1], false where a row has fewer proposals.
    proposed: int32 [rows, proposals + 1], the token that follows; what stands behind the last proposal has no meaning.
    """

    index: jax.Array
    position: jax.Array
    wanted: jax.Array
    proposed: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, ends: jax.Array, kv_len: jax.Array, num_new: jax.Array, proposals: int) -> Draws:
        """tokens: int32 [tokens]. For each row, [rows]: its end there, how many tokens its last one sees, its draws."""
        draw = jnp.arange(proposals + 1)
        index = jnp.clip((ends - num_new)[:, None] + draw, 0, len(tokens) - 1)
        position = (kv_len - num_new + 1)[:, None] + draw
        following = tokens[jnp.minimum(index + 1, len(tokens) - 1)]
        return cls(index, position, draw < num_new[:, None], following)

    @property
    def before(self) -> jax.Array:
        """The proposals before each draw, int32 [rows, proposals + 1, proposals]; -1 where there are fewer."""
        count = self.index.shape[1]
        earlier = jnp.arange(count - 1) < jnp.arange(count)[:, None]
        return jnp.where(earlier, self.proposed[:, None, :-1], -1)

    def kept(self, tokens: jax.Array, stopped: jax.Array) -> jax.Array:
        """Which draws count, bool [rows, proposals + 1]: the first, and each behind a proposal that equals the draw
        before, if that draw counts and does not stop the row. tokens, stopped: of all draws, of this shape."""
        goes_on = (tokens == self.proposed) & ~stopped
        first = jnp.ones_like(goes_on[:, :1])
        reached = jnp.cumprod(jnp.concatenate([first, goes_on[:, :-1]], axis=1), axis=1)
        return self.wanted & (reached > 0)
