"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) in the place of attention: its projections, and the gate and norm of its
results."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, times, weight
from jaxserve.models.norms import normalize
from jaxserve.models.sources import Names, Source, rows, whole
from jaxserve.models.spec import Mamba2Spec
from jaxserve.pallas_kernels.operands import MambaInputs, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class Mamba2(nn.Module):
    """The layer around `Ops.mamba2`. Devices share the heads. Each device computes B and C of all groups, which are
    small. Steps and decays stay in float32."""

    spec: Mamba2Spec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        heads = spec.heads

        def linear(
            name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple, bias: bool = spec.bias
        ) -> Linear:
            return Linear(in_shape, out_shape, axes, bias, self.dtype, as_partials=True, name=name)

        def per_head(name: str, init: Any) -> jax.Array:
            return value_of(weight(self, name, init, ("kv_heads",), (heads,), jnp.float32))

        inputs = (self.hidden_size,)
        zx = linear("zx", inputs, (heads, 2 * spec.head_dim), ("kv_heads", None, "embed"))(x, ops)
        z, own = jnp.split(zx.reduce(self.dtype).reshape(-1, heads, 2 * spec.head_dim), 2, axis=-1)
        bc = linear("bc", inputs, (spec.shared,), (None, "embed"))(x, ops).reduce(self.dtype)
        steps = linear("dt", inputs, (heads,), ("kv_heads", "embed"))(x, ops).reduce(self.dtype)
        if any(scale != 1.0 for scale in spec.scales):
            z, own, b, c, steps = map(times, (z, own, *jnp.split(bc, 2, axis=-1), steps), spec.scales)
            bc = jnp.concatenate([b, c], axis=-1)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + per_head("dt_bias", nn.initializers.ones))
        out = attend(
            MambaInputs(
                x=own.reshape(-1, spec.channels),
                bc=bc,
                step=jnp.maximum(steps, spec.least_step),
                a=-jnp.exp(per_head("a_log", nn.initializers.zeros)),
                d=per_head("d", nn.initializers.ones),
                group=jnp.arange(heads, dtype=jnp.int32) // spec.per_group,
                **self._conv("conv", "kv_heads", spec.channels),
                **self._conv("conv_bc", None, spec.shared),
            )
        )
        out = self._gated(out.reshape(-1, spec.channels), z.reshape(-1, spec.channels)).astype(self.dtype)
        axes = ("embed", "kv_heads", None)
        return linear("out", (heads, spec.head_dim), (self.hidden_size,), axes, spec.out_bias)(out, ops)

    def _conv(self, name: str, axis: str | None, channels: int) -> dict[str, Any]:
        """The convolution of some channels: its weights, and its bias or None."""
        spec = self.spec
        shape = (channels, spec.conv_width)
        found = {name: weight(self, name, nn.initializers.normal(0.5), (axis, None), shape, self.dtype)}
        bias = None
        if spec.conv_bias:
            bias = value_of(weight(self, f"{name}_bias", nn.initializers.zeros, (axis,), (channels,), self.dtype))
        return found | {f"{name}_bias": bias}

    def _gated(self, out: jax.Array, z: jax.Array) -> jax.Array:
        """The gate z and the norm over each group's channels; float32 [tokens, channels]."""
        spec = self.spec
        gate = jax.nn.silu(z.astype(jnp.float32))
        if spec.norm is None:
            return out * gate
        scale = value_of(weight(self, "norm", nn.initializers.ones, ("kv_heads",), (spec.channels,), self.dtype))
        if not spec.norm_first:
            out = out * gate
        out = normalize(out.reshape(len(out), spec.groups, -1), spec.norm, None, None).reshape(out.shape)
        out = out * scale.astype(jnp.float32)
        return out * gate if spec.norm_first else out


def mamba_sources(spec: Mamba2Spec, hidden: int, _: Names) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up.

    The roles are mamba_in, which has the gates z of all heads, then x, B, C and the steps; mamba_conv for x, B and C;
    and mamba_a_log, mamba_d, mamba_dt_bias, mamba_norm and mamba_out.
    """
    heads = spec.heads
    channels = spec.channels
    every = 2 * channels + spec.shared + heads

    def projections(kind: str, inputs: tuple[int, ...]) -> dict[str, list[Source]]:
        tensor = f"mamba_in.{kind}", (every, *inputs)
        columns = (-1,) * len(inputs)

        def both(which: int) -> Source:
            def view(target: np.ndarray) -> np.ndarray:
                return target.reshape(heads, 2, spec.head_dim, *columns)[:, which]

            split = (heads, spec.head_dim, *columns)
            return Source(*tensor, view, split, take=rows(which * channels, channels))

        return {
            "zx": [both(0), both(1)],
            "bc": [Source(*tensor, whole, take=rows(2 * channels, spec.shared))],
            "dt": [Source(*tensor, whole, take=rows(every - heads, heads))],
        }

    def convolutions(kind: str, shape: tuple[int, ...], place: str) -> dict[str, list[Source]]:
        tensor = f"mamba_conv.{kind}", (channels + spec.shared, *shape)
        parts = {"conv": (0, channels), "conv_bc": (channels, spec.shared)}
        return {
            f"{name}{place}": [Source(*tensor, whole, (count, *shape[1:]), take=rows(first, count))]
            for name, (first, count) in parts.items()
        }

    found = {f"{name}/kernel": some for name, some in projections("weight", (hidden,)).items()}
    found |= convolutions("weight", (1, spec.conv_width), "")
    found |= {name: [Source(f"mamba_{name}", (heads,), whole)] for name in ("a_log", "d", "dt_bias")}
    found["out/kernel"] = [Source("mamba_out.weight", (hidden, channels), whole)]
    if spec.bias:
        found |= {f"{name}/bias": some for name, some in projections("bias", ()).items()}
    if spec.out_bias:
        found["out/bias"] = [Source("mamba_out.bias", (hidden,), whole)]
    if spec.conv_bias:
        found |= convolutions("bias", (), "_bias")
    if spec.norm is not None:
        found["norm"] = [Source("mamba_norm.weight", (channels,), whole)]
    return found
