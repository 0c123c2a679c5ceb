"""The one decoder: embeddings, layers of attention and MLP, final norm, output head.

A step's attention is an argument (`AttentionFn`), so that the model knows neither pages nor kernels: `jaxserve.steps`
closes it over the KV cache and the batch's block tables.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import MLP, Embedding, Linear, RMSNorm
from jaxserve.models.rope import rope_angles
from pallas_kernels.ops import Ops

Rope = tuple[jax.Array, jax.Array]  # cosines and sines, see `rope.rope_angles`


class AttentionFn(Protocol):
    """Writes the layer's new keys and values and attends over all that its tokens may see."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q [tokens, kv_heads, group, head_dim]; k, v [tokens, kv_heads, head_dim] -> as q."""


class Attention(nn.Module):
    """Grouped-query attention: fused QKV projection, rotary positions, output projection.

    `kv_heads` may exceed the model's own when each is repeated over more devices than there are heads.
    """

    config: ModelConfig
    kv_heads: int
    dtype: Any
    ops: Ops

    @nn.compact
    def __call__(self, x: jax.Array, rope: Rope, attend: AttentionFn) -> jax.Array:
        config, dim = self.config, self.config.head_dim
        group = config.num_heads // self.kv_heads
        qkv_axes = ("kv_heads", None, None, "embed")
        qkv = Linear(
            (config.hidden_size,),
            (self.kv_heads, group + 2, dim),
            qkv_axes,
            config.qkv_bias,
            self.dtype,
            ops=self.ops,
            name="qkv",
        )(x)
        q, k, v = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
        if config.qk_norm:
            q = RMSNorm(dim, config.norm_eps, self.dtype, self.ops, name="q_norm")(q)
            k = RMSNorm(dim, config.norm_eps, self.dtype, self.ops, name="k_norm")(k)
        out = attend(self.ops.rope(q, *rope), self.ops.rope(k, *rope), v)
        out_axes = ("embed", "kv_heads", None, None)
        return Linear(
            (self.kv_heads, group, dim),
            (config.hidden_size,),
            out_axes,
            config.o_bias,
            self.dtype,
            ops=self.ops,
            name="out",
        )(out)


class DecoderLayer(nn.Module):
    config: ModelConfig
    kv_heads: int
    dtype: Any
    ops: Ops

    @nn.compact
    def __call__(self, x: jax.Array, rope: Rope, attend: AttentionFn) -> jax.Array:
        config = self.config

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, self.dtype, self.ops, name=name)

        attention = Attention(config, self.kv_heads, self.dtype, self.ops, name="attention")
        mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            config.mlp_bias,
            self.dtype,
            self.ops,
            name="mlp",
        )
        x = x + attention(norm("attention_norm")(x), rope, attend)
        return x + mlp(norm("mlp_norm")(x))


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
        self.layers = [DecoderLayer(config, self.kv_heads, self.dtype, self.ops) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, self.dtype, self.ops)
        if not config.tie_embeddings:
            axes = ("vocab", "embed")
            self.head = Linear(
                (config.hidden_size,), (self.vocab_rows,), axes, False, self.dtype, jnp.float32, self.ops
            )

    def counting(self, tokens: jax.Array) -> Decoder:
        """The same, for inputs of which only so many leading rows matter (int32 scalar)."""
        return self.clone(ops=self.ops.counting(tokens))

    @property
    def layer(self) -> DecoderLayer:
        """Any of the layers, to be applied to its own parameters."""
        return DecoderLayer(self.config, self.kv_heads, self.dtype, self.ops, parent=None)

    def begin(self, token_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, Rope]:
        """int32 [tokens], int32 [tokens] -> the first layer's input [tokens, hidden], and rotary angles for all."""
        return self.embed(token_ids), rope_angles(self.config.rope, self.config.head_dim, positions)

    def finish(self, x: jax.Array) -> jax.Array:
        """The last layer's output -> final hidden states [tokens, hidden], normed."""
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [rows, hidden] -> float32 [rows, vocab_rows]; those beyond the vocabulary mean nothing."""
        return self.embed.logits(hidden) if self.config.tie_embeddings else self.head(hidden)

    def init_all(self, token_ids: jax.Array) -> jax.Array:
        """Touches every weight once; only its shapes matter."""
        x, rope = self.begin(token_ids, token_ids)
        for layer in self.layers:
            x = layer(x, rope, lambda q, k, v: q)
        return self.logits(self.finish(x))
