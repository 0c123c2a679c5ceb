"""One pass of the model over a batch of rows: from tokens to hidden states, through the pages of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxserve.execution.drafting import before, write_entries
from jaxserve.execution.kv_cache import CacheLayout, KVCache
from jaxserve.execution.layer_groups import LayerPlace
from jaxserve.execution.slot_states import advance, keep, of_tokens
from jaxserve.execution.slots import SlotState
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.attention import Ropes
from jaxserve.models.decoder import Decoder, DecoderLayer, added, angles
from jaxserve.models.drafter import Drafter
from jaxserve.models.layers import ROUTING
from jaxserve.models.spec import ModelConfig
from jaxserve.pallas_kernels.expert_routing import load
from jaxserve.pallas_kernels.operands import Partials, StateInputs
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.state_rows import StateRows
from jaxserve.scheduling.block_manager import Chunk
from jaxserve.scheduling.image_prompts import SHOWN


@dataclass(frozen=True)
class ForwardContext:
    """What a pass of the model is compiled for."""

    model: Decoder
    shape: StepShape
    layout: CacheLayout
    mesh: Mesh
    drafter: Drafter | None = None  # a draft head that reads the tokens: the pass writes its entries (`drafting`)


class ModelInput(NamedTuple):
    """What one pass of the model reads, unpacked from the step's buffer."""

    tokens: jax.Array  # int32 [tokens]
    q_start: jax.Array  # int32 [rows + 1]
    slot: jax.Array  # int32 [rows]
    num_decodes: jax.Array  # int32
    writes: jax.Array  # bool [rows]: the row's keys and values are kept
    keeps_token: jax.Array  # bool [rows]: the token that it samples is kept
    deferred: jax.Array  # bool [rows]: its hidden state is kept, for `sample_deferred`
    x: jax.Array | None = None  # [tokens, hidden] from the pipeline stage before; None: this stage embeds the tokens
    # int32 [proposals + 1, rows]: the tokens of rows that check proposals, -1 elsewhere; None: no row does
    checked: jax.Array | None = None
    positions: jax.Array | None = None  # int32 [3, tokens], see `StepShape`; None: a token has one

    def checking(self, num_draws: jax.Array, proposals: int) -> ModelInput:
        """The same for rows that draw `num_draws` [rows] tokens: rows that draw several check proposals, and draw
        behind each of their tokens."""
        number = jnp.arange(proposals + 1)[:, None]
        tokens = jnp.where((num_draws > 1) & (number < num_draws), self.q_start[:-1] + number, -1)
        return self._replace(checked=tokens)


class Checked(NamedTuple):
    """What recurrent layers have read of rows that check proposals."""

    tokens: jax.Array  # `ModelInput.checked`
    slot: jax.Array  # int32 [rows]
    layers: list[tuple[LayerPlace, StateInputs]]  # for each such layer the place of its states, and what it read


class Output(NamedTuple):
    """The results of a pass: all hidden states [tokens, hidden]; the hidden state of each row's last token [rows,
    hidden]; and the number of tokens up to and including this last token, int32 [rows]."""

    hidden: jax.Array
    last: jax.Array
    kv_len: jax.Array
    checked: Checked | None  # None: no row checks proposals
    features: jax.Array | None = None  # [tokens, any], for a draft head
    expert_load: jax.Array | None = None  # see `expert_routing.load`; None for a model without experts


class Placement(NamedTuple):
    """The row and the position of each token of a batch."""

    row: jax.Array  # int32 [tokens]
    position: jax.Array  # int32 [tokens], in the row's sequence
    kv_len: jax.Array  # int32 [rows], as in `Output`
    writes: jax.Array  # bool [tokens]: the token's keys and values are kept


class LayerInputs(NamedTuple):
    """What layers read of a batch, beside their input x [tokens, hidden] and their part of the cache."""

    placed: Placement
    tokens: jax.Array  # int32 [tokens]: none is -1 any more
    num_tokens: jax.Array  # int32: those that matter; padding comes last
    ropes: Ropes
    tables: list[jax.Array]  # the rows' block tables, for each group of layers
    of_groups: list[tuple[jax.Array, ...]]  # where attention of each group of layers writes and reads
    rows: StateRows | None  # slots of recurrent states; None: the model has no recurrent layers
    checked: jax.Array | None  # as in `ModelInput`
    limits: jax.Array | None  # see `picture_ends`; None: no layer needs it

    def at(self, place: LayerPlace) -> tuple:
        """The argument `where` of the layer whose part of the cache is at `place`; see `run_layer`."""
        of_layer = (self.rows, self.checked) if place.group is None else self.of_groups[place.group]
        where = *of_layer, np.int32(place.first)
        return where if place.beside is None else (where, self.at(place.beside))


class LayerRun(NamedTuple):
    """What one layer passes on."""

    x: jax.Array  # [tokens, hidden]
    y: Partials | None  # what it leaves to add to x
    pages: Any  # its part of the cache
    chosen: list[jax.Array]  # experts that its router chose, int32 [tokens, top_k]
    seen: jax.Array | None  # int32 [tokens, top_k]: the cached tokens that the last indexer has chosen
    checked: list[StateInputs]  # what its recurrent operations read of `ModelInput.checked`


class LayersRun(NamedTuple):
    """What a pass has computed when it has run its layers."""

    x: jax.Array  # [tokens, hidden]
    y: Partials | None  # what the last of these layers left to add to x
    inputs: LayerInputs
    chosen: list[jax.Array]  # experts that the layers' routers chose
    seen: jax.Array | None  # see `LayerRun`
    read_by_draft: dict[int, jax.Array]  # inputs of layers
    checked: Checked | None  # None: no row checks proposals
    cache: KVCache


def forward(
    params, cache: KVCache, slots: SlotState, batch: ModelInput, context: ForwardContext
) -> tuple[Output, KVCache]:
    """Computes the batch's tokens. Their keys and values are written to the cache, and the rows' new recurrent states
    replace the old ones, but not those of rows that check proposals. Entries of a draft head are written, too. The
    slots do not change."""
    x, y, inputs, chosen, _, read_by_draft, checked, cache = run_layers(params, cache, slots, batch, context)
    model = context.model
    drafter = context.drafter
    q_start = batch.q_start
    placed = inputs.placed
    count = inputs.num_tokens
    hidden: Any = model.apply({"params": params}, x, y, model.ops.counting(count), method="finish")
    last = hidden if context.shape.decode_only else hidden[jnp.maximum(q_start[1:] - 1, 0)]
    features = None
    if drafter is not None and slots.features is not None:
        ops = drafter.ops.counting(count)
        read_by_draft[len(model.config.layers)] = added(x, y)
        states = [read_by_draft[i] for i in drafter.spec.layers] or [hidden]
        place = placed.position - 1
        entries = placed._replace(position=jnp.maximum(place, 0), writes=placed.writes & (place >= 0))
        table = inputs.tables[context.layout.draft_group]
        pending = slots.features[batch.slot, 0]

        features = cast(jax.Array, drafter.apply({"params": params["draft"]}, states, ops, method="features"))
        given = before(features, pending, q_start, placed.row), inputs.tokens, entries.position
        slot = _kv_slots(entries, table, context.layout.page_size)
        where = slot, table, q_start, placed.kv_len, batch.num_decodes, jnp.int32(0)
        cache[-1] = write_entries(
            params,
            cache[-1],
            *given,
            where,
            drafter=drafter,
            ops=ops,
            layout=context.layout,
            mesh=context.mesh,
        )
    return Output(hidden, last, placed.kv_len, checked, features, expert_load(chosen, model, count)), cache


def run_layers(params, cache: KVCache, slots: SlotState, batch: ModelInput, context: ForwardContext) -> LayersRun:
    """The part of `forward` before the last norm: all layers, or those of the model's pipeline stage."""
    model = context.model
    layout = context.layout
    inputs = layer_inputs(slots, batch, context)
    # Padding comes last, and matmuls may skip it.
    ops = model.ops.counting(inputs.num_tokens).adapted_by(slots.adapter(batch.slot)[inputs.placed.row])
    x = batch.x
    levels: list[jax.Array] = []
    if x is None:
        given = inputs.tokens, inputs.placed.position, ops
        x, _ = cast(Any, model.apply({"params": params}, *given, method="begin"))
        if slots.images is not None:
            x, levels = _with_images(x, batch.tokens, slots.images)
    own: Any = None
    if model.config.enters:
        x, own = cast(Any, model.apply({"params": params}, inputs.tokens, x, ops, method="enter"))
    # Jitted per kind of layer, so that equal layers are traced and lowered once.
    run = partial(run_layer, ops=ops, kind=layout.kind, mesh=context.mesh, decode_only=context.shape.decode_only)
    kinds = {spec: jax.jit(partial(run, module=model.layer(spec))) for spec in set(model.config.layers)}
    chosen: list[jax.Array] = []
    seen = nothing_chosen(model.config, len(inputs.tokens))
    read_by_draft: dict[int, jax.Array] = {}  # inputs of layers
    checked: list[tuple[LayerPlace, StateInputs]] = []
    wanted = context.drafter.spec.layers if context.drafter is not None else ()
    cache = list(cache)
    y = None
    layers = model.own_layers
    joint = () if inputs.limits is None else model.config.vision.joint
    places = layout.places([model.config.layers[i] for i in layers])
    for i, place in zip(layers, places, strict=True):
        if i in wanted:
            read_by_draft[i] = added(x, y)
        layer = kinds[model.config.layers[i]]
        of_layer = () if own is None else (own[:, i],)
        given = params[f"layers_{i}"], x, y, inputs.ropes, place.taken(cache), inputs.at(place), seen, *of_layer
        limits = inputs.limits if i in joint else None
        x, y, held, routed, seen, of_checked = layer(*given, limits=limits)
        if i < len(levels):
            x = x + levels[i]
        place.put(cache, held)
        chosen += routed
        checked += [(place.beside or place, read) for read in of_checked]
    of_rows = None if batch.checked is None else Checked(batch.checked, batch.slot, checked)
    return LayersRun(x, y, inputs, chosen, seen, read_by_draft, of_rows, cache)


def _with_images(x: jax.Array, tokens: jax.Array, images: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The first layer's input x [tokens, hidden] with features of pictures in the place of tokens, and what is added
    behind each of the first layers, [tokens, hidden] each (`models.vision.spec.Tap`). tokens: as in `ModelInput`.
    images: as in `SlotState`."""
    row = SHOWN - tokens
    shown = (row >= 0)[:, None]
    first, *levels = jnp.split(images[jnp.maximum(row, 0)].astype(x.dtype), images.shape[1] // x.shape[1], axis=1)
    return jnp.where(shown, first, x), [jnp.where(shown, level, 0) for level in levels]


def nothing_chosen(config: ModelConfig, tokens: int) -> jax.Array | None:
    """What the first layer gets as `LayerRun.seen`; None for a model without indexers."""
    indexers = [layer.indexer for layer in config.layers if layer.indexer is not None]
    return jnp.full((tokens, indexers[0].top_k), -1, jnp.int32) if indexers else None


def keep_states(cache: KVCache, checked: Checked | None, num_kept: jax.Array, context: ForwardContext) -> KVCache:
    """Advances the recurrent states of rows that have checked proposals by the first `num_kept` [rows] of their tokens.
    Returns the cache."""
    states = context.layout.states
    if states is None or checked is None:
        return cache
    count = jnp.where(checked.tokens[0] < 0, 0, num_kept)
    rows = checked.layers, checked.slot, count, states.slots - 1
    return keep(states.net, context.model.ops, cache, *rows, context.mesh)


def layer_inputs(slots: SlotState, batch: ModelInput, context: ForwardContext) -> LayerInputs:
    """What the layers of a pass read of its batch."""
    layout = context.layout
    q_start = batch.q_start
    slot = batch.slot
    placed = _place(slots, batch, context.shape)
    vision = context.model.config.vision
    given = jnp.maximum(batch.tokens, 0)
    if vision is not None and vision.padding:
        given = jnp.where(batch.tokens < 0, vision.padding, batch.tokens)
    tokens = jnp.where(batch.tokens == -1, slots.last_token(slot[placed.row]), given)
    tables = layout.tables(slots.block_tables[slot])
    of_groups: list[tuple[jax.Array, ...]] = []
    for whole, window, fit in zip(tables, layout.groups.windows, layout.groups.fits, strict=True):
        table = whole * fit if fit > 1 else whole
        written = _kv_slots(placed, table, layout.page_size)
        seen = (table, placed.kv_len)
        if isinstance(window, Chunk):
            seen = _of_chunk(table, placed.kv_len, window, layout.page_size)
        of_groups.append((written, seen[0], q_start, seen[1], batch.num_decodes))
    rows = None if layout.states is None else _state_rows(slots, batch, placed)
    position = placed.position
    if batch.positions is not None:
        usual = position + slots.shift(slot)[placed.row]
        position = jnp.where(batch.positions < 0, usual, batch.positions)
    ropes = angles(context.model.config, position)
    limits = None
    if slots.images is not None and vision.joint and not context.shape.decode_only:
        limits = picture_ends(batch.tokens, placed)
    return LayerInputs(placed, tokens, q_start[-1], ropes, tables, of_groups, rows, batch.checked, limits)


def picture_ends(tokens: jax.Array, placed: Placement) -> jax.Array:
    """For each token, the position of the last token of its picture, int32 [tokens]; 0: it is no picture's. A picture
    is what features stand for without interruption. tokens: as in `ModelInput`."""
    shown = tokens <= SHOWN
    row = placed.row
    index = jnp.arange(len(tokens))
    goes_on = jnp.append(shown[1:] & (row[1:] == row[:-1]), False)
    ends = lax.cummin(jnp.where(goes_on, len(tokens), index), reverse=True)
    return jnp.where(shown, placed.position + ends - index, 0)


def expert_load(chosen: list[jax.Array], model: Decoder, count: jax.Array) -> jax.Array | None:
    """`expert_routing.load` of what the layers' routers chose, in one computation for all layers: a GPU launches a few
    kernels for it in a step, not a few in each layer."""
    return load(jnp.stack(chosen), model.config.num_experts, count) if chosen else None


def _place(slots: SlotState, batch: ModelInput, shape: StepShape) -> Placement:
    """Finds the place of each token. A row's tokens follow those that its slot has already. Padding rows have none."""
    q_start = batch.q_start
    count = q_start[1:] - q_start[:-1]
    kv_len = jnp.where(count > 0, slots.length(batch.slot) + jnp.where(batch.writes, count, 0), 0)
    row = index = jnp.arange(shape.tokens)
    if not shape.decode_only:  # comparing all pairs takes one launch on a GPU; a binary search takes ten and a loop
        row = jnp.searchsorted(q_start, index, side="right", method="compare_all").astype(jnp.int32) - 1
        row = jnp.clip(row, 0, shape.rows - 1)
    position = jnp.maximum(kv_len[row] - q_start[row + 1] + index, 0)
    return Placement(row, position, kv_len, (index < q_start[-1]) & batch.writes[row])


def _state_rows(slots: SlotState, batch: ModelInput, placed: Placement) -> StateRows:
    """The slots whose recurrent states the rows read, and those that they write. Rows that keep nothing write to the
    padding slot, and so do rows that check proposals: `slot_states.keep` advances their states afterwards."""
    writes = batch.writes if batch.checked is None else batch.writes & (batch.checked[0] < 0)
    target = jnp.where(writes, batch.slot, slots.progress.shape[0] - 1)
    begun = (batch.q_start[1:] > batch.q_start[:-1]) & (slots.length(batch.slot) > 0)
    return StateRows(batch.slot, target, ~begun, batch.q_start, batch.num_decodes, placed.row)


def _of_chunk(table: jax.Array, kv_len: jax.Array, chunk: Chunk, page_size: int) -> tuple[jax.Array, jax.Array]:
    """For each row, the part of its block table that belongs to its chunk of tokens, and how many tokens its last token
    sees there. All tokens of a row are in one chunk, because the scheduler ends steps where chunks end."""
    begin = jnp.maximum(kv_len - 1, 0) // chunk * chunk
    blocks = jnp.arange(min(chunk // page_size, table.shape[1])) + begin[:, None] // page_size
    return jnp.take_along_axis(table, jnp.minimum(blocks, table.shape[1] - 1), axis=1), kv_len - begin


def _kv_slots(placed: Placement, table: jax.Array, page_size: int) -> jax.Array:
    """Where each token's keys and values are written, int32 [tokens]: page * page_size + index in the page; -1 if they
    are not kept."""
    block = jnp.minimum(placed.position // page_size, table.shape[1] - 1)
    return jnp.where(placed.writes, table[placed.row, block] * page_size + placed.position % page_size, -1)


def run_layer(
    params, x: jax.Array, y: Partials | None, ropes: Ropes, pages: Any, where: Any, seen: jax.Array | None,
    *own: jax.Array, module: DecoderLayer, ops: Ops, kind: Any, mesh: Mesh, decode_only: bool,
    limits: jax.Array | None = None,
) -> LayerRun:  # fmt: skip
    """Runs one layer on x [tokens, hidden], on the sum y that the layer before left to add, and on its pages or states
    in the cache, `LayerPlace.taken`. `seen` is what the last indexer before has chosen. `own` is the layer's vectors
    [tokens, size], where layers have such. `limits`: see `Ops.seeing`."""
    attention_ops = ops if limits is None else ops.seeing(limits)
    alone = module.spec.beside is None
    net: Any = module.spec.recurrent
    both = [(pages, where)] if alone else list(zip(pages, where, strict=True))
    of_checked: list[StateInputs] = []

    def attend(heads: Any) -> jax.Array:
        nonlocal seen
        at = -1 if isinstance(heads, StateInputs) else 0
        held, place = both[at]
        if isinstance(heads, StateInputs):
            rows, checked, first = place
            if checked is not None:
                of_checked.append(of_tokens(heads, jnp.maximum(checked, 0)))
            out, held = advance(net, ops, heads, held, rows, first, mesh, decode_only)
        elif module.spec.indexer is not None:
            out, held, seen = kind.attend_chosen(module, ops, heads, held, seen, place, mesh, decode_only)
        else:
            out, held = kind.attend(module, attention_ops, heads, held, place, mesh, x.dtype, decode_only)
        both[at] = held, place
        return out

    made, noted = module.apply({"params": params}, x, y, ropes, attend, ops, *own, mutable=[ROUTING])
    x, y = cast(tuple[jax.Array, Partials | None], made)
    pages = both[0][0] if alone else tuple(held for held, _ in both)
    return LayerRun(x, y, pages, jax.tree.leaves(noted), seen, of_checked)
