"""What the devices remember of each running sequence between steps, by slot.

A sequence owns one slot while it runs. Its sampling parameters are sent once, when it gets the slot (`encode_slot`,
`set_slots`); a step then carries only what changes. No sequence owns the last slot (`num_slots`), the padding slot:
padding rows point there.

Token counts are as wide as the vocabulary, and few sequences need them. A sequence with penalties therefore owns a
penalty row beside its slot; the others share row 0 (NO_PENALTY_ROW), whose contents mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxserve.limits import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS
from jaxserve.types import NO_PENALTY_ROW, SamplingParams

SLOTS_PER_CALL = 8  # sequences whose parameters the smallest call of `set_slots` writes
COUNTED_PER_CALL = 512  # tokens that the smallest call of `count_tokens` counts


class Field(NamedTuple):
    """How a number, or a list of numbers, is stored in the words of a slot. A list is filled up to `size` numbers with
    `padding`."""

    dtype: DTypeLike
    size: int | None = None
    padding: int | None = None  # None: the field is no list


def _field(dtype: DTypeLike, size: int | None = None, padding: int | None = None) -> Any:
    return Field(dtype, size, padding)


class RowParams(NamedTuple):
    """The parameters that the devices get when a sequence gets a slot. For a batch these are arrays [rows] or [rows,
    size].

    This class is the only declaration of these fields. `encode_slot` packs them in this order, 32 bits each, and
    `decode_slots` unpacks them. Lists come last.
    """

    slot: jax.Array = _field(np.int32)
    penalty_row: jax.Array = _field(np.int32)
    length: jax.Array = _field(np.int32)  # tokens whose keys and values the sequence's pages hold already
    temperature: jax.Array = _field(np.float32)  # 0: greedy
    top_p: jax.Array = _field(np.float32)
    min_p: jax.Array = _field(np.float32)
    repetition: jax.Array = _field(np.float32)
    presence: jax.Array = _field(np.float32)
    frequency: jax.Array = _field(np.float32)
    top_k: jax.Array = _field(np.int32)  # 0: off
    seed: jax.Array = _field(np.uint32, 2)
    no_stop_before: jax.Array = _field(np.int32)  # no stop token is sampled for positions below this one
    logprobs: jax.Array = _field(np.bool_)  # whether the row wants log-probabilities
    adapter: jax.Array = _field(np.int32)  # the place of its LoRA adapter in the pool; NO_ADAPTER: it has none
    shift: jax.Array = _field(np.int32)  # by how much positions of tokens behind its prompt exceed their places
    stop_ids: jax.Array = _field(np.int32, MAX_STOP_TOKENS, -1)
    score_ids: jax.Array = _field(np.int32, MAX_LOGPROBS, -1)  # the alternatives it wants, instead of the most likely
    bias_ids: jax.Array = _field(np.int32, MAX_LOGIT_BIAS, -1)
    bias: jax.Array = _field(np.float32, MAX_LOGIT_BIAS, 0)


def _places() -> tuple[dict[str, slice], int]:
    """(field -> its slice of a slot's words, number of words)."""
    places = {}
    at = 0
    for name, field in RowParams._field_defaults.items():
        places[name] = slice(at, at := at + (field.size or 1))
    return places, at


_PLACES, SLOT_WORDS = _places()
_FIELDS = RowParams._field_defaults
_LISTS = {name: field for name, field in _FIELDS.items() if field.padding is not None}
_FORMATS = {np.int32: "i", np.uint32: "I", np.float32: "f", np.bool_: "i"}
_NUMBERS = Struct("=" + "".join(_FORMATS[f.dtype] * (f.size or 1) for f in _FIELDS.values() if f.padding is None))
_NO_LISTS = np.concatenate([
    np.zeros(_NUMBERS.size // 4, np.int32),
    *(np.full(field.size, field.padding, field.dtype).view(np.int32) for field in _LISTS.values()),
])  # fmt: skip
NO_ADAPTER = -1
LAST_TOKEN, LENGTH = range(2)  # columns of SlotState.progress


class SlotState(NamedTuple):
    """Arrays on every device. `slots` is num_slots + 1, `penalty_rows` is the number of real penalty rows + 1."""

    progress: jax.Array  # int32 [slots, 2]: LAST_TOKEN and LENGTH, in one array because steps change both
    block_tables: jax.Array  # int32 [slots, blocks * groups of layers], see `scheduling.block_manager`
    params: jax.Array  # int32 [slots, SLOT_WORDS], as from `encode_slot`
    counts: jax.Array  # int32 [penalty_rows, vocab]: how often each token is in the output so far
    in_prompt: jax.Array  # bool [penalty_rows, vocab]: whether the token is in the prompt
    # [slots, proposals + 1, hidden]: hidden states behind which a deferred row samples once its masks are known
    hidden: jax.Array
    # [slots, proposals + 1, hidden] for a draft head (`drafting`): first the feature of the last computed token, or of
    # a deferred row those of the tokens behind which it samples
    features: jax.Array | None = None
    # [rows, width]: features of pictures, of models that see (`EncoderConfig.width`)
    images: jax.Array | None = None

    def last_token(self, slot: jax.Array) -> jax.Array:
        """The latest token of each slot, int32 [rows]. It is -1 after a stop token: the sequence samples no more."""
        return self.progress[slot][:, LAST_TOKEN]

    def length(self, slot: jax.Array) -> jax.Array:
        """How many tokens of each slot have their keys and values in the cache, int32 [rows]. The device owns this
        number. The next step continues from it, even if the host does not know yet how many tokens the step before
        kept."""
        return self.progress[slot][:, LENGTH]

    def adapter(self, slot: jax.Array) -> jax.Array:
        """The place of each slot's adapter in the pool, int32 [rows]; NO_ADAPTER where it has none."""
        return self.params[slot, _PLACES["adapter"].start]

    def shift(self, slot: jax.Array) -> jax.Array:
        """By how much positions of tokens behind the prompts of slots exceed their places, int32 [rows]."""
        return self.params[slot, _PLACES["shift"].start]


def create_slots(
    num_slots: int,
    table_width: int,
    vocab_size: int,
    hidden_size: int = 1,
    dtype: DTypeLike = jnp.float32,
    penalty_rows: int = 0,
    zeros: Callable[..., jax.Array] = jnp.zeros,
    proposals: int = 0,
    feature_size: int | None = None,
    images: tuple[int, int] | None = None,
) -> SlotState:
    """Empty slots. A sequence has up to `table_width` pages, and `penalty_rows` sequences can have penalties at a time.
    `zeros` allocates the large arrays. proposals: most tokens that are proposed for a sequence in a step. feature_size:
    of a draft head's features; None: there is no such head. images: the size of the array of features of pictures."""
    rows = num_slots + 1
    return SlotState(
        progress=jnp.zeros((rows, 2), jnp.int32),
        block_tables=jnp.zeros((rows, table_width), jnp.int32),
        params=jnp.tile(padding_slot_params(num_slots), (rows, 1)),
        counts=zeros((1 + penalty_rows, vocab_size), jnp.int32),
        in_prompt=zeros((1 + penalty_rows, vocab_size), jnp.bool_),
        hidden=jnp.zeros((rows, proposals + 1, hidden_size), dtype),
        features=None if feature_size is None else jnp.zeros((rows, proposals + 1, feature_size), dtype),
        images=None if images is None else zeros(images, dtype),
    )


def encode_slot(
    slot: int,
    params: SamplingParams,
    seed: int,
    stop_ids: tuple[int, ...],
    prompt_len: int,
    penalty_row: int = NO_PENALTY_ROW,
    length: int = 0,
    adapter: int = NO_ADAPTER,
    shift: int = 0,
) -> np.ndarray:
    """One row of `set_slots`'s buffer, int32 [SLOT_WORDS].

    Args:
      slot: the slot that the row is written to.
      params: the sequence's sampling parameters.
      seed: the sequence's own seed, 64 bits.
      stop_ids: all tokens that end the output, at most MAX_STOP_TOKENS.
      prompt_len: tokens of the prompt.
      penalty_row: a row of its own for a sequence with penalties.
      length: tokens whose keys and values the sequence's pages hold already.
      adapter: the place of the sequence's LoRA adapter in the pool.
      shift: by how much positions of tokens behind the prompt exceed their places.
    """
    bias = params.logit_bias or {}
    no_stop_before = prompt_len + params.min_tokens if params.min_tokens and not params.grammar else 0
    row = _NO_LISTS.copy()
    _NUMBERS.pack_into(
        row.data,
        0,
        slot,
        penalty_row,
        length,
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        max(params.top_k, 0),
        (seed >> 32) & 0xFFFFFFFF,
        seed & 0xFFFFFFFF,
        min(no_stop_before, 2**31 - 1),
        params.logprobs is not None,
        adapter,
        shift,
    )
    lists = {
        "stop_ids": stop_ids,
        "score_ids": params.logprob_token_ids,
        "bias_ids": tuple(bias),
        "bias": tuple(bias.values()),
    }
    for name, values in lists.items():
        if values:
            row[_PLACES[name]].view(_LISTS[name].dtype)[: len(values)] = values
    return row


def padding_slot_params(num_slots: int) -> np.ndarray:
    """A row of `set_slots`'s buffer that changes no sequence's slot."""
    return encode_slot(num_slots, SamplingParams(temperature=0.0), 0, (), 0)


def decode_slots(rows: jax.Array) -> RowParams:
    """Unpacks int32 [rows, SLOT_WORDS], which `encode_slot` packed."""

    def unpacked(name: str, field: Field) -> jax.Array:
        words = rows[:, _PLACES[name]] if field.size else rows[:, _PLACES[name].start]
        return words > 0 if field.dtype is np.bool_ else lax.bitcast_convert_type(words, field.dtype)

    return RowParams(**{name: unpacked(name, field) for name, field in _FIELDS.items()})


def set_slots(state: SlotState, rows: jax.Array) -> SlotState:
    """Writes the slots encoded in `rows`, int32 [n, SLOT_WORDS], and clears their penalty rows."""
    given = decode_slots(rows)
    slot = given.slot
    row = given.penalty_row
    cleared = jnp.where(row == NO_PENALTY_ROW, state.counts.shape[0], row)  # writes to a row out of range are dropped
    return state._replace(
        progress=state.progress.at[slot].set(jnp.stack((jnp.zeros_like(slot), given.length), axis=1)),
        params=state.params.at[slot].set(rows),
        counts=state.counts.at[cleared].set(0, mode="drop"),
        in_prompt=state.in_prompt.at[cleared].set(False, mode="drop"),
        features=None if state.features is None else state.features.at[slot, 0].set(0),
    )


def count_tokens(state: SlotState, packed: jax.Array, *, in_pieces: bool = False) -> SlotState:
    """Counts tokens for the penalties. packed: int32 [3, n] of (penalty row, token, whether it is in the prompt), as
    from `encode_counts`. Tokens beyond the vocabulary are padding and are not counted. in_pieces: COUNTED_PER_CALL
    tokens at a time. The compiler of TPUs takes a minute for a scatter of 8,192 tokens, and less than a second for a
    loop over small ones."""
    vocab = state.counts.shape[1]
    start = (state.counts, state.in_prompt)

    def count(counted: tuple[jax.Array, jax.Array], packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts, in_prompt = counted
        row, tokens, is_prompt = packed
        counts = counts.at[row, jnp.where(is_prompt == 0, tokens, vocab)].add(1, mode="drop")
        in_prompt = in_prompt.at[row, jnp.where(is_prompt == 1, tokens, vocab)].set(True, mode="drop")
        return counts, in_prompt

    if in_pieces and packed.shape[1] > COUNTED_PER_CALL:
        padded = jnp.pad(packed, [(0, 0), (0, -packed.shape[1] % COUNTED_PER_CALL)], constant_values=vocab)
        pieces = padded.reshape(3, -1, COUNTED_PER_CALL).swapaxes(0, 1)
        counted = lax.fori_loop(0, len(pieces), lambda i, counted: count(counted, pieces[i]), start)
    else:
        counted = count(start, packed)
    counts, in_prompt = counted
    return state._replace(counts=counts, in_prompt=in_prompt)


def encode_counts(penalty_row: int, tokens: np.ndarray, prompt_len: int) -> np.ndarray:
    """A sequence's tokens as a buffer for `count_tokens`, int32 [3, tokens]. The first `prompt_len` are its prompt."""
    in_prompt = np.arange(len(tokens)) < prompt_len
    return np.stack([np.full(len(tokens), penalty_row), tokens, in_prompt]).astype(np.int32)
