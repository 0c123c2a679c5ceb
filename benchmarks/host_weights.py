"""What a TPU's compiler makes of weights in host memory that a step copies to the device, layer by layer.

JAX_PLATFORMS=cpu python benchmarks/host_weights.py [--target v6e-4] [--layers 8]

Compiles layers of an MLP ahead of time for a target (`jaxserve plan` lists them; needs its compiler), whose weights are
arguments in pinned host memory. Prints for each way to write the copies the bytes of temporaries on a device beside the
bytes of its weights: a good way needs those of two layers at most. Nothing runs.

each: an array for each layer, copied when its layer needs it; barrier: the same, with the copies tied to the layer
before; stacked: one array for all layers, of which a layer's part is copied; scan: the same in a loop.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.devices.targets import target_devices

HIDDEN, INNER, TOKENS = 4096, 16384, 256


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return x + jax.nn.silu(x @ up) @ down


def on_device(w: jax.Array) -> jax.Array:
    return jax.device_put(w, jax.memory.Space.Device)


def each(x, ups, downs, tied=False):
    for up, down in zip(ups, downs, strict=True):
        up, down = on_device(up), on_device(down)
        if tied:
            x, up, down = lax.optimization_barrier((x, up, down))
        x = layer(x, up, down)
    return x


def stacked(x, ups, downs):
    for i in range(len(ups)):
        index = lax.optimization_barrier((jnp.int32(i), x))[0]
        x = layer(x, *(on_device(lax.dynamic_index_in_dim(w, index, keepdims=False)) for w in (ups, downs)))
    return x


def scan(x, ups, downs):
    return lax.scan(lambda x, pair: (layer(x, *map(on_device, pair)), None), x, (ups, downs))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v6e-4")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    mesh = Mesh(np.array(target_devices(given.target)), ("tensor",))

    def shape(kind, *sizes, axes=()):
        sharding = NamedSharding(mesh, PartitionSpec(*axes), memory_kind=kind)
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)

    x, n = shape("device", TOKENS, HIDDEN), given.layers
    apart = (
        [shape("pinned_host", HIDDEN, INNER, axes=(None, "tensor"))] * n,
        [shape("pinned_host", INNER, HIDDEN, axes=("tensor",))] * n,
    )
    one = (
        shape("pinned_host", n, HIDDEN, INNER, axes=(None, None, "tensor")),
        shape("pinned_host", n, INNER, HIDDEN, axes=(None, "tensor")),
    )
    ways = {
        "each": (each, apart),
        "barrier": (lambda *args: each(*args, tied=True), apart),
        "stacked": (stacked, one),
        "scan": (scan, one),
    }
    for name, (step, weights) in ways.items():
        with jax.set_mesh(mesh):
            needs = jax.jit(step).lower(x, *weights).compile().memory_analysis()
        sizes = {"temporaries": needs.temp_size_in_bytes, "weights in host memory": needs.host_argument_size_in_bytes}
        print(f"{name}: " + ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in sizes.items()), flush=True)


if __name__ == "__main__":
    main()
