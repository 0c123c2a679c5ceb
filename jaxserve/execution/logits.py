"""From hidden states to logits, and the operations on each row of them, over the devices of a mesh.

Under tensor parallelism each device computes the logits of its own part of the vocabulary. The devices then exchange
rows (all-to-all), so that each has some whole rows, and works only on these. For 256 rows of 128,256 tokens on 8
devices each receives 14 MB. Gathering all rows would send 115 MB to each device, and repeat the work on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.devices.mesh import RULES, constrained, is_split, num_shards, on_each_device, spec
from jaxserve.models.decoder import Decoder
from jaxserve.models.drafter import Drafter
from jaxserve.pallas_kernels.ops import Ops


def replicate(x: Any, mesh: Mesh) -> jax.Array:
    return constrained(x, mesh, PartitionSpec())


def from_logits(
    function: Callable[..., Any],
    model: Decoder | Drafter,
    ops: Ops,
    params: Any,
    hidden: jax.Array,
    rows: tuple,
    shared: Any,
    mesh: Mesh,
) -> Any:
    """Returns `function(logits, *rows, shared)` for the float32 logits [rows, vocab] of hidden states [rows, hidden].

    The arrays in `rows`, and those of the result, must have the same first dimension as `hidden`. `shared` applies to
    all rows. Each device computes its part of the rows; the result is on all devices.
    """
    logits = cast(jax.Array, model.apply({"params": params}, hidden, ops, method="logits"))
    logits = constrained(logits, mesh, spec(None, "vocab"))
    vocab = model.config.vocab_size
    if not is_split(mesh):
        return function(logits[:, :vocab], *rows, shared)
    axis = RULES["vocab"]
    count = hidden.shape[0]
    devices = num_shards(mesh, "vocab")
    each = -(-count // devices)

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, each * devices - count),) + ((0, 0),) * (x.ndim - 1), mode="edge")

    def local(logits: jax.Array, rows: tuple, shared: Any) -> Any:
        """Slices and gathers rows explicitly. Otherwise the compiler would divide other parts of the step, too."""
        whole = lax.all_to_all(pad(logits), axis, split_axis=0, concat_axis=1, tiled=True)[:, :vocab]
        first = lax.axis_index(axis) * each
        mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(pad(x), first, each), rows)
        result = function(whole, *mine, shared)
        return jax.tree.map(lambda x: lax.all_gather(x, axis, tiled=True)[:count], result)

    everywhere = PartitionSpec()
    specs = spec(None, "vocab"), everywhere, everywhere
    return on_each_device(local, mesh, specs, everywhere)(logits, rows, shared)
