"""Shares out the memory of a device: weights, slots, what compiled programs need, and the rest for KV pages."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve import jax_pools
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.layouts import device_bytes
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.slot_states import StateLayout
from jaxserve.models.spec import ModelConfig
from jaxserve.scheduling.block_manager import Windows, most_pages

log = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.5  # share of free host memory for the cache on CPU; other processes need memory, too
PENALTY_BYTES = 2**28  # memory for the token counts of sequences with penalties
PENALTY_BYTES_PER_TOKEN = 5  # per penalty row and token of the vocabulary: an int32 and a bool
RESERVE_BYTES = 2**29  # per accelerator: collectives, fragments of the allocator, copies on their way to the host
OFFLOAD_BYTES = 2**29  # the same for pages on their way to the host, with `kv_offload_gib`
STEPS_IN_FLIGHT = 2  # steps with results on the device: one runs while the host reads the results of another
CODE_ALLOWANCE = 1.25  # estimated code of a program that is not compiled yet, relative to a larger one
PAGE_GRID = 128  # page counts between a power of two and the next that `on_grid` allows, on an accelerator
CPU_PAGE_GRID = 8  # the same on CPU, where free memory differs more from start to start


@dataclass(frozen=True)
class Needs:
    """Bytes that compiled programs take on one device, beside weights, slots and pages."""

    temporaries: int = 0  # temporaries of the program with the most; programs run one after the other
    results: int = 0  # results of steps in flight on the device, without the cache and the slots that they update
    code: int = 0  # code of all programs, which stays on the device (XLA:GPU counts its machine code, XLA:CPU none)

    @classmethod
    def of(cls, compiled: Sequence[Any], pending: Sequence[int] = ()) -> Needs:
        """The needs of compiled programs by the compiler's figures (`Compiled.memory_analysis`), and of smaller
        programs that are not compiled yet. Of each of the latter, `pending` has the code in bytes of a larger program;
        their other needs are assumed to be no larger than those of the compiled programs."""
        code = [figures.generated_code_size_in_bytes for figures in compiled]
        results = [figures.output_size_in_bytes - figures.alias_size_in_bytes for figures in compiled]
        return cls(
            max((figures.temp_size_in_bytes for figures in compiled), default=0),
            STEPS_IN_FLIGHT * max(results, default=0),
            sum(code) + math.ceil(CODE_ALLOWANCE * sum(pending)),
        )

    def __add__(self, other: Needs) -> Needs:
        """The needs of two runners' programs, which run one after the other."""
        temporaries = max(self.temporaries, other.temporaries)
        return Needs(temporaries, self.results + other.results, self.code + other.code)

    @property
    def total(self) -> int:
        return self.temporaries + self.results + self.code


@dataclass(frozen=True)
class Budget:
    """How the memory of one device, in bytes, is divided."""

    total: int  # all memory of the device; on CPU, the host memory that was free before the weights were loaded
    utilization: float  # the share of `total` that may be used
    weights: int
    slots: int
    reserve: int
    most_cache: int | None  # upper limit for pages; None: there is none
    counts_programs: bool = False  # the number of pages allows for the needs of programs, which are negligible on CPU
    states: int = 0  # states of recurrent layers, for all slots

    @property
    def fixed(self) -> int:
        """Bytes of everything except pages and programs."""
        return self.weights + self.slots + self.states + self.reserve

    def left(self, needs: Needs) -> int:
        """Bytes that are left for pages after the needs of programs; may be negative."""
        left = int(self.total * self.utilization) - self.fixed - needs.total
        return left if self.most_cache is None else min(left, self.most_cache)

    def holds(self, needs: Needs, cache: int) -> bool:
        """Whether everything, with a cache of `cache` bytes, fits the memory that may be used."""
        return self.fixed + needs.total + cache <= int(self.total * self.utilization)

    def describe(self, needs: Needs, cache: int) -> str:
        """The sum in words, for the log and for messages."""
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
        """Raises ConfigError unless `holds`."""
        if not self.holds(needs, cache):
            raise ConfigError(
                f"the model does not fit: {self.describe(needs, cache)}. Lower --kv-pages, --max-num-seqs or "
                "--max-num-batched-tokens, or raise --memory-utilization"
            )


def budget(config: EngineConfig, device: jax.Device, devices: int, weights: int, slots: int, states: int = 0) -> Budget:
    """The budget of each of `devices` equal devices. Each holds `weights` and `slots` bytes already, and will hold
    `states` bytes for recurrent layers.

    Raises ConfigError when a device does not tell how much memory it has and kv_pages is not set.
    """
    if device.platform == "cpu":
        free = available_host_bytes() // devices
        most = int(max(free - states, 0) * CPU_CACHE_SHARE)
        return Budget(free + weights + slots, config.memory_utilization, weights, slots, 0, most, states=states)
    total = (device.memory_stats() or {}).get("bytes_limit", 0)
    if not total and config.kv_pages is None:
        raise ConfigError(f"{device.device_kind} does not tell its memory size: set --kv-pages")
    utilization = config.memory_utilization
    if device.platform == "gpu":  # bytes_limit is the size of JAX's pool, which is a fraction of the memory
        pool = jax_pools.fraction()
        total = int(total / pool)
        utilization = min(utilization, pool)
    reserve = RESERVE_BYTES + (OFFLOAD_BYTES if config.kv_offload_gib else 0)
    return Budget(total or 2**62, utilization, weights, slots, reserve, None, True, states)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest request in tokens, prompt and output, that the settings and the model allow. Raises ConfigError when
    max_model_len exceeds the model's own limit."""
    limit = model.max_position
    for rope in model.ropes.values():
        if rope.scaling in ("linear", "yarn", "dynamic"):
            limit = max(limit, int(rope.original_max_position * rope.factor))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's own limit of {limit} tokens")
    return config.max_model_len or limit


def max_batched_tokens(config: EngineConfig) -> int:
    """The most tokens of one step of a group of devices: as configured, or as suits a device, which computes experts
    for the tokens of all groups; and at least one for each sequence."""
    most = config.max_num_batched_tokens
    if most is None:
        device = jax.local_devices()[0]
        large = device.platform == "gpu" and (device.memory_stats() or {}).get("bytes_limit", 0) >= 60e9 * 0.9
        most = (8192 if large else 2048) // config.data_parallel_size
    return max(most, config.max_num_seqs)


def penalty_rows(config: EngineConfig, model: ModelConfig) -> int:
    """How many sequences with penalties can run at a time."""
    rows = config.max_penalty_seqs or max(8, PENALTY_BYTES // (PENALTY_BYTES_PER_TOKEN * model.vocab_size))
    return min(rows, config.max_num_seqs)


def pages_of_longest(config: EngineConfig, longest: int, page_size: int, windows: Windows) -> int:
    """The most pages that a request of `longest` tokens holds at a time. See `plan_pages` for the arguments."""
    return sum(most_pages(longest, page_size, windows, max_batched_tokens(config)))


def fitting_pages(config: EngineConfig, most: int, page_bytes: int, budget: Budget, needs: Needs) -> int:
    """The number of pages: as configured, or as many as fit the budget, but no more than all sequences together could
    use. `most` is the result of `pages_of_longest`; see `plan_pages` for the other arguments."""
    if config.kv_pages is not None:
        return config.kv_pages
    fitting = max(budget.left(needs), 0) // page_bytes
    useful = most * config.max_num_seqs + 1
    if budget.counts_programs:
        return min(useful, on_grid(fitting, PAGE_GRID))
    return min(useful, fitting if budget.most_cache is None else on_grid(fitting, CPU_PAGE_GRID))


def fitting_tokens(config: EngineConfig, layout: CacheLayout, longest: int) -> int:
    """How many tokens the cache holds at a time, in requests of `longest` tokens. Pages behind windows are counted as
    freed. The null page holds none."""
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
      longest: tokens of the longest request that the model and the settings allow.
      page_size: tokens of a page.
      page_bytes: bytes of a page on one device.
      budget: the memory of one device.
      needs: bytes that the compiled programs take on one device.
      windows: how far back each group of layers sees.

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
        if config.kv_pages is None and budget.states:
            larger += f", or lower --max-num-seqs: states of recurrent layers take {size(budget.states)}"
        raise ConfigError(
            f"a request of max_model_len {longest} tokens needs {most} KV pages of {page_size}, "
            f"but only {max(pages - 1, 0)} fit; {shorter}{larger}"
        )
    log.warning("max_model_len lowered from the model's %d to %d tokens, which fit the KV cache", longest, fits)
    return pages, fits


def on_grid(pages: int, grid: int) -> int:
    """Rounds a number of pages down to few significant bits. Compiled programs depend on the number of pages. With the
    rounding, starts with slightly different free memory find the same programs in the compilation cache. It costs 0.4%
    of the cache on average, and 6% on CPU."""
    step = 1 << max(pages.bit_length() - grid.bit_length(), 0)
    return pages // step * step


def available_host_bytes() -> int:
    """Bytes of free host memory; 4 GiB if the system does not tell."""
    meminfo = Path("/proc/meminfo")  # exists on Linux only
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**32


def stored_bytes(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on a device. Two int4 share a byte."""
    return math.ceil(x.size * jax.dtypes.itemsize_bits(x.dtype) / 8)


def bytes_by_dtype(params: Any) -> dict[str, int]:
    """Dtype -> bytes on one device, for a pytree of sharded arrays or of their shapes; the largest first."""
    total: dict[str, int] = {}
    for x in jax.tree.leaves(params):
        total[x.dtype.name] = total.get(x.dtype.name, 0) + device_bytes(x)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def describe_weights(params: Any) -> str:
    """A line for the log: the bytes of weights on one device, by dtype."""
    parts = bytes_by_dtype(params)
    listed = ", ".join(f"{size(count)} {dtype}" for dtype, count in parts.items())
    return f"weights per device: {size(sum(parts.values()))} ({listed})"


def describe_snapshots(states: StateLayout, interval: int) -> str:
    """What the prefix cache's copies of recurrent states cost, over all devices, and where they are made."""
    count = states.snapshots
    within = f", and within prompts after every {interval:,} tokens" if interval else ""
    return (
        f"prefix cache of recurrent states: {count} snapshots of {size(states.slot_bytes)} take "
        f"{size(count * states.slot_bytes)}; they are made at the ends of prompts, where prompts part{within}"
    )


def size(count: float) -> str:
    """A number of bytes with a unit, for people to read."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
