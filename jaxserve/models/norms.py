"""Norms of the residual stream, and of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.layers import weight
from jaxserve.models.spec import NormSpec
from jaxserve.pallas_kernels.operands import Partials, Row, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantArray


def normalize(
    x: jax.Array, spec: NormSpec, scale: jax.Array | None, bias: jax.Array | None, axes: int | Sequence[int] = -1
) -> jax.Array:
    """x normed over `axes`, in plain XLA. It is computed in float32, and the result is rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    if spec.kind == "layer":
        wide -= jnp.mean(wide, axis=axes, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + spec.eps)
    if scale is not None:
        wide *= scale.astype(jnp.float32)
    if bias is not None:
        wide += bias.astype(jnp.float32)
    return wide.astype(x.dtype)


def vectors(
    module: nn.Module, spec: NormSpec, axes: tuple[str | None, ...], shape: tuple[int, ...], dtype: Any
) -> tuple[jax.Array | Row | None, jax.Array | Row | None]:
    """Declares a norm's scale and bias; None for one that the norm does not have."""
    scale = bias = None
    if spec.scale:  # with an offset in float32: bfloat16 would lose most of a small w in 1 + w
        kept = jnp.float32 if spec.offset else dtype
        scale = weight(module, "scale", nn.initializers.ones, axes, shape, kept)
    if spec.bias:
        bias = weight(module, "bias", nn.initializers.zeros, axes, shape, dtype)
    return scale, bias


class Norm(nn.Module):
    """A norm over the last axis. Called with x and y, it returns (x + y, norm(x + y)); without y, (x, norm(x))."""

    spec: NormSpec
    size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, ops: Ops, y: Partials | None = None, reader: QuantArray | None = None
    ) -> tuple[jax.Array, Any]:
        """`reader`: the weight that multiplies the normed result, if its format says how that result is rounded."""
        scale, bias = vectors(self, self.spec, (None,), (self.size,), self.dtype)
        if self.spec.kind == "rms" and scale is not None and bias is None:
            return ops.add_norm(x, y, scale, self.spec.eps, reader)
        total = x if y is None else x + y.reduce(x.dtype)
        scale, bias = (None if vector is None else value_of(vector) for vector in (scale, bias))
        return total, normalize(total, self.spec, scale, bias)


class HeadNorm(nn.Module):
    """A norm of queries or keys. It declares a scale and a bias of `shape`, and computes the norm in plain XLA."""

    spec: NormSpec
    shape: tuple[int, ...]  # [head_dim], or [kv_heads, …, head_dim]
    dtype: Any = jnp.float32

    def setup(self) -> None:
        axes = ("kv_heads", *(None,) * (len(self.shape) - 1)) if len(self.shape) > 1 else (None,)
        self.vectors = vectors(self, self.spec, axes, self.shape, self.dtype)

    def scale(self) -> jax.Array | Row:
        """The scale, for an operation that computes the norm itself (`Ops.rotate`)."""
        assert self.vectors[0] is not None
        return self.vectors[0]

    def __call__(self, x: jax.Array, axes: int | Sequence[int]) -> jax.Array:
        scale, bias = (None if vector is None else value_of(vector) for vector in self.vectors)
        return normalize(x, self.spec, scale, bias, axes)


class StreamNorm(nn.Module):
    """A norm of each of several residual streams [tokens, count, hidden], with a scale of its own, in plain XLA."""

    spec: NormSpec
    shape: tuple[int, int]  # (count, hidden)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale, _ = vectors(self, self.spec, (None, None), self.shape, self.dtype)
        assert scale is not None
        return normalize(x, self.spec, value_of(scale), None)
