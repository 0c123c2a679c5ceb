"""Loads a model of which some layers' weights stay in host memory (`cpu_offload_gib`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxserve.checkpoints import orbax
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices import layouts
from jaxserve.devices.jax_versions import NARROWEST_FROM_HOST
from jaxserve.devices.mesh import num_devices
from jaxserve.engine.combinations import check_combined
from jaxserve.engine.model_plan import PASSING_MORE, ModelPlan
from jaxserve.execution import memory
from jaxserve.execution.layer_uploads import MOST, move_to_host
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.streamed_layers import HostLayer, StreamedLayers
from jaxserve.jax_pools import HOST_POOL, USUAL_HOST_POOL
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import check_ops, checked_matmul_backend, make_params, with_matmul
from jaxserve.models.quantized import arranged
from jaxserve.models.stages import Part, layer_of

log = logging.getLogger(__name__)

LEAST = MOST + 1  # layers in host memory: with fewer, all would be on the devices at times
NOT_COMBINED = {  # settings that must have these values beside weights in host memory
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "num_hosts": 1,
    "coordinator": None,
    "speculative_config": None,
    "enable_lora": False,
    "kv_offload_gib": 0,
    "deterministic": False,
}
GIB = 2**30


def check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that weights in host memory are not made for yet."""
    check_combined(config, "cpu_offload_gib", 0, NOT_COMBINED)


def check_model(config: EngineConfig, plan: ModelPlan) -> None:
    """Raises ConfigError for models that weights in host memory are not made for yet."""
    if plan.model.num_layers < LEAST:
        raise ConfigError(
            f"cpu_offload_gib must be 0 for a model of {plan.model.num_layers} layers: {MOST} layers are on the "
            "devices at a time in any case"
        )
    if plan.pooler is not None:
        raise ConfigError(f"cpu_offload_gib must be 0 for models that embed or score, got {config.cpu_offload_gib:g}")
    if plan.model.passes_more:
        raise ConfigError(f"cpu_offload_gib must be 0 for models {PASSING_MORE}, got {config.cpu_offload_gib:g}")
    if orbax.is_saved(plan.folder):
        raise ConfigError(f"{plan.folder} is an Orbax checkpoint; cpu_offload_gib reads safetensors or GGUF")


def first_on_host(config: EngineConfig, plan: ModelPlan, weights: dict[str, Any]) -> int:
    """The number of the first layer whose weights stay in host memory, by the forms of all weights (path -> shape).

    These are the last layers: as few as hold `cpu_offload_gib`, at least LEAST; all layers if they hold less. Raises
    ConfigError if the host has too little memory, or the devices cannot copy these weights from there.
    """
    sizes = [0] * plan.model.num_layers
    platform = plan.mesh.devices.flat[0].platform
    for path, w in weights.items():
        if (layer := layer_of(path)) is not None:
            sizes[layer] += sum(map(layouts.device_bytes, jax.tree.leaves(w)))
    first = len(sizes) - LEAST
    while first and sum(sizes[first:]) < config.cpu_offload_gib * GIB:
        first -= 1
    check_host(sum(sizes[first:]) * num_devices(plan.mesh), platform)
    if platform == "tpu":
        on_host = [w for path, w in weights.items() if (layer := layer_of(path)) is not None and layer >= first]
        check_copies(jax.tree.leaves(on_host))
    return first


def check_copies(arrays: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Raises ConfigError if a TPU cannot copy these weights from host memory."""
    narrow = {x.dtype.name for x in arrays if jax.dtypes.itemsize_bits(x.dtype) < NARROWEST_FROM_HOST}
    if narrow:
        raise ConfigError(
            f"cpu_offload_gib must be 0 on a TPU for weights in {', '.join(sorted(narrow))}, which JAX "
            f"{jax.__version__} cannot copy from host memory: take 16-bit weights, or JAX 0.11 or newer (Python 3.12)"
        )


def check_host(needed: int, platform: str) -> None:
    """Raises ConfigError unless `needed` bytes of weights fit in host memory for devices of this platform."""
    free = memory.available_host_bytes()
    pool = int(os.environ.get(HOST_POOL, USUAL_HOST_POOL)) * GIB
    needs = f"cpu_offload_gib needs {memory.size(needed)} of host memory for all devices"
    if needed > free:
        raise ConfigError(f"{needs}, but {memory.size(free)} are free: lower it")
    if platform == "gpu" and needed > pool:
        hint = f"set {HOST_POOL} to {2 * needed // GIB + USUAL_HOST_POOL} before JAX starts, or lower it"
        raise ConfigError(f"{needs}, but JAX pins at most {memory.size(pool)} for GPUs: {hint}")


@dataclass(frozen=True)
class _Parts:
    """Reads parts of a model, and chooses their kernels; the same for weights of the same forms."""

    config: EngineConfig
    plan: ModelPlan
    source: Checkpoint | None  # the opened files; None: weights are random
    decoders: dict[str, Decoder]  # by the backend for quantized weights
    chosen: dict[Any, str]  # the backend for weights of given forms

    def read(self, part: Part, *, progress: bool) -> tuple[Decoder, dict[str, Any]]:
        """The parameters of a part of the model, and a decoder with the kernels that suit them."""
        config = self.config
        plan = self.plan
        own = plan.decoder.clone(stage=part)
        backend = config.matmul_backend
        params = make_params(own, plan.folder, plan.mesh, config, progress=progress, source=self.source)
        leaves, structure = jax.tree.flatten(list(flatten_dict(params, sep="/").values()))
        forms = structure, tuple((x.shape, x.dtype) for x in leaves)
        if forms not in self.chosen:
            self.chosen[forms] = checked_matmul_backend(own, params, plan.mesh, backend)
        chosen = self.chosen[forms]
        if chosen not in self.decoders:
            self.decoders[chosen] = with_matmul(plan.decoder, plan.mesh, chosen)
        if chosen == backend:
            params = arranged(params, plan.mesh, plan.dtype, backend)
        return self.decoders[chosen], params


def load_streaming(
    config: EngineConfig, devices: list[jax.Device] | None, *, progress: bool, static: bool | None
) -> tuple[ModelPlan, dict[str, Any], ModelRunner]:
    """Reads a model, with its last layers into host memory one by one. Returns its parameters too, with the shapes of
    those in host memory. Raises ConfigError or CheckpointError."""
    plan = ModelPlan.of(config, devices, checks=True)
    check_model(config, plan)
    plan = replace(plan, decoder=check_ops(plan.decoder, progress=progress))
    forms = abstract_weights(plan.decoder, plan.folder, plan.mesh, config)
    first = first_on_host(config, plan, forms)
    dummy = config.load_format == "dummy"
    source = None if dummy else Checkpoint.open(plan.folder, config.quantization, config.ignore_config_keys)
    parts = _Parts(config, plan, source, {config.matmul_backend: plan.decoder}, {})
    layers: list[HostLayer] = []
    params: dict[str, Any] = {}
    for number in range(first, plan.model.num_layers):
        decoder, read = parts.read(Part(range(number, number + 1), around=False), progress=False)
        own = read[f"layers_{number}"]
        layer = HostLayer.of(number, decoder, own)
        params |= {f"layers_{number}": jax.tree.map(_shape, own)}
        layers.append(layer._replace(arrays=[move_to_host(x) for x in layer.arrays]))
    resident = Part(range(first), around=True)
    decoder, read = parts.read(resident, progress=progress)
    log.info("%s", memory.describe_weights(read))
    rows = config.max_num_seqs, memory.penalty_rows(config, plan.model)
    runner = ModelRunner(
        decoder.clone(stage=resident),
        read,
        plan.mesh,
        *rows,
        max_tokens_per_call=1,
        static=static,
        streamed=StreamedLayers(layers),
    )
    runner.set_cache_size(plan.one_page, -(-plan.longest // plan.one_page.page_size))
    log.info(
        "%d of %d layers are in host memory, %s per device; %d of them are on the devices at a time",
        len(layers), plan.model.num_layers, memory.size(runner.streamed_bytes), MOST,
    )  # fmt: skip
    return plan, params | read, runner


def read_anew(config: EngineConfig, plan: ModelPlan, runner: ModelRunner, source: Checkpoint | None) -> list[jax.Array]:
    """Other weights for a runner, as `ModelRunner.weights`. One of the layers for host memory is on the devices at
    a time. plan: with the other weights' folder."""
    parts = _Parts(config, plan, source, {config.matmul_backend: plan.decoder}, {})
    on_host = list[jax.Array]()
    assert runner.streamed is not None
    layers = runner.streamed.layers
    for layer in layers:
        number = layer.number
        _, read = parts.read(Part(range(number, number + 1), around=False), progress=False)
        on_host += map(move_to_host, jax.tree.leaves(read[f"layers_{number}"]))
    _, read = parts.read(Part(range(layers[0].number), around=True), progress=False)
    return runner.bundled(read) + on_host


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
