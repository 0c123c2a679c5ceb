"""A model on a target before anything is loaded: abstract weights, the engine's own buckets and memory arithmetic.

Programs are compiled for some layers of each kind, and for twice as many. What they need grows by the same amount with
each further layer, so the whole model's figures follow (`tests/aot/test_true_sizes.py` compiles whole models).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from flax.traverse_util import unflatten_dict

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.launches import Exchange, exchanges, launches
from jaxserve.devices.mesh import num_devices, num_groups
from jaxserve.devices.targets import target_devices, target_memory
from jaxserve.engine import data_parallel
from jaxserve.engine.encoder_loading import abstract_encoder
from jaxserve.engine.loading import buckets
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.engine.sizing import Sized, Sizing
from jaxserve.execution import memory
from jaxserve.execution.cost import StepCost
from jaxserve.execution.memory import Budget, Needs
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import AuxProgram, ProgramName
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.load import check_kernels
from jaxserve.models.spec import LayerSpec

FEW = 2  # layers of each kind that are compiled, and then twice as many
# Bytes of a step's code on TPUs, and of each of its layers; other programs have little. By these all steps of Llama 3.1
# 8B in bf16 have 3.7 GiB on v5e-8, and those of Gemma 3 27B 6.1 on v6e-8; compiled 3.6 and 8.0 (docs/plan.md).
TPU_CODE = 8 << 20
TPU_LAYER_CODE = 33 << 18
LARGE_GPU = 60e9 * 0.9  # bytes of memory from which `max_batched_tokens` allows 8192 tokens in a step


class StepFigures(NamedTuple):
    """What the compiler says of one step of the whole model on one device.

    launches: kernels, copies and library calls (GPUs); 0: the platform has none. exchanges: kind of collective -> how
    often it runs and the bytes of its results, together.
    """

    program: str
    temporaries: int
    results: int
    code: int
    launches: int
    exchanges: dict[str, Exchange]


@dataclass(frozen=True)
class Compiled:
    """The needs of all programs, figures of the largest ones, and how many layers were compiled."""

    needs: Needs
    steps: list[StepFigures]
    layers: int


@dataclass(frozen=True)
class Deployment:
    """A model with its settings on a target.

    Attributes:
      target: the target's name; cpu and cpu:N are devices of this process.
      plan: of a stage, `plan.model` has the stage's layers, and `plan.decoder` knows the stage.
      params: path -> abstract weight. `runner` has them all, and compiles nothing unless it is asked.
    """

    target: str
    config: EngineConfig
    plan: ModelPlan
    params: dict[str, Any]
    runner: ModelRunner
    cost: StepCost | None
    shapes: list[StepShape]
    budget: Budget

    @classmethod
    def of(cls, config: EngineConfig, target: str) -> Deployment:
        """A model that is not divided into stages; see `plan.stages` for others. Raises ConfigError or CheckpointError
        for what cannot be served, or is not planned for."""
        assert config.pipeline_parallel_size == 1
        devices = plan_devices(target)
        config, plan = model_plan(config, devices)
        params = abstract_weights(plan.decoder, plan.folder, plan.mesh, config)
        each = num_devices(plan.mesh) // num_groups(plan.mesh)
        cost = StepCost.of(unflatten_dict(params, sep="/"), plan.model, devices[0], each, plan.dtype)
        runner = make_runner(config, plan, params)
        shapes = buckets(config, plan, cost)
        budget = make_budget(config, plan, runner)
        return cls(target, config, plan, params, runner, cost, shapes, budget)

    @property
    def devices(self) -> int:
        return num_devices(self.plan.mesh)

    @property
    def groups(self) -> int:
        """Groups of devices with their own sequences and pages. Settings, buckets and pages are those of each."""
        return num_groups(self.plan.mesh)

    @property
    def device(self) -> Any:
        return self.plan.mesh.devices.flat[0]

    def estimated_needs(self) -> Needs:
        """What programs need by arithmetic: as the engine guesses, and on TPUs the code of all steps."""
        needs = self.guessed_needs()
        if self.device.platform != "tpu":
            return needs
        each = TPU_CODE + self.plan.model.num_layers * TPU_LAYER_CODE
        steps = sum(not isinstance(name, AuxProgram) for name in self.runner.names(self.shapes))
        return replace(needs, code=steps * each)

    def guessed_needs(self) -> Needs:
        """What the engine guesses before it compiles any program, with code that hardly counts."""
        sized = [Sized(self.runner, self.plan.one_page)]
        needs = Sizing(self.config, sized, self.budget, self.shapes, self.plan.longest).guess()
        return needs if self.budget.counts_programs else Needs()

    def pages(self, needs: Needs) -> tuple[int, int]:
        """(pages of a group's cache, longest request), as the engine chooses them. Raises ConfigError if nothing
        fits."""
        layout = self.plan.one_page
        page = layout.page_size, layout.device_page_bytes(self.plan.mesh)
        counted = needs if self.budget.counts_programs else Needs()
        pages, longest = memory.plan_pages(
            self.config, self.plan.longest, *page, self.budget, counted, layout.groups.windows
        )
        self.budget.check(needs, pages * page[1])
        return pages, longest

    def compile(self, all_layers: bool = False) -> Compiled:
        """Compiles the largest programs, and those that bound the code of others. A stage is compiled with all its
        layers, and so is an image encoder."""
        if self.runner.encoder is None:
            return self._compile_layers(all_layers)
        self.runner.encoder.compile_largest()
        compiled = self._compile_layers(all_layers)
        return replace(compiled, needs=compiled.needs + self.runner.encoder.needs)

    def _compile_layers(self, all_layers: bool) -> Compiled:
        layers = self.plan.model.layers
        some = _some(layers, FEW)
        if all_layers or self.plan.decoder.stage is not None or 2 * len(some) >= len(layers):
            return self._compile(self.plan, self.params)
        few, more = (
            self._compile(self.plan.with_layers(self.config, kept), of_layers(self.params, kept))
            for kept in (some, _some(layers, 2 * FEW))
        )
        left = (len(layers) - len(some)) / (more.layers - few.layers)
        steps = [_grown(one, other, left) for one, other in zip(few.steps, more.steps, strict=True)]
        needs = max(few.needs, more.needs, key=lambda needs: needs.temporaries)
        code = few.needs.code + int(max(more.needs.code - few.needs.code, 0) * left)
        return Compiled(replace(needs, code=code), steps, few.layers)

    def _compile(self, plan: ModelPlan, params: dict[str, Any]) -> Compiled:
        runner = make_runner(self.config, plan, params)
        guess, longest = self.pages(self.guessed_needs())
        runner.set_cache_size(replace(plan.one_page, num_pages=guess), -(-longest // plan.one_page.page_size))
        stage = plan.decoder.stage
        names = runner.programs.bounding(self.shapes) if stage is None else runner.largest(self.shapes)
        compiled: dict[ProgramName, Any] = {name: runner.compiled(runner.lower(name)) for name in names}
        for name, one in compiled.items():
            runner.executables[name] = one
        on_gpu = self.device.platform not in ("cpu", "tpu")
        figures = [_figures(name, one, on_gpu) for name, one in compiled.items() if isinstance(name, StepProgram)]
        return Compiled(runner.needs(self.shapes), figures, plan.model.num_layers)


def plan_devices(target: str) -> list[Any]:
    """The devices of a target, or those of this process for cpu and cpu:N. Raises ConfigError."""
    match = re.fullmatch(r"cpu(?::(\d+))?", target)
    if match is None:
        return target_devices(target.removeprefix("gpu:"))
    count = int(match[1] or 1)
    devices = jax.devices("cpu")
    if not 1 <= count <= len(devices):
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={max(count, 1)}"
        raise ConfigError(f"target {target} needs {count} devices, and this process has {len(devices)}: set {flag}")
    return devices[:count]


def _refuse(config: EngineConfig) -> None:
    speculation = config.speculative_config
    if speculation is not None:
        raise ConfigError(f"plan does not count the steps of speculation ({speculation.method}); leave the setting out")
    data_parallel.check_settings(config)
    if config.cpu_offload_gib:
        raise ConfigError("plan does not count weights in host memory; leave out --cpu-offload-gib")
    if config.num_hosts > 1 or config.coordinator:
        raise ConfigError(
            "plan is for one host; leave out --coordinator and --num-hosts, and name all devices together"
        )


def model_plan(config: EngineConfig, devices: list[Any]) -> tuple[EngineConfig, ModelPlan]:
    """The settings as they are on these devices of a target, and what follows from them and the model's config. Raises
    ConfigError or CheckpointError."""
    _refuse(config)
    device = devices[0]
    if config.max_num_batched_tokens is None:  # `memory.max_batched_tokens` would ask this machine's device
        large = device.platform not in ("cpu", "tpu") and target_memory(device) >= LARGE_GPU
        most = (8192 if large else 2048) // config.data_parallel_size
        config = replace(config, max_num_batched_tokens=most)
    plan = ModelPlan.of(config, devices)
    if plan.pooler is not None:
        raise ConfigError("plan is for models that generate; this one embeds or scores")
    return config, plan


def make_budget(config: EngineConfig, plan: ModelPlan, runner: ModelRunner, stages: int = 1, moving: int = 0) -> Budget:
    """The memory of a device of the target. Nothing is loaded yet, unlike where the engine asks `memory.budget`.
    moving: bytes of what stages send each other; they count as slots."""
    device = plan.mesh.devices.flat[0]
    held = (runner.weight_bytes, runner.slot_bytes + moving)
    states = plan.one_page.state_bytes(plan.mesh)
    if device.platform == "cpu":
        found = memory.budget(config, device, num_devices(plan.mesh) * stages, *held, states)
        free = found.total - 2 * sum(held)
        most = int(max(free - states, 0) * memory.CPU_CACHE_SHARE)
        return replace(found, total=found.total - sum(held), most_cache=most)
    reserve = memory.RESERVE_BYTES + (memory.OFFLOAD_BYTES if config.kv_offload_gib else 0)
    return Budget(target_memory(device), config.memory_utilization, *held, reserve, None, True, states)


def make_runner(config: EngineConfig, plan: ModelPlan, params: dict[str, Any]) -> ModelRunner:
    """As `loading.load_models` or `LoadedPipeline.load` makes it, with abstract weights."""
    decoder = plan.decoder
    tree = unflatten_dict(params, sep="/")
    if plan.mesh.devices.flat[0].platform == "cpu":
        decoder, tree = check_kernels(decoder, tree, plan.mesh, config.matmul_backend)
    stage: Any = decoder.stage
    penalized = memory.penalty_rows(config, plan.model) if stage is None or stage.is_last else 0
    runner = ModelRunner(
        decoder,
        tree,
        plan.mesh,
        config.max_num_seqs,
        penalized,
        max_tokens_per_call=config.decode_steps if stage is None else 1,
        adapters=plan.adapter_pool(config),
        encoder=abstract_encoder(plan),
    )
    runner.copies_pages = config.kv_offload_gib > 0
    runner.set_cache_size(plan.one_page, -(-plan.longest // plan.one_page.page_size))
    return runner


def _some(layers: tuple[LayerSpec, ...], count: int) -> list[int]:
    """The first `count` layers of each kind, by index; of a kind with fewer, its last one again."""
    kinds: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(i)
    return sorted(index for of_kind in kinds.values() for index in (of_kind * count)[:count])


def of_layers(params: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    """The weights of a model that has only these layers."""
    kept = {path: x for path, x in params.items() if not path.startswith("layers_")}
    for new, old in enumerate(layers):
        start = f"layers_{old}/"
        kept |= {f"layers_{new}/{path[len(start) :]}": x for path, x in params.items() if path.startswith(start)}
    return kept


def _figures(name: StepProgram, compiled: Any, on_gpu: bool) -> StepFigures:
    said = compiled.memory_analysis()
    text = compiled.as_text()
    results = said.output_size_in_bytes - said.alias_size_in_bytes
    started = len(launches(text)) if on_gpu else 0
    return StepFigures(
        str(name), said.temp_size_in_bytes, results, said.generated_code_size_in_bytes, started, exchanges(text)
    )


def _grown(few: StepFigures, more: StepFigures, left: float) -> StepFigures:
    """The figures with `left` times as many further layers as `more` has beyond `few`."""

    def grow(a: int, b: int) -> int:
        return round(a + max(b - a, 0) * left)

    kinds = Counter([*few.exchanges, *more.exchanges])
    none = Exchange(0, 0)
    pairs = {kind: (few.exchanges.get(kind, none), more.exchanges.get(kind, none)) for kind in kinds}
    grown = {kind: Exchange(*(grow(x, y) for x, y in zip(a, b, strict=True))) for kind, (a, b) in pairs.items()}
    most = max(few.temporaries, more.temporaries), max(few.results, more.results)
    return StepFigures(few.program, *most, grow(few.code, more.code), grow(few.launches, more.launches), grown)
