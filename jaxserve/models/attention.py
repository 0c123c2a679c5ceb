"""The attention of a layer: projections, norms and rotation of queries and keys, and the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.alibi import with_positions
from jaxserve.models.block_choice import choice_of
from jaxserve.models.differential import Difference
from jaxserve.models.layers import GATES, Linear, weight
from jaxserve.models.norms import HeadNorm, normalize
from jaxserve.models.rope import Angles
from jaxserve.models.spec import AttentionSpec, QKNormSpec
from jaxserve.models.value_bias import biased
from jaxserve.pallas_kernels.operands import CompressedHeads, Heads, LatentHeads, Partials, StateInputs, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows

Ropes = Mapping[str, Angles]  # name in `ModelConfig.ropes` -> angles of all tokens


class AttentionFn(Protocol):
    """Writes the layer's new keys and values to the cache; each token then attends over all that it may see."""

    def __call__(self, heads: Heads | LatentHeads | CompressedHeads | StateInputs) -> jax.Array:
        """The results before the output projection. Of Heads: [tokens, kv_heads, group, head_dim]. Of LatentHeads and
        CompressedHeads: [tokens, heads, v_dim]. Of a recurrent layer's: float32 [tokens, *spec.results]."""


class Attention(nn.Module):
    """Grouped-query attention: fused QKV projection, rotary positions, output projection.

    `kv_heads` exceeds the layer's own where the mesh has more devices: each is then repeated.
    `inputs` is the size of its input; None: hidden_size.
    """

    spec: AttentionSpec
    hidden_size: int
    kv_heads: int
    dtype: Any
    inputs: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        group = spec.num_heads // self.kv_heads
        inputs = self.inputs or self.hidden_size

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple, bias: bool) -> Linear:
            return Linear(in_shape, out_shape, axes, bias, self.dtype, as_partials=True, name=name)

        shape = (self.kv_heads, group + (0 if spec.shares_kv else 2), spec.head_dim)
        axes = ("kv_heads", None, None, "embed")
        qkv = linear("qkv", (inputs,), shape, axes, spec.qkv_bias)(x, ops)
        sums = qkv.sums.reshape(*qkv.sums.shape[:2], *shape)
        qkv = Partials(sums, None if qkv.bias is None else value_of(qkv.bias).reshape(shape))
        heads = self._heads(qkv, ropes[spec.rope], ops)
        if spec.value_bias:
            heads = biased(spec, self.kv_heads, heads, self.dtype, ops)
        if spec.sinks:
            init = nn.initializers.normal(1.0)
            sinks = weight(self, "sinks", init, ("kv_heads", None), (self.kv_heads, group), self.dtype)
            heads = heads._replace(sinks=sinks)
        if spec.blocks is not None and heads.choice is None:
            heads = heads._replace(choice=choice_of(spec, inputs, self.kv_heads, self.dtype, x, ropes, ops))
        result = attend(heads)[..., : spec.value_dim] * spec.value_scale
        if spec.difference is not None:
            result = Difference(*spec.difference, self.dtype, name="difference")(result)
        if spec.out_gate is not None:
            gate = linear("gate", (inputs,), (self.kv_heads, group, spec.gate_channels), axes, spec.gate_bias)(x, ops)
            result = result * GATES[spec.out_gate](gate.reduce(self.dtype)).reshape(*result.shape[:-1], -1)
        if spec.out_norm is not None:
            result = HeadNorm(spec.out_norm, result.shape[1:], self.dtype, name="out_norm")(result, (-3, -2, -1))
        return linear("out", result.shape[1:], (self.hidden_size,), ("embed", *axes[:-1]), spec.out_bias)(result, ops)

    def _heads(self, qkv: Partials, angles: Angles, ops: Ops) -> Heads:
        """The argument of `attend`, which rotates queries and keys and computes the norm if it is `fused`. Everything
        else is computed here in plain XLA, which knows how the heads are split over devices."""
        spec = self.spec
        chosen = spec.qk_norm
        norms = [] if chosen is None else self._norms(chosen)
        plain = spec.clip is None and angles.query_scale is None and spec.alibi is None
        fused = chosen is None or (chosen.fused and plain)
        if spec.shares_kv or (fused and plain and spec.v_norm is None):
            scales: list[Any] = [norm.scale() for norm in norms]
            return Heads(qkv, angles.cos, angles.sin, *scales)
        whole = qkv.reduce(self.dtype)
        q, k, v = whole[:, :, :-2], whole[:, :, -2:-1], whole[:, :, -1:]
        cos, sin = angles.cos, angles.sin
        if chosen is not None and chosen.after_rope:
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
            cos, sin = jnp.ones_like(cos), jnp.zeros_like(sin)
        if chosen is not None and not fused:
            axes = (-3, -2, -1) if chosen.over == "width" else -1
            q, k = norms[0](q, axes), norms[1](k, axes)
        if spec.v_norm is not None:
            v = normalize(v, spec.v_norm, None, None)
        if angles.query_scale is not None:
            q = q * angles.query_scale.astype(q.dtype)[:, None, None, None]
        scales = [norm.scale() for norm in norms] if fused else []
        whole = jnp.concatenate([q, k, v], axis=2)
        if spec.clip is not None:
            whole = jnp.clip(whole, -spec.clip, spec.clip)
        if spec.alibi is not None and angles.positions is not None:
            whole, cos, sin = with_positions(whole, spec.alibi, spec.softmax_scale, angles.positions)
        return Heads(Partials(whole[None]), cos, sin, *scales)

    def _norms(self, chosen: QKNormSpec) -> list[HeadNorm]:
        """The norms of queries [tokens, kv_heads, group, head_dim] and of keys [tokens, kv_heads, 1, head_dim]."""
        dim = self.spec.head_dim
        group = self.spec.num_heads // self.kv_heads
        found: dict[str, tuple[int, ...]] = {"q_norm": (self.kv_heads, group, dim), "k_norm": (self.kv_heads, 1, dim)}
        names = ("q_norm",) if self.spec.shares_kv else ("q_norm", "k_norm")
        shapes = {name: (dim,) if chosen.over == "head" else found[name] for name in names}
        return [HeadNorm(chosen.norm, shape, self.dtype, name=name) for name, shape in shapes.items()]
