"""The engine's counters and gauges, which it sends to the API server together with updates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest

import msgspec
import numpy as np


class Histogram(msgspec.Struct):
    """Observations counted by upper bound; the last count is for values above all bounds."""

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

    def plus(self, other: Histogram) -> Histogram:
        """The observations of both, which must have the same bounds."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.total + other.total)


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine: present values of gauges, counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of these, tokens found there
    images_encoded: int = 0  # pictures whose features were computed
    images_reused: int = 0  # pictures whose features were there already
    steps: int = 0
    failed_steps: int = 0  # steps that raised and were undone
    failed_requests: int = 0  # requests that ended because they made steps fail
    step_tokens: Histogram = msgspec.field(default_factory=Histogram.of_counts)  # computed by each step
    step_seconds: dict[str, Histogram] = {}  # by phase; see `jaxserve.engine.timeline`
    prompt_tokens: int = 0  # prompt tokens computed or found in the cache
    generation_tokens: int = 0
    # Of a model with experts, added up over passes and layers:
    moe_routed_tokens: int = 0  # tokens of all experts
    moe_mean_tokens: float = 0.0  # tokens of a layer's mean expert
    moe_busiest_tokens: int = 0  # tokens of a layer's busiest expert
    moe_active_experts: int = 0  # experts that had tokens
    # Of speculative decoding:
    spec_drafts: int = 0  # rows whose proposals were checked
    spec_proposed: int = 0  # tokens proposed for them
    spec_accepted: int = 0  # of these, tokens that were kept
    spec_accepted_at: list[int] = []  # the same by position among a row's proposals
    # Of LoRA adapters:
    adapters_running: list[str] = []  # names that running sequences use
    adapters_waiting: list[str] = []  # names that waiting sequences ask for
    adapter_loads: int = 0  # adapters that were uploaded to the devices
    adapter_evictions: int = 0  # adapters that gave up their place on the devices
    # Of KV pages in lower tiers:
    offload_hits: int = 0  # prompt tokens whose pages were loaded from a lower tier
    offload_host_bytes: int = 0  # of pages in the host's memory
    offload_host_capacity: int = 0
    offload_host_evictions: int = 0  # pages that were given up there
    offload_stored_bytes: int = 0  # of pages copied from the devices
    offload_loaded_bytes: int = 0  # of pages copied to the devices, from files too
    offload_dropped: int = 0  # evicted pages that were not copied, because too many were on their way
    offload_disk_bytes: int = 0  # of files
    offload_disk_evictions: int = 0  # files that were deleted for others
    offload_disk_written_bytes: int = 0
    offload_disk_read_bytes: int = 0
    offload_disk_damaged: int = 0  # files that were not what was written
    # Of prefill and decode apart:
    fetch_requests: int = 0  # prompts whose pages were asked of prefill servers
    fetch_failed: int = 0  # of these, prompts of which pages have not come
    fetch_fallbacks: int = 0  # prompts that were to be asked for, and were computed here, wholly or in part
    fetch_pages: int = 0  # pages received
    fetch_bytes: int = 0
    fetch_seconds: float = 0.0  # of transfers, the computation of their prompts included
    prefill_servers_up: int = 0
    export_requests: int = 0  # prompts whose pages decode servers asked for
    export_pages: int = 0  # pages sent
    export_bytes: int = 0
    export_lost: int = 0  # pages that were evicted before they could be sent
    executables: int = 0  # compiled step functions
    compilations: int = 0  # all programs that this process compiled
    compile_cache_hits: int = 0  # programs read from the persistent cache instead
    compile_seconds: float = 0.0

    def count_experts(self, load: Sequence[int], experts: int) -> None:
        """Counts a `expert_routing.load`: tokens of all experts, of the busiest ones, and experts that had tokens."""
        routed, busiest, active = load
        self.moe_routed_tokens += routed
        self.moe_mean_tokens += routed / experts
        self.moe_busiest_tokens += busiest
        self.moe_active_experts += active

    def count_drafts(self, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """Counts rows of whose `proposed` [rows] tokens, which were checked, the first `accepted` [rows] were kept."""
        self.spec_drafts += len(proposed)
        self.spec_proposed += int(proposed.sum())
        self.spec_accepted += int(accepted.sum())
        self.spec_accepted_at += [0] * (int(proposed.max(initial=0)) - len(self.spec_accepted_at))
        for at in range(int(accepted.max(initial=0))):
            self.spec_accepted_at[at] += int(np.count_nonzero(accepted > at))

    def after(self, past: EngineStats) -> EngineStats:
        """These statistics with counters continued from `past`, the last ones of an earlier engine."""
        counters = {name: getattr(self, name) + getattr(past, name) for name in _COUNTERS}
        phases = {
            phase: histogram.plus(self.step_seconds[phase]) if phase in self.step_seconds else histogram
            for phase, histogram in past.step_seconds.items()
        }
        positions = zip_longest(self.spec_accepted_at, past.spec_accepted_at, fillvalue=0)
        return msgspec.structs.replace(
            self,
            spec_accepted_at=[a + b for a, b in positions],
            step_tokens=past.step_tokens.plus(self.step_tokens),
            step_seconds={**self.step_seconds, **phases},
            **counters,
        )


_GAUGES = {"num_running", "num_waiting", "pages_total", "pages_used", "executables"} | {
    "offload_host_bytes",
    "offload_host_capacity",
    "offload_disk_bytes",
    "prefill_servers_up",
}
_NO_NUMBERS = {"step_tokens", "step_seconds", "spec_accepted_at", "adapters_running", "adapters_waiting"}
_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in _GAUGES | _NO_NUMBERS)
