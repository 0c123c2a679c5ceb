"""Layers that get a vector of their own for each token (`spec.PerLayerInputs`), and Gemma 4's layer, which uses it."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import Attention, AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer
from jaxserve.models.layers import MLP, Embedding, Linear, weight
from jaxserve.models.normed_experts import NormedExperts
from jaxserve.models.norms import HeadNorm, Norm
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import ModelConfig, NormSpec, PerLayerInputs
from jaxserve.pallas_kernels.operands import Partials, value_of
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops

ROWS = 64  # the table's rows are filled up to a multiple of this, so that devices can share them


class PerLayerVectors(nn.Module):
    """The vectors of all layers, from the tokens and their embeddings."""

    spec: PerLayerInputs
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, token_ids: jax.Array, embedded: jax.Array, ops: Ops) -> jax.Array:
        """int32 [tokens], and the first layer's input [tokens, hidden] -> [tokens, layers, size]."""
        spec = self.spec
        width = spec.layers * spec.size
        shape = (-1, spec.layers, spec.size)
        known = jnp.where(token_ids < spec.rows, token_ids, 0)
        own = Embedding(-(-spec.rows // ROWS) * ROWS, width, self.dtype, name="embed")(known, ops)
        own = own * jnp.asarray(spec.size**0.5, self.dtype)
        axes = (None, "embed")
        projected = Linear((self.hidden_size,), (width,), axes, dtype=self.dtype, name="projection")(embedded, ops)
        projected = (projected * jnp.asarray(self.hidden_size**-0.5, self.dtype)).reshape(shape)
        normed = HeadNorm(spec.norm, (spec.size,), self.dtype, name="norm")(projected, -1)
        return (normed + own.reshape(shape)) * jnp.asarray(2**-0.5, self.dtype)


class PerLayerGate(nn.Module):
    """What a layer adds to the stream for its own vectors."""

    spec: PerLayerInputs
    hidden_size: int
    norm: NormSpec
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, own: jax.Array, ops: Ops) -> jax.Array:
        """The stream x [tokens, hidden] and the layer's vectors [tokens, size] -> [tokens, hidden]."""
        size = self.spec.size
        gate = Linear((self.hidden_size,), (size,), (None, "embed"), dtype=self.dtype, name="gate")(x, ops)
        fed = ACTIVATIONS[self.spec.activation](gate) * own
        y = Linear((size,), (self.hidden_size,), ("embed", None), dtype=self.dtype, name="projection")(fed, ops)
        normed: jax.Array = Norm(self.norm, self.hidden_size, self.dtype, name="norm")(y, ops)[1]
        return normed


class ScaledSandwich(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is scaled_sandwich."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops,
        own: jax.Array | None = None,
    ) -> tuple[jax.Array, Partials | None]:  # fmt: skip
        """As `DecoderLayer`. own: the layer's vectors [tokens, size], if it has such."""
        hidden = self.hidden_size
        mlp = self.spec.mlp
        attention: Any = self.spec.attention
        assert mlp is not None

        def norm(name: str, x: jax.Array, y: Partials | None = None) -> tuple[jax.Array, Any]:
            return Norm(self.spec.norm, hidden, self.dtype, name=name)(x, ops, y)

        def normed(name: str, y: Partials) -> Partials:
            return Partials(norm(name, y.reduce(x.dtype))[1][None])

        x, inputs = norm("attention_norm", x, y)
        y = Attention(attention, hidden, self.kv_heads, self.dtype, name="attention")(inputs, ropes, attend, ops)
        x, inputs = norm("mlp_norm", x, normed("attention_out_norm", y))
        if mlp.experts is None:
            y = MLP(mlp, hidden, self.dtype, name="mlp")(inputs, ops)
        else:
            y = NormedExperts(mlp, hidden, self.spec.norm, self.dtype, name="mlp")(inputs, x, ops)
        x = x + normed("mlp_out_norm", y).reduce(x.dtype)
        if self.per_layer is not None:
            assert own is not None
            x = x + PerLayerGate(self.per_layer, hidden, self.spec.norm, self.dtype, name="per_layer")(x, own, ops)
        scale = weight(self, "scale", nn.initializers.ones, (None,), (1,), self.dtype)
        return x * value_of(scale).astype(x.dtype), None


def vector_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path in the decoder's parameters -> the tensors of `PerLayerVectors`, where a model has such."""
    if (spec := config.per_layer) is None:
        return {}
    width = spec.layers * spec.size
    return {
        "per_layer/embed/table": [Source("per_layer_embed.weight", (spec.rows, width), whole)],
        "per_layer/projection/kernel": [Source("per_layer_model.weight", (width, config.hidden_size), whole)],
        "per_layer/norm/scale": [Source("per_layer_model_norm.weight", (spec.size,), whole)],
    }


def gate_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path within a layer -> the tensors of `PerLayerGate`, where a model has such."""
    if (spec := config.per_layer) is None:
        return {}
    hidden = config.hidden_size
    return {
        "per_layer/gate/kernel": [Source("per_layer_gate.weight", (spec.size, hidden), whole)],
        "per_layer/projection/kernel": [Source("per_layer_projection.weight", (hidden, spec.size), whole)],
        "per_layer/norm/scale": [Source("per_layer_norm.weight", (hidden,), whole)],
    }
