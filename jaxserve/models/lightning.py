"""Lightning attention (Qin et al. 2024, arXiv:2405.17381) in the place of attention, as in MiniMax-01."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.attention import AttentionFn, Ropes
from jaxserve.models.layers import Linear
from jaxserve.models.norms import HeadNorm
from jaxserve.models.sources import Names, Source, whole
from jaxserve.models.spec import LightningSpec
from jaxserve.pallas_kernels.operands import LightningHeads, Partials
from jaxserve.pallas_kernels.ops import ACTIVATIONS, Ops
from jaxserve.pallas_kernels.types import QuantRows


class Lightning(nn.Module):
    """The layer around `Ops.lightning`. Devices share the heads."""

    spec: LightningSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, ropes: Ropes, attend: AttentionFn, ops: Ops) -> Partials:
        spec = self.spec
        heads = spec.heads
        dim = spec.dim

        def linear(name: str, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: tuple) -> Linear:
            return Linear(in_shape, out_shape, axes, False, self.dtype, as_partials=True, name=name)

        inputs = (self.hidden_size,)
        axes = ("kv_heads", None, "embed")
        qkv = linear("qkv", inputs, (heads, 3 * dim), axes)(x, ops).reduce(self.dtype).reshape(-1, heads, 3 * dim)
        out = attend(LightningHeads(ACTIVATIONS[spec.activation](qkv), -jnp.asarray(spec.rates, jnp.float32)))
        out = HeadNorm(spec.norm, (heads, dim), self.dtype, name="norm")(out, (-2, -1)).astype(self.dtype)
        gate = linear("gate", inputs, (heads, dim), axes)(x, ops).reduce(self.dtype)
        out = jax.nn.sigmoid(gate).reshape(out.shape) * out
        return linear("out", (heads, dim), (self.hidden_size,), ("embed", "kv_heads", None))(out, ops)


def lightning_sources(spec: LightningSpec, hidden: int, _: Names) -> dict[str, list[Source]]:
    """Path within the attention -> the tensors that make it up. The roles are lightning_qkv, which has for each head
    its query, its key and its value, lightning_norm, lightning_gate and lightning_out."""
    width = spec.heads * spec.dim
    return {
        "qkv/kernel": [Source("lightning_qkv.weight", (3 * width, hidden), whole)],
        "norm/scale": [Source("lightning_norm.weight", (width,), whole, (spec.heads, spec.dim))],
        "gate/kernel": [Source("lightning_gate.weight", (width, hidden), whole)],
        "out/kernel": [Source("lightning_out.weight", (hidden, width), whole)],
    }
