"""A gated short convolution in the place of attention, as in LFM2."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear, weight
from jaxserve.models.sources import Names, Source, whole
from jaxserve.models.spec import ShortConvSpec
from jaxserve.pallas_kernels.operands import ConvInputs, Partials, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class ShortConv(nn.Module):
    """The layer around `Ops.short_conv`. Devices share the channels."""

    spec: ShortConvSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        channels = self.spec.channels
        bias = self.spec.bias

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple) -> Linear:
            return Linear(in_shape, out_shape, axes, bias, self.dtype, as_partials=True, name=name)

        of_token = linear("in", (self.hidden_size,), (channels, 3), ("kv_heads", None, "embed"))(x, ops)
        before, behind, given = jnp.moveaxis(of_token.reduce(self.dtype).reshape(-1, channels, 3), -1, 0)
        shape = (channels, self.spec.width)
        conv = weight(self, "conv", nn.initializers.normal(0.5), ("kv_heads", None), shape, self.dtype)
        conv_bias = None
        if bias:
            conv_bias = value_of(
                weight(self, "conv_bias", nn.initializers.zeros, ("kv_heads",), (channels,), self.dtype)
            )
        out = attend(ConvInputs(before * given, conv, conv_bias))
        out = (behind.astype(jnp.float32) * out).astype(self.dtype)
        return linear("out", (channels,), (self.hidden_size,), ("embed", "kv_heads"))(out, ops)


def conv_sources(spec: ShortConvSpec, hidden: int, _: Names) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up. The roles are conv_in, which has the three projections
    one after the other, conv and conv_out."""
    channels = spec.channels

    def in_turns(t: np.ndarray) -> np.ndarray:
        """The view of the three projections of the layer, whose rows alternate. A bias is [channels, 3] already."""
        return t.T if t.shape == (channels, 3) else t.reshape(channels, 3, -1).swapaxes(0, 1)

    found = {
        "in/kernel": [Source("conv_in.weight", (3 * channels, hidden), in_turns, (3, channels, -1))],
        "conv": [Source("conv.weight", (channels, 1, spec.width), whole, (channels, spec.width))],
        "out/kernel": [Source("conv_out.weight", (hidden, channels), whole)],
    }
    if spec.bias:
        found["in/bias"] = [Source("conv_in.bias", (3 * channels,), in_turns, (3, channels))]
        found["conv_bias"] = [Source("conv.bias", (channels,), whole)]
        found["out/bias"] = [Source("conv_out.bias", (hidden,), whole)]
    return found
