"""What one of several models on the same devices takes of their memory, before anything is loaded.

The sum is the one that `jaxserve plan` and the engine make: weights, slots, states, what programs need, and a cache
whose size is chosen here, because the engine would give the cache all memory that is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxserve.bundles.container import Bundle, is_bundle, read_key
from jaxserve.bundles.stored_weights import StoredWeights
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import num_devices, num_groups
from jaxserve.engine.loading import buckets
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.sizing import Sized, Sizing
from jaxserve.execution import memory
from jaxserve.execution.cost import StepCost
from jaxserve.execution.memory import Budget, Needs
from jaxserve.execution.runner import ModelRunner
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.plan.deployment import make_runner

REQUESTS = 4  # requests of the longest length that a cache holds unless the settings say otherwise
PROCESS_BYTES = 450 << 20  # host memory of a process on a CPU beside what is counted: libraries, code, tokenizer
CONTEXT_BYTES = 600 << 20  # GPU memory of a process outside of JAX's pool
_NO_LIMIT = Budget(2**62, 1.0, 0, 0, 0, None, True)


class TooLargeError(ConfigError):
    """A model needs more memory than it may take."""


@dataclass(frozen=True)
class Share:
    """Bytes that a model takes on each of its devices, and the size of its cache.

    Attributes:
      process: of the process itself, beside what it computes with.
      pages, page_bytes: of the KV cache.
      longest: tokens of the longest request that fits the cache.
    """

    weights: int
    slots: int
    states: int
    needs: int
    process: int
    pages: int
    page_bytes: int
    longest: int

    @property
    def cache(self) -> int:
        return self.pages * self.page_bytes

    @property
    def total(self) -> int:
        return self.weights + self.slots + self.states + self.needs + self.process + self.cache

    def utilization(self, total: int) -> float:
        """The `memory_utilization` of the model's engine on a GPU with `total` bytes."""
        return min(max((self.total - CONTEXT_BYTES) / total, 0.05), 1.0)

    def describe(self) -> str:
        """The sum in words."""
        size = memory.size
        states = f"states {size(self.states)} + " if self.states else ""
        return (
            f"{size(self.total)}: weights {size(self.weights)} + slots {size(self.slots)} + {states}programs "
            f"{size(self.needs)} + process {size(self.process)} + KV cache {size(self.cache)}"
        )


def share_of(config: EngineConfig, most: int, given: int | None = None, devices: Sequence[Any] | None = None) -> Share:
    """The share of a model with these settings on `devices`, by default this process's.

    Args:
      most: bytes of each device that all models may take together.
      given: bytes that the operator gives the model; None: as many as it needs.

    The cache has the pages that the settings name; else those of a bundle; else as many as `given` leaves; else enough
    for REQUESTS of the longest requests, in at most half of what the rest leaves of `most`, but for one request where
    that fits. Raises ConfigError or CheckpointError for what cannot be served, needs more than `most` or `given`, or is
    not counted.
    """
    _refuse(config)
    plan = ModelPlan.of(config, None if devices is None else list(devices))
    device = plan.mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    bundle = None
    if is_bundle(config.model):  # whose folder of the model has no weights
        bundle = Bundle.open(Path(config.model).expanduser(), read_key(config.bundle_key_file))
        params = flatten_dict(StoredWeights(bundle).forms(plan.mesh), sep="/")
    else:
        params = abstract_weights(plan.decoder, plan.folder, plan.mesh, config)
    cost = StepCost.of(
        unflatten_dict(params, sep="/"), plan.model, device, num_devices(plan.mesh) // num_groups(plan.mesh), plan.dtype
    )
    runner = make_runner(config, plan, params)
    one_page = plan.one_page
    needs = _needs(config, plan, runner, cost)
    share = Share(
        weights=runner.weight_bytes,
        slots=runner.slot_bytes,
        states=one_page.state_bytes(plan.mesh),
        needs=needs.temporaries + needs.results + (0 if on_cpu else needs.code),
        process=PROCESS_BYTES if on_cpu else memory.RESERVE_BYTES + CONTEXT_BYTES,
        pages=0,
        page_bytes=one_page.device_page_bytes(plan.mesh),
        longest=plan.longest,
    )
    pages = config.kv_pages
    if pages is None and bundle is not None:
        pages = bundle.manifest.pages
    longest = memory.pages_of_longest(config, plan.longest, one_page.page_size, one_page.groups.windows)
    if pages is None:
        left = (most if given is None else given) - share.total
        useful = longest * config.max_num_seqs + 1
        fit = max(left, 0) // share.page_bytes
        wanted = useful if given is not None else min(useful, REQUESTS * longest + 1, max(fit // 2, longest + 1))
        pages = memory.on_grid(min(wanted, fit), memory.PAGE_GRID)
    share = replace(share, pages=pages)
    limit = most if given is None else min(given, most)
    if pages < 2 or share.total > limit:
        at_least = replace(share, pages=max(pages, 2))
        fit = memory.on_grid((limit - at_least.total + at_least.cache) // share.page_bytes, memory.PAGE_GRID)
        cache = f"{fit} pages (--kv-pages) would fit" if fit >= 2 else "with the smallest cache it does not fit either"
        raise TooLargeError(
            f"{config.model} needs at least {at_least.describe()}, and {memory.size(limit)} are for it; {cache}. Lower "
            "--kv-pages, --max-model-len, --max-num-seqs or --max-num-batched-tokens, quantize it, or give more memory"
        )
    windows = one_page.groups.windows
    chosen = replace(config, kv_pages=pages)
    shape = one_page.page_size, share.page_bytes
    _, fits = memory.plan_pages(chosen, plan.longest, *shape, _NO_LIMIT, Needs(), windows)
    return replace(share, longest=fits)


def _needs(config: EngineConfig, plan: ModelPlan, runner: ModelRunner, cost: StepCost | None) -> Needs:
    sized = [Sized(runner, plan.one_page)]
    return Sizing(config, sized, _NO_LIMIT, buckets(config, plan, cost), plan.longest).guess()


def _refuse(config: EngineConfig) -> None:
    speculative = config.speculative_config
    for wrong, what in (
        (config.num_hosts > 1 or bool(config.coordinator), "several hosts (--num-hosts, --coordinator)"),
        (config.role != "both", "a role (--role)"),
        (config.pipeline_parallel_size > 1, "stages (--pipeline-parallel-size)"),
        (config.cpu_offload_gib > 0, "weights in host memory (--cpu-offload-gib)"),
        (config.kv_offload_gib > 0, "KV pages in host memory (--kv-offload-gib)"),
        (speculative is not None and speculative.method not in ("ngram", "suffix"), "a draft model or head"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"one of several models in a server cannot have {what}: its memory is not counted")


def total_memory(config: EngineConfig) -> tuple[str, int]:
    """(platform, bytes of each device), with nothing loaded yet. On CPU, of the host's memory that is free now."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return "cpu", memory.available_host_bytes()
    return device.platform, memory.budget(config, device, 1, 0, 0).total
