"""The fields of `BlockArray`, and its values in plain XLA or NumPy.

The layouts are those of ggml (ggml-common.h, ggml-quants.c). A group of n inputs has n bytes of `low` and n of `high`,
and each byte has some bits of one input's code. value = (code - offset) * factor + shift. The factor of a K type is its
first float16 times an integer scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray

LOW_MASK = {name: 3 if name in ("Q2_K", "Q3_K") else 15 for name in BLOCK_KINDS}
HIGH_MASK = {name: 3 if name == "Q6_K" else 1 for name in BLOCK_KINDS}


class Group(NamedTuple):
    """Where the codes of a group are: the byte of the block at which their low bits begin, and the shift of these bits;
    likewise for the high bits. In blocks of 32 inputs, high bits are in one int32: `shift` is that of the first input,
    and each following input has one more."""

    low_at: int
    low_shift: int
    high_at: int
    high_shift: int


def _group(kind: str, g: int) -> Group:
    if kind in ("Q4_K", "Q5_K"):  # 32 bytes hold two groups of 32 inputs; each group has one high bit
        return Group(g // 2 * 32, g % 2 * 4, 0, g)
    half = g // 8  # indices of 128 inputs
    part = g // 2 % 4  # of 32
    end = g % 2 * 16  # of 16
    if kind == "Q6_K":
        return Group(half * 64 + part % 2 * 32 + end, part // 2 * 4, half * 32 + end, part * 2)
    if kind in ("Q2_K", "Q3_K"):
        return Group(half * 32 + end, part * 2, end, g // 2)
    return Group(0, g * 4, 0, g * 16)


GROUPS = {name: tuple(_group(name, g) for g in range(kind.block // kind.group)) for name, kind in BLOCK_KINDS.items()}
HIGH_UP = {name: 2 if name == "Q3_K" else 4 for name in BLOCK_KINDS}  # position of the high bits in a code


def dequantize(w: BlockArray) -> jax.Array:
    """Returns the weight [..., out, in] in float32: an array of NumPy if the fields are."""
    kind = BLOCK_KINDS[w.kind]
    lead = w.low.shape[:-1]

    def by_block(values: jax.Array, count: int) -> jax.Array:
        return values.reshape(*lead, -1, count)

    low = by_block(w.low, kind.low)
    factors = by_block(w.factors, kind.factors).astype(jnp.float32)
    scales = by_block(w.scales, kind.words) if kind.words else None
    groups = []
    for g in range(kind.block // kind.group):
        at, shift = GROUPS[w.kind][g][:2]
        code = (low[..., at : at + kind.group] >> shift & LOW_MASK[w.kind]).astype(jnp.int32)
        if kind.high:
            code |= _high(w, g) << HIGH_UP[w.kind]
        scale, minimum = _scales(w.kind, scales, g)
        factor = factors[..., :1] if scale is None else factors[..., :1] * scale.astype(jnp.float32)
        value = (code - kind.offset).astype(jnp.float32) * factor
        if minimum is not None:
            value -= factors[..., 1:] * minimum.astype(jnp.float32)
        groups.append(value + factors[..., 1:] if kind.shifts and minimum is None else value)
    stack: Any = jnp.stack if isinstance(w.low, jax.Array) else np.stack
    return stack(groups, -2).reshape(w.shape)


def _high(w: BlockArray, g: int) -> jax.Array:
    """Returns the high bits of a group's codes, int32 [..., blocks, group]."""
    kind, at, shift = BLOCK_KINDS[w.kind], *GROUPS[w.kind][g][2:]
    if kind.block == 32:
        return w.high[..., None] >> (shift + np.arange(kind.group, dtype=np.int32)) & 1
    high = w.high.reshape(*w.high.shape[:-1], -1, kind.high)[..., at : at + kind.group]
    return (high >> shift & HIGH_MASK[w.kind]).astype(jnp.int32)


def _scales(kind: str, words: jax.Array | None, g: int) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns a group's integer scale and minimum, int32 [..., blocks, 1]; None for one that the type does not have."""
    if words is None:
        return None, None

    def bits(word: int, shift: int, mask: int) -> jax.Array:
        return words[..., word : word + 1] >> shift & mask

    at = 8 * (g % 4)
    if kind == "Q2_K":
        return bits(g // 4, at, 15), bits(g // 4, at + 4, 15)
    if kind == "Q3_K":
        low = bits(g % 8 // 4, at + g // 8 * 4, 15)
        high = bits(2, at + g // 4 * 2, 3)
        return (low | high << 4) - 32, None
    if kind == "Q6_K":
        return words[..., g // 4 : g // 4 + 1] << (24 - at) >> 24, None
    return bits(g // 4, at, 255), bits(2 + g // 4, at, 255)
