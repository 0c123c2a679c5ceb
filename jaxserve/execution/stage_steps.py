"""What the devices of a pipeline stage run: a stage's part of a step, and taking in the tokens of the last stage.

Each stage has slots of its own, and all stages get the same buffers. A sequence's length advances in every stage when
its tokens are computed there. What it sampled is known to the last stage only: `take_tokens` brings it to the others.
So is how many proposals it keeps: in the other stages, the tokens behind which a row samples count when it is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.execution.forward import ForwardContext, run_layers
from jaxserve.execution.kv_cache import KVCache
from jaxserve.execution.logits import replicate
from jaxserve.execution.slots import LAST_TOKEN, LENGTH, SlotState, decode_slots
from jaxserve.execution.steps import read_buffer
from jaxserve.models.decoder import added


class StageResult(NamedTuple):
    x: jax.Array  # [tokens, hidden], the input of the next stage
    cache: KVCache
    slots: SlotState


def run_stage(
    params,
    cache: KVCache,
    slots: SlotState,
    packed: jax.Array,
    x: jax.Array | None = None,
    *,
    context: ForwardContext,
) -> StageResult:
    """The part of a step of a stage that is not the last. `cache` and `slots` are donated. See `steps.run_step`."""
    _, slots, batch, num_new = read_buffer(packed, slots, context.shape, x)
    ran = run_layers(params, cache, slots, batch, context)
    writes = jnp.where(batch.writes, batch.slot, slots.progress.shape[0] - 1)
    length = ran.inputs.placed.kv_len - jnp.abs(num_new)
    slots = slots._replace(progress=slots.progress.at[writes, LENGTH].set(length))
    # One array instead of two goes to the next stage, and all of its devices need it whole.
    return StageResult(replicate(added(ran.x, ran.y), context.mesh), ran.cache, slots)


def take_tokens(slots: SlotState, slot: jax.Array, tokens: jax.Array) -> SlotState:
    """Notes what the last stage has sampled: tokens [most of a row, n] or [n] for the slots `slot`, int32 [n]. Those of
    a slot follow each other; -1 is none, and none comes after it. Each adds one to its slot's length. The last one is
    the slot's last token, or -1 if it is a stop token. Entries without a meaning name the padding slot."""
    slot, tokens = jnp.repeat(slot, tokens.size // len(slot)), tokens.reshape(-1, len(slot)).T.reshape(-1)
    kept = tokens >= 0
    padding_slot = slots.progress.shape[0] - 1
    goes_on = jnp.append(kept[1:] & (slot[1:] == slot[:-1]), False)
    stopped = jnp.any(tokens[:, None] == decode_slots(slots.params[slot]).stop_ids, axis=1)
    progress = slots.progress.at[slot, LENGTH].add((kept & (slot < padding_slot)).astype(jnp.int32))
    target = jnp.where(kept & ~goes_on, slot, padding_slot)
    return slots._replace(progress=progress.at[target, LAST_TOKEN].set(jnp.where(stopped, -1, tokens)))
