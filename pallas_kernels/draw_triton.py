"""From logits to tokens on NVIDIA GPUs in one launch, in Triton: greedy, or at a temperature with top-k, top-p and
min-p. Compiled for H200, not yet run on one.

Grid: (rows,). A program draws the token of one row, in these steps:

  1. Rows without a filter, and those at temperature 0, start with step 4, for all chunks of 128 tokens. For others a
     first pass over the row keeps the largest logit and the sum of exponentials of each chunk.
  2. Most tokens can be excluded. At least k logits reach the k-th largest of the chunks' maxima, so top-k keeps nothing
     below it. All tokens less likely than half of (1 - p) / vocab are together less likely than 1 - p, so top-p keeps
     none of them. The program lists the chunks that have candidates, and copies the candidates.
  3. The thresholds of top-k and top-p are found exactly among the candidates, in rounds that settle four bits of a
     float32 pattern each, as in `jaxserve.execution.filters`.
  4. A pass over the listed chunks finds the token that is kept with the largest sum of scaled logit and noise
     (`draw_noise`).

Traffic: each logit once, and with a filter those of the listed chunks again. Rows of 128,256 tokens with top-k 50 list
50 chunks of 1,002; with only top-p they list nearly all. For 256 rows a pass takes 131 MB, 31 us at 4.3 TB/s; the noise
of 33 million tokens takes some 40 integer and float operations each, as long again by the data sheet's rates. More than
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

from jaxserve.pallas_kernels import draw_noise, triton_compat
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.triton_compat import pad
from jaxserve.pallas_kernels.types import DrawSettings

CHUNK = 128  # tokens
TILE = 32  # chunks that a program reads at a time
# values that a round reads at a time: one column for each thread
LANES = 256
DEPTH = 4
CANDIDATES = 8192  # maximum of candidates of a row that are copied
COLDEST = 1e-5  # lower temperatures are greedy: logits divided by them could overflow
# Of `draw_noise`, as a kernel reads them:
SPREAD, MIX_0, MIX_1 = (tl.constexpr(int(x)) for x in (draw_noise.SPREAD, *draw_noise.MIX))
SMALL = tl.constexpr(draw_noise.SMALL)
LARGEST = tl.constexpr(float(draw_noise.LARGEST))


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
def _mix(x):
    x = (x ^ (x >> 16)) * MIX_0
    x = (x ^ (x >> 15)) * MIX_1
    return x ^ (x >> 16)


@triton.jit
def _gumbel(bits):
    """See `draw_noise.gumbel`."""
    x = tl.minimum(bits.to(tl.float32) * 2.0**-32 + 2.0**-33, LARGEST)
    series = x * (1.0 + x * (0.5 + x * (0.3333333333 + x * 0.25)))
    return -tl.log(tl.where(x < SMALL, series, -tl.log(1.0 - x)))


@triton.jit
def _draw(
    logits, settings, keys, ids, token, maxima, masses, listed, copied,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, COLDEST: tl.constexpr, GREEDY: tl.constexpr, HAS_IDS: tl.constexpr,
    CANDIDATES: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Draws a row's token. settings: [rows, 4], keys and ids as `DrawSettings`. maxima, masses, listed [rows, CHUNKS]
    and copied [rows, CANDIDATES] are scratch memory."""
    at_row = tl.program_id(0).to(tl.int64)
    row = logits + at_row * VOCAB
    lane = tl.arange(0, CHUNK)
    of_tile = tl.arange(0, TILE)
    real: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK  # number of chunks
    chunks = tl.full([], real, tl.int32)
    least = tl.full([], float("-inf"), tl.float32)
    if not GREEDY:
        settings += at_row * 4
        temperature = tl.load(settings)
        k = tl.load(settings + 1)
        p = tl.load(settings + 2)
        least_weight = tl.load(settings + 3)
        hot = temperature >= COLDEST
        by_count = (k > 0) & (k < VOCAB)
        by_mass = p < 1
        filtered = hot & (by_count | by_mass | (least_weight > 0))
        scale = 1.0 / tl.where(hot, temperature, 1.0)
        rate = 1.4426950408889634 * scale  # the exponentials have base 2
        key_0 = tl.load(keys + at_row * 2)
        key_1 = tl.load(keys + at_row * 2 + 1)
        maxima = maxima + at_row * CHUNKS
        masses = masses + at_row * CHUNKS
        listed = listed + at_row * CHUNKS
        copied += at_row * CANDIDATES
        if filtered:
            for first in tl.range(0, real, TILE, num_stages=3):
                which = first + of_tile
                at = which[:, None] * CHUNK + lane[None, :]
                value = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
                top = tl.max(value, 1)
                tl.store(maxima + which, top, mask=which < real)
                bottom = tl.where(top > float("-inf"), top, 0.0)
                mass = tl.sum(tl.exp2((value - bottom[:, None]) * rate), 1)
                tl.store(masses + which, mass, mask=which < real)
            tl.debug_barrier()  # threads read what others have written
            chunk = tl.arange(0, CHUNKS)
            top = tl.load(maxima + chunk, mask=chunk < real, other=float("-inf"))
            peak = tl.max(top, 0)
            total = tl.sum(tl.load(masses + chunk, mask=chunk < real, other=0.0) * tl.exp2((top - peak) * rate), 0)
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
                    start = tl.load(listed + first + of_tile, mask=first + of_tile < chunks, other=real) * CHUNK
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
            # Of equal weights all stay, so a threshold of weights is one of logits.
            least = tl.where(least_weight > 0, tl.maximum(least, peak + tl.log2(least_weight) / rate), least)

    best = tl.full([TILE, CHUNK], float("-inf"), tl.float32)
    best_at = tl.full([TILE, CHUNK], 0, tl.int32)
    for first in tl.range(0, chunks, TILE, num_stages=3):
        which = first + of_tile
        if not GREEDY:  # noqa: SIM102 (known when this is compiled, unlike the next)
            if filtered:
                which = tl.load(listed + which, mask=which < chunks, other=real)
        at = which[:, None] * CHUNK + lane[None, :]
        value = tl.load(row + at, mask=at < VOCAB, other=float("-inf"))
        score = value
        if not GREEDY:
            token_id = at
            if HAS_IDS:
                token_id = tl.load(ids + at, mask=at < VOCAB, other=0)
            bits = _mix(_mix(token_id.to(tl.uint32) * SPREAD + key_0) ^ key_1)
            noise = tl.where(hot, _gumbel(bits), 0.0)
            score = tl.where(value >= least, value * scale + noise, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_at = tl.where(better, at, best_at)
    winner = tl.max(tl.max(best, 1), 0)
    tl.store(token + at_row, tl.min(tl.min(tl.where(best == winner, best_at, VOCAB - 1), 1), 0))


def draw(logits: jax.Array, settings: DrawSettings | None) -> jax.Array:
    """Draws a token int32 [rows] for each row of float32 logits [rows, vocab]; without settings the likeliest."""
    rows, vocab = logits.shape
    packed = keys = ids = logits
    chunks = 1
    candidates = 1
    noted = 1
    if settings is not None:
        packed = jnp.stack([x.astype(jnp.float32) for x in settings[:4]], 1)
        keys, ids = settings.keys, keys if settings.ids is None else settings.ids
        chunks = pad(-(-vocab // CHUNK), 2)
        candidates = CANDIDATES
        noted = rows
    notes = [jax.ShapeDtypeStruct((noted, chunks), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)]
    return triton_compat.call(
        _draw, logits, packed, keys, ids,
        out=[
            jax.ShapeDtypeStruct((rows,), jnp.int32), *notes,
            jax.ShapeDtypeStruct((noted, candidates), jnp.float32),
        ],
        grid=(rows,), num_warps=8,
        VOCAB=vocab, CHUNKS=chunks, COLDEST=COLDEST, GREEDY=settings is None,
        HAS_IDS=settings is not None and settings.ids is not None, CANDIDATES=candidates, CHUNK=CHUNK, TILE=TILE,
        LANES=LANES, DEPTH=DEPTH,
    )[0]  # fmt: skip
