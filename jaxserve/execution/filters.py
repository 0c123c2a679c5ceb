"""Top-k, top-p and min-p: the smallest set of most likely tokens that each row may draw from, without a sort.

Top-k and top-p both keep the most likely tokens whose weights reach a sum: top-k counts tokens, top-p adds their
probabilities. The threshold of this set is found exactly, in rounds that each settle a few bits of its float32 pattern.
In one pass over the logits, a round computes the sum of weights above each pattern that these bits may have. Sums have
a fixed order, without atomics, so that equal rows give equal sets.

On GPUs and TPUs a round settles ROUND_BITS = 4 bits with 15 sums in one kernel; on GPUs all rounds are unrolled. XLA's
program for an H200 passes 20 times over the logits: 8 rounds for top-k; 8 for top-p, which also read the exponentials;
4 before and after. It moves 140 bytes for each logit, sampling included. For 256 rows of 128,256 tokens this is 4.6 GB,
or 1.1 ms at 4.3 TB/s; one bit a round would take 64 passes and 3.5 ms. These estimates follow from the compiled program
and have not been measured. `pallas_kernels.draw_triton` needs only one or two passes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.types import DrawSettings

EXCLUDED = -1e30  # finite, so that a row without allowed tokens still samples one
ROUND_BITS = 4  # bits of a threshold that a round settles, where passes over the logits cost more than sums


def filter_logits(logits: jax.Array, settings: DrawSettings, *, unrolled: bool, bits: int = ROUND_BITS) -> jax.Array:
    """Makes the logits of tokens that may not be drawn EXCLUDED. `DrawSettings` says which these are, as transformers
    and vLLM have it; `selfcheck_draw.kept` is the same in NumPy.

    logits: float32 [rows, vocab]. `unrolled` unrolls the rounds, for GPUs. Otherwise they are one loop, which compiles
    faster. bits: of a threshold that a round settles, a power of two.
    """
    peak = logits.max(axis=-1)
    keep = keep_unrolled if unrolled else keep_in_loop
    kept = keep(logits, peak, settings, bits) & (jnp.exp(logits - peak[:, None]) >= settings.min_p[:, None])
    return jnp.where(kept, logits, EXCLUDED)


def keep_in_loop(logits: jax.Array, peak: jax.Array, settings: DrawSettings, bits: int) -> jax.Array:
    """The tokens that top-k and top-p keep, bool [rows, vocab], in one loop of two iterations for both."""

    def narrow(i: jax.Array, least_logit: jax.Array) -> jax.Array:
        by_mass = i == 1
        left = logits >= least_logit[:, None]
        weights = jnp.where(left, jnp.where(by_mass, jnp.exp(logits - peak[:, None]), 1.0), 0.0)
        total = jnp.sum(weights, axis=-1)
        least = jnp.where(by_mass, settings.top_p * total, _most_kept(settings, logits.shape[1]))
        weigh = lambda keep: jnp.where(keep, weights, 0.0)  # noqa: E731
        found = lax.fori_loop(
            0,
            32 // bits,
            lambda i, found: _round(logits, weigh, least, found, 32 - bits * (i + 1), bits),
            jnp.zeros(logits.shape[0], jnp.uint32),
        )
        off = by_mass & (settings.top_p >= 1)
        return jnp.where(off, least_logit, jnp.maximum(least_logit, _at_most(found, peak)))

    least_logit = lax.fori_loop(0, 2, narrow, jnp.full(logits.shape[0], -jnp.inf))
    return logits >= least_logit[:, None]


def keep_unrolled(logits: jax.Array, peak: jax.Array, settings: DrawSettings, bits: int) -> jax.Array:
    """The tokens that top-k and top-p keep, bool [rows, vocab], with all rounds unrolled."""

    def threshold(weigh: Callable[[jax.Array], jax.Array], least: jax.Array) -> jax.Array:
        found = jnp.zeros(logits.shape[0], jnp.uint32)
        for shift in range(32 - bits, -1, -bits):
            found = _round(logits, weigh, least, found, jnp.int32(shift), bits)
        return _at_most(found, peak)

    def mass(keep: jax.Array) -> jax.Array:
        return jnp.where(keep & (logits >= least_logit[:, None]), jnp.exp(logits - peak[:, None]), 0.0)

    least_logit = threshold(lambda keep: jnp.where(keep, 1.0, 0.0), _most_kept(settings, logits.shape[1]))
    total = jnp.sum(mass(jnp.ones(logits.shape, bool)), axis=-1)
    by_mass = jnp.where(settings.top_p >= 1, -jnp.inf, threshold(mass, settings.top_p * total))
    return logits >= jnp.maximum(least_logit, by_mass)[:, None]


def _most_kept(settings: DrawSettings, vocab: int) -> jax.Array:
    """The number of tokens [rows] that top-k keeps, without ties, exact in float32."""
    return jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab).astype(jnp.float32)


def _round(
    x: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
    least: jax.Array,
    found: jax.Array,
    shift: jax.Array,
    bits: int,
) -> jax.Array:
    """Settles `bits` bits, from bit `shift` up, of the largest threshold for which the weights above it reach `least`.

    `found`, uint32 [rows], has the higher bits, in an order in which larger patterns are larger floats. `weigh` returns
    weights [rows, vocab] for the tokens that a comparison keeps, and 0 for others.
    """
    candidates = [found | (jnp.uint32(i) << shift.astype(jnp.uint32)) for i in range(1, 1 << bits)]
    weights = [weigh(x >= _float_of(candidate)[:, None]) for candidate in candidates]
    zeros = [jnp.float32(0)] * len(weights)
    # One reduction computes all sums: XLA:GPU fuses at most eight separate ones into a kernel.
    sums = lax.reduce(weights, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,))
    # Larger thresholds keep less. So the number of thresholds that keep enough is the digit.
    digit = sum((kept >= least).astype(jnp.uint32) for kept in sums)
    return found | (digit << shift.astype(jnp.uint32))


def _float_of(order: jax.Array) -> jax.Array:
    """The float32 of an ordered pattern. Patterns below that of -infinity give -infinity."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32((1 << 31) - 1), ~order)
    return jnp.where(order < jnp.uint32(0x00800000), -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


def _at_most(order: jax.Array, peak: jax.Array) -> jax.Array:
    """The threshold of a pattern, but at most the peak, so that the most likely token is always kept."""
    found = _float_of(order)
    return jnp.where(found <= peak, found, peak)  # the peak also where found is NaN
