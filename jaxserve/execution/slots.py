"""What the devices remember of each running sequence between steps, by slot.

A sequence owns one slot while it runs. Its sampling parameters are sent once, when it gets the slot (`encode_slot`,
`set_slots`); a step then carries only what changes. The last slot (`num_slots`) is nobody's: padding rows point there.

Token counts are as wide as the vocabulary, and few sequences need them. A sequence with penalties therefore owns a
penalty row beside its slot; the others share row 0 (NO_PENALTY_ROW), whose contents mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxserve.limits import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from jaxserve.types import NO_PENALTY_ROW, SamplingParams

SLOTS_PER_CALL = 8  # sequences whose parameters the smallest call of `set_slots` writes
COUNTED_PER_CALL = 512  # tokens that the smallest call of `count_tokens` counts


class RowParams(NamedTuple):
    """Sampling parameters of the rows of a batch; the fields are SamplingParams', arrays [rows] unless noted."""

    temperature: jax.Array  # 0 is greedy
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    top_k: jax.Array  # 0 is off
    seed: jax.Array  # uint32 [rows, 2]
    no_stop_before: jax.Array  # no stop token is sampled for a position (in tokens from the prompt's start) below this
    stop_ids: jax.Array  # int32 [rows, MAX_STOP_TOKENS], padded with -1
    bias_ids: jax.Array  # int32 [rows, MAX_LOGIT_BIAS], padded with -1
    bias: jax.Array  # float32 [rows, MAX_LOGIT_BIAS]
    logprobs: jax.Array  # bool: this row wants log-probabilities


class SlotState(NamedTuple):
    """Arrays on every device. `slots` is num_slots + 1, `penalty_rows` is the number of real penalty rows + 1."""

    last_token: jax.Array  # int32 [slots]; -1 after a stop token: the slot's sequence draws no more
    block_tables: jax.Array  # int32 [slots, max_pages]
    params: jax.Array  # int32 [slots, SLOT_WORDS], as from `encode_slot`
    counts: jax.Array  # int32 [penalty_rows, vocab]: how often each token stands in the output so far
    in_prompt: jax.Array  # bool [penalty_rows, vocab]: whether it stands in the prompt
    hidden: jax.Array  # [slots, hidden]: the last hidden state of a deferred row, which samples once its mask is known


_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_FLOATS_AT = 2  # after slot and penalty row
_HEADER = _FLOATS_AT + len(_FLOATS) + 5  # … | floats | top_k, seed x 2, no_stop_before, logprobs
SLOT_WORDS = _HEADER + MAX_STOP_TOKENS + 2 * MAX_LOGIT_BIAS


def create_slots(
    num_slots: int,
    max_pages: int,
    vocab_size: int,
    hidden_size: int = 1,
    dtype: DTypeLike = jnp.float32,
    penalty_rows: int = 0,
    zeros: Callable[..., jax.Array] = jnp.zeros,
) -> SlotState:
    """Empty slots; `penalty_rows` sequences can have penalties at a time. `zeros` makes what is large."""
    rows = num_slots + 1
    return SlotState(
        last_token=jnp.zeros(rows, jnp.int32),
        block_tables=jnp.zeros((rows, max_pages), jnp.int32),
        params=jnp.tile(padding_slot(num_slots), (rows, 1)),
        counts=zeros((1 + penalty_rows, vocab_size), jnp.int32),
        in_prompt=zeros((1 + penalty_rows, vocab_size), jnp.bool_),
        hidden=jnp.zeros((rows, hidden_size), dtype),
    )


def encode_slot(
    slot: int,
    params: SamplingParams,
    seed: int,
    stop_ids: tuple[int, ...],
    prompt_len: int,
    penalty_row: int = NO_PENALTY_ROW,
) -> np.ndarray:
    """One row of `set_slots`'s buffer, int32 [SLOT_WORDS]. `stop_ids` are all that end the output, at most
    MAX_STOP_TOKENS; `seed` is the sequence's own, 64 bits. A sequence with penalties needs a penalty row of its own."""
    row = np.zeros(SLOT_WORDS, np.int32)
    floats = (
        0.0 if params.greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    row[0] = slot
    row[1] = penalty_row
    row[_FLOATS_AT : _FLOATS_AT + len(floats)] = np.asarray(floats, np.float32).view(np.int32)
    seed_words = np.asarray([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    row[_HEADER - 5 : _HEADER] = (
        max(params.top_k, 0),
        *seed_words,
        min(prompt_len + params.min_tokens, 2**31 - 1) if params.min_tokens and not params.grammar else 0,
        params.logprobs is not None,
    )
    stops = row[_HEADER : _HEADER + MAX_STOP_TOKENS]
    stops[:] = -1
    stops[: len(stop_ids)] = stop_ids
    bias_ids = row[_HEADER + MAX_STOP_TOKENS : _HEADER + MAX_STOP_TOKENS + MAX_LOGIT_BIAS]
    bias_ids[:] = -1
    if params.logit_bias:
        bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
        values = np.fromiter(params.logit_bias.values(), np.float32)
        row[_HEADER + MAX_STOP_TOKENS + MAX_LOGIT_BIAS :][: len(values)] = values.view(np.int32)
    return row


def padding_slot(num_slots: int) -> np.ndarray:
    """A row of `set_slots`'s buffer that changes nobody's slot."""
    return encode_slot(num_slots, SamplingParams(temperature=0.0), 0, (), 0)


def penalty_rows(rows: jax.Array) -> jax.Array:
    """The penalty row of each of the encoded slots int32 [rows, SLOT_WORDS]."""
    return rows[:, 1]


def decode_slots(rows: jax.Array) -> RowParams:
    """What `encode_slot` packed, of int32 [rows, SLOT_WORDS]."""
    floats = lax.bitcast_convert_type(rows[:, _FLOATS_AT : _FLOATS_AT + len(_FLOATS)], jnp.float32)
    ints = rows[:, _HEADER - 5 : _HEADER]
    stops, bias_ids, bias = jnp.split(rows[:, _HEADER:], [MAX_STOP_TOKENS, MAX_STOP_TOKENS + MAX_LOGIT_BIAS], axis=1)
    return RowParams(
        **{name: floats[:, i] for i, name in enumerate(_FLOATS)},
        top_k=ints[:, 0],
        seed=lax.bitcast_convert_type(ints[:, 1:3], jnp.uint32),
        no_stop_before=ints[:, 3],
        stop_ids=stops,
        bias_ids=bias_ids,
        bias=lax.bitcast_convert_type(bias, jnp.float32),
        logprobs=ints[:, 4] > 0,
    )


def set_slots(state: SlotState, rows: jax.Array) -> SlotState:
    """Writes the slots encoded in `rows`, int32 [any, SLOT_WORDS]; their penalty rows begin empty."""
    slot, row = rows[:, 0], penalty_rows(rows)
    cleared = jnp.where(row == NO_PENALTY_ROW, state.counts.shape[0], row)  # what lies outside is dropped
    return state._replace(
        last_token=state.last_token.at[slot].set(0),
        params=state.params.at[slot].set(rows),
        counts=state.counts.at[cleared].set(0, mode="drop"),
        in_prompt=state.in_prompt.at[cleared].set(False, mode="drop"),
    )


def count_tokens(state: SlotState, packed: jax.Array) -> SlotState:
    """Counts tokens for the penalties: packed int32 [3, any] of (penalty row, token, whether it is in the prompt), as
    from `encode_counts`; a token beyond the vocabulary counts nowhere."""
    row, tokens, in_prompt = packed
    vocab = state.counts.shape[1]
    return state._replace(
        counts=state.counts.at[row, jnp.where(in_prompt == 0, tokens, vocab)].add(1, mode="drop"),
        in_prompt=state.in_prompt.at[row, jnp.where(in_prompt == 1, tokens, vocab)].set(True, mode="drop"),
    )


def encode_counts(penalty_row: int, tokens: np.ndarray, prompt_len: int) -> np.ndarray:
    """A sequence's tokens for `count_tokens`, int32 [3, tokens]; the first `prompt_len` are its prompt."""
    in_prompt = np.arange(len(tokens)) < prompt_len
    return np.stack([np.full(len(tokens), penalty_row), tokens, in_prompt]).astype(np.int32)
