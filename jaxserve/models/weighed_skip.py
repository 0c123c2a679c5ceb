"""Layers of Doge, which multiply what they add to by a learned number for each channel."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer, attention_of, mlp_of
from jaxserve.models.layers import weight
from jaxserve.models.norms import Norm
from jaxserve.pallas_kernels.operands import Partials, value_of
from jaxserve.pallas_kernels.ops import Ops


class WeighedSkipLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is weighed_skip."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, Partials | None]:
        """As `DecoderLayer`."""
        attention = attention_of(self.spec, self.hidden_size, self.kv_heads, self.dtype)
        mlp = mlp_of(self.spec, self.hidden_size, self.dtype)
        parts = {"attention": lambda x: attention(x, ropes, attend, ops), "mlp": lambda x: mlp(x, ops)}
        for name, part in parts.items():
            norm = Norm(self.spec.norm, self.hidden_size, self.dtype, name=f"{name}_norm")
            x, inputs = norm(x, ops, y)
            skip = weight(self, f"{name}_skip", nn.initializers.ones, ("embed",), (self.hidden_size,), self.dtype)
            x, y = x * value_of(skip), part(inputs)
        return x, y
