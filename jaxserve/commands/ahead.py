"""A model compiled for devices that are not here, with its weights prepared for them on this host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxserve.commands.model_report import abstract_weights
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import num_devices
from jaxserve.devices.targets import target_devices, target_memory
from jaxserve.engine.encoder_loading import abstract_encoder
from jaxserve.engine.loading import buckets
from jaxserve.engine.model_plan import ModelPlan, mesh_of
from jaxserve.engine.sizing import Sized, Sizing
from jaxserve.execution import memory
from jaxserve.execution.cost import StepCost
from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.signatures import CREATE_CACHE, CREATE_SLOTS
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.load import load_params
from jaxserve.models.quantized import Rounding, keeps_blocks
from jaxserve.models.weights import dummy_params
from jaxserve.pallas_kernels.quant_matmul import fragments
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import QuantArray


@dataclass(frozen=True)
class Ahead:
    """What `compile_ahead` made. `runner` has shapes for weights, and all programs; `arrays` are its weights on this
    host, and `eyes` the parameters of its encoder, if it has one. `config` has the settings that depend on the
    target."""

    config: EngineConfig
    folder: Path
    runner: ModelRunner
    arrays: list[jax.Array]
    eyes: Any
    shapes: list[StepShape]
    longest: int


@dataclass(frozen=True)
class Planned:
    """A runner for a target, which has shapes for weights and no programs yet, and what compiling it needs."""

    config: EngineConfig
    plan: ModelPlan
    forms: Any
    runner: ModelRunner
    shapes: list[StepShape]
    sizing: Sizing


def compile_ahead(config: EngineConfig, target: str) -> Ahead:
    """Compiles everything that serving needs for a target such as h200x1, by the target's data sheet, and prepares the
    weights. Raises ConfigError for a target whose weights can be prepared only on its devices."""
    if target_devices(target)[0].platform == "tpu":
        raise ConfigError("bundles for TPUs cannot be made elsewhere: the order of their weights is made by the device")
    made = plan_ahead(config, target)
    runner = made.runner
    sizing = made.sizing
    sizing.begin()
    runner.compile(runner.names(made.shapes))
    sizing.finish(made.shapes)
    runner.compile([CREATE_SLOTS, CREATE_CACHE])
    arrays = runner.bundled(_weights(made.config, made.plan, made.forms))
    eyes = None
    if runner.encoder is not None:
        runner.encoder.compile()
        eyes = _eyes(made.config, made.plan, runner.encoder)
    return Ahead(made.config, made.plan.folder, runner, arrays, eyes, made.shapes, sizing.longest)


def plan_ahead(config: EngineConfig, target: str) -> Planned:
    """Everything of an engine that shapes suffice for, by the target's data sheet. Raises ConfigError."""
    if config.data_parallel_size > 1:
        raise ConfigError("bundles are not made for several groups of devices; leave out --data-parallel-size")
    devices = target_devices(target)
    if config.tensor_parallel_size == 1:
        config = replace(config, tensor_parallel_size=len(devices))
    if config.max_num_batched_tokens is None:
        large = target_memory(devices[0]) >= 60e9
        config = replace(config, max_num_batched_tokens=8192 if large else 2048)
    plan = ModelPlan.of(config, devices, checks=False)
    if plan.pooler is not None:
        raise ConfigError("bundles are for models that generate; this one embeds or scores")
    forms = unflatten_dict(abstract_weights(plan.decoder, plan.folder, plan.mesh, config), sep="/")
    rows = config.max_num_seqs, memory.penalty_rows(config, plan.model)
    runner = ModelRunner(
        plan.decoder,
        forms,
        plan.mesh,
        *rows,
        max_tokens_per_call=config.decode_steps,
        proposals=config.num_proposals,
        encoder=abstract_encoder(plan),
    )
    runner.copies_pages = config.kv_offload_gib > 0
    runner.set_cache_size(plan.one_page, -(-plan.longest // plan.one_page.page_size))
    cost = StepCost.of(forms, plan.model, devices[0], num_devices(plan.mesh), plan.dtype)
    shapes = buckets(config, plan, cost)
    reserve = memory.RESERVE_BYTES + (memory.OFFLOAD_BYTES if config.kv_offload_gib else 0)
    held = (runner.weight_bytes, runner.slot_bytes)
    states = plan.one_page.state_bytes(plan.mesh)
    budget = memory.Budget(target_memory(devices[0]), config.memory_utilization, *held, reserve, None, True, states)
    sizing = Sizing(config, [Sized(runner, plan.one_page)], budget, shapes, plan.longest)
    return Planned(config, plan, forms, runner, shapes, sizing)


def _weights(config: EngineConfig, plan: ModelPlan, forms: Any) -> Any:
    """The weights on CPU devices, in the forms and with the shards that the target's devices need.

    Raises ConfigError if there are too few CPU devices, or if forms differ from those that the target would make.
    """
    mesh = _here(config, plan)
    rounding = Rounding(config.rounding, Device.of(plan.mesh.devices.flat[0]), plan.decoder.dtype)
    if config.load_format == "dummy":
        scheme = None if config.quantization == "auto" or config.dequantize else config.quantization
        flat = flatten_dict(dummy_params(plan.decoder, mesh, config.seed, scheme), sep="/")
        params = unflatten_dict({name: rounding(name, w) for name, w in flat.items()}, sep="/")
    else:
        params = load_params(
            plan.decoder,
            plan.folder,
            mesh,
            quantization=config.quantization,
            dequantize=config.dequantize,
            ignored_keys=config.ignore_config_keys,
            blocks=keeps_blocks(plan.mesh),
            keep_mixed=True,
            rounding=rounding,
        )
    made = _shuffled(params, forms, mesh)
    if _forms(made) != _forms(forms):
        raise ConfigError("weights of this format can be prepared only on the target's devices; make the bundle there")
    return made


def _here(config: EngineConfig, plan: ModelPlan) -> Mesh:
    """A mesh of CPU devices like the target's. Raises ConfigError if there are too few of them."""
    count = num_devices(plan.mesh)
    hosts = jax.devices("cpu")
    if len(hosts) < count:
        raise ConfigError(f"a bundle for {count} devices needs as many here; set JAX_NUM_CPU_DEVICES={count}")
    return mesh_of(config, hosts[:count])


def _eyes(config: EngineConfig, plan: ModelPlan, runner: EncoderRunner) -> Any:
    """The parameters of the image encoder on CPU devices, as `_weights`."""
    mesh = _here(config, plan)
    encoder: Any = runner.encoder
    files: Any = plan.eyes and plan.eyes.files
    if files is None:
        return unflatten_dict(dummy_params(encoder, mesh, config.seed, None), sep="/")
    return load_params(encoder, plan.folder, mesh, ignored_keys=config.ignore_config_keys, source=files, progress=False)


def _shuffled(params: Any, forms: Any, mesh: Mesh) -> Any:
    """The weights with codes in the order of `fragments` where the forms have it; each device's part has its own."""

    def one(w: Any, form: Any) -> Any:
        if not isinstance(form, QuantArray) or not isinstance(w, QuantArray) or not form.shuffled:
            return w
        spec = w.codes.sharding.spec
        local = jax.shard_map(fragments.shuffled_codes, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return replace(w, codes=jax.jit(local)(w.codes), shuffled=True)

    return jax.tree.map(one, params, forms, is_leaf=lambda x: isinstance(x, QuantArray))


def _forms(params: Any) -> list[Any]:
    """What the programs see of the weights: the tree, shapes, dtypes and how devices split them."""
    leaves, structure = jax.tree.flatten(params)
    return [str(structure), *((x.shape, x.dtype, tuple(x.sharding.spec)) for x in leaves)]
