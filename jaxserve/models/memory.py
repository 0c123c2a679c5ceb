"""Layers of Zamba and Zamba 2: Mamba or Mamba-2, and blocks of attention and MLP that several places of the model
share. A block reads the stream and the embedding of the token, side by side, and what it finds is added to the input of
the next Mamba only. So there are three streams: the usual one, the embedding, and what the last block has found.

At each place a block of Zamba 2 has low-rank matrices of its own beside its shared ones.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layer_parts import BaseLayer
from jaxserve.models.layers import EXPERTS_FAN_IN, Linear, weight
from jaxserve.models.norms import Norm
from jaxserve.models.recurrent import recurrent_layer
from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import AttentionSpec, LayerSpec, RecurrentSpec
from jaxserve.pallas_kernels.operands import Heads, Partials, value_of
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops


class MemoryAttention(nn.Module):
    """Attention whose heads have keys and values of their own."""

    spec: AttentionSpec
    rank: int  # of the place's own matrices; 0: there are none
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, ropes: Ropes, attend: AttentionFn, ops: Ops) -> jax.Array:
        """x: [tokens, 2 * hidden]."""
        spec = self.spec
        inputs = (x.shape[-1],)
        shape = (spec.num_heads, 3, spec.head_dim)
        axes = ("kv_heads", None, None, "embed")
        qkv = Linear(inputs, shape, axes, False, self.dtype, name="qkv")(x, ops)
        if self.rank:
            low = Linear(inputs, (3, self.rank), (None, None, "embed"), False, self.dtype, name="qkv_low")(x, ops)
            up = weight(self, "qkv_up", EXPERTS_FAN_IN, ("kv_heads", None, None, None), (*shape, self.rank), self.dtype)
            qkv = qkv + jnp.einsum("tkr,hkdr->thkd", low, value_of(up))
        angles = ropes[spec.rope]
        found = attend(Heads(Partials(qkv[None]), angles.cos, angles.sin))
        of_out = ("embed", "kv_heads", None, None)
        out = Linear(found.shape[1:], (self.hidden_size,), of_out, False, self.dtype, name="out")
        return out(found, ops)


class MemoryMLP(nn.Module):
    """A gated MLP."""

    spec: LayerSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        mlp, memory = self.spec.mlp, self.spec.memory
        assert mlp is not None
        assert memory is not None
        hidden = (self.hidden_size,)
        shape = (mlp.size, 2)
        both = Linear(hidden, shape, ("mlp", None, "embed"), False, self.dtype, name="gate_up")(x, ops)
        if rank := memory.mlp_rank:
            low = Linear(hidden, (rank,), (None, "embed"), False, self.dtype, name="gate_up_low")(x, ops)
            up = weight(self, "gate_up_up", EXPERTS_FAN_IN, ("mlp", None, None), (*shape, rank), self.dtype)
            both = both + jnp.einsum("tr,mkr->tmk", low, value_of(up))
        inner = ACTIVATIONS[mlp.activation](both[..., 0]) * both[..., 1]
        return Linear((mlp.size,), hidden, ("embed", "mlp"), False, self.dtype, name="down")(inner, ops)


class MemoryLayer(BaseLayer):
    """A `decoder.DecoderLayer` whose `residual` is memory: a block, or Mamba. Its stream x is [tokens, 3, hidden]."""

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops, own: jax.Array
    ) -> tuple[jax.Array, None]:
        """As `DecoderLayer`. own: the tokens' ids, which are not used."""
        attention, memory, hidden = self.spec.attention, self.spec.memory, self.hidden_size
        assert memory is not None
        stream, embedding, found = x[:, 0], x[:, 1], x[:, 2]

        def normed(name: str, x: jax.Array) -> jax.Array:
            return Norm(self.spec.norm, x.shape[-1], self.dtype, name=name)(x, ops)[1]

        if isinstance(attention, RecurrentSpec):
            mamba = recurrent_layer(attention, hidden, self.dtype)
            read = normed("attention_norm", stream + found)
            stream = stream + mamba(read, ropes, attend, ops).reduce(x.dtype)
            found = jnp.zeros_like(found)
        else:
            assert isinstance(attention, AttentionSpec)
            both = normed("attention_norm", jnp.concatenate([stream, embedding], axis=-1))
            reads = MemoryAttention(attention, memory.attention_rank, hidden, self.dtype, name="attention")
            inputs = normed("mlp_norm", reads(both, ropes, attend, ops))
            result = MemoryMLP(self.spec, hidden, self.dtype, name="mlp")(inputs, ops)
            found = Linear((hidden,), (hidden,), (None, "embed"), False, self.dtype, name="linear")(result, ops)
        return jnp.stack([stream, embedding, found], axis=1), None


def memory_sources(spec: LayerSpec, hidden: int) -> dict[str, list[Source]]:
    """Path within a block -> the tensors that it has beside usual attention and MLP. The roles are linear, and for the
    place's own matrices adapter_q_in, adapter_q_out and so on for k and v, adapter_in and adapter_out."""
    attention, mlp, memory = spec.attention, spec.mlp, spec.memory
    assert isinstance(attention, AttentionSpec)
    assert mlp is not None
    assert memory is not None
    heads, dim, size = attention.num_heads, attention.head_dim, mlp.size

    def kind(which: int) -> Any:
        return lambda t: t[:, which]

    found = {"linear/kernel": [Source("linear.weight", (hidden, hidden), whole)]}
    if rank := memory.mlp_rank:
        found["mlp/gate_up_low/kernel"] = [Source("adapter_in.weight", (rank, hidden), whole)]
        found["mlp/gate_up_up"] = [
            Source("adapter_out.weight", (2 * size, rank), kind(which), take=rows(which * size, size))
            for which in (0, 1)
        ]
    if rank := memory.attention_rank:
        found["attention/qkv_low/kernel"] = [
            Source(f"adapter_{role}_in.weight", (rank, 2 * hidden), rows(which * rank, rank))
            for which, role in enumerate("qkv")
        ]
        found["attention/qkv_up"] = [
            Source(f"adapter_{role}_out.weight", (heads * dim, rank), kind(which), (heads, dim, -1))
            for which, role in enumerate("qkv")
        ]
    return found
