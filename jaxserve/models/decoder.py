"""The one decoder: embeddings, layers of attention and MLP, final norm, output head.

A step's attention is an argument (`AttentionFn`), so that the model knows neither pages nor kernels:
`jaxserve.execution.steps` closes it over the KV cache and the batch's block tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.layers import MLP, Embedding, Experts, Linear, RMSNorm, Scale, reader
from jaxserve.models.rope import rope_angles
from jaxserve.models.spec import AttentionSpec, LayerSpec, ModelConfig
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.parts import Heads, Parts, value_of
from jaxserve.pallas_kernels.types import QuantRows

Ropes = Mapping[str, tuple[jax.Array, jax.Array]]  # name in `ModelConfig.ropes` -> cosines and sines of all tokens


def angles(config: ModelConfig, positions: jax.Array) -> Ropes:
    """Of each of a model's rotary embeddings, at positions int32 [tokens]."""
    return {name: rope_angles(rope, config.head_dim, positions) for name, rope in config.ropes.items()}


class AttentionFn(Protocol):
    """Writes the layer's new keys and values (`Ops.rotate_and_write`, or `rotate`) and attends over all that its tokens
    may see."""

    def __call__(self, heads: Heads) -> jax.Array:
        """What attention gives [tokens, kv_heads, group, head_dim]."""


class Attention(nn.Module):
    """Grouped-query attention: fused QKV projection, rotary positions, output projection.

    `kv_heads` may exceed the model's own when each is repeated over more devices than there are heads.
    """

    spec: AttentionSpec
    hidden_size: int
    kv_heads: int
    dtype: Any
    ops: Ops

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn) -> Parts:
        spec, dim = self.spec, self.spec.head_dim
        group = spec.num_heads // self.kv_heads

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple, bias: bool) -> Linear:
            return Linear(in_shape, out_shape, axes, bias, self.dtype, ops=self.ops, in_parts=True, name=name)

        shape = (self.kv_heads, group + 2, dim)
        qkv = linear("qkv", (self.hidden_size,), shape, ("kv_heads", None, None, "embed"), spec.qkv_bias)(x)
        sums = qkv.sums.reshape(*qkv.sums.shape[:2], *shape)
        qkv = Parts(sums, None if qkv.bias is None else value_of(qkv.bias).reshape(shape))
        norms = [Scale(dim, self.dtype, name=name)() for name in ("q_norm", "k_norm") if spec.qk_norm]
        out = attend(Heads(qkv, *ropes[spec.rope], *norms))
        out_axes = ("embed", "kv_heads", None, None)
        return linear("out", (self.kv_heads, group, dim), (self.hidden_size,), out_axes, spec.out_bias)(out)


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the norm of a residual stream x [tokens, hidden] to which its result is added; the
    last of these results, y, is left for the next layer, whose norm needs the sum."""

    spec: LayerSpec
    hidden_size: int
    norm_eps: float
    kv_heads: int
    dtype: Any
    ops: Ops

    @nn.compact
    def __call__(self, x: jax.Array, y: Parts | None, ropes: Ropes, attend: AttentionFn) -> tuple[jax.Array, Parts]:
        """`y` is None in the first layer."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm(self.hidden_size, self.norm_eps, self.dtype, self.ops, name=name)

        attention = Attention(
            self.spec.attention, self.hidden_size, self.kv_heads, self.dtype, self.ops, name="attention"
        )
        kind = MLP if self.spec.mlp.experts is None else Experts
        mlp = kind(self.spec.mlp, self.hidden_size, self.dtype, self.ops, name="mlp")
        x, normed = norm("attention_norm")(x, y, reader(self, "attention", "qkv"))
        x, normed = norm("mlp_norm")(x, attention(normed, ropes, attend), reader(self, "mlp", "gate_up"))
        return x, mlp(normed)


class Decoder(nn.Module):
    """The weights around the layers, and the order of it all: `begin`, each `layer`, `finish`, `logits`.

    The layers are applied one by one from outside (`layer`, on the parameters of "layers_0", "layers_1", …), so that
    layers that are alike are traced once. `kv_heads` and `vocab_rows` are the model's own, or more where the mesh needs
    it: repeated heads, empty rows.
    """

    config: ModelConfig
    kv_heads: int
    vocab_rows: int
    dtype: Any = jnp.float32
    ops: Ops = Ops()

    def setup(self) -> None:
        config = self.config
        self.embed = Embedding(self.vocab_rows, config.hidden_size, self.dtype, self.ops)
        self.layers = [self.layer(spec) for spec in config.layers]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, self.ops)
        if not config.tie_embeddings:
            axes = ("vocab", "embed")
            self.head = Linear(
                (config.hidden_size,), (self.vocab_rows,), axes, False, self.dtype, jnp.float32, self.ops
            )

    def counting(self, tokens: jax.Array) -> Decoder:
        """The same, for inputs of which only so many leading rows matter (int32 scalar)."""
        return self.clone(ops=self.ops.counting(tokens))

    def layer(self, spec: LayerSpec, **options: Any) -> DecoderLayer:
        """A layer of this kind. With `parent=None` it is one to be applied to parameters from outside."""
        config = self.config
        return DecoderLayer(spec, config.hidden_size, config.norm_eps, self.kv_heads, self.dtype, self.ops, **options)

    def begin(self, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, Ropes]:
        """int32 [tokens], int32 [tokens] -> the first layer's input [tokens, hidden], and rotary angles for all."""
        return self.embed(token_ids), angles(self.config, positions)

    def finish(self, x: jax.Array, y: Parts) -> jax.Array:
        """What the last layer leaves -> final hidden states [tokens, hidden], normed."""
        return self.norm(x, y)[1]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [rows, hidden] -> float32 [rows, vocab_rows]; those beyond the vocabulary mean nothing."""
        return self.embed.logits(hidden) if self.config.tie_embeddings else self.head(hidden)

    def init_all(self, token_ids: jax.Array) -> jax.Array:
        """Touches every weight once; only its shapes matter."""
        x, ropes = self.begin(token_ids, token_ids)
        y: Any = None
        for layer in self.layers:
            x, y = layer(x, y, ropes, lambda heads: self.ops.rotate(heads, self.config.norm_eps, self.dtype)[0])
        return self.logits(self.finish(x, y))
