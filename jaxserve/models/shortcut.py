"""Layers of LongCat-Flash, whose mixtures of experts are a shortcut: a mixture reads what follows the first attention
of a block, and its result is added at the block's end. So a second stream holds the result until then."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer, attention_of, mlp_of
from jaxserve.models.norms import Norm
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops


class ShortcutLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is shortcut. Its stream x is [tokens, 2, hidden]."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops, own: jax.Array
    ) -> tuple[jax.Array, None]:
        """As `DecoderLayer`. own: the tokens' ids, which are not used."""
        attention = attention_of(self.spec, self.hidden_size, self.kv_heads, self.dtype)
        mlp = mlp_of(self.spec, self.hidden_size, self.dtype)

        def normed(name: str, x: jax.Array) -> jax.Array:
            return Norm(self.spec.norm, self.hidden_size, self.dtype, name=name)(x, ops)[1]

        stream, held = x[:, 0], x[:, 1]
        if attention is not None:
            stream = stream + attention(normed("attention_norm", stream), ropes, attend, ops).reduce(x.dtype)
        result = mlp(normed("mlp_norm", stream), ops).reduce(x.dtype)
        match self.spec.shortcut:
            case "begins":
                held = result
            case "between":
                stream = stream + result
            case _:
                stream = stream + result + held
        return jnp.stack([stream, held], axis=1), None
