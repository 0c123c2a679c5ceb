"""Measures a compiled function's time on the device.

Calls are asynchronous: many are queued, and only the last is waited for. Several calls, each with its own arguments,
are compiled into one program, so that the host launches them faster than the device runs them. All arguments together
do not fit the device's cache. `Timing.host_bound` reports a measurement that the host limits nevertheless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.alone import alone

SPREAD = {"gpu": 256 << 20, "tpu": 256 << 20, "cpu": 16 << 20}  # bytes of arguments that exceed any cache
MOST_SETS = 32  # most sets of arguments
CHAIN = 16  # most calls in one program
SAMPLES = 11
LEAST_SAMPLES = 3
QUEUED = 16  # rounds that are queued before the runtime waits for earlier ones
SAMPLE_SECONDS = 0.02  # least time of a sample
ALL_SECONDS = 1.0  # approximate time of all samples


class Work(Protocol):
    """A function to measure. Each round queues `calls` calls of it, or runs them if it is not asynchronous."""

    calls: int
    asynchronous: bool
    state: Any
    outputs: Any  # the last round's

    def enqueue(self, rounds: int) -> None: ...

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each sample. host_bound: queueing took nearly all the time, so the device may be faster."""

    samples: list[float]
    host_bound: bool

    @property
    def seconds(self) -> float:
        return float(np.median(self.samples))


def measure(work: Work, all_seconds: float = ALL_SECONDS) -> Timing:
    """Measures the time per call of a compiled function, in about `all_seconds`, while the other processes of a run
    stand still (`alone`)."""
    with alone():
        return _measure(work, all_seconds)


def _measure(work: Work, all_seconds: float) -> Timing:
    clock = time.perf_counter

    def sample(rounds: int) -> tuple[float, float]:
        start = clock()
        work.enqueue(rounds)
        queued = clock()
        work.wait()
        return clock() - start, queued - start

    sample(1)
    seconds = sample(1)[0]
    if seconds < SAMPLE_SECONDS:
        seconds = sample(5)[0] / 5
    rounds = math.ceil(SAMPLE_SECONDS / seconds)
    count = min(max(int(all_seconds / (rounds * seconds)), LEAST_SAMPLES), SAMPLES)
    taken = [sample(rounds) for _ in range(count)]
    total, queued = sample(QUEUED) if work.asynchronous else (1.0, 0.0)
    return Timing([total / (rounds * work.calls) for total, _ in taken], queued > 0.9 * total)


def in_groups(items: Sequence[Any], most: int = CHAIN) -> list[Sequence[Any]]:
    """The items of each round, in turn; `most` is a power of two."""
    size = 1 if jax.default_backend() == "cpu" else math.gcd(len(items), most)
    return [items[i : i + size] for i in range(0, len(items), size)]


class Chain:
    """Calls `call(state, *arguments) -> (state, output)` with each of the sets of arguments in turn, `most` calls in a
    program. The state is donated and passed from each call to the next. With `later` it must be compiled (`compile`)
    before it is measured, which another thread may do; the sets may be shapes until then (`use`). `name` is for the
    reader's own use."""

    def __init__(
        self,
        call: Callable[..., tuple[Any, Any]],
        state: Any,
        sets: Sequence[tuple[Any, ...]],
        most: int = CHAIN,
        *,
        later: bool = False,
        name: Any = None,
    ) -> None:
        self.name = name
        self.asynchronous = jax.default_backend() != "cpu"  # the CPU may run several calls at a time
        self.most = most
        self.use(sets)
        self.calls = len(self.groups[0])
        self.state = state
        self.turn = 0
        self.outputs: Any = None

        inner = jax.jit(call)  # lowered only once

        def run(state, sets):
            outputs = []
            for arguments in sets:
                state, output = inner(state, *arguments)
                outputs.append(output)
            return state, outputs

        self._lowered = jax.jit(run, donate_argnums=0).lower(state, self.groups[0])
        self.run: Any = None
        if not later:
            self.compile()

    def use(self, sets: Sequence[tuple[Any, ...]]) -> None:
        """Takes other sets of the same shapes."""
        self.groups = in_groups(sets, self.most)

    def compile(self) -> Chain:
        self.run = self._lowered.compile()
        return self

    def enqueue(self, rounds: int) -> None:
        for _ in range(rounds):
            self.state, self.outputs = self.run(self.state, self.groups[self.turn % len(self.groups)])
            self.turn += 1
            if not self.asynchronous:
                self.wait()

    def wait(self) -> None:
        jax.block_until_ready((self.state, self.outputs))


def sets_needed(bytes_: int, platform: str) -> int:
    """The number of argument sets of that size that exceed any cache; a power of two."""
    needed = math.ceil(SPREAD[platform] / bytes_)
    return min(1 << (needed - 1).bit_length(), MOST_SETS)


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
