"""The matrices of LoRA adapters on the devices: for each product of the model, those of all adapters in the pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b", "ranks"], meta_fields=["widths"])
@dataclass(frozen=True)
class AdapterStack:
    """What adapters add to a product with a weight [out, in]: x A^T B, by place in the pool.

    A fused weight has parts, such as queries, keys and values, each of which has an A of its own. For a mixture of
    experts, a and b have an axis of experts behind that of places.

    Attributes:
      a: [places, parts * rank, in].
      b: [places, rank, out], with the adapter's scaling.
      ranks: int32 [places, parts or more], the rank of each part; 0: the adapter does not change it. Rows of a and b
        beyond it are zero.
      widths: how many outputs belong to each part in turns. Their sum divides the number of outputs.
    """

    a: jax.Array
    b: jax.Array
    ranks: jax.Array
    widths: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[-2]

    @property
    def parts(self) -> int:
        return len(self.widths)

    def of_experts(self) -> AdapterStack:
        """The stack of a mixture with a place for each adapter and expert; place = adapter * experts + expert."""
        experts = self.a.shape[1]
        a, b = (x.reshape(-1, *x.shape[2:]) for x in (self.a, self.b))
        return replace(self, a=a, b=b, ranks=jnp.repeat(self.ranks, experts, axis=0))
