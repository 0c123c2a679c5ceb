"""A mixture of experts: each token through a few of several gated MLPs (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.quant_matmul import reference as quantized
from jaxserve.pallas_kernels.types import QuantArray

_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def route(logits: jax.Array, top_k: int, *, normalized: bool) -> tuple[jax.Array, jax.Array]:
    """Which experts a token goes through, and what each counts.

    Args:
      logits: the router's, float32 [tokens, experts].
      normalized: the weights of the chosen experts are the softmax over their logits alone, and sum to one; otherwise
        they are taken from the softmax over all experts.

    Returns:
      int32 [tokens, top_k], the experts with the greatest logits, and their weights, float32 [tokens, top_k].
    """
    chosen, experts = jax.lax.top_k(logits, top_k)
    over = chosen if normalized else logits
    total = jax.nn.logsumexp(over, axis=-1, keepdims=True)
    return experts.astype(jnp.int32), jnp.exp(chosen - total)


def grouped_matmul(x: jax.Array, w: jax.Array | QuantArray, group_sizes: jax.Array) -> jax.Array:
    """Rows of x [rows, in], sorted by expert, each times its expert's weight [experts, out, in], transposed -> float32
    [rows, out].

    group_sizes: int32 [experts], rows of each expert; rows beyond their sum give 0.
    """
    if isinstance(w, QuantArray):
        return quantized.grouped_quant_matmul(x, w, group_sizes)
    return jax.lax.ragged_dot_general(x, w, group_sizes, _TRANSPOSED, preferred_element_type=jnp.float32)


def mixture(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | QuantArray,
    down: jax.Array | QuantArray,
    *,
    gate: Callable[..., jax.Array],
    count: jax.Array | None = None,
) -> jax.Array:
    """What the chosen experts make of each token, added up by their weights.

    Args:
      x: [tokens, in].
      chosen: int32 [tokens, top_k], experts of each token.
      weights: float32 [tokens, top_k].
      gate_up: [experts, 2 * size, in], rows of the gate and of the other branch in turns.
      down: [experts, out, size].
      gate: [rows, size, 2] -> [rows, size], the activation of a gated MLP; `count` says how many rows matter.
      count: int32 scalar, how many leading tokens matter; None: all. The others give 0.

    Returns:
      float32 [tokens, out].
    """
    tokens, top_k = chosen.shape
    number = gate_up.shape[0]
    if count is not None:
        chosen = jnp.where(jnp.arange(tokens)[:, None] < count, chosen, number)
    # A row for each token and expert, sorted by expert: rows of no expert come last.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(number), axis=0, dtype=jnp.int32)
    hidden = grouped_matmul(x[order // top_k], gate_up, sizes).astype(x.dtype)
    hidden = gate(hidden.reshape(len(hidden), -1, 2), count=jnp.sum(sizes))
    y = grouped_matmul(hidden, down, sizes)
    # Gathered and summed in a fixed order, where a scatter would add in any.
    place = jnp.argsort(order)
    return jnp.sum(y[place].reshape(tokens, top_k, -1) * weights[..., None], axis=1)
