"""Hashed n-grams of tokens (Qwen4-Exp) in plain XLA: the tokens before each token, their hashes, and a convolution that
leaves tokens out.

A hash multiplies each token of an n-gram with a number of 63 bits, joins the products by exclusive or, and takes the
remainder of a division by a prime number. Devices compute with 32 bits, so products are in parts of 16 bits, and
remainders are taken a few bits at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import isqrt

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.operands import RecentTokens, SpacedInputs
from jaxserve.pallas_kernels.state_rows import StateRows, convolve, earlier, last_inputs, read, write
from jaxserve.pallas_kernels.types import NgramState

PART = 16  # bits of a part of a product
PARTS = 4
WORD = 2**64
STEP = 0x9E3779B97F4A7C15  # of SplitMix64 (Steele et al. 2014)
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
OF_LAYER = 10007  # by which the seeds of layers differ


def recent_tokens(
    inputs: RecentTokens,
    state: NgramState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, NgramState]:
    """The tokens before each token, and the states with the rows' last tokens.

    Args:
      first: int32 scalar, the index of the layer's first state, to which slots are added.
      decode_only, static: as for other recurrent layers; they change nothing here.

    Returns int32 [tokens, count], the newest first, -1 before the first token.
    """
    x = inputs.tokens[:, None, None] + 1
    before = read(state.tokens, rows, first)[:, None, :, None]
    found = [earlier(x, before, rows, back)[:, 0, 0] - 1 for back in range(1, before.shape[2] + 1)]
    after = write(state.tokens, last_inputs(x, before, rows)[:, 0, :, 0], rows, first)
    return jnp.stack(found, axis=1), state._replace(tokens=after)


def spaced_convolution(
    inputs: SpacedInputs,
    state: NgramState,
    rows: StateRows,
    first: jax.Array | int = 0,
    *,
    decode_only: bool = False,
    static: bool = False,
) -> tuple[jax.Array, NgramState]:
    """The convolution of each channel over tokens that lie apart, and the states with its last inputs. The other
    arguments are those of `recent_tokens`.

    Returns float32 [tokens, channels].
    """
    before = read(state.inputs, rows, first)
    width = inputs.conv.shape[1]
    x, w = inputs.x.astype(jnp.float32)[:, None], inputs.conv.astype(jnp.float32)[None]
    spacing = before.shape[1] // (width - 1)
    mixed, after = convolve(x, w, before.reshape(len(before), 1, -1), rows, spacing)
    after = write(state.inputs, after.reshape(before.shape), rows, first)
    return mixed[:, 0], state._replace(inputs=after)


def hashes(
    tokens: jax.Array, before: jax.Array, end: int, multipliers: Sequence[int], sizes: Sequence[Sequence[int]]
) -> jax.Array:
    """The hashes of the n-grams that end with each token.

    Args:
      tokens: int32 [tokens].
      before: int32 [tokens, longest - 1], as `recent_tokens` returns them.
      end: the token that stands for those beyond itself and before the first one.
      multipliers: of the tokens of an n-gram, from the last one on.
      sizes: for pairs, then for longer n-grams, the prime numbers below which their hashes are.

    Returns int32 [tokens, hashes], those of pairs first.
    """
    of_token = _product(tokens, multipliers[0])
    within = jnp.ones(tokens.shape, bool)
    found = []
    for back, multiplier in enumerate(multipliers[1:]):
        within &= (before[:, back] >= 0) & (before[:, back] != end)
        part = _product(jnp.where(within, before[:, back], end), multiplier)
        of_token = [a ^ b for a, b in zip(of_token, part, strict=True)]
        found.append(_remainders(of_token, sizes[back]))
    return jnp.concatenate(found, axis=1)


def _product(tokens: jax.Array, multiplier: int) -> list[jax.Array]:
    """The product of each token and a number, modulo 2 ** 64: its parts, uint32 [tokens] each, the lowest first."""
    x = tokens.astype(jnp.uint32)
    mask = np.uint32(2**PART - 1)
    halves = [x & mask, x >> PART]
    sums = [jnp.zeros_like(x) for _ in range(PARTS + 1)]
    for i, half in enumerate(halves):
        for j in range(PARTS - i):
            product = half * np.uint32((multiplier >> PART * j) % 2**PART)
            sums[i + j] += product & mask
            sums[i + j + 1] += product >> PART
    parts = []
    carry = jnp.zeros_like(x)
    for part in sums[:PARTS]:
        total = part + carry
        parts.append(total & mask)
        carry = total >> PART
    return parts


def _remainders(parts: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    """The remainders of numbers, given in parts as `_product` returns them, int32 [tokens, sizes]."""
    divisors = np.array(sizes, np.uint32)
    most = 32 - max(size.bit_length() for size in sizes)  # bits that can be appended to a remainder
    remainder = jnp.zeros((len(parts[0]), len(sizes)), jnp.uint32)
    for part in reversed(parts):
        left = PART
        while left:
            bits = min(most, left)
            left -= bits
            appended = (part >> left) & np.uint32(2**bits - 1)
            remainder = ((remainder << bits) | appended[:, None]) % divisors
    return remainder.astype(jnp.int32)


def multipliers(vocab: int, longest: int, index: int, seed: int) -> list[int]:
    """The odd numbers that a layer multiplies the tokens of an n-gram with, from the last token on: so small that no
    product exceeds 63 bits. index: of the layer among those with n-grams."""
    bound = max(1, (2**63 - 1) // vocab // 2)
    start = seed + OF_LAYER * index
    return [2 * (_mixed(start + STEP * (back + 1)) % bound) + 1 for back in range(longest)]


def _mixed(value: int) -> int:
    """The output of SplitMix64 for a state."""
    value = (value + STEP) % WORD
    for shift, factor in MIX:
        value = (value ^ (value >> shift)) * factor % WORD
    return value ^ (value >> 31)


@cache
def primes(start: int, first: int, count: int) -> tuple[int, ...]:
    """`count` prime numbers of at least `start`, without the `first` smallest of these."""
    found: list[int] = []
    value = max(start, 2)
    while len(found) < first + count:
        if all(map(partial(_leaves_rest, value), range(2, isqrt(value) + 1))):
            found.append(value)
        value += 1
    return tuple(found[first:])


def _leaves_rest(value: int, divisor: int) -> bool:
    return value % divisor != 0
