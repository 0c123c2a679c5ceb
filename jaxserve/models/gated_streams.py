"""Residual streams of Qwen4-Exp. Each attention and each MLP reads the mean of the normed streams, of which every
channel is multiplied by a gate, and adds its result to all streams, by a share for each."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer, attention_of, mlp_of
from jaxserve.models.layers import Linear
from jaxserve.models.ngrams import NgramMemory, stream_norm_source
from jaxserve.models.norms import StreamNorm
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import GatedStreamsSpec, ModelConfig, NormSpec
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops


class GatedMean(nn.Module):
    """What is read of the streams."""

    spec: GatedStreamsSpec
    hidden_size: int
    norm: NormSpec
    dtype: Any
    writes: bool = True  # whether a result is added to the streams

    @nn.compact
    def __call__(self, streams: jax.Array, ops: Ops) -> tuple[jax.Array, jax.Array | None]:
        """streams [tokens, count, hidden] -> what is read of them [tokens, hidden], and the share of the result that
        each of them gets, [tokens, count]; None: there is no result."""
        count = self.spec.count
        size = count * self.hidden_size

        def linear(name: str, inputs: int, outputs: int, x: jax.Array) -> jax.Array:
            made: jax.Array = Linear((inputs,), (outputs,), (None, "embed"), False, self.dtype, name=name)(x, ops)
            return made

        normed = StreamNorm(self.norm, (count, self.hidden_size), self.dtype, name="norm")(streams)
        wide = normed.reshape(-1, size)
        latent = jax.nn.silu(linear("down", size, self.spec.rank, wide) / count)
        gates = jax.nn.sigmoid(linear("up", self.spec.rank, size, latent))
        read = jnp.mean(gates.reshape(normed.shape) * normed, axis=1)
        if not self.writes:
            return read, None
        return read, 2.0 * jax.nn.sigmoid(linear("shares", size, count, wide) / count)


class GatedStreams(nn.Module):
    """The way from an embedding to the streams, which begin alike, and from these to the input of the output head."""

    spec: GatedStreamsSpec
    hidden_size: int
    norm: NormSpec
    layers: int
    dtype: Any

    def setup(self) -> None:
        self.read = GatedMean(self.spec, self.hidden_size, self.norm, self.dtype, writes=False)

    def begin(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, hidden] -> the streams [tokens, count, hidden]."""
        return jnp.broadcast_to(x[:, None], (len(x), self.spec.count, x.shape[-1]))

    def tokens(self, token_ids: jax.Array, x: jax.Array, ops: Ops) -> jax.Array:
        """int32 [tokens] -> what the layers get beside the streams, [tokens, layers]: the tokens."""
        return jnp.broadcast_to(token_ids[:, None], (len(x), self.layers))

    def end(self, streams: jax.Array, ops: Ops) -> jax.Array:
        """The streams [tokens, count, hidden] -> [tokens, hidden]."""
        read: jax.Array = self.read(streams, ops)[0]
        return read


class GatedStreamsLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is gated_streams. Its stream x is [tokens, count, hidden]."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops, own: jax.Array
    ) -> tuple[jax.Array, None]:
        """As `DecoderLayer`. own: the tokens' ids, int32 [tokens]."""
        gated = self.spec.gated
        assert gated is not None
        attention = attention_of(self.spec, self.hidden_size, self.kv_heads, self.dtype)
        module = mlp_of(self.spec, self.hidden_size, self.dtype)
        if self.spec.ngrams is not None:
            sizes = gated.count, self.hidden_size
            x = x + NgramMemory(self.spec.ngrams, sizes, self.spec.norm, self.dtype, name="ngrams")(x, own, attend, ops)

        def around(name: str, streams: jax.Array, part: Any) -> jax.Array:
            mean = GatedMean(gated, self.hidden_size, self.spec.norm, self.dtype, name=f"{name}_streams")
            inputs, shares = mean(streams, ops)
            assert shares is not None
            return streams + part(inputs).reduce(streams.dtype)[:, None] * shares[..., None]

        x = around("attention", x, lambda inputs: attention(inputs, ropes, attend, ops))
        return around("mlp", x, lambda inputs: module(inputs, ops)), None


def gated_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path within a layer -> the tensors of its `GatedMean`s. The roles begin with attention_gated and mlp_gated."""
    return _sources("attention_streams", "attention_gated", config) | _sources("mlp_streams", "mlp_gated", config)


def last_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path in the decoder's parameters -> the tensors of `GatedStreams`, where a model has such. Their roles begin with
    head_gated."""
    if not isinstance(config.streams, GatedStreamsSpec):
        return {}
    return _sources("streams/read", "head_gated", config, writes=False)


def _sources(path: str, role: str, config: ModelConfig, writes: bool = True) -> dict[str, list[Source]]:
    spec = config.streams
    assert isinstance(spec, GatedStreamsSpec)
    size = spec.count * config.hidden_size
    shapes = {"down": (spec.rank, size), "up": (size, spec.rank)} | ({"shares": (spec.count, size)} if writes else {})
    found = {f"{path}/{name}/kernel": [Source(f"{role}_{name}.weight", shape, whole)] for name, shape in shapes.items()}
    norm = stream_norm_source(f"{role}_norm.weight", config.layers[0].norm, (spec.count, config.hidden_size))
    return found | {f"{path}/norm/scale": [norm]}
