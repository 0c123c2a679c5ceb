"""How the memory of a device is shared out: weights, what the compiled programs need, and the rest for KV pages."""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.config import POOL_FRACTION, ConfigError, EngineConfig
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.models.spec import ModelConfig
from jaxserve.scheduling.block_manager import Windows, most_pages

log = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.5  # of the memory that is free, for the cache on CPU: everything else on the machine needs some too
PENALTY_BYTES = 2**28  # for the token counts of sequences with penalties
PENALTY_BYTES_PER_TOKEN = 5  # of the vocabulary: an int32 and a bool
RESERVE_BYTES = 2**29  # per accelerator: collectives, fragments of the allocator, copies on their way to the host
STEPS_IN_FLIGHT = 2  # whose results are on the device at once: one step runs, of the other the host reads the results
CODE_ALLOWANCE = 1.25  # code of a program that is not compiled yet, in those of the largest that is
PAGE_GRID = 128  # numbers of pages between a power of two and the next, on an accelerator
CPU_PAGE_GRID = 8  # on CPU, where the memory that is free differs from start to start


@dataclass(frozen=True)
class Needs:
    """Bytes of one device that compiled programs take, beside weights, slots and pages."""

    temporaries: int = 0  # of the program with the most, while it runs; programs run one after the other
    results: int = 0  # what steps in flight leave on the device, beyond the cache and the slots that they update
    code: int = 0  # of all programs, which stay on the device (XLA:GPU counts its machine code, XLA:CPU none)

    @classmethod
    def of(cls, compiled: Sequence[Any], pending: int = 0) -> Needs:
        """What programs need by the compiler's own figures (`Compiled.memory_analysis`), and `pending` more, smaller
        ones that are not compiled yet. Their code is allowed for; what else they need is within the others'."""
        code = [figures.generated_code_size_in_bytes for figures in compiled]
        results = [figures.output_size_in_bytes - figures.alias_size_in_bytes for figures in compiled]
        return cls(
            max((figures.temp_size_in_bytes for figures in compiled), default=0),
            STEPS_IN_FLIGHT * max(results, default=0),
            sum(code) + math.ceil(CODE_ALLOWANCE * pending * max(code, default=0)),
        )

    @property
    def total(self) -> int:
        return self.temporaries + self.results + self.code


@dataclass(frozen=True)
class Budget:
    """Bytes of one device."""

    total: int  # what it has; on CPU what was free before the weights came
    utilization: float  # the share of it that may be used
    weights: int
    slots: int
    reserve: int
    most_cache: int | None  # no more than this for pages, whatever is left
    counts_programs: bool = False  # pages are chosen beside what the programs need; on CPU that is a trifle
    states: int = 0  # of recurrent layers, for all slots

    @property
    def fixed(self) -> int:
        """What neither pages nor programs take."""
        return self.weights + self.slots + self.states + self.reserve

    def left(self, needs: Needs) -> int:
        """For pages, beside what the programs need."""
        left = int(self.total * self.utilization) - self.fixed - needs.total
        return left if self.most_cache is None else min(left, self.most_cache)

    def holds(self, needs: Needs, cache: int) -> bool:
        """Whether all of it together is no more than may be used."""
        return self.fixed + needs.total + cache <= int(self.total * self.utilization)

    def describe(self, needs: Needs, cache: int) -> str:
        """The arithmetic, in words."""
        used = self.fixed + needs.total + cache
        states = f"states of recurrent layers {size(self.states)} + " if self.states else ""
        return (
            f"memory per device: {size(self.total)} x {self.utilization:g} = "
            f"{size(self.total * self.utilization)}; weights {size(self.weights)} + slots {size(self.slots)} + "
            f"{states}temporaries of the largest step {size(needs.temporaries)} + results of steps in flight "
            f"{size(needs.results)} + code of all programs {size(needs.code)} + reserve {size(self.reserve)} + "
            f"KV cache {size(cache)} = {size(used)}"
        )

    def check(self, needs: Needs, cache: int) -> None:
        """Raises ConfigError when all of it together is more than may be used."""
        if not self.holds(needs, cache):
            raise ConfigError(
                f"the model does not fit: {self.describe(needs, cache)}. Lower --kv-pages, --max-num-seqs or "
                "--max-num-batched-tokens, or raise --memory-utilization"
            )


def budget(config: EngineConfig, device: jax.Device, devices: int, weights: int, slots: int, states: int = 0) -> Budget:
    """The budget of each of `devices` equal devices, which hold `weights` and `slots` bytes each already, and will hold
    `states` more for recurrent layers.

    Raises ConfigError where a device does not tell how much memory it has and kv_pages is not set either.
    """
    if device.platform == "cpu":
        free = available_host_bytes() // devices
        most = int(max(free - states, 0) * CPU_CACHE_SHARE)
        return Budget(free + weights + slots, config.memory_utilization, weights, slots, 0, most, states=states)
    total = (device.memory_stats() or {}).get("bytes_limit", 0)
    if not total and config.kv_pages is None:
        raise ConfigError(f"{device.device_kind} does not tell its memory size: set --kv-pages")
    utilization = config.memory_utilization
    if device.platform == "gpu":  # the limit is that of JAX's pool, which is itself a fraction of the memory
        pool = float(os.environ.get(POOL_FRACTION, 0.75))
        total, utilization = int(total / pool), min(utilization, pool)
    return Budget(total or 2**62, utilization, weights, slots, RESERVE_BYTES, None, True, states)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Longest request in tokens that the settings and the model allow. Raises ConfigError when they contradict."""
    limit = model.max_position
    for rope in model.ropes.values():
        if rope.scaling in ("linear", "yarn", "dynamic"):
            limit = max(limit, int(rope.original_max_position * rope.factor))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's own limit of {limit} tokens")
    return config.max_model_len or limit


def max_batched_tokens(config: EngineConfig) -> int:
    """Most tokens of one step: as configured, or as suits the device, and at least one for each sequence."""
    most = config.max_num_batched_tokens
    if most is None:
        device = jax.devices()[0]
        large = device.platform == "gpu" and (device.memory_stats() or {}).get("bytes_limit", 0) >= 60e9 * 0.9
        most = 8192 if large else 2048
    return max(most, config.max_num_seqs)


def penalty_rows(config: EngineConfig, model: ModelConfig) -> int:
    """How many sequences can have penalties at a time."""
    rows = config.max_penalty_seqs or max(8, PENALTY_BYTES // (PENALTY_BYTES_PER_TOKEN * model.vocab_size))
    return min(rows, config.max_num_seqs)


def pages_of_longest(config: EngineConfig, longest: int, page_size: int, windows: Windows) -> int:
    """Pages that the longest request holds at a time, at most; the arguments are those of `plan_pages`."""
    return sum(most_pages(longest, page_size, windows, max_batched_tokens(config)))


def fitting_pages(config: EngineConfig, most: int, page_bytes: int, budget: Budget, needs: Needs) -> int:
    """Pages of the KV cache that were asked for; else those that fit, as far as they are useful. `most`: see
    `pages_of_longest`; the other arguments are those of `plan_pages`."""
    if config.kv_pages is not None:
        return config.kv_pages
    fitting = max(budget.left(needs), 0) // page_bytes
    useful = most * config.max_num_seqs + 1
    if budget.counts_programs:
        return min(useful, _on_grid(fitting, PAGE_GRID))
    return min(useful, fitting if budget.most_cache is None else _on_grid(fitting, CPU_PAGE_GRID))


def fitting_tokens(config: EngineConfig, layout: CacheLayout, longest: int) -> int:
    """Tokens that the cache holds at a time, those of requests of `longest` tokens whose pages behind windows are given
    up; one page is the null page."""
    blocks = -(-longest // layout.page_size)
    most = pages_of_longest(config, longest, layout.page_size, layout.groups.windows)
    return max(layout.num_pages - 1, 0) * blocks // most * layout.page_size


def plan_pages(
    config: EngineConfig,
    longest: int,
    page_size: int,
    page_bytes: int,
    budget: Budget,
    needs: Needs,
    windows: Windows = (None,),
) -> tuple[int, int]:
    """(pages of the KV cache, longest request in tokens that fits them).

    Args:
      longest: of a request, in tokens, as far as the model and the settings go.
      page_size: tokens of a page.
      page_bytes: of a page on one device.
      needs: of the compiled programs, on one device.
      windows: for each group of layers, how many tokens back they see; None: all.

    Raises ConfigError when not even one request fits.
    """
    most = pages_of_longest(config, longest, page_size, windows)
    pages = fitting_pages(config, most, page_bytes, budget, needs)
    if pages - 1 >= most:
        return pages, longest

    def needed(blocks: int) -> int:
        return pages_of_longest(config, blocks * page_size, page_size, windows)

    fits = max(bisect_right(range(-(-longest // page_size) + 1), pages - 1, key=needed) - 1, 0) * page_size
    if config.max_model_len is not None or fits < min(longest, 2 * page_size):
        shorter = f"lower --max-model-len to {fits} or less, or " if fits else ""
        larger = "give more memory" if config.kv_pages is None else "raise --kv-pages, of which one is kept free"
        raise ConfigError(
            f"a request of max_model_len {longest} tokens needs {most} KV pages of {page_size}, "
            f"but only {max(pages - 1, 0)} fit; {shorter}{larger}"
        )
    log.warning("max_model_len lowered from the model's %d to %d tokens, which fit the KV cache", longest, fits)
    return pages, fits


def _on_grid(pages: int, grid: int) -> int:
    """The next number below that has few significant bits: so the programs that a start finds in the compilation cache
    are not missed for a few bytes more or less. It costs 0.4% of the cache on average, and 6% on CPU."""
    step = 1 << max(pages.bit_length() - grid.bit_length(), 0)
    return pages // step * step


def available_host_bytes() -> int:
    """Of the host's memory, what nobody uses."""
    meminfo = Path("/proc/meminfo")  # of Linux alone
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**32


def stored_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Of an array on a device, where two int4 share a byte."""
    return math.ceil(x.size * jax.dtypes.itemsize_bits(x.dtype) / 8)


def bytes_by_dtype(params: Any) -> dict[str, int]:
    """Dtype -> bytes on one device of a pytree of sharded arrays, or of their shapes."""
    total: dict[str, int] = {}
    for x in jax.tree.leaves(params):
        shard = jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        total[x.dtype.name] = total.get(x.dtype.name, 0) + stored_bytes(shard)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def describe_weights(params: Any) -> str:
    """Bytes of weights on one device, in words."""
    parts = bytes_by_dtype(params)
    listed = ", ".join(f"{size(count)} {dtype}" for dtype, count in parts.items())
    return f"weights per device: {size(sum(parts.values()))} ({listed})"


def size(count: float) -> str:
    """Bytes, readable."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
