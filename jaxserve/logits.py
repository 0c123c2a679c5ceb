"""From hidden states to logits, and what is done with each row of them, over the devices of a mesh.

Under tensor parallelism each device computes the logits of its own part of the vocabulary. The rows are then exchanged
(all-to-all), so that each device has some rows whole, and works on these alone: for 256 rows of 128,256 tokens on 8
devices each receives 14 MB, where gathering all rows would send 115 MB to each and repeat the work on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.mesh import sharding, spec
from jaxserve.models.decoder import Decoder


def replicate(x: Any, mesh: Mesh) -> jax.Array:
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, PartitionSpec()))


def from_logits(
    function: Callable[..., Any], model: Decoder, params: Any, hidden: jax.Array, rows: tuple, shared: Any, mesh: Mesh
) -> Any:
    """`function(logits, *rows, shared)` of the float32 logits [rows, vocab] of hidden states [rows, hidden].

    The arrays in `rows` begin with that dimension, as those of the result must; `shared` is the same for all rows. Each
    device does its share of the rows; the result is on all of them.
    """
    logits = cast(jax.Array, model.apply({"params": params}, hidden, method="logits"))
    logits = lax.with_sharding_constraint(logits, sharding(mesh, None, "vocab"))
    vocab = model.config.vocab_size
    if mesh.size == 1:
        return function(logits[:, :vocab], *rows, shared)
    count = hidden.shape[0]
    padding = -count % mesh.shape["tensor"]

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1), mode="edge") if padding else x

    def local(logits: jax.Array, rows: tuple, shared: Any) -> Any:
        whole = lax.all_to_all(logits, "tensor", split_axis=0, concat_axis=1, tiled=True)
        return function(whole[:, :vocab], *rows, shared)

    by_row = PartitionSpec("tensor")
    result = jax.shard_map(
        local, mesh=mesh, in_specs=(spec(None, "vocab"), by_row, PartitionSpec()), out_specs=by_row, check_vma=False
    )(pad(logits), jax.tree.map(pad, rows), shared)
    return jax.tree.map(lambda x: replicate(x[:count], mesh), result)
