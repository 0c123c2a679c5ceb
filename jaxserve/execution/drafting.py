"""Draft heads on the device (`models.drafter`): entries for the tokens that a step computes, and proposals.

A head's entries are in pages of their own, which have the same numbers as the target's. The entry of the token at
position p is at place p - 1, so that a sequence of n tokens has n - 1. Since a head has a single layer, an entry's keys
and values depend on nothing but the feature before the token and the token itself. So a step only writes the keys and
values of its tokens, and attention over them runs when tokens are proposed.

The feature before a row's first token comes from the step before, in `SlotState.features`. Zeros there mean that no
step computed it: the sequence begins behind a cached prefix, whose last page has the entry already. Whatever is wrong
in features or entries costs proposals, and never a token of an answer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.logits import from_logits, replicate
from jaxserve.execution.sampling import RowKernels, TokenCounts, sample
from jaxserve.execution.slots import SlotState
from jaxserve.models.decoder import Decoder, angles
from jaxserve.models.drafter import Drafter
from jaxserve.models.layers import ROUTING
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.scheduling.step_plan import Sampler

ENTRIES: dict[str, Any] = {"method": "entries", "mutable": [ROUTING]}  # what routers chose is not kept


def of_head(params: Any) -> dict[str, Any]:
    """A head's parameters with the target's embeddings, unless it has its own. `params` are those of the target, with
    the head's under "draft"."""
    return {"embed": params["embed"], **params["draft"]}


def before(features: jax.Array, pending: jax.Array, q_start: jax.Array, row: jax.Array) -> jax.Array:
    """The feature before each token [tokens, hidden]: that of the token before in its row, or for a row's first token
    `pending` [rows, hidden]. `row`: int32 [tokens], each token's row."""
    first = jnp.arange(len(features)) == q_start[row]
    return jnp.where(first[:, None], pending[row], jnp.roll(features, 1, axis=0))


def remember(slots: SlotState, writes: jax.Array, features: jax.Array, number: jax.Array | int = 0) -> SlotState:
    """Keeps features [rows, hidden] in the slots `writes`: of the last tokens that rows computed and keep; for deferred
    rows of the tokens behind which they make the draws `number`."""
    assert slots.features is not None
    return slots._replace(features=slots.features.at[writes, number].set(features))


def write_entries(
    params: Any,
    pages: Any,
    features: jax.Array,
    tokens: jax.Array,
    place: jax.Array,
    where: tuple,
    *,
    drafter: Drafter,
    ops: Ops,
    layout: CacheLayout,
    mesh: Mesh,
) -> Any:
    """Writes the entries of tokens into the head's pages. features: before each token. place: int32 [tokens], of each
    entry. where: as for `CacheKind.attend`; entries without a known feature are not written. Returns the pages."""
    kind = layout.draft
    layer = drafter.layer(drafter.config.layers[0])
    assert kind is not None
    slots = jnp.where(jnp.any(features != 0, axis=-1), where[0], -1)

    def write(heads: Any) -> jax.Array:
        nonlocal pages
        out, pages = kind.write(layer, ops, heads, pages, (slots, *where[1:]), mesh, drafter.dtype)
        return out

    ropes = angles(drafter.config, jnp.maximum(place, 0))
    drafter.apply({"params": of_head(params)}, features, tokens, ropes, write, ops, **ENTRIES)
    return pages


def propose(
    params: Any,
    pages: Any,
    slots: SlotState,
    packed: jax.Array,
    *,
    model: Decoder,
    drafter: Drafter,
    layout: CacheLayout,
    mesh: Mesh,
    sampler: Sampler,
    passes: int,
    static: bool,
) -> tuple[jax.Array, Any]:
    """Proposes a token in each pass behind the last known one of each row, whose tokens before it are computed. Returns
    the tokens, int32 [passes, rows], and the head's pages.

    packed: int32 [2 + rows]: the number of rows, the number of passes unless it is `static`, and each row's slot. A
    token is drawn with the target's noise for its position, so that similar distributions draw the same token often.
    """
    kind = layout.draft
    layer = drafter.layer(drafter.config.layers[0])
    assert kind is not None
    assert slots.features is not None
    count = packed[0]
    slot = packed[2:]
    rows = len(slot)
    real = jnp.arange(rows) < count
    table = layout.tables(slots.block_tables[slot])[layout.draft_group]
    q_start = jnp.minimum(jnp.arange(rows + 1), count)
    length = slots.length(slot)
    words = slots.params[slot]
    seen = TokenCounts(slots.counts, slots.in_prompt)  # for penalties, which proposals do not follow
    ops = drafter.ops.counting(count)
    head: Drafter | Decoder = drafter if drafter.spec.own_head else model
    head_ops = head.ops.counting(count)
    head_params = params["draft"] if drafter.spec.own_head else params

    ids = params["draft"].get("ids")

    def draw(logits: jax.Array, words: jax.Array, position: jax.Array, shared: tuple) -> jax.Array:
        seen, ids = shared
        token = sample(logits, words, seen, position, sampler=sampler, kernels=RowKernels.of(head_ops), ids=ids).tokens
        return token if ids is None else ids[token]

    def one_pass(i: jax.Array | int, state: Any) -> Any:
        pages, features, token, drawn = state
        # A sequence at its limit may have room for fewer tokens than others. Its table ends there.
        place = jnp.clip(length - 1 + i, 0, table.shape[1] * layout.page_size - 1)
        page = jnp.take_along_axis(table, place[:, None] // layout.page_size, axis=1)[:, 0]
        written = jnp.where(real, page * layout.page_size + place % layout.page_size, -1)
        where = (written, table, q_start, jnp.where(real, place + 1, 0), count, jnp.int32(0))

        def attend(heads: Any) -> jax.Array:
            nonlocal pages
            out, pages = kind.attend(layer, ops, heads, pages, where, mesh, drafter.dtype, True)
            return out

        ropes = angles(drafter.config, place)
        (features, hidden), _ = drafter.apply(
            {"params": of_head(params)}, features, token, ropes, attend, ops, **ENTRIES
        )
        token = from_logits(draw, head, head_ops, head_params, hidden, (words, length + 1 + i), (seen, ids), mesh)
        return pages, features, token, drawn.at[i].set(token)

    drawn = jnp.zeros((passes, rows), jnp.int32)
    state = (pages, slots.features[slot, 0], slots.last_token(slot), drawn)
    pages, _, _, drawn = lax.fori_loop(0, passes if static else packed[1], one_pass, state)
    return replicate(drawn, mesh), pages
