"""Experts beside a dense MLP, each with norms of its own (Gemma 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxserve.models.layers import MLP, Experts
from jaxserve.models.norms import Norm
from jaxserve.models.sources import Source, whole
from jaxserve.models.spec import MLPSpec, NormSpec
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops


class NormedExperts(nn.Module):
    """The sum of a dense MLP's and of the experts' results, each normed by itself. The dense MLP is the shared one of
    `ExpertsSpec`. The router and the experts read the stream through norms of their own."""

    spec: MLPSpec
    hidden_size: int
    norm: NormSpec
    dtype: Any

    def setup(self) -> None:
        experts = self.spec.experts
        assert experts is not None
        apart = replace(self.spec, experts=replace(experts, shared_size=0))
        dense = replace(self.spec, size=experts.shared_size, experts=None)
        norms = [Norm(self.norm, self.hidden_size, self.dtype) for _ in range(4)]
        self.router_norm, self.experts_norm, self.experts_out_norm, self.shared_out_norm = norms
        self.shared = MLP(dense, self.hidden_size, self.dtype)
        self.experts = Experts(apart, self.hidden_size, self.dtype)
        nn.share_scope(self, self.experts)

    def __call__(self, inputs: jax.Array, x: jax.Array, ops: Ops) -> Partials:
        """The normed input of the dense MLP, and the stream; both [tokens, hidden]."""

        def normed(norm: Norm, x: jax.Array) -> jax.Array:
            result: jax.Array = norm(x, ops)[1]
            return result

        dense = self.shared(inputs, ops).reduce(x.dtype)
        routed = normed(self.router_norm, x)
        chosen = self.experts(normed(self.experts_norm, x), ops, routed).reduce(x.dtype)
        return Partials((normed(self.shared_out_norm, dense) + normed(self.experts_out_norm, chosen))[None])


def normed_sources(hidden: int) -> dict[str, list[Source]]:
    """Path within the layer -> the tensors of the norms. The router's norm also has the factor hidden ** -0.5."""
    found = {
        f"mlp/{name}/scale": [Source(f"{name}.weight", (hidden,), whole)]
        for name in ("experts_norm", "experts_out_norm", "shared_out_norm")
    }
    found["mlp/router_norm/scale"] = [
        Source("router_norm.weight", (hidden,), whole, take=lambda t: t.astype(np.float32) * np.float32(hidden**-0.5))
    ]
    return found
