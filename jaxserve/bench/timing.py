"""The device's highest rates, and how to measure others (`pallas_kernels.tuning.timing`)."""

from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.alone import alone
from jaxserve.pallas_kernels.tuning.timing import CHAIN, LEAST_SAMPLES, Chain
from jaxserve.pallas_kernels.tuning.timing import Timing as Timing
from jaxserve.pallas_kernels.tuning.timing import Work as Work
from jaxserve.pallas_kernels.tuning.timing import in_groups as in_groups
from jaxserve.pallas_kernels.tuning.timing import measure as measure
from jaxserve.pallas_kernels.tuning.timing import sets_needed as sets_needed

CEILING_SECONDS = 0.2  # of a sample of the highest rates
COPY_BYTES = 8 << 30  # of the copy that tells the highest rate, or less if the device is small


def ceilings(platform: str) -> dict[str, float]:
    """This device's measured rates: bytes per second (read and written) of a large copy, and operations per second of a
    large matmul in bfloat16, or float32 on CPU."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 5 * COPY_BYTES)
    copied = 64 << 20 if platform == "cpu" else min(COPY_BYTES, memory // 5)
    dtype, size = (jnp.float32, 1024) if platform == "cpu" else (jnp.bfloat16, 8192)
    array = jax.jit(lambda: jnp.arange(copied // 4, dtype=jnp.uint32) * jnp.uint32(2654435761))()
    copies = [Chain(lambda _, x, f=f: ((), f(x)), (), [(array,)]) for f in (jnp.copy, lambda x: x + 1)]
    copy = min(least_seconds(work) for work in copies)
    del array, copies
    a, b = (jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0)))
    # Each product is the next one's input, so that one program has many, and rows keep their norms.
    product = least_seconds(Chain(lambda x, b: (x @ b, ()), a, [(b / math.sqrt(size),)] * CHAIN))
    return {"bytes_per_s": 2 * copied / copy, "flops_per_s": 2 * size**3 / product}


def least_seconds(work: Work) -> float:
    """The time per call in the best of a few samples that are so long that the host hardly counts: what the device can
    give. Other processes of a run stand still meanwhile."""
    with alone():
        work.enqueue(1)
        work.wait()
        rounds = 1
        samples: list[float] = []
        while len(samples) < LEAST_SAMPLES:
            began = time.perf_counter()
            work.enqueue(rounds)
            work.wait()
            seconds = time.perf_counter() - began
            if seconds < CEILING_SECONDS / 2:
                rounds = math.ceil(rounds * CEILING_SECONDS / max(seconds, 1e-3))
            else:
                samples.append(seconds / (rounds * work.calls))
    return min(samples)
