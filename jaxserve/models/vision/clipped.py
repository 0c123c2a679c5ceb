"""Gemma 4's encoder layers that clip the inputs and the results of their products, so that these stay in the range for
which they were quantized in training."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import HeadNorm, Norm, normalize
from jaxserve.models.sources import Source, rows, whole
from jaxserve.models.spec import AttentionSpec, LayerSpec
from jaxserve.pallas_kernels.operands import Heads, Partials, value_of
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops

BOUNDS = "input_min", "input_max", "output_min", "output_max"
NORMS = "attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"


def _wide(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Bounds that clip nothing."""
    return jnp.asarray([-jnp.inf, jnp.inf] * 2, dtype)


class ClippedLinear(nn.Module):
    """A product with a matrix [outputs, inputs]."""

    inputs: int
    outputs: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        least, most, least_out, most_out = value_of(weight(self, "bounds", _wide, (None,), (4,), jnp.float32))
        linear = Linear((self.inputs,), (self.outputs,), (None, "embed"), dtype=self.dtype, name="linear")
        x = jnp.clip(x, least.astype(x.dtype), most.astype(x.dtype))
        y: jax.Array = linear(x, ops)
        return jnp.clip(y, least_out.astype(y.dtype), most_out.astype(y.dtype))


def _products(spec: LayerSpec, hidden: int) -> dict[str, tuple[int, int]]:
    """Role -> inputs and outputs of each product of a layer."""
    attention: Any = spec.attention
    assert spec.mlp is not None
    dim, size = attention.head_dim, spec.mlp.size
    heads, kv_heads = attention.num_heads * dim, attention.num_kv_heads * dim
    of_attention = {"q": (hidden, heads), "k": (hidden, kv_heads), "v": (hidden, kv_heads), "o": (heads, hidden)}
    return of_attention | {"gate": (hidden, size), "up": (hidden, size), "down": (size, hidden)}


class ClippedLayer(nn.Module):
    """As a `decoder.DecoderLayer` whose `residual` is sandwich, with norms of queries, keys and values."""

    spec: LayerSpec
    hidden_size: int
    kv_heads: int
    dtype: Any

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms of queries and keys (`Ops.rotate`)."""
        return self.spec.norm.eps

    @nn.compact
    def __call__(
        self, x: jax.Array, y: Partials | None, ropes: Ropes, attend: AttentionFn, ops: Ops
    ) -> tuple[jax.Array, None]:
        attention: Any = self.spec.attention
        assert isinstance(attention, AttentionSpec)
        assert attention.v_norm is not None
        assert self.spec.mlp is not None
        hidden = self.hidden_size
        linears = {
            role: ClippedLinear(*sizes, self.dtype, name=role) for role, sizes in _products(self.spec, hidden).items()
        }
        norms = {name: Norm(self.spec.norm, hidden, self.dtype, name=name) for name in NORMS}

        def normed(name: str, x: jax.Array) -> jax.Array:
            result: jax.Array = norms[name](x, ops)[1]
            return result

        inputs = normed("attention_norm", x)
        shape = len(x), attention.num_kv_heads, -1, attention.head_dim
        q, k, v = (linears[role](inputs, ops).reshape(shape) for role in "qkv")
        qkv = jnp.concatenate([q, k, normalize(v, attention.v_norm, None, None)], axis=2)
        q_norm = HeadNorm(self.spec.norm, shape[3:], self.dtype, name="q_norm").scale()
        k_norm = HeadNorm(self.spec.norm, shape[3:], self.dtype, name="k_norm").scale()
        angles = ropes[attention.rope]
        attended = attend(Heads(Partials(qkv[None]), angles.cos, angles.sin, q_norm, k_norm))
        x = x + normed("attention_out_norm", linears["o"](attended.reshape(len(x), -1), ops))
        inputs = normed("mlp_norm", x)
        gates = ACTIVATIONS[self.spec.mlp.activation](linears["gate"](inputs, ops))
        return x + normed("mlp_out_norm", linears["down"](gates * linears["up"](inputs, ops), ops)), None


def clipped_sources(spec: LayerSpec, hidden: int, order: Any) -> dict[str, list[Source]]:
    """Path within a layer -> the tensors that make it up. order: of a head's channels, see `rope.head_order`."""
    attention: Any = spec.attention
    dim = attention.head_dim

    def ordered(t: Any) -> Any:
        return t.reshape(-1, dim, *t.shape[1:])[:, order].reshape(t.shape)

    turned = {"q": ordered, "k": ordered}
    found = {f"{name}/scale": [Source(f"{name}.weight", (hidden,), whole)] for name in NORMS}
    for name in ("q_norm", "k_norm"):
        found[f"{name}/scale"] = [Source(f"{name}.weight", (dim,), whole, take=ordered)]
    for role, (inputs, outputs) in _products(spec, hidden).items():
        found[f"{role}/linear/kernel"] = [Source(f"{role}.weight", (outputs, inputs), whole, take=turned.get(role))]
        found[f"{role}/bounds"] = [
            Source(f"{role}.{bound}", (), rows(i, 1), take=lambda t: t.reshape(1)) for i, bound in enumerate(BOUNDS)
        ]
    return found
