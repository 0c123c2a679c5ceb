"""Matmul, norm, rotary positions and gate on CPU, in C++ (`cpu_kernels.cc`). XLA's own matmul is far from the machine's
limits, and the others compute padding too, or an angle's sine anew in every layer.

Grid: pieces of 48 outputs, handed to XLA's threads as they come free; within one, tiles of 3 rows x 4 outputs or 4 x 3,
  or from 40 rows on of 6 rows x 16 outputs against a transposed panel of the weight.
Traffic: the weight once, x once per piece, from the cache.
Pipeline: while a tile's or a panel's weights are multiplied, the next ones come into the second-level cache, a share of
  them in each pass over the present ones.

The source is compiled for the machine at hand by its C++ compiler, once, into the user's cache folder; that of products
with quantized weights (`cpu_quant_matmul.cc`) when there are such. Without a compiler everything runs in plain XLA.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ops
from pallas_kernels.cpu_build import ATTENTION, KERNELS, PANELS, load

log = logging.getLogger(__name__)

_building = threading.Lock()
QUANT_MATMUL = "cpu_quant_matmul"
FUNCTIONS = {
    KERNELS: {
        "jaxserve_matmul": "Matmul",
        "jaxserve_rms_norm": "RmsNorm",
        "jaxserve_rope": "Rope",
        "jaxserve_silu_gate": "SiluGate",
        "jaxserve_untouched": "Untouched",
    },
    ATTENTION: {"jaxserve_paged_attention": "PagedAttention", "jaxserve_write_kv": "WriteKv"},
    QUANT_MATMUL: {"jaxserve_quant_matmul": "QuantMatmul", "jaxserve_int4_of_bytes": "Int4OfBytes"},
    PANELS: {"jaxserve_panel_matmul": "PanelMatmul", "jaxserve_panel_rows": "PanelRows"},
}


def available(name: str = KERNELS) -> bool:
    """Whether a library's kernels are there; builds and registers them when called first, from whichever thread."""
    with _building:
        return jax.default_backend() == "cpu" and _register(name)


@cache
def _register(name: str) -> bool:
    try:
        library = load(name)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("no CPU kernels, so steps run slower: %s", getattr(error, "stderr", None) or error)
        return False
    for target, symbol in FUNCTIONS[name].items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return True


def _call(
    target: str,
    plain: Callable[..., jax.Array],
    shape: Sequence[int],
    arrays: Sequence[jax.Array],
    count: jax.Array | None,
    **attributes: Any,
) -> jax.Array:
    """What the kernel `target` makes of float32 arrays, of which `count` rows matter: float32 `shape`. Elsewhere, for
    other types and without kernels, what `plain` does."""
    if any(x.dtype != jnp.float32 for x in arrays) or not available():
        return plain(*arrays)

    def native(*operands: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))(*operands, **attributes)

    count = jnp.int32(len(arrays[0])) if count is None else count
    return jax.lax.platform_dependent(*arrays, count, cpu=native, default=lambda *operands: plain(*operands[:-1]))


def untouched(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array of any contents, whose memory the system hands out page by page as it is first written; zeros, written
    at once, without the kernels."""
    if not available():
        return jnp.zeros(shape, dtype)
    return jax.ffi.ffi_call("jaxserve_untouched", jax.ShapeDtypeStruct(shape, dtype))()


def matmul(x: jax.Array, w: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """As `ops.matmul`."""
    return _call("jaxserve_matmul", ops.matmul, (x.shape[0], w.shape[0]), (x, w), count)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, count: jax.Array | None = None) -> jax.Array:
    """As `ops.rms_norm`."""
    plain = partial(ops.rms_norm, eps=eps)
    return _call("jaxserve_rms_norm", plain, x.shape, (x, scale), count, eps=np.float32(eps))


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """As `ops.rope`."""
    return _call("jaxserve_rope", ops.rope, x.shape, (x, cos, sin), count)


def gate(gate_up: jax.Array, activation: str, count: jax.Array | None = None) -> jax.Array:
    """As `ops.gate`; by the kernel where the activation is silu."""
    plain = partial(ops.gate, activation=activation)
    if activation != "silu":
        return plain(gate_up)
    return _call("jaxserve_silu_gate", plain, gate_up.shape[:-1], (gate_up,), count)
