"""The modules of a layer's attention and MLP, to be called within the layer's own module."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from jaxserve.models.attention import Attention
from jaxserve.models.compressed import CompressedAttention
from jaxserve.models.latent import LatentAttention
from jaxserve.models.layers import MLP, Experts, NormGate
from jaxserve.models.norms import Norm
from jaxserve.models.recurrent import recurrent_layer, with_beside
from jaxserve.models.routed_attention import RoutedAttention
from jaxserve.models.spec import CompressedAttentionSpec, LatentAttentionSpec, LayerSpec, PerLayerInputs, RecurrentSpec
from jaxserve.pallas_kernels.operands import Partials
from jaxserve.pallas_kernels.ops import Ops


class BaseLayer(nn.Module):
    """What the layers have in common whose `residual` is none of those that `decoder.DecoderLayer` knows. They are
    called as it is."""

    spec: LayerSpec
    hidden_size: int
    kv_heads: int
    dtype: Any
    per_layer: PerLayerInputs | None  # None: layers have no vectors of their own

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms of queries and keys (`Ops.rotate`), where they have such."""
        return self.spec.norm.eps


def attention_of(spec: LayerSpec, hidden_size: int, kv_heads: int, dtype: Any) -> Any:
    """The layer's attention, with the recurrent layer beside it if there is one, or the recurrent layer in its place;
    None if it has none."""
    attention = spec.attention
    if attention is None:
        return None
    if isinstance(attention, RecurrentSpec):
        return recurrent_layer(attention, hidden_size, dtype)
    if isinstance(attention, LatentAttentionSpec):
        return LatentAttention(attention, hidden_size, dtype, name="attention")
    if isinstance(attention, CompressedAttentionSpec):
        return CompressedAttention(attention, hidden_size, dtype, name="attention")
    kind = RoutedAttention if attention.experts else Attention
    made = kind(attention, hidden_size, kv_heads, dtype, name="attention")
    return made if spec.beside is None else with_beside(spec.beside, made, hidden_size, dtype)


def mlp_of(spec: LayerSpec, hidden_size: int, dtype: Any) -> Any:
    """The layer's MLP, or its mixture of experts; None if it has none."""
    kind = MLP if spec.experts is None else Experts
    return None if spec.mlp is None else kind(spec.mlp, hidden_size, dtype, name="mlp")


def norm_of(
    spec: LayerSpec, name: str, size: int, dtype: Any, x: jax.Array, ops: Ops, y: Partials | None, reader: Any
) -> tuple[jax.Array, Any]:
    """What the layer's norm `name` returns for x, y and the reader (`Norm`), with the gate that it may have."""
    made = Norm(spec.norm, size, dtype, name=name)
    if name not in spec.gated_norms:
        return made(x, ops, y, reader)
    x, normed = made(x, ops, y)
    return x, NormGate(spec.gate_rank, dtype, name=f"{name}_gate")(normed, ops)
