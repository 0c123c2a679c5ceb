"""A mixture of experts: each token goes through a few of several gated MLPs (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.lora.reference import add_expert_adapters, grouped_product
from jaxserve.pallas_kernels.lora.stacks import AdapterStack
from jaxserve.pallas_kernels.quant_matmul import reference as quantized
from jaxserve.pallas_kernels.types import BlockArray, QuantArray


@partial(jax.tree_util.register_dataclass, data_fields=["gate_up", "down", "gate_up_bias"], meta_fields=[])
@dataclass(frozen=True)
class ExpertWeights:
    """The weights of all experts of a layer.

    gate_up: [experts, 2 * size, in], rows of the gate and of the other branch in turns; of any kind of weight. Experts
      without a gate have the other branch only, [experts, size, in].
    down: [experts, out, size], of any kind of weight.
    gate_up_bias: [experts, 2 * size], or None.
    """

    gate_up: Any
    down: Any
    gate_up_bias: Any = None

    @property
    def gated(self) -> bool:
        return self.gate_up.shape[1] == 2 * self.down.shape[2]


@partial(jax.tree_util.register_dataclass, data_fields=["gate_up", "down"], meta_fields=[])
@dataclass(frozen=True)
class ExpertStacks:
    """What LoRA adapters add to the products of all experts of a layer."""

    gate_up: AdapterStack
    down: AdapterStack


class MixtureOptions(TypedDict, total=False):
    """Options of `mixture` that do not depend on the backend."""

    gate: Callable[..., jax.Array]
    count: jax.Array | None
    weighs_inputs: bool
    stacks: ExpertStacks | None
    places: jax.Array | None


def grouped_matmul(x: jax.Array, w: jax.Array | QuantArray | BlockArray, group_sizes: jax.Array) -> jax.Array:
    """Rows of x [rows, in], sorted by expert, each times its expert's weight [experts, out, in], transposed -> float32
    [rows, out]. In plain XLA.

    group_sizes: int32 [experts], rows of each expert; rows beyond their sum give 0.
    """
    if isinstance(w, QuantArray | BlockArray):
        return quantized.grouped_quant_matmul(x, w, group_sizes)
    return grouped_product(x, w, group_sizes, 2)


def as_codes(w: jax.Array) -> QuantArray:
    """Weights [..., out, in] in floats as codes with a scale of 1, which kernels for quantized ones multiply."""
    return QuantArray(w, jnp.ones((*w.shape[:-2], 1, 1), jnp.float32), block=(w.shape[-2], w.shape[-1]))


def mixture(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    w: ExpertWeights,
    *,
    gate: Callable[..., jax.Array],
    count: jax.Array | None = None,
    multiply: Callable[..., jax.Array] = grouped_matmul,
    weighs_inputs: bool = False,
    stacks: ExpertStacks | None = None,
    places: jax.Array | None = None,
    add_adapters: Callable[..., jax.Array] = add_expert_adapters,
) -> jax.Array:
    """The sum of the chosen experts' results for each token, weighted by the router's weights.

    Args:
      x: [tokens, in].
      chosen: int32 [tokens, top_k], experts of each token; numbers beyond the experts stand for none, which gives 0.
      weights: float32 [tokens, top_k].
      gate: [rows, size, 2] -> [rows, size], the activation of a gated MLP; `count` says how many rows matter. For
        experts without a gate it gets [rows, size].
      count: int32 scalar, how many leading tokens matter; None: all. The others give 0.
      multiply: as `grouped_matmul`.
      weighs_inputs: the weights multiply the experts' inputs, not their results.
      stacks, places: what adapters add, and the place of each token's adapter, int32 [tokens], or -1.
      add_adapters: as `lora.reference.add_expert_adapters`.

    Returns:
      float32 [tokens, out].
    """
    tokens, top_k = chosen.shape
    number = w.gate_up.shape[0]
    if count is not None:
        chosen = jnp.where(jnp.arange(tokens)[:, None] < count, chosen, number)
    # A row for each token and expert, sorted by expert: rows of no expert come last.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(number), axis=0, dtype=jnp.int32)
    rows = x[order // top_k]
    if weighs_inputs:
        rows = (rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]).astype(x.dtype)
    hidden = multiply(rows, w.gate_up, sizes)
    if stacks is not None and places is not None:
        where = places[order // top_k], chosen.reshape(-1)[order], sizes
        hidden = add_adapters(hidden, rows, stacks.gate_up, *where)
    if w.gate_up_bias is not None:
        owner = jnp.minimum(chosen.reshape(-1)[order], number - 1)
        hidden = hidden + w.gate_up_bias[owner].astype(jnp.float32)
    hidden = hidden.astype(x.dtype)
    hidden = gate(hidden.reshape(len(hidden), -1, 2) if w.gated else hidden, count=jnp.sum(sizes))
    y = multiply(hidden, w.down, sizes)
    if stacks is not None and places is not None:
        y = add_adapters(y, hidden, stacks.down, *where)
    # Gathered and summed in a fixed order, where a scatter would add in any.
    place = jnp.argsort(order)
    y = y[place].reshape(tokens, top_k, -1)
    return jnp.sum(y if weighs_inputs else y * weights[..., None], axis=1)


def chosen_biases(chosen: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """The biases [experts, out] of the chosen experts' results, added up by their weights -> float32 [tokens, out]."""
    share = jnp.sum(jnp.where(chosen[..., None] == jnp.arange(len(bias)), weights[..., None], 0.0), axis=1)
    return jax.lax.dot_general(share, bias.astype(jnp.float32), (((1,), (0,)), ((), ())), jax.lax.Precision.HIGHEST)
