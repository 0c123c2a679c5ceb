"""Biases of cached tokens by their values (Doge): the score of a query and a key grows by a learned function of the
values of all heads of the key's token, one number for each head of keys and values.

Every head of queries and keys gets two more channels, whose product is this bias, so that any kernel of attention
computes it (as with biases by distance, `alibi`). With more tokens than a query may see, those with the largest biases
are seen, which is a choice of blocks of one token (`chosen_blocks`).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.alibi import CHANNELS
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import normalize
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import AttentionSpec
from jaxserve.pallas_kernels.operands import ChoiceInputs, Heads, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops


class ValueBias(nn.Module):
    """The biases of new tokens. Every device computes those of all heads."""

    kv_heads: int  # at least `own`: heads are repeated where more devices share the model
    own: int
    head_dim: int
    use_bias: bool  # of the projection
    dtype: Any

    @nn.compact
    def __call__(self, v: jax.Array, ops: Ops) -> jax.Array:
        """v: values [tokens, kv_heads, head_dim] -> float32 [tokens, own]."""
        values = v[:, :: self.kv_heads // self.own].reshape(len(v), -1)
        size = self.own * self.head_dim
        made = Linear((size,), (self.own,), (None, "embed"), self.use_bias, self.dtype, name="project")(values, ops)
        rate = weight(self, "rate", nn.initializers.zeros, (None,), (self.own,), jnp.float32)
        return jnp.exp(value_of(rate) * jax.nn.softplus(made.astype(jnp.float32)))


def biased(spec: AttentionSpec, kv_heads: int, heads: Heads, dtype: Any, ops: Ops) -> Heads:
    """Heads with the channels, within the module of the attention. Their queries and keys are normed and turned, and
    the rotation that is left to do leaves them as they are. If there are more tokens than a query may see, they have
    the inputs of the choice."""
    whole = heads.qkv.reduce(dtype)
    q, k, v = whole[:, :, :-2], whole[:, :, -2:-1], whole[:, :, -1:]
    own = spec.num_kv_heads
    biases = ValueBias(kv_heads, own, spec.head_dim, spec.qkv_bias, dtype, name="value_bias")(v[:, :, 0], ops)
    if spec.qk_norm is not None and heads.q_norm is not None and heads.k_norm is not None:
        q, k = (
            normalize(one, spec.qk_norm.norm, value_of(scale), None)
            for one, scale in ((q, heads.q_norm), (k, heads.k_norm))
        )
    q, k = (ops.rope(one, heads.cos, heads.sin) for one in (q, k))
    each = jnp.repeat(biases, kv_heads // own, axis=1)[:, :, None, None]
    first = jnp.concatenate([jnp.full((*q.shape[:3], 1), 1 / spec.softmax_scale), each, jnp.zeros_like(each)], axis=2)
    more = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1).astype(dtype)
    made = jnp.concatenate([jnp.concatenate([q, k, v], axis=2), more], axis=-1)
    angles = (len(made), (spec.head_dim + CHANNELS) // 2)
    choice = None
    if spec.blocks is not None:
        of_own = jnp.repeat(jnp.eye(own), kv_heads // own, axis=0)
        choice = ChoiceInputs(jnp.broadcast_to(of_own, (len(made), *of_own.shape)), biases)
    return Heads(Partials(made[None]), jnp.ones(angles), jnp.zeros(angles), choice=choice)


def value_bias_sources(own: int, head_dim: int, use_bias: bool) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors of a `ValueBias`. The roles are value_bias and value_rate."""
    shape = (own, own * head_dim)
    found = {
        "project/kernel": [Source("value_bias.weight", shape, whole)],
        "rate": [Source("value_rate", (own,), whole)],
    }
    if use_bias:
        found["project/bias"] = [Source("value_bias.bias", (own,), whole)]
    return {f"value_bias/{path}": some for path, some in found.items()}
