"""The functions that run on the devices: one step of the model, and the upkeep around it. Pure; jitted by `runner`.

A step advances a ragged batch: rows of decodes first (one token each), then rows of prompt chunks. All that changes
from step to step arrives in one packed int32 buffer (`StepShape`); what stays is in the slots. A batch of decodes may
draw several tokens a row in one call: the loop over them runs on the device (`_decode_loop`). `programs` says which
programs are compiled of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.execution.forward import ModelInput, Output, forward
from jaxserve.execution.kv_cache import CacheLayout, KVCache
from jaxserve.execution.logits import from_logits, replicate
from jaxserve.execution.sampling import SCORE_WORDS, Sampled, TokenCounts, sample, score_tokens
from jaxserve.execution.slots import LAST_TOKEN, SlotState, decode_slots
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.decoder import Decoder
from jaxserve.scheduling.sampler import Sampler

SCORED_ROWS, CPU_SCORED_ROWS = 128, 32  # prompt positions that `score_prompt` takes at a time


class StepResult(NamedTuple):
    drawn: Sampled  # tokens [tokens per call, rows], -1 where a row drew none; scores [the same, …]
    # [tokens, hidden] of a mixed step that keeps them, for prompt log-probabilities; or what is pooled of them
    hidden: jax.Array | None
    cache: KVCache
    slots: SlotState


def run_step(
    params,
    cache: KVCache,
    slots: SlotState,
    packed: jax.Array,
    *,
    model: Decoder,
    shape: StepShape,
    layout: CacheLayout,
    mesh: Mesh,
    sampler: Sampler = Sampler.ANY,
    tokens_per_call: int | None = None,
    keeps_hidden: bool = True,
    pooling: str | None = None,
) -> StepResult:
    """One step over a batch. `cache` and `slots` are donated; the results replace them.

    sampler: all that the rows need; see `Sampler`.
    tokens_per_call: passes of the model over a batch of decodes; None: as many as the buffer says, and rows need.
    keeps_hidden: a mixed step returns its hidden states, or with `pooling` what `pool_rows` makes of them.
    """
    field = {name: lax.slice(packed, (at,), (at + size,)) for name, (at, size) in shape.fields.items()}
    tables = slots.block_tables.at[field["update_slot"], field["update_index"]].set(field["update_page"])
    slots = slots._replace(block_tables=tables)
    q_start, slot = field["q_start"], field["slot"]
    going = slots.last_token(slot) >= 0  # a step in flight may have met a stop token that the host has not seen yet
    num_new = jnp.where(going, field["num_new"], 0)
    writes = (q_start[1:] > q_start[:-1]) & going
    deferred = (num_new < 0) & going
    num_decodes = field["num_decodes"][0]
    batch = ModelInput(field["tokens"], q_start, slot, num_decodes, writes, num_new > 0, deferred)
    advance = partial(_advance, params, model=model, shape=shape, layout=layout, mesh=mesh, sampler=sampler)
    if shape.decode_only and tokens_per_call != 1:
        most = field["tokens_per_call"][0] if tokens_per_call is None else tokens_per_call
        return _decode_loop(advance, cache, slots, batch, num_new, most)
    sampled, hidden, cache, slots = advance(cache, slots, batch)
    sampled = sampled._replace(tokens=jnp.where(batch.keeps_token, sampled.tokens, -1))
    if pooling is not None:
        hidden = pool_rows(hidden, q_start, pooling)
    kept = replicate(hidden, mesh) if keeps_hidden and not shape.decode_only else None
    return StepResult(jax.tree.map(lambda x: x[None], sampled), kept, cache, slots)


def pool_rows(hidden: jax.Array, q_start: jax.Array, pooling: str) -> jax.Array:
    """Of hidden states [tokens, hidden] of rows that begin at `q_start` [rows + 1]: those of each row's last or first
    token ("last", "cls"), or the sum of a row's ("mean"); float32 [rows, hidden].

    The sum is a product with ones and zeros, which adds in the same order in every run, and exact floats with float32
    sums where hidden states have 16 bits.
    """
    if pooling == "last":
        return hidden[jnp.maximum(q_start[1:] - 1, 0)].astype(jnp.float32)
    if pooling == "cls":
        return hidden[jnp.minimum(q_start[:-1], len(hidden) - 1)].astype(jnp.float32)
    index = jnp.arange(len(hidden))
    belongs = (index >= q_start[:-1, None]) & (index < q_start[1:, None])
    finite = jnp.where((index < q_start[-1])[:, None], hidden, 0)  # padding may hold anything
    return jnp.dot(belongs.astype(hidden.dtype), finite, precision="highest", preferred_element_type=jnp.float32)


def _decode_loop(
    advance: Callable, cache: KVCache, slots: SlotState, batch: ModelInput, num_new: jax.Array, passes: jax.Array | int
) -> StepResult:
    """Samples up to `num_new` [rows] tokens per row, one after the other; a row's own stop token ends it early."""

    def one_pass(i, state):
        cache, slots, drawn, going = state
        now = batch._replace(
            tokens=jnp.where(i == 0, batch.tokens, -1),
            writes=batch.writes & ((i == 0) | going),
            keeps_token=going,
            deferred=batch.deferred & (i == 0),
        )
        sampled, _, cache, slots = advance(cache, slots, now)
        sampled = sampled._replace(tokens=jnp.where(going, sampled.tokens, -1))
        drawn = jax.tree.map(lambda all_of_them, one: all_of_them.at[i].set(one), drawn, sampled)
        return cache, slots, drawn, going & (slots.last_token(batch.slot) >= 0) & (i + 1 < num_new)

    sampled, *_ = jax.eval_shape(advance, cache, slots, batch)
    most = passes if isinstance(passes, int) else MAX_TOKENS_PER_CALL
    nothing = Sampled(
        jnp.full((most, len(num_new)), -1, jnp.int32),
        *(None if x is None else jnp.zeros((most, *x.shape), jnp.int32) for x in sampled[1:]),
    )
    state: Any = (cache, slots, nothing, num_new > 0)
    if isinstance(passes, int):
        cache, slots, drawn, _ = lax.fori_loop(0, passes, one_pass, state)
    else:  # until no row goes on; deferred rows need the first pass
        more = lambda x: (x[0] < passes) & ((x[0] == 0) | jnp.any(x[1][3]))  # noqa: E731
        _, (cache, slots, drawn, _) = lax.while_loop(more, lambda x: (x[0] + 1, one_pass(*x)), (0, state))
    return StepResult(drawn, None, cache, slots)


def _advance(
    params,
    cache: KVCache,
    slots: SlotState,
    batch: ModelInput,
    *,
    model: Decoder,
    shape: StepShape,
    layout: CacheLayout,
    mesh: Mesh,
    sampler: Sampler,
) -> tuple[Sampled, jax.Array, KVCache, SlotState]:
    """One pass of the model over a batch, which samples a token per row; hidden states [tokens, hidden] beside them."""
    out, cache = forward(params, cache, slots, batch, model=model, shape=shape, layout=layout, mesh=mesh)
    head = model.counting(jnp.sum(batch.q_start[1:] > batch.q_start[:-1], dtype=jnp.int32))
    sampled = _sample_rows(head, params, out, batch, slots, sampler, mesh)
    sampled = sampled._replace(expert_load=out.expert_load)
    # Rows that keep nothing leave their slot alone: their writes go to the slot of nobody.
    slot, nobody = batch.slot, slots.progress.shape[0] - 1
    last = jnp.where(batch.keeps_token, _unless_stopped(sampled, slots, slot), slots.last_token(slot))
    writes = jnp.where(batch.writes, slot, nobody)
    slots = slots._replace(
        progress=slots.progress.at[writes].set(jnp.stack((last, out.kv_len), axis=1)),
        hidden=slots.hidden.at[jnp.where(batch.deferred, slot, nobody)].set(out.last),
    )
    if sampler >= Sampler.FULL:
        slots = _count(sampled, slots, jnp.where(batch.keeps_token, slot, nobody))
    return sampled, out.hidden, cache, slots


def _sample_rows(
    model: Decoder, params, out: Output, batch: ModelInput, slots: SlotState, sampler: Sampler, mesh: Mesh
) -> Sampled:
    """A token for each row; those of rows that keep none mean nothing."""

    if sampler is Sampler.NONE:
        return Sampled(jnp.full(len(out.last), -1, jnp.int32), None)

    def sampled() -> Sampled:
        return _sample(model, params, out.last, slots, batch.slot, out.kv_len, None, sampler, mesh)

    if sampler is not Sampler.ANY:
        return sampled()
    rows = len(out.last)
    nothing = Sampled(jnp.zeros(rows, jnp.int32), jnp.zeros((rows, SCORE_WORDS), jnp.int32))
    return lax.cond(jnp.any(batch.keeps_token), sampled, lambda: nothing)


def sample_deferred(
    params, slots: SlotState, packed: jax.Array, *, model: Decoder, mesh: Mesh, sampler: Sampler = Sampler.ANY
) -> tuple[Sampled, SlotState]:
    """Samples the tokens of deferred rows, from what grammars allow.

    packed: int32 [rows, 2 + words]: a slot, the position of the token to draw, and a bit for each token.
    """
    slot, position, masks = packed[:, 0], packed[:, 1], packed[:, 2:]
    model = model.counting(jnp.sum(slot < slots.progress.shape[0] - 1, dtype=jnp.int32))
    sampled = _sample(model, params, slots.hidden[slot], slots, slot, position, masks, sampler, mesh)
    slots = slots._replace(progress=slots.progress.at[slot, LAST_TOKEN].set(_unless_stopped(sampled, slots, slot)))
    return sampled, _count(sampled, slots, slot)


def _sample(
    model: Decoder,
    params,
    hidden: jax.Array,
    slots: SlotState,
    slot: jax.Array,
    position: jax.Array,
    masks: jax.Array | None,
    sampler: Sampler,
    mesh: Mesh,
) -> Sampled:
    def of_rows(logits, words, position, masks, seen) -> Sampled:
        kernels = {"kernel": model.ops.draw, "arg_max": model.ops.arg_max}
        return sample(logits, words, seen, position, masks, sampler=sampler, **kernels)

    seen = TokenCounts(slots.counts, slots.in_prompt)
    return from_logits(of_rows, model, params, hidden, (slots.params[slot], position, masks), seen, mesh)


def _unless_stopped(sampled: Sampled, slots: SlotState, slot: jax.Array) -> jax.Array:
    """The tokens of rows [rows], -1 for those that are stop tokens of their `slot`."""
    stopped = jnp.any(sampled.tokens[:, None] == decode_slots(slots.params[slot]).stop_ids, axis=1)
    return jnp.where(stopped, -1, sampled.tokens)


def _count(sampled: Sampled, slots: SlotState, target: jax.Array) -> SlotState:
    """Counts the tokens of rows, of which some may have penalties, in the slots `target` [rows]."""
    counted = decode_slots(slots.params[target]).penalty_row
    return slots._replace(counts=slots.counts.at[counted, sampled.tokens].add(1))


def scored_words(tokens: int, on_cpu: bool) -> tuple[int, int]:
    """(rows of `score_prompt`'s buffer for a step of so many tokens, how many of them it takes at a time)."""
    each = min(tokens, CPU_SCORED_ROWS if on_cpu else SCORED_ROWS)
    return -(-tokens // each) * each, each


def score_prompt(
    params, hidden: jax.Array, packed: jax.Array, *, model: Decoder, mesh: Mesh, each: int, on_cpu: bool
) -> jax.Array:
    """Packed log-probabilities (`Sampled.scores`) of given tokens at rows of a step's hidden states [tokens, hidden].

    packed: int32 [1 + 2 x rows]: how many rows count, the index in `hidden` of each, and the token that follows each.
    The logits of `each` rows exist at a time. Accelerators go through all rows, because they run a loop without the
    host only where its length is known to the compiler; a CPU goes through those that count.
    """
    count, (rows, targets) = packed[0], jnp.split(packed[1:], 2)

    def score(logits: jax.Array, tokens: jax.Array, _: None) -> jax.Array:
        return score_tokens(logits, tokens, sorts=on_cpu)

    def score_some(i: jax.Array, scores: jax.Array) -> jax.Array:
        some, tokens = (lax.dynamic_slice_in_dim(x, i * each, each) for x in (rows, targets))
        counting = model.counting(jnp.clip(count - i * each, 0, each))
        new = from_logits(score, counting, params, hidden[some], (tokens,), None, mesh)
        return lax.dynamic_update_slice_in_dim(scores, new, i * each, 0)

    turns = (count + each - 1) // each if on_cpu else len(rows) // each
    return lax.fori_loop(0, turns, score_some, jnp.zeros((len(rows), SCORE_WORDS), jnp.int32))


def update_tables(slots: SlotState, copies: jax.Array, entries: jax.Array) -> SlotState:
    """Copies rows of the block table, then writes entries of it: those that found no place in the step.

    copies: int32 [rows, 2] of (source, target) slots, copied one after the other. entries: int32 [3, updates] of
    (slot, index, page). What is left over in both names the slot of nobody.
    """

    def copy(i, tables):
        source, target = copies[i]
        return lax.dynamic_update_index_in_dim(tables, tables[source], target, axis=0)

    tables = lax.fori_loop(0, len(copies), copy, slots.block_tables)
    slot, index, page = entries
    return slots._replace(block_tables=tables.at[slot, index].set(page))
