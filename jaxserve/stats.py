"""What the engine counts of itself; it crosses to the front beside the updates of requests."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


class Histogram(msgspec.Struct):
    """Observations counted by upper bound; the last count is of those above all bounds."""

    bounds: list[float]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of_seconds(cls) -> Histogram:
        """Bounds from 10 us to 10 s, three per decade."""
        bounds = [m * 10.0**e for e in range(-5, 1) for m in (1, 2.5, 5)] + [10.0]
        return cls(bounds, [0] * (len(bounds) + 1))

    @classmethod
    def of_counts(cls) -> Histogram:
        """Bounds 1, 2, 4, … 16384."""
        bounds = [2.0**e for e in range(15)]
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine: gauges as they stand, counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of these, found
    steps: int = 0
    step_tokens: Histogram = msgspec.field(default_factory=Histogram.of_counts)  # computed by each step
    step_seconds: dict[str, Histogram] = {}  # by phase; see `jaxserve.timeline`
    prompt_tokens: int = 0  # prompt tokens computed or found in the cache
    generation_tokens: int = 0
    executables: int = 0  # compiled step functions
    compilations: int = 0  # programs that this process compiled, whatever for
    compile_cache_hits: int = 0  # programs that it read from the persistent cache instead
    compile_seconds: float = 0.0
