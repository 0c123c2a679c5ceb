"""Matmul and norm on CPU, in C++ (`cpu_kernels.cc`): XLA's own are far from the machine's limits.

Grid: pieces of 48 outputs, handed to XLA's threads as they come free; within one, tiles of 3 rows x 4 outputs or 4 x 3,
  or from 16 rows on of 6 rows x 16 outputs against a transposed panel of the weight.
Traffic: the weight once, x once per piece, from the cache.
Pipeline: while a tile's or a panel's weights are multiplied, the next ones come into the second-level cache, a share of
  them in each pass over the present ones.

The source is compiled for the machine at hand by its C++ compiler, once, into the user's cache folder; that of products
with quantized weights (`cpu_quant_matmul.cc`) when there are such. Without a compiler everything runs in plain XLA.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ops
from pallas_kernels.cpu_build import KERNELS, build

log = logging.getLogger(__name__)

_building = threading.Lock()
QUANT_MATMUL = "cpu_quant_matmul"
FUNCTIONS = {
    KERNELS: {
        "jaxserve_matmul": "Matmul",
        "jaxserve_rms_norm": "RmsNorm",
        "jaxserve_paged_attention": "PagedAttention",
    },
    QUANT_MATMUL: {"jaxserve_quant_matmul": "QuantMatmul"},
}


def available(name: str = KERNELS) -> bool:
    """Whether a library's kernels are there; builds and registers them when called first, from whichever thread."""
    with _building:
        return jax.default_backend() == "cpu" and _register(name)


@cache
def _register(name: str) -> bool:
    try:
        library = ctypes.CDLL(str(build(name)))
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("no CPU kernels, so steps run slower: %s", getattr(error, "stderr", None) or error)
        return False
    for target, symbol in FUNCTIONS[name].items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return True


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """As `ops.matmul`; on CPU by the kernel, where it can, which leaves out the rows that do not matter."""
    count = jnp.int32(len(x)) if count is None else count

    def native(x: jax.Array, w: jax.Array, count: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
        return jax.ffi.ffi_call("jaxserve_matmul", result)(x, w, count)

    if {x.dtype, w.dtype} != {jnp.dtype("float32")} or not available():
        return ops.matmul(x, w)
    return jax.lax.platform_dependent(x, w, count, cpu=native, default=ops.matmul)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """As `ops.rms_norm`; on CPU by the kernel, where it can."""

    def native(x: jax.Array, scale: jax.Array) -> jax.Array:
        call = jax.ffi.ffi_call("jaxserve_rms_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
        return call(x, scale, eps=np.float32(eps))

    plain = partial(ops.rms_norm, eps=eps)
    if {x.dtype, scale.dtype} != {jnp.dtype("float32")} or not available():
        return plain(x, scale)
    return jax.lax.platform_dependent(x, scale, cpu=native, default=plain)
