"""A gated delta net (Yang et al. 2025, arXiv:2412.06464) in the place of attention, as in Qwen3-Next: its projections,
and the norm and gate of its results."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import GATES, Linear, weight
from jaxserve.models.norms import HeadNorm
from jaxserve.models.sources import Names, Source, rows, whole
from jaxserve.models.spec import GatedDeltaSpec
from jaxserve.pallas_kernels.operands import DeltaHeads, Partials
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class GatedDeltaNet(nn.Module):
    """The layer around `Ops.delta_net`. Key heads are split over devices, each with its group of value heads. Decays
    and rates stay in float32."""

    spec: GatedDeltaSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        heads = self.spec.key_heads
        group = self.spec.group

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple) -> Linear:
            return Linear(in_shape, out_shape, axes, False, self.dtype, as_partials=True, name=name)

        def per_head(name: str, init: Any) -> jax.Array:
            return weight(self, name, init, ("kv_heads", None), (heads, group), jnp.float32)

        inputs = (self.hidden_size,)
        axes = ("kv_heads", None, "embed")
        qkvz = linear("qkvz", inputs, (heads, spec.channels + group * spec.value_dim), axes)(x, ops)
        ba = linear("ba", inputs, (heads, 2 * group), axes)(x, ops)
        qkv, z = jnp.split(
            qkvz.reduce(self.dtype).reshape(-1, heads, qkvz.sums.shape[-1] // heads), [spec.channels], -1
        )
        rates, steps = jnp.split(ba.reduce(self.dtype).astype(jnp.float32).reshape(-1, heads, 2 * group), 2, axis=-1)
        a_log = per_head("a_log", nn.initializers.zeros)
        bias = per_head("dt_bias", nn.initializers.ones)
        decay = -jnp.exp(a_log) * jax.nn.softplus(steps + bias)
        shape = (heads, spec.channels, spec.conv_width)
        conv = weight(self, "conv", nn.initializers.normal(0.5), ("kv_heads", None, None), shape, self.dtype)
        out = attend(DeltaHeads(qkv, decay, spec.rate_scale * jax.nn.sigmoid(rates), conv))
        out = HeadNorm(spec.norm, (spec.value_dim,), self.dtype, name="norm")(out, -1)
        out = (out * GATES[spec.gate](z.astype(jnp.float32).reshape(out.shape))).astype(self.dtype)
        return linear("out", out.shape[1:], (self.hidden_size,), ("embed", "kv_heads", None, None))(out, ops)


def delta_sources(spec: GatedDeltaSpec, hidden: int, names: Names) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up.

    The roles are delta_a_log, delta_dt_bias, delta_norm and delta_out, and those of the convolution and the projections
    in one of these forms. delta_conv has all queries, then all keys, then all values; or delta_conv_q, delta_conv_k and
    delta_conv_v have one kind each. delta_qkvz has for each key head its query, its key, its values and its gates, and
    delta_ba its rates and its steps; or the gates are in delta_z, the rates in delta_b, the steps in delta_a, and
    delta_qkv, or delta_qkv_q, delta_qkv_k and delta_qkv_v, have the forms of the convolution. Or delta_in has all of
    these one after the other: those of delta_qkv, then delta_z, delta_b and delta_a.
    """
    heads = spec.key_heads
    group = spec.group
    value = spec.value_dim
    channels = heads * spec.channels
    values = spec.value_heads * value
    sizes = spec.key_dim, spec.key_dim, group * value
    found = {
        "conv": by_kinds("delta_conv", names, heads, sizes, 1, spec.conv_width),
        "a_log": [Source("delta_a_log", (spec.value_heads,), whole, (heads, group))],
        "dt_bias": [Source("delta_dt_bias", (spec.value_heads,), whole, (heads, group))],
        "norm/scale": [Source("delta_norm.weight", (value,), whole)],
        "out/kernel": [Source("delta_out.weight", (hidden, values), whole)],
    }
    if "delta_in.weight" in names:
        starts = 0, sizes[0], 2 * sizes[0], spec.channels, spec.channels + group * value
        counts = (*sizes, group * value, group, group)
        shape = (channels + values + 2 * spec.value_heads, hidden)
        parts = [
            by_heads("delta_in", heads, at, count, shape, take=rows(heads * first, heads * count))
            for first, at, count in zip((*starts, starts[-1] + group), (*starts[:4], 0, group), counts, strict=True)
        ]
        found["qkvz/kernel"] = parts[:4]
        found["ba/kernel"] = parts[4:]
    elif "delta_qkvz.weight" in names:
        found["qkvz/kernel"] = [Source("delta_qkvz.weight", (channels + values, hidden), whole)]
        found["ba/kernel"] = [Source("delta_ba.weight", (2 * spec.value_heads, hidden), whole)]
    else:
        gates = by_heads("delta_z", heads, spec.channels, group * value, (values, hidden))
        found["qkvz/kernel"] = [*by_kinds("delta_qkv", names, heads, sizes, hidden), gates]
        both = {"delta_b": 0, "delta_a": group}
        found["ba/kernel"] = [by_heads(role, heads, at, group, (spec.value_heads, hidden)) for role, at in both.items()]
    return found


def by_heads(role: str, heads: int, first: int, size: int, shape: tuple[int, ...], take: Any = None) -> Source:
    """The source of `size` rows of each head, which begin at the head's row `first`."""

    def view(target: np.ndarray) -> np.ndarray:
        return target.reshape(heads, -1, target.shape[-1])[:, first : first + size]

    return Source(f"{role}.weight", shape, view, (heads, size, -1), take=take)


def by_kinds(role: str, names: Names, heads: int, sizes: tuple[int, int, int], *columns: int) -> list[Source]:
    """The sources of queries, keys and values, of which a head has `sizes` channels, one after the other. The files
    have all heads' in one tensor, or in one for each kind."""
    starts = 0, sizes[0], sizes[0] + sizes[1]
    parts = dict(zip("qkv", zip(starts, sizes, strict=True), strict=True))
    if f"{role}.weight" not in names:
        return [by_heads(f"{role}_{kind}", heads, *part, (heads * part[1], *columns)) for kind, part in parts.items()]
    shape = (heads * sum(sizes), *columns)
    return [by_heads(role, heads, at, size, shape, take=rows(heads * at, heads * size)) for at, size in parts.values()]
