"""The pure functions that run on the devices: one step of the model, and auxiliary programs. `runner` jits them.

A step advances a ragged batch: rows of decodes first (one token each), then rows of prompt chunks. Everything that
changes from step to step arrives in one packed int32 buffer (`StepShape`); everything else is in the slots. A batch of
decodes may sample several tokens per row in one call: the loop over them runs on the device (`_decode_loop`).
`programs` chooses which programs are compiled from these functions.
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
from jaxserve.devices.command_buffers import exchanges
from jaxserve.devices.mesh import num_groups
from jaxserve.execution.drafting import remember
from jaxserve.execution.forward import ForwardContext, ModelInput, forward, keep_states
from jaxserve.execution.kv_cache import KVCache
from jaxserve.execution.logits import from_logits, replicate
from jaxserve.execution.sampling import SCORE_WORDS, RowKernels, Sampled, TokenCounts, sample, score_tokens
from jaxserve.execution.slots import SlotState, decode_slots
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verify import DEFERRED_WORDS, DeferredDraws, Draws
from jaxserve.models.decoder import Decoder
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.scheduling.step_plan import Sampler

# rows for which `score_prompt` computes logits at a time
SCORED_ROWS = 128
CPU_SCORED_ROWS = 32


class StepResult(NamedTuple):
    drawn: Sampled  # tokens [tokens per call, rows], -1 where a row sampled none; scores [tokens per call, rows, …]
    # Hidden states [tokens, hidden] of a mixed step that keeps them, for prompt log-probabilities; or pooled ones.
    hidden: jax.Array | None
    cache: KVCache
    slots: SlotState


def run_step(
    params,
    cache: KVCache,
    slots: SlotState,
    packed: jax.Array,
    x: jax.Array | None = None,
    *,
    context: ForwardContext,
    sampler: Sampler = Sampler.ANY,
    tokens_per_call: int | None = None,
    keeps_hidden: bool = True,
    pooling: str | None = None,
    proposals: int = 0,
) -> StepResult:
    """Computes one step over a batch. `cache` and `slots` are donated; the results replace them.

    Args:
      packed: the step's buffer, int32 [context.shape.words].
      x: [tokens, hidden], what the pipeline stage before has computed; None: there is none.
      sampler: what sampling can do in this program; it must suffice for all rows, see `Sampler`.
      tokens_per_call: passes of the model over a batch of decodes. None: as many as rows need, at most as many as the
        buffer says.
      proposals: most tokens proposed for a row of a mixed step; see `_verify`.
      keeps_hidden: a mixed step returns its hidden states, or with `pooling` the result of `pool_rows`.
    """
    decode_only = context.shape.decode_only
    field, slots, batch, num_new = read_buffer(packed, slots, context.shape, x)
    # Jitted, so that the loop and what is asked of its shapes have one trace.
    advance: Callable = partial(jax.jit(partial(_advance, context=context, sampler=sampler), inline=True), params)
    if decode_only and tokens_per_call != 1:
        most = field["tokens_per_call"][0] if tokens_per_call is None else tokens_per_call
        return _decode_loop(advance, cache, slots, batch, num_new, most, ends_early=num_groups(context.mesh) == 1)
    if proposals:
        return _verify(params, cache, slots, batch, num_new, context, sampler=sampler, proposals=proposals)
    sampled, hidden, cache, slots = advance(cache, slots, batch)
    sampled = sampled._replace(tokens=jnp.where(batch.keeps_token, sampled.tokens, -1))
    if pooling is not None:
        hidden = pool_rows(hidden, batch.q_start, pooling)
    kept = replicate(hidden, context.mesh) if keeps_hidden and not decode_only else None
    return StepResult(jax.tree.map(lambda x: x[None], sampled), kept, cache, slots)


def read_buffer(
    packed: jax.Array, slots: SlotState, shape: StepShape, x: jax.Array | None
) -> tuple[dict[str, jax.Array], SlotState, ModelInput, jax.Array]:
    """Unpacks a step's buffer: its fields, the slots with new entries of block tables, what the model reads, and how
    many tokens each row samples [rows]."""
    field = {name: lax.slice(packed, (at,), (at + size,)) for name, (at, size) in shape.fields.items()}
    tables = slots.block_tables.at[field["update_slot"], field["update_index"]].set(field["update_page"])
    slots = slots._replace(block_tables=tables)
    q_start = field["q_start"]
    slot = field["slot"]
    going = slots.last_token(slot) >= 0  # the step before may have sampled a stop token that the host has not read yet
    num_new = jnp.where(going, field["num_new"], 0)
    writes = (q_start[1:] > q_start[:-1]) & going
    deferred = (num_new < 0) & going
    num_decodes = field["num_decodes"][0]
    positions = field["positions"].reshape(3, -1) if shape.three_positions else None
    batch = ModelInput(field["tokens"], q_start, slot, num_decodes, writes, num_new > 0, deferred, x, None, positions)
    return field, slots, batch, num_new


def pool_rows(hidden: jax.Array, q_start: jax.Array, pooling: str) -> jax.Array:
    """Pools the hidden states [tokens, hidden] of rows that begin at `q_start` [rows + 1]; float32 [rows, hidden].

    "last" takes each row's last token, "cls" its first token, and "mean" the sum over the row. The host divides the sum
    by the length of the prompt. The sum is a product with a matrix of ones and zeros, which adds in the same order in
    every run. The products are exact, and sums are float32.
    """
    if pooling == "last":
        return hidden[jnp.maximum(q_start[1:] - 1, 0)].astype(jnp.float32)
    if pooling == "cls":
        return hidden[jnp.minimum(q_start[:-1], len(hidden) - 1)].astype(jnp.float32)
    index = jnp.arange(len(hidden))
    belongs = (index >= q_start[:-1, None]) & (index < q_start[1:, None])
    finite = jnp.where((index < q_start[-1])[:, None], hidden, 0)  # padding may hold any value, even NaN
    return jnp.dot(belongs.astype(hidden.dtype), finite, precision="highest", preferred_element_type=jnp.float32)


def _decode_loop(
    advance: Callable, cache: KVCache, slots: SlotState, batch: ModelInput, num_new: jax.Array, passes: jax.Array | int,
    *, ends_early: bool,
) -> StepResult:  # fmt: skip
    """Samples up to `num_new` [rows] tokens per row, one per pass of the model. A row ends early at its stop token. So
    does the loop when no row continues (`ends_early`), unless other groups of devices, which take part, may go on."""

    def one_pass(i, state):
        cache, slots, drawn, going = state
        now = batch._replace(
            tokens=jnp.where(i == 0, batch.tokens, -1),
            writes=batch.writes & ((i == 0) | going),
            keeps_token=going,
            deferred=batch.deferred & (i == 0),
            positions=None if batch.positions is None else jnp.where(i == 0, batch.positions, -1),
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
    else:  # until no row continues; the first pass always runs, because deferred rows need it
        more = lambda x: (x[0] < passes) & ((x[0] == 0) | (not ends_early) | jnp.any(x[1][3]))  # noqa: E731
        _, (cache, slots, drawn, _) = lax.while_loop(more, lambda x: (x[0] + 1, one_pass(*x)), (0, state))
    return StepResult(drawn, None, cache, slots)


def _advance(
    params, cache: KVCache, slots: SlotState, batch: ModelInput, *, context: ForwardContext, sampler: Sampler
) -> tuple[Sampled, jax.Array, KVCache, SlotState]:
    """One pass of the model over a batch. Returns a sampled token per row, hidden states [tokens, hidden], cache and
    slots."""
    model = context.model
    out, cache = forward(params, cache, slots, batch, context)
    ops = model.ops.counting(jnp.sum(batch.q_start[1:] > batch.q_start[:-1], dtype=jnp.int32))
    drawn = partial(_sample, model, ops, params, out.last, slots, batch.slot, out.kv_len, None, sampler, context.mesh)
    sampled = _if_any(batch.keeps_token, drawn, sampler, context.mesh)
    sampled = sampled._replace(expert_load=out.expert_load)
    # Rows that keep nothing must not change their slot, so they write to the padding slot.
    slot = batch.slot
    padding_slot = slots.progress.shape[0] - 1
    last = jnp.where(batch.keeps_token, _unless_stopped(sampled, slots, slot), slots.last_token(slot))
    writes = jnp.where(batch.writes, slot, padding_slot)
    slots = slots._replace(
        progress=slots.progress.at[writes].set(jnp.stack((last, out.kv_len), axis=1)),
        hidden=slots.hidden.at[jnp.where(batch.deferred, slot, padding_slot), 0].set(out.last),
    )
    if out.features is not None:
        features = out.features if context.shape.decode_only else out.features[jnp.maximum(batch.q_start[1:] - 1, 0)]
        slots = remember(slots, writes, features)
    if sampler >= Sampler.FULL:
        slots = _count(sampled, slots, jnp.where(batch.keeps_token, slot, padding_slot))
    return sampled, out.hidden, cache, slots


def _verify(
    params, cache: KVCache, slots: SlotState, batch: ModelInput, num_new: jax.Array, context: ForwardContext,
    *, sampler: Sampler, proposals: int,
) -> StepResult:  # fmt: skip
    """One pass of the model over a batch whose rows end with |`num_new`| - 1 proposals. A row samples behind its last
    token that is no proposal and behind each proposal, and keeps the draws of `verify.Draws.kept`. Keys and values of
    the other proposals stay behind the row's length, where later tokens replace them. `sample_deferred` draws for rows
    whose `num_new` is negative."""
    model = context.model
    num_draws = jnp.abs(num_new)
    out, cache = forward(params, cache, slots, batch.checking(num_draws, proposals), context)
    slot = batch.slot
    padding_slot = slots.progress.shape[0] - 1
    draws = Draws.of(batch.tokens, batch.q_start[1:], out.kv_len, num_draws, proposals)
    count = num_draws.sum(dtype=jnp.int32)
    ops = model.ops.counting(count)
    owner = slot[draws.row]
    hidden = out.hidden[draws.token]
    later = jnp.where(batch.deferred[draws.row] & (jnp.arange(len(owner)) < count), owner, padding_slot)
    given = params, hidden, slots, owner, draws.position, None, sampler, context.mesh, draws.before
    drawn = partial(_sample, model, ops, *given)
    sampled = _if_any((num_new > 0)[draws.row], drawn, sampler, context.mesh)
    ends = _unless_stopped(sampled, slots, owner)
    kept = draws.kept(sampled.tokens, ends < 0, jnp.maximum(num_new, 0))
    num_kept = kept.sum(axis=1)
    tokens = sampled.tokens[draws.places]
    cache = keep_states(cache, out.checked, num_kept, context)
    place = jnp.take_along_axis(draws.places, jnp.maximum(num_kept - 1, 0)[:, None], axis=1)[:, 0]  # of its last draw
    last = jnp.where(num_kept > 0, ends[place], slots.last_token(slot))
    writes = jnp.where(batch.writes, slot, padding_slot)
    slots = slots._replace(
        progress=slots.progress.at[writes].set(jnp.stack((last, out.kv_len - num_draws + num_kept), axis=1)),
        hidden=slots.hidden.at[later, draws.number].set(hidden),
    )
    if out.features is not None:
        computed = jnp.where(num_kept > 0, draws.token[place], jnp.maximum(batch.q_start[1:] - 1, 0))
        slots = remember(slots, writes, out.features[computed])
        slots = remember(slots, later, out.features[draws.token], draws.number)
    if sampler >= Sampler.FULL:
        each = Sampled(tokens.reshape(-1), None)
        slots = _count(each, slots, jnp.where(kept, slot[:, None], padding_slot).reshape(-1))
    scores = None if sampled.scores is None else sampled.scores[draws.places].swapaxes(0, 1)
    load = None if out.expert_load is None else out.expert_load[None]
    return StepResult(Sampled(jnp.where(kept, tokens, -1).T, scores, load), None, cache, slots)


def _if_any(wanted: jax.Array, drawn: Callable[[], Sampled], sampler: Sampler, mesh: Mesh) -> Sampled:
    """The draws, of which some are wanted, bool [draws]. The others have no meaning. A program that decides at run time
    draws nothing if none is wanted, unless GPUs exchange logits, which they could not record in a conditional."""
    if sampler is Sampler.NONE:
        return Sampled(jnp.full(len(wanted), -1, jnp.int32), None)
    if sampler is not Sampler.ANY or exchanges(mesh):
        return drawn()
    nothing = Sampled(jnp.zeros(len(wanted), jnp.int32), jnp.zeros((len(wanted), SCORE_WORDS), jnp.int32))
    return lax.cond(jnp.any(wanted), drawn, lambda: nothing)


def sample_deferred(
    params, slots: SlotState, packed: jax.Array, *,
    model: Decoder, mesh: Mesh, sampler: Sampler = Sampler.ANY, proposals: int = 0,
) -> tuple[Sampled, SlotState]:  # fmt: skip
    """Samples the tokens of deferred rows from the tokens that their grammars allow.

    packed: int32 [draws, DEFERRED_WORDS + words], row by row: the fields of `verify.DeferredDraws`, and a bit for each
    allowed token. Returned tokens are -1 where a draw is not kept.
    """
    draws = DeferredDraws(*packed[:, :DEFERRED_WORDS].T)
    masks = packed[:, DEFERRED_WORDS:]
    slot = draws.slot
    padding_slot = slots.progress.shape[0] - 1
    ops = model.ops.counting(jnp.sum(slot < padding_slot, dtype=jnp.int32))
    before = draws.before(proposals) if proposals else None
    hidden = slots.hidden[slot, draws.number]
    sampled = _sample(model, ops, params, hidden, slots, slot, draws.position, masks, sampler, mesh, before)
    last = _unless_stopped(sampled, slots, slot)
    kept, is_last = draws.kept(sampled.tokens, last < 0)
    writes = jnp.where(is_last, slot, padding_slot)
    slots = slots._replace(progress=slots.progress.at[writes].set(jnp.stack((last, draws.position), axis=1)))
    if slots.features is not None:
        slots = remember(slots, writes, slots.features[slot, draws.number])
    slots = _count(sampled, slots, jnp.where(kept, slot, padding_slot))
    return sampled._replace(tokens=jnp.where(kept, sampled.tokens, -1)), slots


def _sample(
    model: Decoder,
    ops: Ops,
    params,
    hidden: jax.Array,
    slots: SlotState,
    slot: jax.Array,
    position: jax.Array,
    masks: jax.Array | None,
    sampler: Sampler,
    mesh: Mesh,
    before: jax.Array | None = None,
) -> Sampled:
    platform = mesh.devices.flat[0].platform
    ops = ops.adapted_by(slots.adapter(slot))
    draw = partial(sample, sampler=sampler, kernels=RowKernels.of(ops), platform=platform)

    def of_rows(logits, words, position, masks, before, seen) -> Sampled:
        return draw(logits, words, seen, position, masks, before=before)

    seen = TokenCounts(slots.counts, slots.in_prompt)
    return from_logits(of_rows, model, ops, params, hidden, (slots.params[slot], position, masks, before), seen, mesh)


def _unless_stopped(sampled: Sampled, slots: SlotState, slot: jax.Array) -> jax.Array:
    """The sampled tokens [rows], with -1 in the place of stop tokens of the row's `slot`."""
    stopped = jnp.any(sampled.tokens[:, None] == decode_slots(slots.params[slot]).stop_ids, axis=1)
    return jnp.where(stopped, -1, sampled.tokens)


def _count(sampled: Sampled, slots: SlotState, target: jax.Array) -> SlotState:
    """Counts the sampled tokens in the penalty rows of the slots `target` [rows]. Slots without penalties share one."""
    counted = decode_slots(slots.params[target]).penalty_row
    return slots._replace(counts=slots.counts.at[counted, sampled.tokens].add(1))


def scored_words(tokens: int, on_cpu: bool) -> tuple[int, int]:
    """(rows of `score_prompt`'s buffer for a step of `tokens` tokens, rows for which it computes logits at a time)."""
    each = min(tokens, CPU_SCORED_ROWS if on_cpu else SCORED_ROWS)
    return -(-tokens // each) * each, each


def score_prompt(
    params, hidden: jax.Array, packed: jax.Array, *, model: Decoder, mesh: Mesh, each: int, on_cpu: bool
) -> jax.Array:
    """Packed log-probabilities (`Sampled.scores`) of given tokens at rows of a step's hidden states [tokens, hidden].

    packed: int32 [1 + 2 x rows]: the number of rows that count, each row's index in `hidden`, and the token that
    follows each; with adapters 1 + 3 x rows, and the place of each row's adapter is last. Logits of `each` rows exist
    at a time. GPUs and TPUs go through all rows of the buffer, because a GPU runs a loop without the host only if the
    compiler knows its length. A CPU goes through the rows that count.
    """
    count, (rows, targets, *places) = packed[0], jnp.split(packed[1:], 2 if model.ops.add_adapters is None else 3)

    def score_some(i: jax.Array, scores: jax.Array) -> jax.Array:
        some, tokens, *where = (lax.dynamic_slice_in_dim(x, i * each, each) for x in (rows, targets, *places))
        ops = model.ops.counting(jnp.clip(count - i * each, 0, each))
        if where:
            ops = ops.adapted_by(where[0])
        scored = partial(score_tokens, sorts=on_cpu, log_softmax=ops.log_softmax)
        new = from_logits(
            lambda logits, tokens, _: scored(logits, tokens), model, ops, params, hidden[some], (tokens,), None, mesh
        )
        return lax.dynamic_update_slice_in_dim(scores, new, i * each, 0)

    turns = (count + each - 1) // each if on_cpu else len(rows) // each
    return lax.fori_loop(0, turns, score_some, jnp.zeros((len(rows), SCORE_WORDS), jnp.int32))


def update_tables(slots: SlotState, copies: jax.Array, entries: jax.Array) -> SlotState:
    """Copies rows of the block table, then writes entries for which the step's buffer has no room.

    copies: int32 [rows, 2] of (source, target) slots, copied one after the other. entries: int32 [3, updates] of
    (slot, index, page). Padding in both names the padding slot.
    """

    def copy(i, tables):
        source, target = copies[i]
        return lax.dynamic_update_index_in_dim(tables, tables[source], target, axis=0)

    tables = lax.fori_loop(0, len(copies), copy, slots.block_tables)
    slot, index, page = entries
    return slots._replace(block_tables=tables.at[slot, index].set(page))
