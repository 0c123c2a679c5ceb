"""What chooses the blocks of tokens that a layer's attention sees."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.layers import Linear
from jaxserve.models.norms import HeadNorm
from jaxserve.models.pooled_choice import PooledChooser
from jaxserve.models.rope import Angles
from jaxserve.models.spec import AttentionSpec, BlockChoiceSpec, PooledChoiceSpec
from jaxserve.pallas_kernels.operands import ChoiceInputs, PooledInputs
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


def choice_of(
    spec: AttentionSpec, inputs: int, kv_heads: int, dtype: Any, x: jax.Array | QuantRows, ropes: Any, ops: Ops
) -> ChoiceInputs | PooledInputs:
    """What chooses the blocks that an attention sees, within its module. x: its input [tokens, inputs]. ropes: see
    `attention.Ropes`."""
    blocks = spec.blocks
    if isinstance(blocks, PooledChoiceSpec):
        return PooledChooser(blocks, inputs, dtype, name="chooser")(x, ropes[spec.rope], ropes[blocks.rope], ops)
    assert isinstance(blocks, BlockChoiceSpec)
    return BlockChooser(blocks, inputs, kv_heads, dtype, name="chooser")(x, ropes[spec.rope], ops)


class BlockChooser(nn.Module):
    """The projections of what chooses blocks of tokens (`BlockChoiceSpec`). A head of keys and values that several
    devices have gets the same query on each. Every device computes the keys."""

    spec: BlockChoiceSpec
    hidden_size: int
    kv_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, angles: Angles, ops: Ops) -> ChoiceInputs:
        """x: the layer's input [tokens, hidden]."""
        assert not isinstance(x, QuantRows), "rounded before the choice of blocks read it, see `DecoderLayer`"
        dim = self.spec.dim
        pairs = self.spec.turned // 2

        def rotated(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
            y = Linear((self.hidden_size,), shape, (*axes, "embed"), False, self.dtype, name=name)(x, ops)
            y = HeadNorm(self.spec.norm, (dim,), self.dtype, name=f"{name}_norm")(y, -1)
            first, rest = jnp.split(y, [2 * pairs], axis=-1)
            first = ops.rope(first, angles.cos[:, :pairs], angles.sin[:, :pairs])
            return jnp.concatenate([first, rest], axis=-1)

        return ChoiceInputs(rotated("q", (self.kv_heads, dim), ("kv_heads", None)), rotated("k", (dim,), (None,)))
