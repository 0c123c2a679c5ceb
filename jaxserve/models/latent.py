"""Multi-head latent attention of a layer (DeepSeek-V2, arXiv:2405.04434): projections down to latents, and up again."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import Norm
from jaxserve.models.rope import Angles
from jaxserve.models.spec import IndexerSpec, LatentAttentionSpec
from jaxserve.pallas_kernels.operands import IndexInputs, LatentHeads, Partials
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class Indexer(nn.Module):
    """The projections of an indexer. Every device computes all of it, because a token's choice is for all heads.

    Scores are only compared with each other. So they lack the factors heads ** -0.5 and dim ** -0.5, which change no
    order, and the rotation by a Hadamard matrix of DeepSeek's own code, which changes no product of a query and a key.
    """

    spec: IndexerSpec
    hidden_size: int
    q_rank: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, of_queries: jax.Array, angles: Angles, ops: Ops) -> IndexInputs:
        """x: the layer's input. of_queries: [tokens, q_rank], the normed latent of the attention's queries."""
        spec = self.spec

        def linear(name: str, inputs: int, out_shape: tuple[int, ...], out_dtype: Any = None) -> Linear:
            axes = (*(None,) * len(out_shape), "embed")
            return Linear((inputs,), out_shape, axes, False, self.dtype, out_dtype, name=name)

        def turned(x: jax.Array) -> jax.Array:
            first, rest = jnp.split(x, [2 * angles.cos.shape[-1]], axis=-1)
            return jnp.concatenate([ops.rope(first, angles.cos, angles.sin), rest], axis=-1)

        q = linear("q", self.q_rank, (spec.heads, spec.dim))(of_queries, ops)
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
        of_queries, latent, key = jnp.split(down, [spec.q_rank or 0, spec.down_size - spec.rope_dim], axis=-1)
        q_shape = (heads, spec.nope_dim + spec.rope_dim)
        q_axes = ("kv_heads", None)
        if spec.q_rank is None:
            q = linear("q", (hidden,), q_shape, (*q_axes, "embed"), False)(x, ops)
        else:
            of_queries = norm("q_norm", of_queries)
            q = linear("q_up", (spec.q_rank,), q_shape, (*q_axes, None), False)(of_queries, ops)
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
        index_inputs = None
        if spec.indexer is not None and spec.q_rank is not None and spec.chooses:
            assert not isinstance(x, QuantRows), "rounded before the indexer read it, see `DecoderLayer`"
            indexer = Indexer(spec.indexer, hidden, spec.q_rank, self.dtype, name="indexer")
            index_inputs = indexer(x, of_queries, angles, ops)
        out = attend(LatentHeads(q_whole, row, k_up, v_up, index_inputs))
        if spec.head_gate:
            gate = linear("gate", (hidden,), (heads,), ("kv_heads", "embed"), False)(x, ops)
            out = out * jax.nn.sigmoid(gate.reduce(self.dtype))[..., None]
        return linear("out", (heads, spec.v_dim), (hidden,), ("embed", "kv_heads", None), spec.bias)(out, ops)

    @property
    def _init(self) -> Any:
        return nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=(0, 1))
