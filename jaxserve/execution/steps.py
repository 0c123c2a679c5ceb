"""The functions that run on the devices: one step of the model, and the upkeep around it. Pure; jitted by `runner`.

A step advances a ragged batch: rows of decodes first (one token each), then rows of prompt chunks. All that changes
from step to step arrives in one packed int32 buffer (`StepShape`); what stays is in the slots. A batch of decodes may
draw several tokens a row in one call: the loop over them runs on the device (`_decode_loop`). `programs` says which
programs are compiled of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.config import MAX_TOKENS_PER_CALL
from jaxserve.devices.mesh import is_split, spec
from jaxserve.execution.kv_cache import KVCache
from jaxserve.execution.logits import from_logits, replicate
from jaxserve.execution.sampling import SCORE_WORDS, Sampled, TokenCounts, sample, score_tokens
from jaxserve.execution.slots import SlotState, decode_slots, penalty_rows
from jaxserve.models.decoder import Decoder, DecoderLayer, Ropes
from jaxserve.pallas_kernels.parts import Heads, Parts
from jaxserve.pallas_kernels.types import KVPages
from jaxserve.scheduling.sampler import Sampler

SCORED_ROWS, CPU_SCORED_ROWS = 128, 32  # prompt positions that `score_prompt` takes at a time


@dataclass(frozen=True)
class StepShape:
    """A bucket: the padded sizes of one compiled step, and where each field lies in its packed buffer.

    Fields, int32: tokens [tokens], -1 for one that only the device knows (the slot's last); q_start [rows + 1]; kv_len
    [rows], this step's tokens included; slot [rows]; num_new [rows], how many new tokens the row samples, -1 for one
    that `sample_deferred` samples later; tokens_per_call [1], the largest of them, or 1; num_decodes [1]; and new
    block-table entries, as (slot, index, page) columns [table_updates] each.
    """

    tokens: int
    rows: int
    table_updates: int
    decode_only: bool

    @classmethod
    def of(cls, tokens: int, rows: int, page_size: int, *, decode_only: bool) -> StepShape:
        """A bucket with room for the block-table entries that so many tokens add by themselves."""
        return cls(tokens, rows, rows + tokens // page_size, decode_only)

    @cached_property
    def fields(self) -> dict[str, tuple[int, int]]:
        """Name -> (offset, length) in the packed buffer."""
        sizes = {
            "tokens": self.tokens,
            "q_start": self.rows + 1,
            "kv_len": self.rows,
            "slot": self.rows,
            "num_new": self.rows,
            "tokens_per_call": 1,
            "num_decodes": 1,
            "update_slot": self.table_updates,
            "update_index": self.table_updates,
            "update_page": self.table_updates,
        }
        fields, offset = {}, 0
        for name, size in sizes.items():
            fields[name] = (offset, size)
            offset += size
        return fields

    def empty(self, num_slots: int) -> np.ndarray:
        """A buffer without rows: the slot of nobody, and no token that the host knows."""
        packed = np.zeros(self.words, np.int32)
        for name, value in (("tokens", -1), ("slot", num_slots), ("update_slot", num_slots)):
            at, size = self.fields[name]
            packed[at : at + size] = value
        return packed

    @property
    def max_tokens_per_call(self) -> int:
        """Tokens that a row can draw in one call, whatever program is compiled of it."""
        return MAX_TOKENS_PER_CALL if self.decode_only else 1

    @property
    def words(self) -> int:
        offset, size = self.fields["update_page"]
        return offset + size

    def __str__(self) -> str:
        return f"decode[{self.rows}]" if self.decode_only else f"mixed[{self.tokens} tokens, {self.rows} rows]"


class StepResult(NamedTuple):
    drawn: Sampled  # tokens [tokens per call, rows], -1 where a row drew none; scores [the same, …]
    hidden: jax.Array | None  # [tokens, hidden] of a mixed step that keeps them, for prompt log-probabilities
    cache: KVCache
    slots: SlotState


class ModelInput(NamedTuple):
    """What one pass of the model reads, unpacked from the step's buffer; int32 arrays."""

    tokens: jax.Array  # [tokens]
    q_start: jax.Array  # [rows + 1]
    kv_len: jax.Array  # [rows]
    slot: jax.Array  # [rows]
    num_decodes: jax.Array
    writes: jax.Array  # bool [rows]: the row's keys and values are kept
    keeps_token: jax.Array  # bool [rows]: the token that it samples is kept
    deferred: jax.Array  # bool [rows]: its hidden state is kept, for `sample_deferred`


def run_step(
    params,
    cache: KVCache,
    slots: SlotState,
    packed: jax.Array,
    *,
    model: Decoder,
    shape: StepShape,
    mesh: Mesh,
    sampler: Sampler = Sampler.ANY,
    tokens_per_call: int | None = None,
    keeps_hidden: bool = True,
) -> StepResult:
    """One step over a batch. `cache` and `slots` are donated; the results replace them.

    sampler: all that the rows need; see `Sampler`.
    tokens_per_call: passes of the model over a batch of decodes; None: as many as the buffer says, and rows need.
    keeps_hidden: a mixed step returns its hidden states.
    """
    field = {name: lax.slice(packed, (at,), (at + size,)) for name, (at, size) in shape.fields.items()}
    tables = slots.block_tables.at[field["update_slot"], field["update_index"]].set(field["update_page"])
    slots = slots._replace(block_tables=tables)
    q_start, slot = field["q_start"], field["slot"]
    going = slots.last_token[slot] >= 0  # a step in flight may have met a stop token that the host has not seen yet
    num_new = jnp.where(going, field["num_new"], 0)
    writes = (q_start[1:] > q_start[:-1]) & going
    deferred = (num_new < 0) & going
    num_decodes = field["num_decodes"][0]
    batch = ModelInput(field["tokens"], q_start, field["kv_len"], slot, num_decodes, writes, num_new > 0, deferred)
    forward = partial(_forward, params, model=model, shape=shape, mesh=mesh, sampler=sampler)
    if shape.decode_only and tokens_per_call != 1:
        most = field["tokens_per_call"][0] if tokens_per_call is None else tokens_per_call
        return _decode_loop(forward, cache, slots, batch, num_new, most)
    sampled, hidden, cache, slots = forward(cache, slots, batch)
    sampled = sampled._replace(tokens=jnp.where(batch.keeps_token, sampled.tokens, -1))
    kept = replicate(hidden, mesh) if keeps_hidden and not shape.decode_only else None
    return StepResult(jax.tree.map(lambda x: x[None], sampled), kept, cache, slots)


def _decode_loop(
    forward: Callable, cache: KVCache, slots: SlotState, batch: ModelInput, num_new: jax.Array, passes: jax.Array | int
) -> StepResult:
    """Samples up to `num_new` [rows] tokens per row, one after the other; a row's own stop token ends it early."""

    def advance(i, state):
        cache, slots, drawn, going = state
        now = batch._replace(
            tokens=jnp.where(i == 0, batch.tokens, -1),
            kv_len=batch.kv_len + jnp.where(going, i, 0),
            writes=batch.writes & ((i == 0) | going),
            keeps_token=going,
            deferred=batch.deferred & (i == 0),
        )
        sampled, _, cache, slots = forward(cache, slots, now)
        sampled = sampled._replace(tokens=jnp.where(going, sampled.tokens, -1))
        drawn = jax.tree.map(lambda all_of_them, one: all_of_them.at[i].set(one), drawn, sampled)
        return cache, slots, drawn, going & (slots.last_token[batch.slot] >= 0) & (i + 1 < num_new)

    sampled, *_ = jax.eval_shape(forward, cache, slots, batch)
    most = passes if isinstance(passes, int) else MAX_TOKENS_PER_CALL
    nothing = Sampled(
        jnp.full((most, len(num_new)), -1, jnp.int32),
        None if sampled.scores is None else jnp.zeros((most, *sampled.scores.shape), jnp.int32),
    )
    state: Any = (cache, slots, nothing, num_new > 0)
    if isinstance(passes, int):
        cache, slots, drawn, _ = lax.fori_loop(0, passes, advance, state)
    else:  # until no row goes on; deferred rows need the first pass
        more = lambda x: (x[0] < passes) & ((x[0] == 0) | jnp.any(x[1][3]))  # noqa: E731
        _, (cache, slots, drawn, _) = lax.while_loop(more, lambda x: (x[0] + 1, advance(*x)), (0, state))
    return StepResult(drawn, None, cache, slots)


def _forward(
    params,
    cache: KVCache,
    slots: SlotState,
    batch: ModelInput,
    *,
    model: Decoder,
    shape: StepShape,
    mesh: Mesh,
    sampler: Sampler,
) -> tuple[Sampled, jax.Array, KVCache, SlotState]:
    """One pass of the model over a batch: samples a token per row; hidden states [tokens, hidden] beside them."""
    # Which row each token belongs to, and its position in that row's sequence.
    q_start, kv_len, slot = batch.q_start, batch.kv_len, batch.slot
    index = jnp.arange(shape.tokens)
    row = index
    if not shape.decode_only:  # by comparing all: on a GPU one launch, where a search takes ten and a loop
        row = jnp.searchsorted(q_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
        row = jnp.clip(row, 0, shape.rows - 1)
    position = jnp.maximum(kv_len[row] - q_start[row + 1] + index, 0)
    kept = (index < q_start[-1]) & batch.writes[row]
    tokens = jnp.where(batch.tokens < 0, slots.last_token[slot[row]], batch.tokens)

    row_tables = slots.block_tables[slot]
    page_size = cache[0].page_size
    page = row_tables[row, jnp.minimum(position // page_size, row_tables.shape[1] - 1)]
    kv_slot = jnp.where(kept, page * page_size + position % page_size, -1)

    # Rows of padding come last, and matmuls may leave them out.
    model = model.counting(q_start[-1])
    decoder = partial(model.apply, {"params": params})
    x, ropes = decoder(tokens, position, method="begin")
    each = model.config.num_layers // len(cache)  # layers of an array of the cache
    pages = cache[0].data.shape[0] // each
    first_page = [jnp.int32(i * pages) for i in range(each)]
    where = (kv_slot, row_tables, q_start, kv_len, batch.num_decodes)
    # Jitted here, so that layers that are alike are traced and lowered once.
    run = partial(_layer, mesh=mesh, decode_only=shape.decode_only)
    kinds = {kind: jax.jit(partial(run, module=model.layer(kind, parent=None))) for kind in set(model.config.layers)}
    cache, y = list(cache), None
    for i, kind in enumerate(model.config.layers):
        inputs, place = (x, y, ropes, cache[i // each]), (*where, first_page[i % each])
        x, y, cache[i // each] = kinds[kind](params[f"layers_{i}"], *inputs, place)
    hidden: Any = decoder(x, y, method="finish")
    last = hidden if shape.decode_only else hidden[jnp.maximum(q_start[1:] - 1, 0)]
    head = model.counting(jnp.sum(q_start[1:] > q_start[:-1], dtype=jnp.int32))
    sampled = _sample_rows(head, params, last, batch, slots, sampler, mesh)
    # Rows that draw nothing leave their slot alone: their writes go to the slot that nobody owns.
    nobody = slots.last_token.shape[0] - 1
    slots = _note(sampled, slots, slot, jnp.where(batch.keeps_token, slot, nobody), counts=sampler >= Sampler.FULL)
    slots = slots._replace(hidden=slots.hidden.at[jnp.where(batch.deferred, slot, nobody)].set(last))
    return sampled, hidden, cache, slots


def _sample_rows(
    model: Decoder, params, last: jax.Array, batch: ModelInput, slots: SlotState, sampler: Sampler, mesh: Mesh
) -> Sampled:
    """A token for each row, from the hidden states `last` [rows, hidden]; those of rows that draw none mean nothing."""

    def sampled() -> Sampled:
        return _sample(model, params, last, slots, batch.slot, batch.kv_len, None, sampler, mesh)

    if sampler is not Sampler.ANY:
        return sampled()
    nothing = Sampled(jnp.zeros(len(last), jnp.int32), jnp.zeros((len(last), SCORE_WORDS), jnp.int32))
    return lax.cond(jnp.any(batch.keeps_token), sampled, lambda: nothing)


def sample_deferred(
    params, slots: SlotState, packed: jax.Array, *, model: Decoder, mesh: Mesh, sampler: Sampler = Sampler.ANY
) -> tuple[Sampled, SlotState]:
    """Samples the tokens of deferred rows, from what grammars allow.

    packed: int32 [rows, 2 + words]: a slot, the position of the token to draw, and a bit for each token.
    """
    slot, position, masks = packed[:, 0], packed[:, 1], packed[:, 2:]
    model = model.counting(jnp.sum(slot < slots.last_token.shape[0] - 1, dtype=jnp.int32))
    sampled = _sample(model, params, slots.hidden[slot], slots, slot, position, masks, sampler, mesh)
    return sampled, _note(sampled, slots, slot, slot, counts=True)


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


def _note(sampled: Sampled, slots: SlotState, slot: jax.Array, target: jax.Array, *, counts: bool) -> SlotState:
    """Remembers the tokens of rows, whose parameters are those of `slot`, in the slots `target` [rows]; `counts` them
    for the penalties, where rows may have some."""
    stopped = jnp.any(sampled.tokens[:, None] == decode_slots(slots.params[slot]).stop_ids, axis=1)
    slots = slots._replace(last_token=slots.last_token.at[target].set(jnp.where(stopped, -1, sampled.tokens)))
    if not counts:
        return slots
    counted = penalty_rows(slots.params[target])
    return slots._replace(counts=slots.counts.at[counted, sampled.tokens].add(1))


def _layer(
    params, x: jax.Array, y: Parts | None, ropes: Ropes, pages: KVPages, where: tuple,
    *, module: DecoderLayer, mesh, decode_only,
) -> tuple[jax.Array, Parts | None, KVPages]:  # fmt: skip
    """One layer on x [tokens, hidden], what the layer before left to add to it, and its pages of the cache; returns
    all three."""

    def attend(heads: Heads) -> jax.Array:
        nonlocal pages
        chosen = module.spec.attention
        options: Any = {"scale": chosen.softmax_scale, "window": chosen.window, "softcap": chosen.softcap}
        options |= {"eps": module.norm_eps, "dtype": x.dtype, "decode_only": decode_only}
        out, pages = _attention(partial(module.ops.attend, **options), heads, pages, *where, mesh=mesh)
        return out

    x, y = cast(tuple[jax.Array, Parts | None], module.apply({"params": params}, x, y, ropes, attend))
    return x, y, pages


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


def _attention(
    attend: Callable[..., tuple[jax.Array, KVPages]],
    heads: Heads,
    pages: KVPages,
    kv_slot,
    tables,
    q_start,
    kv_len,
    num_decodes,
    first_page,
    *,
    mesh: Mesh,
) -> tuple[jax.Array, KVPages]:
    """`Ops.attend` on each device's own heads."""

    def local(heads, pages, kv_slot, tables, q_start, kv_len, num_decodes, first_page):
        return attend(heads, pages, kv_slot, (tables, q_start, kv_len, num_decodes), first_page)

    where = (kv_slot, tables, q_start, kv_len, num_decodes, first_page)
    if not is_split(mesh):
        return local(heads, pages, *where)
    everywhere = PartitionSpec()
    of_qkv: Any = jax.tree.map(lambda x: spec(*(None,) * (x.ndim - 3), "kv_heads"), heads.qkv)
    of_sinks = None if heads.sinks is None else spec("kv_heads")
    of_heads = jax.tree.map(lambda _: everywhere, heads)._replace(qkv=of_qkv, sinks=of_sinks)
    out, cache = spec(None, "kv_heads"), spec(None, None, "kv_heads")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(of_heads, cache, *(everywhere,) * len(where)),
        out_specs=(out, cache),
        check_vma=False,
    )(heads, pages, *where)
