"""Layers of ZAYA. Attention and experts add to the stream as (f + b) s + (x + c) t, with learned vectors b, s, c and t.

Queries and keys are mixed by causal convolutions (compressed convolutional attention, arXiv:2510.04476): one of each
channel, then one of each head's channels together. Half of all values' channels are those of the token before. Both
need the last few tokens' projections, which a `ShortConvSpec` beside the attention keeps: its one operation computes
the first convolution, as often as the second one reads it, each time a token later, and delays the values.

A small network makes what the router reads. What enters it is also carried to the next layer, in a second stream.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer
from jaxserve.models.layers import FAN_IN, Experts, Linear, weight
from jaxserve.models.norms import Norm
from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import AffineSpec, AttentionSpec, LayerSpec, ModelConfig
from jaxserve.pallas_kernels.operands import ConvInputs, Heads, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops

ROLES = ("result_scale", "result_bias", "stream_scale", "stream_bias")  # of the vectors of each sum


def _vector(module: nn.Module, name: str, size: int, dtype: Any) -> jax.Array:
    init = nn.initializers.zeros if name.endswith("bias") else nn.initializers.ones
    return value_of(weight(module, name, init, (None,), (size,), dtype))


class AffineStreams(nn.Module):
    """The way from an embedding to the streams, and back. The second one is what routers have read."""

    layers: int
    hidden_size: int
    dtype: Any

    def setup(self) -> None:
        self.scale, self.bias = (_vector(self, name, self.hidden_size, self.dtype) for name in ("scale", "bias"))

    def begin(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [tokens, hidden] -> the streams [tokens, 2, hidden]."""
        return jnp.stack([(x + self.bias) * self.scale, jnp.zeros_like(x)], axis=1)

    def tokens(self, token_ids: jax.Array, x: jax.Array, ops: Ops) -> jax.Array:
        """int32 [tokens] -> what the layers get beside the streams, [tokens, layers]: the tokens."""
        return jnp.broadcast_to(token_ids[:, None], (len(x), self.layers))

    def end(self, streams: jax.Array, ops: Ops) -> jax.Array:
        """The streams [tokens, 2, hidden] -> [tokens, hidden]."""
        return streams[:, 0]


class MixedAttention(nn.Module):
    """Attention behind convolutions. Called as `attention.Attention`."""

    spec: AttentionSpec
    affine: AffineSpec
    hidden_size: int
    kv_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, ropes: Ropes, attend: AttentionFn, ops: Ops) -> jax.Array:
        spec, hidden = self.spec, (self.hidden_size,)
        own, dim = spec.num_kv_heads, spec.head_dim
        count, group = spec.num_heads + own, spec.num_heads // own
        total = (count + own) * dim
        projected = Linear(hidden, (total,), ("kv_heads", "embed"), False, self.dtype, name="qkv")(x, ops)
        qk, now, later = jnp.split(projected, [count * dim, count * dim + own * dim // 2], axis=-1)
        mixed, before = self._convolved(qk, later, attend)
        queries, keys = jnp.split(qk.astype(jnp.float32).reshape(-1, count, dim), [spec.num_heads], axis=1)
        both = (queries + jnp.repeat(keys, group, axis=1)) / 2
        q = _unit(mixed[:, : spec.num_heads] + both)
        k = _unit(mixed[:, spec.num_heads :] + both.reshape(-1, own, group, dim).mean(2))
        k = k * _vector(self, "key_scale", own, self.dtype)[:, None].astype(jnp.float32)
        v = jnp.concatenate([now.astype(jnp.float32), before], axis=-1).reshape(-1, own, dim)
        k, v = (jnp.repeat(part, self.kv_heads // own, axis=1)[:, :, None] for part in (k, v))
        whole = jnp.concatenate([q.reshape(-1, self.kv_heads, spec.num_heads // self.kv_heads, dim), k, v], axis=2)
        angles = ropes[spec.rope]
        found = attend(Heads(Partials(whole.astype(self.dtype)[None]), angles.cos, angles.sin))
        of_out = ("embed", "kv_heads", None, None)
        return Linear(found.shape[1:], hidden, of_out, False, self.dtype, name="out")(found, ops)

    def _convolved(self, qk: jax.Array, later: jax.Array, attend: AttentionFn) -> tuple[jax.Array, jax.Array]:
        """Queries and keys behind both convolutions, [tokens, heads, dim], and what the token before has of `later`.
        Both are float32."""
        dim, channels = self.spec.head_dim, qk.shape[-1]
        first, second = self.affine.widths
        conv = weight(self, "conv", nn.initializers.normal(0.5), (None, None), (channels, first), self.dtype)
        bias = _vector(self, "conv_bias", channels, self.dtype)
        pads = [((0, 0), (second - 1 - delay, delay)) for delay in range(second)]
        delays = jnp.zeros((later.shape[-1], self.affine.width), self.dtype).at[:, -2].set(1)
        kernels = jnp.concatenate([*(jnp.pad(value_of(conv), pad) for pad in pads), delays])
        biases = jnp.concatenate([jnp.tile(bias, second), jnp.zeros(later.shape[-1], self.dtype)])
        found = attend(ConvInputs(jnp.concatenate([*[qk] * second, later], axis=-1), kernels, biases))
        of_heads, before = jnp.split(found, [second * channels], axis=-1)
        heads = channels // dim
        of_heads = of_heads.reshape(-1, second, heads, dim)
        shape = (channels, dim * second)
        kernel = value_of(weight(self, "mix", FAN_IN, (None, None), shape, self.dtype)).astype(jnp.float32)
        kernel = kernel.reshape(heads, dim, dim, second)[..., ::-1]  # the last is a token's own
        mixed = jnp.einsum("tshi,hois->tho", of_heads, kernel)
        return mixed + _vector(self, "mix_bias", channels, self.dtype).reshape(heads, dim), before


def _unit(x: jax.Array) -> jax.Array:
    """x [tokens, heads, dim], float32, with a root mean square of 1."""
    size = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
    return x * (x.shape[-1] ** 0.5 / jnp.maximum(size, np.finfo(np.float32).eps))


class AffineLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is affine. Its stream x is [tokens, 2, hidden]."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops, own: jax.Array
    ) -> tuple[jax.Array, None]:
        """As `DecoderLayer`. own: the tokens' ids, which are not used."""
        attention, affine, mlp, hidden = self.spec.attention, self.spec.affine, self.spec.mlp, self.hidden_size
        assert isinstance(attention, AttentionSpec)
        assert affine is not None
        assert mlp is not None
        stream, carried = x[:, 0], x[:, 1]

        def normed(name: str, x: jax.Array) -> jax.Array:
            return Norm(self.spec.norm, hidden, self.dtype, name=name)(x, ops)[1]

        def joined(name: str, result: jax.Array, x: jax.Array) -> jax.Array:
            s, b, t, c = (_vector(self, f"{name}_{role}", hidden, self.dtype) for role in ROLES)
            return (result + b) * s + (x + c) * t

        attend_to = MixedAttention(attention, affine, hidden, self.kv_heads, self.dtype, name="attention")
        result = attend_to(normed("attention_norm", stream), ropes, attend, ops)
        stream = joined("attention", result, stream)
        inputs = normed("mlp_norm", stream)
        latent, reads = self._routed(inputs, carried, ops)
        result = Experts(mlp, hidden, self.dtype, name="mlp")(inputs, ops, reads).reduce(x.dtype)
        return jnp.stack([joined("mlp", result, stream), latent], axis=1), None

    def _routed(self, x: jax.Array, carried: jax.Array, ops: Ops) -> tuple[jax.Array, jax.Array]:
        """What is carried on [tokens, hidden], of which only the first numbers count, and what the router reads."""
        affine, mlp = self.spec.affine, self.spec.mlp
        assert affine is not None
        assert mlp is not None
        assert mlp.experts is not None
        size = mlp.experts.router_size
        assert size is not None

        def linear(name: str, inputs: int) -> Linear:
            return Linear((inputs,), (size,), (None, "embed"), True, self.dtype, name=f"router_{name}")

        latent = linear("down", self.hidden_size)(x, ops)
        if affine.carried:
            latent = latent + carried[:, :size] * _vector(self, "carried_scale", size, self.dtype)
        reads = Norm(self.spec.norm, size, self.dtype, name="router_norm")(latent, ops)[1]
        for name in ("first", "second"):
            reads = jax.nn.gelu(linear(name, size)(reads, ops), approximate=False)
        return jnp.pad(latent, ((0, 0), (0, self.hidden_size - size))), reads


def begin_sources(config: ModelConfig) -> dict[str, list[Source]]:
    """The same of the streams' beginning, for a model that has these streams."""
    if not isinstance(config.streams, AffineSpec):
        return {}
    return {f"streams/{kind}": [Source(f"input_{kind}", (config.hidden_size,), whole)] for kind in ("scale", "bias")}


def affine_sources(spec: LayerSpec, order: np.ndarray | None, hidden: int) -> dict[str, list[Source]]:
    """Path within the layer -> the tensors that make it up, beside norms and experts. The roles are those of attention,
    v_now and v_later in the place of v, conv, mix, key_scale, those of the sums (`ROLES`) and of the router. `order` is
    that of a head's channels, see `rope.head_order`."""
    attention, affine, mlp = spec.attention, spec.affine, spec.mlp
    assert isinstance(attention, AttentionSpec)
    assert affine is not None
    assert mlp is not None
    assert mlp.experts is not None
    own, dim, size = attention.num_kv_heads, attention.head_dim, mlp.experts.router_size or 0
    width, channels = attention.num_heads * dim, (attention.num_heads + own) * dim
    first, second = affine.widths
    parts = {"q": width, "k": own * dim, "v_now": own * dim // 2, "v_later": own * dim // 2}
    place = np.arange(dim) if order is None else order

    def ordered(t: np.ndarray) -> np.ndarray:
        """A tensor of queries' or keys' channels as a matrix, or as a vector if it is one."""
        made = t.reshape(-1, dim, *t.shape[1:])[:, place]
        return made.reshape(len(t)) if t.ndim == 1 else made.reshape(len(t), -1)

    ends = np.cumsum(list(parts.values()))
    found = {
        "attention/qkv/kernel": [
            Source(
                f"{role}.weight",
                (count, hidden),
                rows(int(end) - count, count),
                take=ordered if role in "qk" else None,
            )
            for (role, count), end in zip(parts.items(), ends, strict=True)
        ],
        "attention/out/kernel": [Source("o.weight", (hidden, width), whole)],
        "attention/conv": [Source("conv.weight", (channels, 1, first), whole, take=ordered)],
        "attention/conv_bias": [Source("conv.bias", (channels,), whole, take=ordered)],
        "attention/mix": [Source("mix.weight", (channels, dim, second), whole, take=lambda t: ordered(t[:, place]))],
        "attention/mix_bias": [Source("mix.bias", (channels,), whole, take=ordered)],
        "attention/key_scale": [Source("key_scale", (own,), whole)],
        "router_norm/scale": [Source("router_norm.weight", (size,), whole)],
    }
    for name, inputs in (("down", hidden), ("first", size), ("second", size)):
        found[f"router_{name}/kernel"] = [Source(f"router_{name}.weight", (size, inputs), whole)]
        found[f"router_{name}/bias"] = [Source(f"router_{name}.bias", (size,), whole)]
    if affine.carried:
        found["carried_scale"] = [Source("carried_scale", (size,), whole)]
    sums = [f"{part}_{role}" for part in ("attention", "mlp") for role in ROLES]
    return found | {name: [Source(name, (hidden,), whole)] for name in sums}
