"""Attention with experts (JetMoE): a router chooses some of several projections of queries for each token, and with
each the projection of results that belongs to it. Keys and values have one projection for all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, weight
from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import AttentionSpec
from jaxserve.pallas_kernels.operands import Heads, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops


class RoutedAttention(nn.Module):
    """Called as `attention.Attention`. A token's queries of all experts are computed at once and those of the chosen
    ones are kept, as the queries of each head of keys and values. Results are brought back to their experts' places,
    times the router's weights, before each expert projects its own."""

    spec: AttentionSpec
    hidden_size: int
    kv_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        experts, dim, hidden = spec.experts, spec.head_dim, (self.hidden_size,)
        router = Linear(hidden, (experts,), (None, "embed"), False, self.dtype, jnp.float32, name="router")
        logits, chosen = jax.lax.top_k(router(x, ops), spec.num_heads // spec.num_kv_heads)
        gates = jax.nn.softmax(logits, axis=-1)
        axes = ("kv_heads", None, None, "embed")
        qkv = Linear(hidden, (self.kv_heads, experts + 2, dim), axes, False, self.dtype, name="qkv")(x, ops)
        q = jnp.take_along_axis(qkv[:, :, :experts], chosen[:, None, :, None], axis=2)
        angles = ropes[spec.rope]
        found = attend(Heads(Partials(jnp.concatenate([q, qkv[:, :, experts:]], 2)[None]), angles.cos, angles.sin))
        weights = gates[:, :, None] * jax.nn.one_hot(chosen, experts)
        spread = jnp.einsum("tkgd,tge->etkd", found.astype(jnp.float32), weights).astype(found.dtype)
        of_out = ("embed", "kv_heads", None)

        def projected(e: int) -> jax.Array:
            out = Linear((self.kv_heads, dim), hidden, of_out, False, self.dtype, as_partials=True, name=f"out_{e}")
            made: Partials = out(spread[e], ops)
            return made.sums

        bias = weight(self, "bias", nn.initializers.zeros, ("embed",), hidden, self.dtype)
        return Partials(sum(projected(e) for e in range(1, experts)) + projected(0), value_of(bias))


def routed_sources(spec: AttentionSpec, order: np.ndarray | None, hidden: int) -> dict[str, list[Source]]:
    """Path within the layer -> the tensors that make it up. The roles are attention_router, q and o of each expert, kv,
    which has all keys and then all values, and attention_bias. `order`: of a head's channels, see `rope.head_order`."""
    own, dim, experts = spec.num_kv_heads, spec.head_dim, spec.experts
    width = own * dim
    place = np.arange(dim) if order is None else order

    def head(which: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda t: t.reshape(own, experts + 2, dim, -1)[:, which]

    def ordered(t: np.ndarray) -> np.ndarray:
        return t.reshape(own, dim, -1)[:, place].reshape(t.shape)

    split = (own, dim, -1)
    q = [Source("q.weight", (width, hidden), head(e), split, head=e, take=ordered) for e in range(experts)]
    kv = "kv.weight", (2 * width, hidden)
    k = Source(*kv, head(experts), split, take=lambda t: ordered(t[:width]))
    v = Source(*kv, head(experts + 1), split, take=rows(width, width))
    outs = {f"attention/out_{e}/kernel": [Source("o.weight", (hidden, width), whole, head=e)] for e in range(experts)}
    return outs | {
        "attention/router/kernel": [Source("attention_router.weight", (experts, hidden), whole)],
        "attention/qkv/kernel": [*q, k, v],
        "attention/bias": [Source("attention_bias", (hidden,), whole)],
    }
