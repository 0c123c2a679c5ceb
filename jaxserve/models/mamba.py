"""Mamba (Gu & Dao 2023, arXiv:2312.00752) in the place of attention: its projections, and the gate of its results."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import EXPERTS_FAN_IN, Linear, weight
from jaxserve.models.norms import HeadNorm
from jaxserve.models.sources import Names, Source, rows, whole
from jaxserve.models.spec import MambaSpec
from jaxserve.pallas_kernels.operands import ConvInputs, Partials, ScanInputs, value_of
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops
from jaxserve.pallas_kernels.types import QuantRows


class Mamba(nn.Module):
    """The layer around `Ops.selective_scan`, which first computes the convolution and then the scan. Devices share the
    channels. Each device computes B, C and the latent of the steps. Steps and decays stay in float32."""

    spec: MambaSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        channels = spec.channels

        def linear(name: str, inputs: int, out_shape: tuple[int, ...], axes: tuple, bias: bool = False) -> Linear:
            return Linear((inputs,), out_shape, axes, bias, self.dtype, as_partials=True, name=name)

        def per_channel(name: str, init: Any, dtype: Any = jnp.float32) -> jax.Array:
            return value_of(weight(self, name, init, ("kv_heads",), (channels,), dtype))

        both = linear("in", self.hidden_size, (channels, 2), ("kv_heads", None, "embed"), spec.bias)(x, ops)
        own, z = jnp.moveaxis(both.reduce(self.dtype).reshape(-1, channels, 2), -1, 0)
        shape = (channels, spec.conv_width)
        conv = weight(self, "conv", nn.initializers.normal(0.5), ("kv_heads", None), shape, self.dtype)
        conv_bias = per_channel("conv_bias", nn.initializers.zeros, self.dtype) if spec.conv_bias else None
        mixed = ACTIVATIONS[spec.activation](attend(ConvInputs(own, conv, conv_bias))).astype(self.dtype)
        sizes = spec.rank, spec.state_dim, spec.state_dim
        if spec.heads is None:
            of_token = linear("x", channels, (sum(sizes),), ("embed", "kv_heads"))(mixed, ops).reduce(self.dtype)
        else:
            of_token = self._of_heads("x", mixed.reshape(len(mixed), spec.heads, -1), sum(sizes))
        parts = jnp.split(of_token, np.cumsum(sizes)[:2], axis=-1)
        latent, b, c = (self._normed(name, part) for name, part in zip(("dt", "b", "c"), parts, strict=True))
        if spec.heads is None:
            step = linear("dt", spec.rank, (channels,), ("kv_heads", None))(latent, ops).reduce(self.dtype)
        else:
            step = self._of_heads("dt", latent, channels // spec.heads).reshape(-1, channels)
        step = step.astype(jnp.float32) + per_channel("dt_bias", nn.initializers.ones)
        shape = (channels, spec.state_dim)
        a_log = weight(self, "a_log", nn.initializers.zeros, ("kv_heads", None), shape, jnp.float32)
        out = attend(
            ScanInputs(
                x=mixed.astype(jnp.float32),
                step=jax.nn.softplus(step),
                b=b.astype(jnp.float32),
                c=c.astype(jnp.float32),
                a=-jnp.exp(a_log),
                d=per_channel("d", nn.initializers.ones),
            )
        )
        out = (out * jax.nn.silu(z.astype(jnp.float32))).astype(self.dtype)
        return linear("out", channels, (self.hidden_size,), ("embed", "kv_heads"), spec.bias)(out, ops)

    def _of_heads(self, name: str, x: jax.Array, size: int) -> jax.Array:
        """x [tokens, heads, inputs] times each head's own matrix: [tokens, heads, size]."""
        _, heads, inputs = x.shape
        kernel = weight(self, name, EXPERTS_FAN_IN, ("kv_heads", None, None), (heads, size, inputs), self.dtype)
        return jnp.einsum("thi,hsi->ths", x, value_of(kernel))

    def _normed(self, name: str, x: jax.Array) -> jax.Array:
        norm = self.spec.norm
        return x if norm is None else HeadNorm(norm, x.shape[-1:], self.dtype, name=f"{name}_norm")(x, -1)


def scan_sources(spec: MambaSpec, hidden: int, _: Names) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up.

    The roles are mamba_in, which has x of all channels and then the gates; mamba_conv, mamba_x, mamba_dt with its bias,
    mamba_a_log, mamba_d, mamba_out, and, where they have scales, mamba_dt_norm, mamba_b_norm and mamba_c_norm.
    With heads, x and gate of each channel are neighbours in mamba_in, and the others are stacks of the heads' own.
    """
    channels = spec.channels
    sizes = {"dt": spec.rank, "b": spec.state_dim, "c": spec.state_dim}

    def projection(kind: str, inputs: tuple[int, ...]) -> list[Source]:
        def half(which: int) -> Source:
            def view(target: np.ndarray) -> np.ndarray:
                return target.reshape(channels, 2, *(-1,) * len(inputs))[:, which]

            return Source(f"mamba_in.{kind}", (2 * channels, *inputs), view, take=rows(which * channels, channels))

        return [half(0), half(1)]

    found = {
        "in/kernel": projection("weight", (hidden,)),
        "conv": [Source("mamba_conv.weight", (channels, 1, spec.conv_width), whole, (channels, spec.conv_width))],
        "x/kernel": [Source("mamba_x.weight", (sum(sizes.values()), channels), whole)],
        "dt/kernel": [Source("mamba_dt.weight", (channels, spec.rank), whole)],
        "dt_bias": [Source("mamba_dt.bias", (channels,), whole)],
        "a_log": [Source("mamba_a_log", (channels, spec.state_dim), whole)],
        "d": [Source("mamba_d", (channels,), whole)],
        "out/kernel": [Source("mamba_out.weight", (hidden, channels), whole)],
    }
    if (heads := spec.heads) is not None:
        size = channels // heads
        own = {"dt_bias": ("mamba_dt_bias", ()), "d": ("mamba_d", ()), "a_log": ("mamba_a_log", (spec.state_dim,))}
        for path, (role, rest) in own.items():
            found[path] = [Source(role, (heads, size, *rest), whole, take=lambda t: t.reshape(channels, *t.shape[2:]))]
        del found["x/kernel"], found["dt/kernel"]
        found["x"] = [Source("mamba_x", (heads, sum(sizes.values()), size), whole)]
        found["dt"] = [Source("mamba_dt", (heads, size, spec.rank), whole)]
        found["in/kernel"] = [Source("mamba_in.weight", (2 * channels, hidden), whole)]
    if spec.conv_bias:
        found["conv_bias"] = [Source("mamba_conv.bias", (channels,), whole)]
    if spec.bias:
        of_heads = [Source("mamba_in.bias", (2 * channels,), whole, (channels, 2))]
        found["in/bias"] = projection("bias", ()) if spec.heads is None else of_heads
        found["out/bias"] = [Source("mamba_out.bias", (hidden,), whole)]
    if spec.norm is not None and spec.norm.scale:
        found |= {
            f"{name}_norm/scale": [Source(f"mamba_{name}_norm.weight", (size,), whole)] for name, size in sizes.items()
        }
    return found
