"""Gemma 3n's layer: alternating updates (AltUp, Baykal et al. 2023, arXiv:2301.13310) of several residual streams, and
a learned low-rank path beside attention (LAuReL, Menghani et al. 2024, arXiv:2411.07501)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import Attention, AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer
from jaxserve.models.layers import FAN_IN, MLP, Linear, weight
from jaxserve.models.norms import Norm
from jaxserve.models.per_layer import PerLayerGate, gate_sources
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import AltUpSpec, LayerSpec, ModelConfig
from jaxserve.pallas_kernels.operands import Partials, value_of
from jaxserve.pallas_kernels.ops import Ops

LEAST = 1e-5  # of the mean square of a projected stream


class Streams(nn.Module):
    """The way from an embedding to the streams of AltUp, and from these to the input of the last norm."""

    count: int
    hidden_size: int
    dtype: Any

    def setup(self) -> None:
        def projections() -> list[Linear]:
            shape = (self.hidden_size,), (self.hidden_size,), (None, "embed")
            return [Linear(*shape, dtype=self.dtype) for _ in range(self.count - 1)]

        self.spread = projections()
        self.join = projections()

    def begin(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, hidden] -> the streams [tokens, count, hidden], all of x's size."""
        others = [_as_large(project(x, ops), x) for project in self.spread]
        return jnp.stack([x, *others], axis=1)

    def end(self, streams: jax.Array, ops: Ops) -> jax.Array:
        """The mean of the streams [tokens, count, hidden], of which all but the first are projected."""
        first = streams[:, 0]
        others = [_as_large(project(streams[:, i], ops), first) for i, project in enumerate(self.join, 1)]
        return jnp.mean(jnp.stack([first, *others], axis=1), axis=1)


def _as_large(y: jax.Array, x: jax.Array) -> jax.Array:
    """y times the factor that gives it the root mean square of x."""
    size = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    return y * size / jnp.sqrt(jnp.maximum(jnp.mean(y * y, axis=-1, keepdims=True), LEAST))


class AltUp(nn.Module):
    """Predicts a layer's results for all streams, and corrects the predictions by the result of one of them."""

    spec: AltUpSpec
    layer: LayerSpec
    hidden_size: int
    dtype: Any

    def setup(self) -> None:
        count = self.spec.count
        axes = (None, None)
        self.router_norm = Norm(self.layer.norm, self.hidden_size, self.dtype)
        self.router = Linear((self.hidden_size,), (count,), (None, "embed"), dtype=self.dtype)
        self.prediction = weight(self, "prediction", FAN_IN, axes, (count * count, count), self.dtype)
        self.correction = weight(self, "correction", FAN_IN, axes, (count, count), self.dtype)

    def _modalities(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, hidden] -> [tokens, count]."""
        routed = self.router(self.router_norm(x, ops)[1] * jnp.asarray(1 / self.hidden_size, x.dtype), ops)
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def predict(self, x: jax.Array, ops: Ops) -> jax.Array:
        """The streams x [tokens, count, hidden] -> predictions of the same shape."""
        count = self.spec.count
        shares = self._modalities(x[:, self.spec.active], ops) @ self.prediction.T
        return x + jnp.einsum("tji,tih->tjh", shares.reshape(-1, count, count), x)

    def correct(self, predicted: jax.Array, result: jax.Array, ops: Ops) -> jax.Array:
        """predicted [tokens, count, hidden], and the result [tokens, hidden] of the active stream."""
        shares = self._modalities(result, ops) @ self.correction.T + 1
        return predicted + (result - predicted[:, self.spec.active])[:, None] * shares[:, :, None]


class AltUpLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is altup. Its stream x is [tokens, count, hidden]."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops, own: jax.Array
    ) -> tuple[jax.Array, None]:
        """As `DecoderLayer`. own: the layer's vectors [tokens, size]."""
        hidden = self.hidden_size
        altup = self.spec.altup
        mlp = self.spec.mlp
        attention: Any = self.spec.attention
        assert altup is not None
        assert mlp is not None
        assert self.per_layer is not None

        def norm(name: str, x: jax.Array) -> jax.Array:
            normed: jax.Array = Norm(self.spec.norm, hidden, self.dtype, name=name)(x, ops)[1]
            return normed

        def linear(name: str, size: int, out: int, axes: tuple[str | None, ...]) -> Linear:
            return Linear((size,), (out,), axes, dtype=self.dtype, name=name)

        streams = AltUp(altup, self.spec, hidden, self.dtype, name="altup")
        predicted = streams.predict(x, ops)
        active = predicted[:, altup.active]
        inputs = norm("attention_norm", active)
        low = linear("laurel_left", hidden, altup.laurel_rank, (None, "embed"))(inputs, ops)
        high = linear("laurel_right", altup.laurel_rank, hidden, ("embed", None))(low, ops)
        laurel = inputs + norm("laurel_norm", high)
        attended = Attention(attention, hidden, self.kv_heads, self.dtype, name="attention")(inputs, ropes, attend, ops)
        stream = active + norm("attention_out_norm", attended.reduce(x.dtype)) + laurel
        stream = stream * jnp.asarray(2**-0.5, x.dtype)
        y = MLP(mlp, hidden, self.dtype, name="mlp")(norm("mlp_norm", stream), ops)
        corrected = streams.correct(predicted, stream + norm("mlp_out_norm", y.reduce(x.dtype)), ops)
        first = corrected[:, altup.active]
        if altup.scaled:
            first = first * value_of(weight(self, "scale", nn.initializers.ones, (None,), (hidden,), self.dtype))
        fed = PerLayerGate(self.per_layer, hidden, self.spec.norm, self.dtype, name="per_layer")(first, own, ops)
        return corrected.at[:, 1:].add(fed[:, None]), None


def stream_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path in the decoder's parameters -> the tensors of `Streams`, where a model has such."""
    if not isinstance(config.streams, AltUpSpec):
        return {}
    hidden = config.hidden_size
    return {
        f"streams/{name}_{i}/kernel": [Source(f"{name}.weight", (hidden, hidden), whole, head=i)]
        for name in ("spread", "join")
        for i in range(config.streams.count - 1)
    }


def altup_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path within a layer -> the tensors that its attention and MLP do not have."""
    altup = config.streams
    assert isinstance(altup, AltUpSpec)
    hidden = config.hidden_size
    count = altup.count
    rank = altup.laurel_rank
    shapes = {
        "altup/router/kernel": ("altup_router.weight", (count, hidden)),
        "altup/router_norm/scale": ("altup_norm.weight", (hidden,)),
        "altup/prediction": ("altup_prediction.weight", (count * count, count)),
        "altup/correction": ("altup_correction.weight", (count, count)),
        "laurel_left/kernel": ("laurel_left.weight", (rank, hidden)),
        "laurel_right/kernel": ("laurel_right.weight", (hidden, rank)),
        "laurel_norm/scale": ("laurel_norm.weight", (hidden,)),
    }
    if altup.scaled:
        shapes["scale"] = ("altup_scale", (hidden,))
    return gate_sources(config) | {path: [Source(role, shape, whole)] for path, (role, shape) in shapes.items()}
