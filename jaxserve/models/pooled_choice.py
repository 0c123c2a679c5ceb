"""What chooses blocks of tokens by the means of their keys (Qwen4-Exp), for the attention of a layer."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxserve.models.layers import Linear
from jaxserve.models.norms import HeadNorm
from jaxserve.models.rope import Angles
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import PooledChoiceSpec
from jaxserve.pallas_kernels.operands import PooledInputs, value_of
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.types import QuantRows


class PooledChooser(nn.Module):
    """The projections of a `PooledChoiceSpec`. Every device computes all of it, because the choice is for all heads."""

    spec: PooledChoiceSpec
    hidden_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array | QuantRows, angles: Angles, of_blocks: Angles, ops: Ops) -> PooledInputs:
        """x: the layer's input [tokens, hidden]. angles: of the attention. of_blocks: of the blocks of the tokens."""
        assert not isinstance(x, QuantRows), "rounded before the choice of blocks read it, see `DecoderLayer`"
        heads, dim, pairs = self.spec.heads, self.spec.dim, self.spec.turned // 2
        shape = (heads + 1, dim)
        both = Linear((self.hidden_size,), shape, (None, None, "embed"), False, self.dtype, name="qk")(x, ops)
        q = HeadNorm(self.spec.norm, (dim,), self.dtype, name="q_norm")(both[:, :heads], -1)
        first, rest = jnp.split(q, [2 * pairs], axis=-1)
        first = ops.rope(first, angles.cos[:, :pairs], angles.sin[:, :pairs])
        scale = value_of(HeadNorm(self.spec.norm, (dim,), self.dtype, name="k_norm").scale())
        turned = of_blocks.cos[:, :pairs], of_blocks.sin[:, :pairs]
        return PooledInputs(jnp.concatenate([first, rest], axis=-1), both[:, heads], scale, *turned)


def pooled_sources(spec: PooledChoiceSpec, hidden: int) -> dict[str, Source]:
    """Path within the module -> the tensor of its projection. The role is index_qk: all queries, then the key."""
    return {"qk/kernel": Source("index_qk.weight", ((spec.heads + 1) * spec.dim, hidden), whole)}
