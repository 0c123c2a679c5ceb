"""Builds the parts of an engine from its settings: decoder, parameters, runner, buckets and the cache's size."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np

from jaxserve import heap
from jaxserve.bundles.program_cache import ProgramCache
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.compile_cache import enable_compile_cache
from jaxserve.devices.mesh import num_devices, num_groups, on_one_cpu
from jaxserve.devices.platforms import check_platform
from jaxserve.engine import data_parallel, streaming
from jaxserve.engine.determinism import check_weights
from jaxserve.engine.draft_loading import load_draft, load_head
from jaxserve.engine.encoder_loading import load_encoder, whole_tokens
from jaxserve.engine.held_weights import HeldWeights
from jaxserve.engine.kernel_timing import KernelTiming
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.pipeline import LoadedPipeline, check_settings
from jaxserve.engine.prepared import Prepared
from jaxserve.engine.role import begin_role
from jaxserve.engine.sizing import Sized, Sizing
from jaxserve.execution import memory
from jaxserve.execution.buckets import step_shapes
from jaxserve.execution.cost import StepCost, prefill_chunk
from jaxserve.execution.pipeline_runner import PipelineRunner
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.hosts.first_host import FirstHost
from jaxserve.hosts.start_jax import start_jax
from jaxserve.models.load import check_kernels, make_params
from jaxserve.models.quantized import arranged
from jaxserve.pallas_kernels import cpu_build
from jaxserve.scheduling.adapter_pool import AdapterPool
from jaxserve.scheduling.block_manager import BlockManager, StateSnapshots
from jaxserve.scheduling.groups import GroupBlocks, GroupScheduler, SchedulerSizes
from jaxserve.scheduling.image_rows import ImageRows
from jaxserve.scheduling.page_tiers import PageTiers
from jaxserve.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that depend on model and devices.

    Attributes:
      shapes: the buckets that steps are padded to.
      cost: estimates the time of a step; None on CPU.
      held: the weights of the models.
      draft: the draft model of speculative decoding.
      hosts: the other hosts of the replica; None: there are none.
      listener: where a prefill server waits for decode servers; see `role.begin_role`.
      progress: the engine tells how many programs are compiled.
    """

    plan: ModelPlan
    runner: ModelRunner
    shapes: list[StepShape]
    cost: StepCost | None
    sizing: Sizing
    held: HeldWeights
    draft: Sized | None = None
    hosts: FirstHost | None = None
    listener: socket.socket | None = None
    progress: bool = False


@dataclass(frozen=True)
class LoadedModels:
    """The models of an engine on the devices, with caches of a single page. With a bundle, `params` are only shapes."""

    plan: ModelPlan
    params: Any
    runner: ModelRunner
    draft: Sized | None
    prepared: Prepared | None = None

    @property
    def runners(self) -> list[ModelRunner]:
        return [self.runner] if self.draft is None else [self.runner, self.draft.runner]

    def held(self, config: EngineConfig) -> HeldWeights:
        """The weights of the models. On several hosts, the settings have the number of all devices."""
        return HeldWeights(config, self.plan, [self.runner], self.draft and self.draft.runner)


def load_models(
    config: EngineConfig,
    devices: list[jax.Device] | None,
    *,
    progress: bool,
    static_steps: bool | None,
    checks: bool = True,
) -> LoadedModels:
    """Reads the model and its draft, and places them on the mesh. On several hosts, all call it. checks: whether
    kernels are checked on the devices first, which else are taken as they are."""
    start = time.perf_counter()
    _check_settings(config)
    cache = enable_compile_cache()
    prepared = Prepared.of(config)
    if config.cpu_offload_gib:
        return _load_streaming(config, prepared, devices, progress=progress, static_steps=static_steps)
    plan = ModelPlan.of(config, devices, checks=checks)
    mesh = plan.mesh
    model = plan.model
    decoder = plan.decoder
    if prepared is None:
        timing = KernelTiming.begin(config, plan)
        # While kernels are timed none is checked: the device is busy, and which products to check is not yet known.
        untried = decoder if timing is None else decoder.clone(ops=replace(decoder.ops, trials=None))
        params = make_params(untried, plan.folder, mesh, config, progress=progress)
        if timing is not None:
            timing.finish()
        if checks:
            decoder, params = check_kernels(decoder, params, mesh, config.matmul_backend, progress=progress)
        else:
            params = arranged(params, mesh, decoder.dtype, config.matmul_backend)
    else:
        prepared.check_places(mesh)
        params = prepared.forms(mesh)
        if checks:
            decoder, _ = check_kernels(plan.decoder, params, mesh, config.matmul_backend, progress=progress)
            prepared.check_kernels(plan.decoder.ops, decoder.ops)
    if config.deterministic:
        check_weights(params)
    heap.trim()
    log.info("loaded %s in %.1f s", config.model, time.perf_counter() - start)
    log.info("%s", memory.describe_weights(params))
    rows = config.max_num_seqs, memory.penalty_rows(config, model)
    pooling = None if plan.pooler is None else plan.pooler.method
    drafter = None
    if (head := load_head(config, plan)) is not None:
        drafter, params["draft"], plan = head
    runner = ModelRunner(
        decoder,
        params,
        mesh,
        *rows,
        max_tokens_per_call=config.decode_steps,
        static=static_steps,
        pooling=pooling,
        proposals=config.num_proposals,
        drafter=drafter,
        adapters=plan.adapter_pool(config),
        encoder=load_encoder(config, plan, decoder.ops, prepared),
    )
    if prepared is not None:
        runner.weights = prepared.arrays(mesh)
    runner.copies_pages = config.kv_offload_gib > 0
    runner.kept = ProgramCache.of(config, runner, cache)
    draft = load_draft(config, plan, devices, static=static_steps)
    if draft is not None:
        runner.beside = [draft.runner]
        draft.runner.beside = [runner]
    runner.set_cache_size(plan.one_page, -(-plan.longest // plan.one_page.page_size))
    return LoadedModels(plan, params, runner, draft, prepared)


def _check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that are not combined."""
    check_settings(config)
    data_parallel.check_settings(config)
    streaming.check_settings(config)


def _load_streaming(
    config: EngineConfig,
    prepared: Prepared | None,
    devices: list[jax.Device] | None,
    *,
    progress: bool,
    static_steps: bool | None,
) -> LoadedModels:
    """`load_models` for a model that has weights in host memory."""
    start = time.perf_counter()
    if prepared is not None:
        raise ConfigError(f"{config.model} is a bundle, whose programs need all weights: leave cpu_offload_gib at 0")
    plan, params, runner = streaming.load_streaming(config, devices, progress=progress, static=static_steps)
    heap.trim()
    log.info("loaded %s in %.1f s", config.model, time.perf_counter() - start)
    return LoadedModels(plan, params, runner, None)


def load_parts(
    config: EngineConfig,
    devices: list[jax.Device] | None,
    *,
    progress: bool,
    static_steps: bool | None,
    checks: bool = True,
) -> EngineParts:
    """Reads the model, places it on the mesh and chooses the number of KV pages. See `Engine.load`."""
    _check_settings(config)
    staged = config.pipeline_parallel_size > 1
    hosts = None
    listener = None if staged else begin_role(config)
    if config.num_hosts > 1:
        hosts = FirstHost(config)
        hosts.gather()
        config = start_jax(config)
    if devices is None:
        check_platform(config)
    if staged:
        return _load_pipeline(config, hosts, devices, progress=progress, static_steps=static_steps)
    loaded = load_models(config, devices, progress=progress, static_steps=static_steps, checks=checks)
    plan = loaded.plan
    runner = loaded.runner
    draft = loaded.draft
    mesh = plan.mesh
    model = plan.model
    held = loaded.held(config)
    if hosts is not None:
        _tell_hosts(hosts, loaded.runners, held)
    device = mesh.devices.flat[0]
    sharing = num_devices(mesh) // num_groups(mesh)
    cost = StepCost.of(loaded.params, model, device, sharing, plan.dtype, streamed=runner.streamed_bytes)
    shapes = buckets(config, plan, cost)
    models = [Sized(runner, plan.one_page)] + ([draft] if draft is not None else [])
    taken = sum(one.runner.weight_bytes for one in models), sum(one.runner.slot_bytes for one in models)
    budget = memory.budget(config, device, num_devices(mesh), *taken, plan.one_page.state_bytes(mesh))
    prepared = loaded.prepared
    given = _with_pages(config, prepared)
    sizing = Sizing(given, models, budget, shapes, plan.longest, progress=progress)
    sizing.begin()
    if prepared is not None:
        prepared.load_programs(runner, shapes, budget, plan.one_page.device_page_bytes(mesh))
        if given != _with_pages(config, prepared):  # chosen for programs that are not used
            sizing = Sizing(config, models, budget, shapes, plan.longest, progress=progress)
            sizing.begin()
    return EngineParts(plan, runner, shapes, cost, sizing, held, draft, hosts, listener, progress)


def load_runners(config: EngineConfig) -> tuple[list[Any], HeldWeights]:
    """The runners and the weights of a host that is not the first one, which repeat the calls of the first host's."""
    check_platform(config)
    if config.pipeline_parallel_size == 1:
        models = load_models(config, None, progress=False, static_steps=None)
        return list(models.runners), models.held(config)
    enable_compile_cache()
    loaded = LoadedPipeline.load(config, None, progress=False, static=None)
    heap.trim()
    assert isinstance(loaded.runner, PipelineRunner)
    loaded.runner.sizing_of = partial(loaded.sizing, config)
    return [loaded.runner], HeldWeights(config, loaded.plan, loaded.runner.here)


def _tell_hosts(hosts: FirstHost, runners: list[Any], held: HeldWeights) -> None:
    """Passes on the calls of the first host's runners and weights, and the tokens that the model's runner samples."""
    runners[0].watcher = hosts.digests.add
    for number, one in enumerate([*runners, held]):
        one.listener = partial(hosts.tell, number)


def _load_pipeline(
    config: EngineConfig,
    hosts: FirstHost | None,
    devices: list[jax.Device] | None,
    *,
    progress: bool,
    static_steps: bool | None,
) -> EngineParts:
    """`load_parts` for a model in several stages."""
    start = time.perf_counter()
    enable_compile_cache()
    loaded = LoadedPipeline.load(config, devices, progress=progress, static=static_steps)
    heap.trim()
    log.info("loaded %s in %.1f s", config.model, time.perf_counter() - start)
    plan = loaded.plan
    held = HeldWeights(config, loaded.plan, loaded.runner.here)
    if hosts is not None:
        _tell_hosts(hosts, [loaded.runner], held)
    # A token takes the time of all stages, as if the devices of one stage had all layers.
    cost = StepCost.of(loaded.params, plan.model, plan.mesh.devices.flat[0], config.tensor_parallel_size, plan.dtype)
    shapes = buckets(config, plan, cost)
    sizing = loaded.sizing(config, shapes)
    sizing.begin()
    runner: Any = loaded.runner
    return EngineParts(plan, runner, shapes, cost, cast(Any, sizing), held, hosts=hosts, progress=progress)


def _with_pages(config: EngineConfig, prepared: Prepared | None) -> EngineConfig:
    """The settings with the number of pages that a bundle's programs were compiled for, if they may be used."""
    return config if prepared is None or prepared.pages is None else replace(config, kv_pages=prepared.pages)


def make_scheduler(
    config: EngineConfig, parts: EngineParts, longest: int, adapters: AdapterPool | None, tiers: PageTiers | None = None
) -> Scheduler:
    """The scheduler, with the pages of the runner's cache. longest: most tokens of a sequence."""
    runner = parts.runner
    layout = parts.runner.layout
    caches = config.prefix_caching
    states = None
    if layout.states is not None:
        count = layout.states.snapshots
        interval = layout.snapshot_interval(config.state_snapshot_interval)
        states = StateSnapshots(layout.states.slots, count, min(64, interval or 64), interval)
        caches = count > 0
        if caches:
            log.info("%s", memory.describe_snapshots(layout.states, interval))
    # Tokens found in the prefix cache have no hidden states, so prefixes are reused only for pooling by last token.
    caches = caches and (parts.plan.pooler is None or parts.plan.pooler.method == "last")
    windows = layout.groups.windows
    max_batched = memory.max_batched_tokens(config)
    sizes: SchedulerSizes = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max_batched,
        "prefill_chunk": prefill_chunk(config, parts.cost),
        "prefill_bursts": parts.cost is None,
        "prompts_first": config.prompts_first and parts.cost is not None and config.prefill_chunk is None,
        "max_model_len": longest,
        "penalty_rows": runner.penalty_rows,
        "stages": runner.num_stages,
    }
    groups = config.data_parallel_size
    if groups > 1:
        each = config.max_num_seqs, layout.num_pages
        log.info("%d groups of devices; each has %d sequences and %d pages", groups, *each)
        blocks = GroupBlocks(groups, layout.num_pages, layout.page_size, prefix_caching=caches, windows=windows)
        return GroupScheduler(blocks, **sizes)
    encoder = runner.encoder
    images = None
    if encoder is not None:
        images = ImageRows(encoder.rows, encoder.sizes[-1], max_batched, whole_tokens(parts.plan))
    return Scheduler(
        BlockManager(
            layout.num_pages,
            layout.page_size,
            prefix_caching=caches,
            windows=windows,
            states=states,
            tiers=tiers,
        ),
        recurrent=parts.plan.model.recurrent is not None,
        adapters=adapters,
        images=images,
        **sizes,
    )


def buckets(config: EngineConfig, plan: ModelPlan, cost: StepCost | None) -> list[StepShape]:
    """The buckets of steps. No bucket is larger than the largest possible step."""
    tokens = memory.max_batched_tokens(config)
    if cost is not None:
        tokens = min(tokens, config.max_num_seqs * plan.longest)
    free = on_one_cpu(plan.mesh) and plan.dtype == np.float32 and cpu_build.possible()
    vision = plan.model.vision
    shapes = step_shapes(
        config.max_num_seqs,
        tokens,
        plan.one_page.page_size,
        cost=cost,
        chunk=prefill_chunk(config, cost),
        num_groups=plan.one_page.groups.num_groups,
        padding_is_free=free,
        three_positions=vision is not None and vision.tokens.has_three_positions,
        least=whole_tokens(plan),
    )
    return shapes if plan.pooler is None else [shape for shape in shapes if not shape.decode_only]
