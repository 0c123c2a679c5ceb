"""Builds the stages of a pipeline: which devices have which layers, their runners, and one number of pages for all."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxserve.checkpoints import orbax
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import by_host, num_devices
from jaxserve.engine.combinations import check_combined, check_lookup
from jaxserve.engine.model_plan import PASSING_MORE, ModelPlan, mesh_of
from jaxserve.engine.sizing import Sized, Sizing
from jaxserve.execution import memory, runner_commands
from jaxserve.execution.host_transport import HostTransport
from jaxserve.execution.pipeline_runner import LocalTransport, PipelineRunner
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.load import check_kernels, make_decoder, make_params
from jaxserve.models.stages import Stage, split_layers
from jaxserve.models.weights import abstract_params

log = logging.getLogger(__name__)

NOT_COMBINED = {  # settings that must have these values beside several stages
    "deterministic": False,
    "enable_lora": False,
    "kv_offload_gib": 0,
}


@dataclass(frozen=True)
class LoadedPipeline:
    """A model whose stages are on their devices, with caches of a single page."""

    plan: ModelPlan
    params: Any  # of all stages together; of those on other hosts the shapes
    runner: PipelineRunner

    @classmethod
    def load(
        cls, config: EngineConfig, devices: list[jax.Device] | None, *, progress: bool, static: bool | None
    ) -> LoadedPipeline:
        """Reads the weights of each stage onto its devices. Raises ConfigError or CheckpointError."""
        found = by_host(jax.devices()) if devices is None else devices
        check_devices(config, found)
        plan = ModelPlan.of(config, found)
        check_model(config, plan)
        stages = choose_stages(config, plan)
        runners = []
        each = devices_of_stage(config)
        params: dict[str, Any] = {}
        for number, stage in enumerate(stages):
            own = found[number * each : (number + 1) * each]
            runner, loaded = _load_stage(config, plan, stage, own, progress=progress, static=static)
            params |= loaded
            runners.append(runner)
            layers = f"layers {stage.begin} to {stage.end - 1}{'' if _is_here(own) else ', on another host'}"
            log.info("stage %d of %d: %s; %s", number + 1, len(stages), layers, memory.describe_weights(loaded))
        transport = LocalTransport(runners) if config.num_hosts == 1 else HostTransport(runners)
        pipeline = PipelineRunner(runners, plan.one_page, transport)
        if isinstance(transport, HostTransport):
            transport.take_everywhere = pipeline.take_all
        return cls(plan, params, pipeline)

    def sizing(self, config: EngineConfig, shapes: Sequence[StepShape]) -> PipelineSizing:
        """Chooses the pages. Each stage's budget includes what is on its way from the stage before. Must be called
        before pages are chosen."""
        dtype = self.plan.dtype
        model = self.plan.model
        count = len(self.runner.stages)
        most = max(shape.tokens for shape in shapes)
        moving = (count + 1) * most * model.hidden_size * np.dtype(dtype).itemsize
        parts = []
        for runner in self.runner.here:
            device = next(one for one in runner.mesh.devices.flat if _is_here([one]))
            held = runner.weight_bytes, runner.slot_bytes + moving
            budget = memory.budget(config, device, num_devices(runner.mesh) * count, *held)
            parts.append(Sizing(config, [Sized(runner, runner.layout)], budget, shapes, self.plan.longest))
        return PipelineSizing(parts, self.runner, shapes)


class PipelineSizing:
    """Chooses one number of pages for all stages: the most that every stage allows. See `Sizing`. If the stages are on
    several hosts, each host chooses for its own one, and all take the least.

    Attributes:
      longest: tokens of the longest request that fits the pages.
    """

    def __init__(self, parts: list[Sizing], runner: PipelineRunner, shapes: Sequence[StepShape]):
        self._parts = parts
        self._runner = runner
        self._shapes = list(shapes)
        self.longest = min(part.longest for part in parts)

    def begin(self) -> None:
        self._runner.announce(runner_commands.BeginPages(self._shapes))
        for part in self._parts:
            part.begin()
        self._level(changed=False)

    def finish(self, shapes: Sequence[StepShape]) -> bool:
        """As `Sizing.finish`, for all stages."""
        self._runner.announce(runner_commands.FinishPages(list(shapes)))
        changed = [part.finish(shapes) for part in self._parts]
        if not self._level(any(changed)):
            return False
        for one in self._runner.here:
            one.compile(one.names(shapes))
        return True

    def _level(self, changed: bool) -> bool:
        """Gives all stages the number of pages of the stage with the fewest. Returns whether any stage has `changed`
        its number."""
        pages = min(one.layout.num_pages for one in self._runner.here)
        found = [pages, min(part.longest for part in self._parts), not changed]
        pages, self.longest, unchanged = self._runner.transport.least(found)
        for one in self._runner.stages:
            blocks = -(-self.longest // one.layout.page_size)
            if (one.layout.num_pages, one.max_len) != (pages, blocks * one.layout.page_size):
                one.set_pages(pages, blocks)
        return not unchanged


def _load_stage(
    config: EngineConfig,
    plan: ModelPlan,
    stage: Stage,
    devices: list[jax.Device],
    *,
    progress: bool,
    static: bool | None,
) -> tuple[ModelRunner, dict[str, Any]]:
    """The runner of a stage on its devices, with a cache of a single page, and its parameters."""
    mesh = mesh_of(config, devices)
    decoder = make_decoder(
        plan.model,
        mesh,
        plan.dtype,
        page_size=plan.one_page.page_size,
        kv_dtype=plan.one_page.dtype,
        attention=config.attention_backend,
        matmul=config.matmul_backend,
        checks=_is_here(devices),
    ).clone(stage=stage)
    if _is_here(devices):
        params = make_params(decoder, plan.folder, mesh, config, progress=progress)
        decoder, params = check_kernels(decoder, params, mesh, config.matmul_backend, progress=progress)
    else:
        params = unflatten_dict(abstract_weights(decoder, plan.folder, mesh, config), sep="/")
    rows = memory.penalty_rows(config, plan.model) if stage.is_last else 0
    runner = ModelRunner(
        decoder,
        params,
        mesh,
        config.max_num_seqs,
        rows,
        max_tokens_per_call=1,
        static=static,
        proposals=config.num_proposals,
    )
    one_page = replace(plan.one_page, groups=plan.one_page.groups.of_stage(stage.layers))
    runner.set_cache_size(one_page, -(-plan.longest // one_page.page_size))
    return runner, params


def _is_here(devices: Sequence[jax.Device]) -> bool:
    """Whether this process has some of the devices."""
    return any(device.process_index == jax.process_index() for device in devices)


def check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that pipelines are not made for yet."""
    check_combined(config, "pipeline_parallel_size", 1, NOT_COMBINED)
    check_lookup(config, "pipeline_parallel_size")
    stages = config.pipeline_parallel_size
    groups = config.data_parallel_size
    if stages > 1 and groups > 1 and config.num_hosts > 1:
        raise ConfigError(
            f"pipeline_parallel_size {stages} x data_parallel_size {groups} must be on one host, but num_hosts is "
            f"{config.num_hosts}: transfers between hosts know no groups with their own sequences; leave one of the "
            "two sizes at 1"
        )


def devices_of_stage(config: EngineConfig) -> int:
    """How many devices each stage has."""
    return config.data_parallel_size * config.tensor_parallel_size


def check_devices(config: EngineConfig, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if there are too few devices for all stages."""
    each = devices_of_stage(config)
    groups = config.data_parallel_size
    needed = config.pipeline_parallel_size * each
    if len(devices) < needed:
        platform = devices[0].platform
        flags = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        hint = f"; to try it on CPU, set {flags}" if platform == "cpu" else ""
        raise ConfigError(
            f"pipeline_parallel_size {config.pipeline_parallel_size} x "
            f"{'' if groups == 1 else f'data_parallel_size {groups} x '}tensor_parallel_size "
            f"{config.tensor_parallel_size} needs {needed} devices, but JAX sees {len(devices)} {platform} "
            f"device(s){hint}"
        )
    stages_of_host: dict[int, set[int]] = {}
    for place, device in enumerate(devices[:needed]):
        stages_of_host.setdefault(device.process_index, set()).add(place // each)
    if config.num_hosts > 1 and any(len(stages) > 1 for stages in stages_of_host.values()):
        raise ConfigError(
            f"pipeline_parallel_size {config.pipeline_parallel_size} over {config.num_hosts} hosts needs stages of "
            f"whole hosts, but with tensor_parallel_size {each} some hosts would have devices of several stages: lower "
            "--pipeline-parallel-size to the number of hosts, or to a divisor of it"
        )


def check_model(config: EngineConfig, plan: ModelPlan) -> None:
    """Raises ConfigError if the model cannot be divided into this many stages."""
    size = config.pipeline_parallel_size
    if plan.model.num_layers < size:
        raise ConfigError(
            f"pipeline_parallel_size {size} needs as many layers; the model has {plan.model.num_layers}: lower "
            "--pipeline-parallel-size"
        )
    if plan.pooler is not None or plan.model.recurrent is not None:
        kind = "embed or score" if plan.pooler is not None else "have recurrent layers"
        raise ConfigError(f"pipeline_parallel_size must be 1 for models that {kind}, got {size}")
    if any(layer.indexer is not None and layer.indexer.shared for layer in plan.model.layers):
        raise ConfigError(
            f"pipeline_parallel_size must be 1, not {size}, for a model whose layers share what an indexer has chosen, "
            "which stages do not pass on"
        )
    if plan.model.passes_more:
        raise ConfigError(f"pipeline_parallel_size must be 1 for models {PASSING_MORE}, got {size}")
    if orbax.is_saved(plan.folder):
        raise ConfigError(f"{plan.folder} is an Orbax checkpoint; pipeline_parallel_size reads safetensors or GGUF")


def choose_stages(config: EngineConfig, plan: ModelPlan) -> list[Stage]:
    """Divides the layers by the bytes of their weights."""
    if config.load_format == "dummy":
        shapes = abstract_params(plan.decoder, plan.mesh)
        weights = {path: math.prod(x.shape) * x.dtype.itemsize for path, x in shapes.items()}
    else:
        source = Checkpoint.open(plan.folder, config.quantization, config.ignore_config_keys)
        weights = source.bytes_of(plan.decoder)
    return stages_of(weights, plan.model.num_layers, config.pipeline_parallel_size)


def stages_of(weights: dict[str, int], num_layers: int, count: int) -> list[Stage]:
    """`count` stages for weights of these bytes by path. The embeddings belong to the first, the head to the last."""
    layers = [0] * num_layers
    around = dict.fromkeys(("embed", "head"), 0)
    for path, size in weights.items():
        part = path.partition("/")[0]
        if part.startswith("layers_"):
            layers[int(part.removeprefix("layers_"))] += size
        elif part in around:
            around[part] += size
    return split_layers(layers, around["embed"], around["head"] or around["embed"], count)
