"""Kimi delta attention (Kimi Team 2025, arXiv:2510.26692) in the place of attention: its projections, and the norm and
gate of its results."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.delta_net import by_kinds
from jaxserve.models.layers import Linear, weight
from jaxserve.models.norms import HeadNorm
from jaxserve.models.sources import Names, Source, rows, whole
from jaxserve.models.spec import KimiDeltaSpec
from jaxserve.pallas_kernels.operands import DeltaHeads, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class KimiDelta(nn.Module):
    """The layer around `Ops.kimi_delta`. Devices share the heads. Each device computes all of the latents, which are
    small. Decays and rates stay in float32."""

    spec: KimiDeltaSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        heads = spec.heads
        dim = spec.dim

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple) -> Linear:
            return Linear(in_shape, out_shape, axes, False, self.dtype, as_partials=True, name=name)

        def of_heads(name: str, x: Any, inputs: int, axis: str | None, *channels: int) -> jax.Array:
            """A projection to the heads; [tokens, heads, *channels]."""
            shape = (heads, *channels)
            made = linear(name, (inputs,), shape, ("kv_heads", *(None,) * len(channels), axis))(x, ops)
            return made.reduce(self.dtype).reshape(-1, *shape)

        hidden = self.hidden_size
        qkv = of_heads("qkv", x, hidden, "embed", 3 * dim)
        rate = jax.nn.sigmoid(of_heads("rate", x, hidden, "embed").astype(jnp.float32))
        if spec.rank is None:
            decay = of_heads("decay", x, hidden, "embed", dim)
            gate = of_heads("gate", x, hidden, "embed", dim)
        else:
            latents = linear("down", (hidden,), (2 * spec.rank,), (None, "embed"))(x, ops).reduce(self.dtype)
            of_decay, of_gate = jnp.split(latents, 2, axis=-1)
            decay = of_heads("decay", of_decay, spec.rank, None, dim)
            gate = of_heads("gate", of_gate, spec.rank, None, dim)
        conv = weight(self, "conv", nn.initializers.normal(0.5), ("kv_heads", None, None),
                      (heads, 3 * dim, spec.conv_width), self.dtype)  # fmt: skip
        out = attend(DeltaHeads(qkv, self._decay(decay), rate, conv))
        out = HeadNorm(spec.norm, (dim,), self.dtype, name="norm")(out, -1)
        out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)
        return linear("out", (heads, dim), (hidden,), ("embed", "kv_heads", None))(out, ops)

    def _decay(self, x: jax.Array) -> jax.Array:
        """The logarithms of the decays, from their projection [tokens, heads, dim]; float32."""
        spec = self.spec
        a_log = value_of(weight(self, "a_log", nn.initializers.zeros, ("kv_heads",), (spec.heads,), jnp.float32))
        bias = weight(self, "dt_bias", nn.initializers.ones, ("kv_heads", None), (spec.heads, spec.dim), jnp.float32)
        fastest = jnp.exp(a_log)[:, None]
        x = x.astype(jnp.float32) + bias
        if spec.least_decay is None:
            return -fastest * jax.nn.softplus(x)
        return spec.least_decay * jax.nn.sigmoid(fastest * x)


def kimi_sources(spec: KimiDeltaSpec, hidden: int, names: Names) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up.

    The roles are kimi_qkv and kimi_conv, or kimi_qkv_q, kimi_conv_q and the like; kimi_rate, kimi_dt_bias, kimi_norm
    and kimi_out; kimi_decay and kimi_gate, with kimi_decay_down and kimi_gate_down if there are latents; and kimi_a_log
    [heads], or kimi_a_log_row [1, 1, heads, 1].
    """
    heads = spec.heads
    channels = heads * spec.dim
    sizes = (spec.dim,) * 3
    found = {
        "qkv/kernel": by_kinds("kimi_qkv", names, heads, sizes, hidden),
        "conv": by_kinds("kimi_conv", names, heads, sizes, 1, spec.conv_width),
        "rate/kernel": [Source("kimi_rate.weight", (heads, hidden), whole)],
        "dt_bias": [Source("kimi_dt_bias", (channels,), whole, (heads, spec.dim))],
        "norm/scale": [Source("kimi_norm.weight", (spec.dim,), whole)],
        "out/kernel": [Source("kimi_out.weight", (hidden, channels), whole)],
    }
    if "kimi_a_log" in names:
        found["a_log"] = [Source("kimi_a_log", (heads,), whole)]
    else:
        found["a_log"] = [Source("kimi_a_log_row", (1, 1, heads, 1), whole, take=lambda t: t.reshape(heads))]
    inputs = spec.rank or hidden
    found |= {
        f"{kind}/kernel": [Source(f"kimi_{kind}.weight", (channels, inputs), whole)] for kind in ("decay", "gate")
    }
    if (rank := spec.rank) is not None:
        down = {"kimi_decay_down.weight": 0, "kimi_gate_down.weight": rank}
        found["down/kernel"] = [Source(role, (rank, hidden), rows(at, rank)) for role, at in down.items()]
    return found
