"""Manifold-constrained hyper-connections (Xie et al. 2026, arXiv:2512.24880): a layer of DeepSeek-V4 has several
residual streams, which learned shares mix. HY-V4's are not mixed. All shares of a token follow from its streams, and
stay in float32."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer, attention_of, mlp_of
from jaxserve.models.layers import FAN_IN, weight
from jaxserve.models.norms import Norm, normalize
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import HyperSpec, ModelConfig, NormSpec
from jaxserve.pallas_kernels.operands import Partials, value_of
from jaxserve.pallas_kernels.ops import Ops


def kinds_of(spec: HyperSpec) -> tuple[int, ...]:
    """How many shares there are of each kind: of reading streams, of writing to them, and of mixing them."""
    both = (spec.count, spec.count)
    return (*both, spec.count * spec.count) if spec.steps else both


class Shares(nn.Module):
    """Learned linear functions of a token's streams, of which each kind has a scale of its own."""

    count: int  # of the functions
    kinds: tuple[int, ...]  # how many of them each kind has
    inputs: int
    norm: NormSpec

    @nn.compact
    def __call__(self, streams: jax.Array) -> jax.Array:
        """streams [tokens, streams, hidden] -> float32 [tokens, count]."""
        wide = streams.reshape(len(streams), -1).astype(jnp.float32)
        mixing = value_of(weight(self, "mixing", FAN_IN, (None, "embed"), (self.count, self.inputs), jnp.float32))
        base = value_of(weight(self, "base", nn.initializers.zeros, (None,), (self.count,), jnp.float32))
        scale = value_of(weight(self, "scale", nn.initializers.ones, (None,), (len(self.kinds),), jnp.float32))
        found = jnp.matmul(normalize(wide, self.norm, None, None), mixing.T, precision=lax.Precision.HIGHEST)
        return found * jnp.repeat(scale, jnp.array(self.kinds), total_repeat_length=self.count) + base


class HyperConnection(nn.Module):
    """What stands around an attention, or an MLP."""

    spec: HyperSpec
    hidden_size: int
    norm: NormSpec

    @nn.compact
    def __call__(self, streams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The streams [tokens, streams, hidden] -> what the attention or the MLP reads [tokens, hidden], the shares of
        its result that streams get [tokens, streams], and a matrix [tokens, streams, streams] that mixes the streams:
        row i has the shares of stream i that each of the new ones gets. None: streams are not mixed."""
        count = self.spec.count
        eps = self.spec.eps
        kinds = kinds_of(self.spec)
        shares = Shares(sum(kinds), kinds, count * self.hidden_size, self.norm, name="shares")(streams)
        read, write, mix = jnp.split(shares, [count, 2 * count], axis=-1)
        write = self.spec.magnitude * jax.nn.sigmoid(write)
        inputs = jnp.einsum("tn,tnh->th", jax.nn.sigmoid(read) + eps, streams.astype(jnp.float32))
        if not self.spec.steps:
            return inputs.astype(streams.dtype), write + eps, None
        mix = jax.nn.softmax(mix.reshape(-1, count, count), axis=-1) + eps
        mix = _over_sums(mix, 1, eps)
        mix = lax.fori_loop(1, self.spec.steps, lambda _, m: _over_sums(_over_sums(m, 2, eps), 1, eps), mix)
        return inputs.astype(streams.dtype), write, mix


def _over_sums(matrix: jax.Array, axis: int, eps: float) -> jax.Array:
    return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + eps)


class HyperStreams(nn.Module):
    """The way from an embedding to the streams, which begin alike, and from these to the input of the last norm."""

    spec: HyperSpec
    hidden_size: int
    norm: NormSpec
    layers: int

    def setup(self) -> None:
        count = self.spec.count
        self.shares = Shares(count, (count,), count * self.hidden_size, self.norm)

    def begin(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, hidden] -> the streams [tokens, count, hidden]."""
        return jnp.broadcast_to(x[:, None], (len(x), self.spec.count, x.shape[-1]))

    def tokens(self, token_ids: jax.Array, x: jax.Array, ops: Ops) -> jax.Array:
        """int32 [tokens] -> what the layers get beside the streams, [tokens, layers]: the tokens."""
        return jnp.broadcast_to(token_ids[:, None], (len(x), self.layers))

    def end(self, streams: jax.Array, ops: Ops) -> jax.Array:
        """The streams [tokens, count, hidden] -> [tokens, hidden]."""
        shares = jax.nn.sigmoid(self.shares(streams)) + self.spec.eps
        return jnp.einsum("tn,tnh->th", shares, streams.astype(jnp.float32)).astype(streams.dtype)


class HyperLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is hyper. Its stream x is [tokens, count, hidden]."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops, own: jax.Array
    ) -> tuple[jax.Array, None]:
        """As `DecoderLayer`. own: the tokens' ids, int32 [tokens]."""
        hyper = self.spec.hyper
        mlp = self.spec.mlp
        assert hyper is not None
        assert mlp is not None
        attention = attention_of(self.spec, self.hidden_size, self.kv_heads, self.dtype)
        module = mlp_of(self.spec, self.hidden_size, self.dtype)
        of_tokens = {} if mlp.experts is None else {"tokens": own}

        def around(name: str, streams: jax.Array, part: Any) -> jax.Array:
            connection = HyperConnection(hyper, self.hidden_size, self.spec.norm, name=f"{name}_streams")
            inputs, write, mix = connection(streams)
            normed = Norm(self.spec.norm, self.hidden_size, self.dtype, name=f"{name}_norm")(inputs, ops)[1]
            result = part(normed).reduce(streams.dtype)
            mixed = streams if mix is None else jnp.einsum("tij,tih->tjh", mix.astype(streams.dtype), streams)
            return write.astype(streams.dtype)[..., None] * result[:, None] + mixed

        x = around("attention", x, lambda inputs: attention(inputs, ropes, attend, ops))
        return around("mlp", x, lambda inputs: module(inputs, ops, **of_tokens)), None


def hyper_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path within a layer -> the tensors of its hyper-connections. The roles begin with attention_hyper and
    mlp_hyper."""
    assert isinstance(config.streams, HyperSpec)
    kinds = kinds_of(config.streams)
    sizes = sum(kinds), len(kinds), config
    of_attention = _sources("attention_streams/shares", "attention_hyper", *sizes)
    return of_attention | _sources("mlp_streams/shares", "mlp_hyper", *sizes)


def head_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """Path in the decoder's parameters -> the tensors of `HyperStreams`, where a model has such. Their roles begin with
    head_hyper."""
    if not isinstance(config.streams, HyperSpec):
        return {}
    return _sources("streams/shares", "head_hyper", config.streams.count, 1, config)


def _sources(path: str, role: str, count: int, kinds: int, config: ModelConfig) -> dict[str, list[Source]]:
    assert isinstance(config.streams, HyperSpec)
    shapes = {
        "mixing": (count, config.streams.count * config.hidden_size),
        "base": (count,),
        "scale": (kinds,),
    }
    return {f"{path}/{name}": [Source(f"{role}_{name}", shape, whole)] for name, shape in shapes.items()}
