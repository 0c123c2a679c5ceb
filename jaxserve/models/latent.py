"""Multi-head latent attention of a layer (DeepSeek-V2, arXiv:2405.04434): projections down to latents, and up again."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, times, weight
from jaxserve.models.norms import Norm
from jaxserve.models.rope import Angles, learned_angles
from jaxserve.models.spec import IndexerSpec, LatentAttentionSpec
from jaxserve.pallas_kernels.operands import IndexInputs, LatentHeads, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class LogScale(nn.Module):
    """Multiplies each head's query by a learned line of log(position + 1) (Mistral Large 4)."""

    heads: int
    axis: str | None  # how devices share the heads
    dtype: Any

    @nn.compact
    def __call__(self, q: jax.Array, log_position: jax.Array) -> jax.Array:
        """q: [tokens, heads, dim]."""
        slope, start = (
            value_of(weight(self, name, nn.initializers.ones, (self.axis,), (self.heads,), self.dtype))
            for name in ("slope", "start")
        )
        line = log_position[:, None].astype(q.dtype) * slope.astype(q.dtype) + start.astype(q.dtype)
        return q * line[..., None]


class Indexer(nn.Module):
    """The projections of an indexer. Every device computes all of it, because a token's choice is for all heads.

    Scores are only compared with each other. So they lack the factors heads ** -0.5 and dim ** -0.5, which change no
    order, and the rotation by a Hadamard matrix of DeepSeek's own code, which changes no product of a query and a key.
    """

    of: LatentAttentionSpec
    spec: IndexerSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, of_queries: jax.Array, angles: Angles, ops: Ops) -> IndexInputs:
        """x: the layer's input. of_queries: [tokens, q_rank], the normed latent of the attention's queries."""
        spec = self.spec

        def linear(name: str, inputs: int, out_shape: tuple[int, ...], out_dtype: Any = None) -> Linear:
            axes = (*(None,) * len(out_shape), "embed")
            return Linear((inputs,), out_shape, axes, False, self.dtype, out_dtype, name=name)

        def turned(x: jax.Array) -> jax.Array:
            if not self.of.rotates:
                return x
            first, rest = jnp.split(x, [self.of.rope_dim], axis=-1)
            return jnp.concatenate([ops.rope(first, angles.cos, angles.sin), rest], axis=-1)

        if spec.input_norm is not None:
            of_queries = Norm(spec.input_norm, self.hidden_size, self.dtype, name="input_norm")(x, ops)[1]
        q = linear("q", of_queries.shape[-1], (spec.heads, spec.dim))(of_queries, ops)
        if self.of.learned_scale and angles.unlearned is not None:
            q = LogScale(spec.heads, None, self.dtype, name="log_scale")(q, angles.unlearned.log_position)
        key = linear("k", self.hidden_size, (spec.dim,))(x, ops)
        key = Norm(spec.norm, spec.dim, self.dtype, name="k_norm")(key, ops)[1]
        weights = linear("head_weights", self.hidden_size, (spec.heads,), jnp.float32)(x, ops)
        return IndexInputs(turned(q), weights, turned(key))


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
        of_queries, latent, key = jnp.split(down, [spec.q_rank or 0, spec.down_size - spec.turned_dim], axis=-1)
        q_shape = (heads, spec.head_dim)
        q_axes = ("kv_heads", None)
        if spec.q_rank is None:
            q = linear("q", (hidden,), q_shape, (*q_axes, "embed"), False)(x, ops)
        else:
            before = of_queries
            of_queries = norm("q_norm", of_queries)
            read = jnp.concatenate([of_queries, before], axis=-1) if spec.latent_twice else of_queries
            q = linear("q_up", (read.shape[-1],), q_shape, (*q_axes, None), False)(read, ops)
        angles = ropes[spec.rope]
        if angles.unlearned is not None and spec.rotates:
            zeros = nn.initializers.zeros
            logs = value_of(weight(self, "angle_logs", zeros, (None,), (spec.rope_dim // 2,), jnp.float32))
            angles = learned_angles(angles.unlearned, logs)
        q_whole, turned_key = self._turned(q.reduce(self.dtype).reshape(-1, *q_shape), key, angles, ops)
        if angles.query_scale is not None:
            q_whole = q_whole * angles.query_scale.astype(self.dtype)[:, None, None]
        if spec.learned_scale and angles.unlearned is not None:
            scaling = LogScale(heads, "kv_heads", self.dtype, name="log_scale")
            q_whole = scaling(q_whole, angles.unlearned.log_position)
        row = jnp.concatenate([times(norm("kv_norm", latent), spec.latent_scale), turned_key], axis=-1)
        k_up, v_up = (
            weight(self, name, self._init, ("kv_heads", None, None), (heads, size, spec.rank), self.dtype)
            for name, size in (("k_up", spec.projected_dim), ("v_up", spec.v_dim))
        )
        index_inputs = None
        if spec.indexer is not None and spec.chooses:
            assert not isinstance(x, QuantRows), "rounded before the indexer read it, see `DecoderLayer`"
            indexer = Indexer(spec, spec.indexer, hidden, self.dtype, name="indexer")
            index_inputs = indexer(x, of_queries, angles, ops)
        sinks = None
        if spec.sinks:
            sinks = weight(self, "sinks", nn.initializers.normal(1.0), ("kv_heads",), (heads,), jnp.float32)
        out = attend(LatentHeads(q_whole, row, k_up, v_up, index_inputs, sinks))
        if spec.head_gate:
            given = read if spec.latent_twice else x
            axes = ("kv_heads", None, None if spec.latent_twice else "embed")
            gate = linear("gate", (given.shape[-1],), (heads, spec.gates), axes, False)(given, ops)
            out = out * jax.nn.sigmoid(gate.reduce(self.dtype)).reshape(-1, heads, spec.gates)
        return linear("out", (heads, spec.v_dim), (hidden,), ("embed", "kv_heads", None), spec.bias)(out, ops)

    def _turned(self, q: jax.Array, key: jax.Array, angles: Angles, ops: Ops) -> tuple[jax.Array, jax.Array]:
        """Queries [tokens, heads, projected_dim + rope_dim] and keys [tokens, rope_dim], after the rotation. Zeros
        stand for what a layer without rotated keys does not have, because all layers have rows of the same size."""
        spec = self.spec
        if not spec.rotates:
            q = jnp.pad(q, ((0, 0), (0, 0), (0, spec.rope_dim)))
            return q, jnp.zeros((len(q), spec.rope_dim), q.dtype)
        plain, turned = jnp.split(q, [spec.nope_dim], axis=-1)
        turned = ops.rope(turned, angles.cos, angles.sin)
        return jnp.concatenate([plain, turned], axis=-1), ops.rope(key, angles.cos, angles.sin)

    @property
    def _init(self) -> Any:
        return nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=(0, 1))
