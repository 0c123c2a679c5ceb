"""Differential attention (Ye et al. 2024, arXiv:2410.05258), as in DiffLlama: the heads of the second half, times a
learned number, are subtracted from those of the first half, and the results are normed.

Both heads of a pair read the same values: those of the two heads of keys and values that belong to the pair, side by
side. So a head has twice as many channels for values as for keys, and behind a key and its queries are zeros. The two
heads of a pair are neighbours here, so that devices share whole pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.layers import weight
from jaxserve.models.norms import normalize
from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import AttentionSpec, NormSpec
from jaxserve.pallas_kernels.operands import value_of

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Difference(nn.Module):
    """What pairs of heads give."""

    start: float  # a part of the number that is not learned
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Results of heads [tokens, kv_heads, group, dim] -> of pairs [tokens, kv_heads / 2, group, dim]."""
        shape = (len(LAMBDAS), x.shape[-1] // 2)
        learned = weight(self, "lambdas", nn.initializers.normal(0.1), (None, None), shape, self.dtype)
        q1, k1, q2, k2 = value_of(learned).astype(jnp.float32)
        share = (jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.start).astype(x.dtype)
        pairs = x.reshape(len(x), -1, 2, *x.shape[2:])
        normed = normalize(pairs[:, :, 0] - share * pairs[:, :, 1], NormSpec(eps=self.eps, scale=False), None, None)
        return normed * jnp.asarray(1.0 - self.start, x.dtype)


def difference_sources(spec: AttentionSpec, hidden: int) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that differ from those of other attention. The roles are q, k, v, o and
    those of LAMBDAS."""
    dim = spec.head_dim // 2
    found = {
        "out/kernel": [Source("o.weight", (hidden, spec.num_heads * dim), whole)],
        "difference/lambdas": [
            Source(role, (dim,), rows(i, 1), (1, dim)) for i, role in enumerate(LAMBDAS)
        ],
        "qkv/kernel": _qkv(spec, "weight", (hidden,)),
    }  # fmt: skip
    if spec.qkv_bias:
        found["qkv/bias"] = _qkv(spec, "bias", ())
    if spec.out_bias:
        found["out/bias"] = [Source("o.bias", (hidden,), whole)]
    return {f"attention/{path}": some for path, some in found.items()}


def _qkv(spec: AttentionSpec, kind: str, inputs: tuple[int, ...]) -> list[Source]:
    """The sources of the fused projection [kv_heads, group + 2, head_dim, *inputs]. A head's channels are in the order
    of `rope.head_order`: the halves that turn together lie half of all channels apart."""
    pairs, group, dim = spec.num_kv_heads // 2, spec.num_heads // spec.num_kv_heads, spec.head_dim // 2
    columns = (-1,) * len(inputs)

    def by_head(target: np.ndarray) -> np.ndarray:
        """The axes: half of the heads, pair, row of the head, half of the channels, channel."""
        return target.reshape(pairs, 2, group + 2, 2, dim, *columns).swapaxes(0, 1)

    def turning(first: int, count: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda t: by_head(t)[:, :, first : first + count, :, : dim // 2]

    def values(target: np.ndarray) -> np.ndarray:
        """The axes: half of the channels, pair, half of the heads, channel."""
        return np.moveaxis(by_head(target)[:, :, group + 1], (2, 1, 0), (0, 1, 2))

    def source(role: str, heads: int, view: Callable, split: tuple[int, ...]) -> Source:
        return Source(f"{role}.{kind}", (heads * dim, *inputs), view, (*split, *columns))

    return [
        source("q", spec.num_heads, turning(0, group), (2, pairs, group, 2, dim // 2)),
        source("k", spec.num_kv_heads, turning(group, 1), (2, pairs, 1, 2, dim // 2)),
        source("v", spec.num_kv_heads, values, (2, pairs, 1, dim)),
    ]
