"""From logits to tokens, on the device, within the step.

Every row follows its own parameters, which its slot holds (`jaxserve.execution.slots`). Work that no row of a batch
asks for is skipped: `lax.cond` decides on the device, or the host chooses a program for a `Sampler` (`programs`). A
row's token is a function of its logits, parameters, seed and position, in every implementation
(`jaxserve.pallas_kernels.draw_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.filters import EXCLUDED, ROUND_BITS, filter_logits
from jaxserve.execution.slots import RowParams, decode_slots
from jaxserve.limits import MAX_LOGPROBS
from jaxserve.pallas_kernels.draw_noise import gumbel, noise_bits
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import DrawSettings
from jaxserve.scheduling.step_plan import Sampler

SCORE_WORDS = 2 + 2 * MAX_LOGPROBS  # columns of Sampled.scores
LANES = 128  # width of a TPU's vector registers
BIAS_PIECE = 8  # ids of each row that `_add_bias` adds at a time on TPUs


class Sampled(NamedTuple):
    """The sampled tokens, int32 [rows], and their scores.

    `scores` int32 [rows, SCORE_WORDS] packs, as bits, the sampled token's log-probability and rank, then the ids and
    log-probabilities of the most likely tokens: one array, so that the host fetches one buffer. They are zero if no row
    asked for log-probabilities, and None if the program does not compute them.
    """

    tokens: jax.Array
    scores: jax.Array | None
    expert_load: jax.Array | None = None  # int32 [3] of a pass of a model with experts; see `expert_routing.load`


class TokenCounts(NamedTuple):
    """SlotState's whole arrays for penalties. Rows of them are gathered only if a row has a penalty."""

    counts: jax.Array  # int32 [penalty_rows, vocab], how often each token is in the output so far
    in_prompt: jax.Array  # bool [penalty_rows, vocab], whether it is in the prompt


class RowKernels(NamedTuple):
    """A device's kernels for rows of logits, as in `Ops`. None: there is none, and plain XLA takes its place."""

    draw: Callable[..., jax.Array] | None = None
    arg_max: Callable[[jax.Array], jax.Array] | None = None
    filter_logits: Callable[..., jax.Array] | None = None
    log_softmax: Callable[[jax.Array], jax.Array] = jax.nn.log_softmax

    @classmethod
    def of(cls, ops: Ops) -> RowKernels:
        return cls(ops.draw, ops.arg_max, ops.filter_logits, ops.log_softmax)


NO_KERNELS = RowKernels()


def sample(
    logits: jax.Array,
    words: jax.Array,
    seen: TokenCounts,
    position: jax.Array,
    masks: jax.Array | None = None,
    *,
    sampler: Sampler = Sampler.ANY,
    before: jax.Array | None = None,
    kernels: RowKernels = NO_KERNELS,
    ids: jax.Array | None = None,
    platform: str = "cpu",
) -> Sampled:
    """Samples one token per row of float32 logits [rows, vocab].

    `words`, int32 [rows, SLOT_WORDS], are the rows' parameters, as `encode_slot` packs them. Each branch unpacks only
    its own, which gives fewer and smaller programs than one buffer for each field. `position`, int32 [rows], is the
    position of the sampled token; together with the seed it determines the noise.
    `masks`, int32 [rows, words], has a bit for each token: whether it may be sampled.
    `ids`, int32 [vocab], are the tokens of the logits' columns, in a vocabulary that is a part of the model's; the
    sampled tokens are columns.
    `platform`: cpu, gpu or tpu. On a CPU, programs that decide at run time use what is fast there alone: `lax.top_k`,
    and filters that settle one bit in a round. On a TPU, biases are added in small pieces.
    """
    if sampler is Sampler.ANY and masks is None and kernels.arg_max is not None:
        # On a CPU most rows are greedy. The most likely token takes one pass over the logits.
        params = decode_slots(words)
        arg_max = kernels.arg_max
        plain = (params.temperature <= 0) & ~params.logprobs & ~_is_penalized(params) & ~_is_biased(params, position)

        def most_likely_tokens(logits: jax.Array, *_: Any) -> Sampled:
            return Sampled(arg_max(logits), _no_scores(logits))

        draw = partial(_sample, masks=None, sampler=sampler, kernels=kernels, platform=platform)
        return lax.cond(jnp.all(plain), most_likely_tokens, draw, logits, words, seen, position, before, ids)
    return _sample(logits, words, seen, position, before, ids, masks, sampler, kernels, platform)


def _is_penalized(params: RowParams) -> jax.Array:
    return (params.repetition != 1) | (params.presence != 0) | (params.frequency != 0)


def _is_biased(params: RowParams, position: jax.Array) -> jax.Array:
    return (params.bias_ids >= 0).any(axis=1) | (position < params.no_stop_before)


def _sample(
    logits: jax.Array,
    words: jax.Array,
    seen: TokenCounts,
    position: jax.Array,
    before: jax.Array | None,
    ids: jax.Array | None,
    masks: jax.Array | None,
    sampler: Sampler,
    kernels: RowKernels,
    platform: str,
) -> Sampled:
    raw = logits
    on_cpu = platform == "cpu"
    params = decode_slots(words)
    any_ = sampler is Sampler.ANY
    full = sampler is Sampler.FULL
    if any_ or full:
        penalized = _is_penalized(params)
        biased = _is_biased(params, position)
        logits = _where_any(any_, penalized, _penalize, _unchanged, logits, words, seen, before)
        add_bias = partial(_add_bias, in_pieces=platform == "tpu")
        logits = _where_any(any_, biased, add_bias, _unchanged, logits, words, position)
    if masks is not None:
        bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
        logits = jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[1]] > 0, logits, EXCLUDED)
    if sampler is Sampler.GREEDY:
        return Sampled(_greedy(logits) if kernels.draw is None else kernels.draw(logits, None), None)
    plainly = partial(draw_plainly, sampler=sampler, keep=kernels.filter_logits, on_cpu=on_cpu)
    draw = partial(_draw, kernel=kernels.draw or plainly, ids=ids)
    tokens = _where_any(any_, params.temperature > 0, draw, _greedy, logits, words, position)
    if not (any_ or full):
        return Sampled(tokens, None)
    score = partial(score_tokens, sorts=any_ and on_cpu, log_softmax=kernels.log_softmax)
    return Sampled(tokens, _where_any(any_, params.logprobs, score, _no_scores, raw, tokens, params.score_ids))


def _where_any(at_run_time: bool, wanted: jax.Array, function: Callable, otherwise: Callable, *args: Any) -> Any:
    """`function` of the arguments. `at_run_time`: `otherwise` of them, unless some row wants `function`."""
    return lax.cond(jnp.any(wanted), function, otherwise, *args) if at_run_time else function(*args)


def _unchanged(logits: jax.Array, *_: Any) -> jax.Array:
    return logits


def score_tokens(
    logits: jax.Array,
    tokens: jax.Array,
    named: jax.Array | None = None,
    *,
    sorts: bool,
    log_softmax: Callable[[jax.Array], jax.Array] = jax.nn.log_softmax,
) -> jax.Array:
    """Packed log-probabilities of `tokens` [rows] and of the most likely tokens. See Sampled.scores.

    A row of `named`, int32 [rows, MAX_LOGPROBS], whose first id is not -1 gets the log-probabilities of these tokens
    instead of the most likely ones.
    `sorts` finds the most likely tokens by `lax.top_k`, which is fast on CPU. Elsewhere XLA sorts whole rows for it.
    """
    logprobs = log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    rank = jnp.sum(logprobs > chosen, axis=-1, keepdims=True, dtype=jnp.int32) + 1
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = lax.top_k(logprobs, count) if sorts else most_likely(logprobs, count)
    pad = ((0, 0), (0, MAX_LOGPROBS - count))
    top = jnp.pad(top, pad, constant_values=-jnp.inf)
    ids = jnp.pad(ids, pad, constant_values=-1)

    if named is not None:
        wants = named[:, :1] >= 0
        ids = jnp.where(wants, named, ids)
        top = jnp.where(wants, jnp.take_along_axis(logprobs, jnp.maximum(named, 0), axis=-1), top)
    chosen, top = (lax.bitcast_convert_type(x, jnp.int32) for x in (chosen, top))
    return jnp.concatenate([chosen, rank, ids.astype(jnp.int32), top], axis=-1)


def most_likely(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest values of each row of float32 x [rows, vocab], and their indices, in `lax.top_k`'s order.

    Of equal values the first comes first. They are found one by one: the block with the largest maximum, then the
    largest value in this block.
    """
    blocks = _blocks(x)
    rows = jnp.arange(x.shape[0])
    width = blocks.shape[-1]
    places = jnp.arange(width)

    def take_one(i: jax.Array, state: tuple) -> tuple:
        tops, values, ids = state  # an id is -1 until a value is found for it
        block = jnp.argmax(tops, axis=-1)
        taken = ((ids - block[:, None] * width)[:, :, None] == places).any(axis=1)
        left = jnp.where(taken, -jnp.inf, _take(blocks, block))
        place = jnp.argmax(left, axis=-1)
        rest = jnp.where(places == place[:, None], -jnp.inf, left).max(axis=-1)
        found = (block * width + place).astype(jnp.int32)
        return tops.at[rows, block].set(rest), values.at[:, i].set(left[rows, place]), ids.at[:, i].set(found)

    values = jnp.zeros((len(x), count), x.dtype)
    ids = jnp.full((len(x), count), -1, jnp.int32)
    _, values, ids = lax.fori_loop(0, count, take_one, (blocks.max(axis=-1), values, ids))
    return values, ids


def _no_scores(logits: jax.Array, *_: jax.Array) -> jax.Array:
    return jnp.zeros((logits.shape[0], SCORE_WORDS), jnp.int32)


def _penalize(logits: jax.Array, words: jax.Array, seen: TokenCounts, before: jax.Array | None) -> jax.Array:
    """Repetition penalty (Keskar et al. 2019, arXiv:1909.05858) over prompt and output; others only over the output.
    `before`, int32 [rows, any], are tokens of the output that `seen` does not count; -1 is none."""
    params = decode_slots(words)
    row = params.penalty_row
    repetition = params.repetition[:, None]
    counts = seen.counts[row]
    if before is not None:
        counts = counts.at[jnp.arange(len(row))[:, None], jnp.where(before < 0, counts.shape[1], before)].add(
            1, mode="drop"
        )
    repeated = seen.in_prompt[row] | (counts > 0)
    logits = jnp.where(repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    often = counts.astype(jnp.float32)
    present = (counts > 0).astype(jnp.float32)
    return logits - params.frequency[:, None] * often - params.presence[:, None] * present


def _add_bias(logits: jax.Array, words: jax.Array, position: jax.Array, *, in_pieces: bool) -> jax.Array:
    """Adds the logit bias, and excludes stop tokens before the minimum of new tokens. in_pieces: in a loop over
    BIAS_PIECE ids of each row, which the compiler of TPUs takes a tenth of the time for."""
    params = decode_slots(words)
    early = position < params.no_stop_before
    ids = jnp.concatenate([params.bias_ids, jnp.where(early[:, None], params.stop_ids, -1)], axis=1)
    bias = jnp.concatenate([params.bias, jnp.full(params.stop_ids.shape, EXCLUDED)], axis=1)
    rows = jnp.arange(logits.shape[0])[:, None]

    def add(logits: jax.Array, ids: jax.Array, bias: jax.Array) -> jax.Array:
        return logits.at[rows, jnp.where(ids >= 0, ids, logits.shape[1])].add(bias, mode="drop")  # -1 is dropped

    if not in_pieces:
        return add(logits, ids, bias)
    assert ids.shape[1] % BIAS_PIECE == 0, "the places of a slot's biases and stop tokens are multiples of it"

    def add_piece(i: jax.Array, logits: jax.Array) -> jax.Array:
        piece = (lax.dynamic_slice_in_dim(x, i * BIAS_PIECE, BIAS_PIECE, axis=1) for x in (ids, bias))
        return add(logits, *piece)

    return lax.fori_loop(0, ids.shape[1] // BIAS_PIECE, add_piece, logits)


def _greedy(logits: jax.Array, *_: Any) -> jax.Array:
    """The first most likely token, found by blocks, since XLA on CPU has no fast argmax of long rows."""
    blocks = _blocks(logits)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    place = jnp.argmax(_take(blocks, block), axis=-1)
    return (block * blocks.shape[-1] + place).astype(jnp.int32)


def _blocks(logits: jax.Array) -> jax.Array:
    """logits [rows, vocab] -> [rows, blocks, width], with about as many blocks as tokens in each, padded with -inf."""
    rows, vocab = logits.shape
    width = -(-math.isqrt(vocab) // LANES) * LANES
    return jnp.pad(logits, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf).reshape(rows, -1, width)


def _take(blocks: jax.Array, block: jax.Array) -> jax.Array:
    """Takes one block [rows, width] of each row."""
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _draw(
    logits: jax.Array,
    words: jax.Array,
    position: jax.Array,
    *,
    kernel: Callable[..., jax.Array],
    ids: jax.Array | None,
) -> jax.Array:
    params = decode_slots(words)
    none = jnp.zeros_like(params.seed[:, 0])
    keys = jnp.stack(threefry(params.seed[:, 0], params.seed[:, 1], position.astype(jnp.uint32), none), axis=1)
    return kernel(logits, DrawSettings(params.temperature, params.top_k, params.top_p, params.min_p, keys, ids))


def draw_plainly(
    logits: jax.Array,
    settings: DrawSettings,
    *,
    sampler: Sampler = Sampler.FILTERED,
    keep: Callable[..., jax.Array] | None = None,
    on_cpu: bool = True,
) -> jax.Array:
    """Draws a token int32 [rows] of each row of float32 logits [rows, vocab], in plain XLA. `keep` is a kernel that
    takes the place of `filter_logits`, as `Ops.filter_logits`. `on_cpu` as for `sample`."""
    hot = settings.temperature >= 1e-5
    scaled = logits / jnp.where(hot, settings.temperature, 1.0)[:, None]
    if sampler is not Sampler.PLAIN:
        any_ = sampler is Sampler.ANY
        filtered = hot & ((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0))
        bits = 1 if any_ and on_cpu else ROUND_BITS
        keep = partial(keep, excluded=EXCLUDED) if keep else partial(filter_logits, unrolled=not any_, bits=bits)
        scaled = _where_any(any_, filtered, keep, _unchanged, scaled, settings)
    return _greedy(jnp.where(hot[:, None], _race(scaled, settings), logits))


def _race(scaled: jax.Array, settings: DrawSettings) -> jax.Array:
    """Logits [rows, vocab] plus noise."""
    ids = jnp.arange(scaled.shape[1]) if settings.ids is None else settings.ids
    return scaled + gumbel(noise_bits(settings.keys, ids.astype(jnp.uint32)))


def threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, doi:10.1145/2063384.2063405) of counters x0, x1, all uint32.

    JAX's own implementation takes three times as long to compile, and twice as long to run on CPU.
    """
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    x0 = x0 + key0
    x1 = x1 + key1
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << turn | x1 >> 32 - turn)
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1
