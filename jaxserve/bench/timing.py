"""The device's highest rates, and how to measure others (`pallas_kernels.tuning.timing`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.tuning.timing import CHAIN as CHAIN
from jaxserve.pallas_kernels.tuning.timing import Chain, measure
from jaxserve.pallas_kernels.tuning.timing import Timing as Timing
from jaxserve.pallas_kernels.tuning.timing import Work as Work
from jaxserve.pallas_kernels.tuning.timing import in_groups as in_groups
from jaxserve.pallas_kernels.tuning.timing import sets_needed as sets_needed


def ceilings(platform: str) -> dict[str, float]:
    """This device's measured rates: bytes per second (read and written) of a copy, and operations per second of a large
    matmul in bfloat16, or float32 on CPU."""
    dtype, elements, size = (jnp.float32, 16 << 20, 1024) if platform == "cpu" else (jnp.bfloat16, 1 << 30, 8192)
    keys = jax.random.split(jax.random.key(0), 3)
    array = jax.random.normal(keys[0], (elements,), dtype)
    copies = [Chain(lambda _, x, f=f: ((), f(x)), (), [(array,)]) for f in (jnp.copy, lambda x: x + 1)]
    copy = min(measure(work).seconds for work in copies)
    a, b = (jax.random.normal(key, (size, size), dtype) for key in keys[1:])
    product = measure(Chain(lambda _, a, b: ((), a @ b), (), [(a, b)])).seconds
    return {"bytes_per_s": 2 * array.nbytes / copy, "flops_per_s": 2 * size**3 / product}
