"""From logits to tokens on NVIDIA GPUs in one launch, in Triton: greedy, or at a temperature with top-k, top-p and
min-p. Compiled for H200, not yet run on one.

Grid: (rows,). A program draws the token of one row, in these steps:

  1. It passes over the row, and keeps the largest logit and the sum of exponentials of each chunk of 128 tokens. At
     temperature 0 the row ends here, with a token of the chunk with the largest logit. Rows without a filter also end
     here, with the chunk in which the running sum of probabilities passes the row's random number.
  2. With a filter, most tokens can be excluded. At least k logits reach the k-th largest of the chunks' maxima, so
     top-k keeps nothing below it. All tokens less likely than half of (1 - p) / vocab are together less likely than
     1 - p, so top-p keeps none of them. The program lists the chunks that have candidates, and copies the candidates.
  3. The thresholds of top-k and top-p are found exactly among the candidates, in rounds that settle four bits of a
     float32 pattern each, as in `jaxserve.execution.filters`.
  4. A second pass over the listed chunks sums the tokens that are kept, and the draw is as without a filter.

Traffic: each logit once, and those of the listed chunks again. Rows of 128,256 tokens with top-k 50 list 50 chunks of
1,002; with only top-p they list nearly all. For 256 rows the first pass takes 131 MB, 31 us at 4.3 TB/s. More than
CANDIDATES candidates, from flat distributions or a very large k, are not copied; each of the 16 rounds passes over the
row instead.
Pipeline: `num_stages` tiles of 16 KiB in flight while one is computed; two programs of 8 warps on a multiprocessor.
Every sum has a fixed order, which depends only on the row, so that a row draws the same token in every batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxserve.pallas_kernels import triton_compat
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import DrawSettings

CHUNK = 128  # tokens
TILE = 32  # chunks that a program reads at a time
LANES, DEPTH = 256, 4  # values that a round reads at a time: one column for each thread
CANDIDATES = 8192  # maximum of candidates of a row that are copied
COLDEST = 1e-5  # lower temperatures are greedy: logits divided by them could overflow


def why_not(device: Device) -> str | None:
    """Returns the reason why `device` cannot use the kernel, or None where it can."""
    if device.platform != "gpu" or (device.capability or (0, 0)) < (8, 0):
        return "it is for NVIDIA GPUs of compute capability 8.0 or newer"
    return None


@triton.jit
def _float_of(order):
    """The float32 of a pattern. Larger patterns are larger floats; patterns below the first one are -inf."""
    bits = tl.where(order >= 0x80000000, order & 0x7FFFFFFF, ~order)
    return tl.where(order < 0x00800000, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _threshold(
    copied, copies, row, count, floor, goal, total, peak, rate,
    BY_MASS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The largest float32 such that the weights of all values at or above it reach the goal; at most the peak.

    Only values at or above `floor` count. The values are the first `count` of `copied`, or those of the row. Weights
    are 1, or exponentials (BY_MASS). By mass, the goal is a part of `total`, or where that is negative, of the weights
    of all values.
    """
    digit = tl.arange(0, 16)
    place = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    found = tl.full([], 0, tl.uint32)
    shift = tl.full([], 32, tl.uint32)
    for turn in range(8):
        shift -= 4
        pivot = _float_of(found | (digit.to(tl.uint32) << shift))
        sums = tl.zeros([16, LANES], tl.float32)
        for first in range(0, tl.maximum(copies, count), DEPTH * LANES):
            at = first + place
            value = tl.load(copied + at, mask=at < copies, other=float("-inf"))
            value = tl.maximum(value, tl.load(row + at, mask=at < count, other=float("-inf")))
            weight = tl.exp2((value - peak) * rate) if BY_MASS else tl.full([DEPTH, LANES], 1.0, tl.float32)
            weight = tl.where((at < copies + count) & (value >= floor), weight, 0.0)
            sums += tl.sum(tl.where(value[None] >= pivot[:, None, None], weight[None], 0.0), 1)
        kept = tl.sum(sums, 1)
        if BY_MASS and turn == 0:  # the first pivot is -inf
            goal = goal * tl.where(total < 0, tl.sum(tl.where(digit == 0, kept, 0.0), 0), total)
        reached = tl.sum(((kept >= goal) & (digit > 0)).to(tl.uint32), 0)
        found = found | (reached << shift)
    value = _float_of(found)
    return tl.where(value <= peak, value, peak)  # the peak also where value is NaN


@triton.jit
def _crossing(weight, index, uniform):
    """The index at which the sum of weights passes a part `uniform` of the total, and the part of that index's own
    weight at which it does. Rounding never yields an index of weight 0."""
    up_to = tl.cumsum(weight, 0)
    aim = uniform * tl.max(up_to, 0)
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    first = tl.min(tl.where((weight > 0) & (up_to > aim), index, last), 0)
    own = tl.sum(tl.where(index == first, weight, 0.0), 0)
    end = tl.sum(tl.where(index == first, up_to, 0.0), 0)
    return first, tl.minimum(tl.maximum((aim - (end - own)) / own, 0.0), 1.0)


@triton.jit
def _draw(
    logits, settings, token, maxima, masses, listed, copied,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, COLDEST: tl.constexpr, GREEDY: tl.constexpr, CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Draws a row's token. settings: [rows, 5], as `DrawSettings`. maxima, masses, listed [rows, CHUNKS] and copied
    [rows, CANDIDATES] are scratch memory."""
    at_row = tl.program_id(0).to(tl.int64)
    row = logits + at_row * VOCAB
    maxima, masses, listed = maxima + at_row * CHUNKS, masses + at_row * CHUNKS, listed + at_row * CHUNKS
    copied += at_row * CANDIDATES
    lane, chunk = tl.arange(0, CHUNK), tl.arange(0, CHUNKS)
    real: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK  # number of chunks
    settings += at_row * 5
    rate = tl.full([], 0.0, tl.float32)
    if not GREEDY:
        temperature = tl.load(settings)
        if temperature >= COLDEST:
            rate = 1.4426950408889634 / temperature  # the exponentials have base 2

    for first in tl.range(0, real, TILE, num_stages=3):
        of_tile = first + tl.arange(0, TILE)
        at = of_tile[:, None] * CHUNK + lane[None, :]
        value = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        top = tl.max(value, 1)
        tl.store(maxima + of_tile, top, mask=of_tile < real)
        if not GREEDY:
            least = tl.where(top > float("-inf"), top, 0.0)
            mass = tl.sum(tl.exp2((value - least[:, None]) * rate), 1)
            tl.store(masses + of_tile, mass, mask=of_tile < real)
    tl.debug_barrier()  # threads read what others have written

    top = tl.load(maxima + chunk, mask=chunk < real, other=float("-inf"))
    peak = tl.max(top, 0)
    if GREEDY or rate == 0:
        start = tl.argmax(top, 0) * CHUNK
        value = tl.load(row + start + lane, mask=start + lane < VOCAB, other=float("-inf"))
        tl.store(token + at_row, start + tl.argmax(value, 0))
    else:
        k, p, least_weight = tl.load(settings + 1), tl.load(settings + 2), tl.load(settings + 3)
        by_count, by_mass = (k > 0) & (k < VOCAB), p < 1
        filtered = by_count | by_mass | (least_weight > 0)
        weight = tl.load(masses + chunk, mask=chunk < real, other=0.0) * tl.exp2((top - peak) * rate)
        least = tl.full([], float("-inf"), tl.float32)
        if filtered:
            total = tl.sum(weight, 0)
            cutoff = tl.full([], float("-inf"), tl.float32)
            if by_count:
                cutoff = _threshold(maxima, real, row, 0, cutoff, k, total, peak, rate, False, LANES, DEPTH)
                cutoff = tl.where(k <= real, cutoff, float("-inf"))
                total = tl.full([], -1.0, tl.float32)  # top-k replaces it
            elif by_mass:
                cutoff = peak + tl.log2(0.5 * (1.0 - p) * total / VOCAB) / rate
            has_some = (chunk < real) & (top >= cutoff)
            tl.store(listed + tl.cumsum(has_some.to(tl.int32), 0) - 1, chunk, mask=has_some)
            chunks = tl.sum(has_some.to(tl.int32), 0)
            tl.debug_barrier()
            if by_count | by_mass:
                count = tl.full([], 0, tl.int32)
                for first in range(0, chunks, TILE):
                    which = first + tl.arange(0, TILE)
                    start = tl.load(listed + which, mask=which < chunks, other=real) * CHUNK
                    at = start[:, None] + lane[None, :]
                    value = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
                    keep = ((at < VOCAB) & (value >= cutoff)).to(tl.int32)
                    of_chunk = tl.sum(keep, 1)
                    before = count + tl.cumsum(of_chunk, 0) - of_chunk
                    to = before[:, None] + tl.cumsum(keep, 1) - keep
                    tl.store(copied + to, value, mask=(keep > 0) & (to < CANDIDATES))
                    count += tl.sum(of_chunk, 0)
                copies = tl.where(count <= CANDIDATES, count, 0)
                count = tl.where(count <= CANDIDATES, 0, VOCAB)
                tl.debug_barrier()
                if by_count:
                    least = _threshold(copied, copies, row, count, least, k, total, peak, rate, False, LANES, DEPTH)
                if by_mass:
                    of_mass = _threshold(copied, copies, row, count, least, p, total, peak, rate, True, LANES, DEPTH)
                    least = tl.maximum(least, of_mass)
            for first in range(0, chunks, TILE):
                which = first + tl.arange(0, TILE)
                start = tl.load(listed + which, mask=which < chunks, other=real) * CHUNK
                at = start[:, None] + lane[None, :]
                value = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
                part = tl.exp2((value - peak) * rate)
                part = tl.where((value >= least) & (part >= least_weight), part, 0.0)
                tl.store(masses + which, tl.sum(part, 1), mask=which < chunks)
            tl.debug_barrier()
            weight = tl.load(masses + chunk, mask=chunk < chunks, other=0.0)
        index, rest = _crossing(weight, chunk, tl.load(settings + 4))
        start = tl.load(listed + index, mask=filtered, other=0)
        start = tl.where(filtered, start, index) * CHUNK
        value = tl.load(row + start + lane, mask=start + lane < VOCAB, other=float("-inf"))
        part = tl.exp2((value - peak) * rate)
        part = tl.where((value >= least) & (part >= least_weight), part, 0.0)
        place, _ = _crossing(part, lane, rest)
        tl.store(token + at_row, start + place)


def draw(logits: jax.Array, settings: DrawSettings | None) -> jax.Array:
    """Draws a token int32 [rows] for each row of float32 logits [rows, vocab]; without settings the likeliest."""
    rows, vocab = logits.shape
    greedy = settings is None
    packed = logits if settings is None else jnp.stack([x.astype(jnp.float32) for x in settings], 1)
    chunks = pad(-(-vocab // CHUNK), 2)
    notes = [jax.ShapeDtypeStruct((rows, chunks), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)]
    if greedy:
        notes[1:] = [jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.float32, jnp.int32)]
    return triton_compat.call(
        _draw, logits, packed,
        out=[
            jax.ShapeDtypeStruct((rows,), jnp.int32), *notes,
            jax.ShapeDtypeStruct((1 if greedy else rows, CANDIDATES), jnp.float32),
        ],
        grid=(rows,), num_warps=8,
        VOCAB=vocab, CHUNKS=chunks, COLDEST=COLDEST, GREEDY=greedy, CANDIDATES=CANDIDATES, CHUNK=CHUNK, TILE=TILE,
        LANES=LANES, DEPTH=DEPTH,
    )[0]  # fmt: skip
