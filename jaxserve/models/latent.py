"""Multi-head latent attention of a layer (DeepSeek-V2, arXiv:2405.04434): projections down to latents, and up again."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import Norm
from jaxserve.models.spec import LatentAttentionSpec
from jaxserve.pallas_kernels.operands import LatentHeads, Partials
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class LatentAttention(nn.Module):
    """One product projects a token down to all latents and the shared key; every device computes all of it. The
    projections up, and the output projection, are split over devices by heads."""

    spec: LatentAttentionSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        heads = self.spec.num_heads
        hidden = self.hidden_size

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple, bias: bool) -> Linear:
            return Linear(in_shape, out_shape, axes, bias, self.dtype, as_partials=True, name=name)

        def norm(name: str, x: jax.Array) -> jax.Array:
            return Norm(spec.norm, x.shape[-1], self.dtype, name=name)(x, ops)[1]

        down = linear("down", (hidden,), (spec.down_size,), (None, "embed"), spec.bias)(x, ops).reduce(self.dtype)
        of_queries, latent, key = jnp.split(down, [spec.q_rank or 0, spec.down_size - spec.rope_dim], axis=-1)
        q_shape = (heads, spec.nope_dim + spec.rope_dim)
        q_axes = ("kv_heads", None)
        if spec.q_rank is None:
            q = linear("q", (hidden,), q_shape, (*q_axes, "embed"), False)(x, ops)
        else:
            q = linear("q_up", (spec.q_rank,), q_shape, (*q_axes, None), False)(norm("q_norm", of_queries), ops)
        angles = ropes[spec.rope]
        plain, turned = jnp.split(q.reduce(self.dtype).reshape(-1, *q_shape), [spec.nope_dim], axis=-1)
        q_whole = jnp.concatenate([plain, ops.rope(turned, angles.cos, angles.sin)], axis=-1)
        if angles.query_scale is not None:
            q_whole = q_whole * angles.query_scale.astype(self.dtype)[:, None, None]
        row = jnp.concatenate([norm("kv_norm", latent), ops.rope(key, angles.cos, angles.sin)], axis=-1)
        k_up, v_up = (
            weight(self, name, self._init, ("kv_heads", None, None), (heads, size, spec.rank), self.dtype)
            for name, size in (("k_up", spec.nope_dim), ("v_up", spec.v_dim))
        )
        out = attend(LatentHeads(q_whole, row, k_up, v_up))
        if spec.head_gate:
            gate = linear("gate", (hidden,), (heads,), ("kv_heads", "embed"), False)(x, ops)
            out = out * jax.nn.sigmoid(gate.reduce(self.dtype))[..., None]
        return linear("out", (heads, spec.v_dim), (hidden,), ("embed", "kv_heads", None), spec.bias)(out, ops)

    @property
    def _init(self) -> Any:
        return nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=(0, 1))
