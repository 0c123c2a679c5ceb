"""`jaxserve models inspect`: a model's use of each device's memory, computed without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import num_devices, num_groups
from jaxserve.devices.targets import target_memory
from jaxserve.engine.encoder_loading import abstract_encoder
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution import memory
from jaxserve.execution.encoder_runner import EncoderRunner
from jaxserve.models.abstract_weights import abstract_weights
from jaxserve.models.spec import ModelConfig
from jaxserve.pallas_kernels.types import BlockArray, PanelArray, QuantArray


def describe_model(config: EngineConfig, devices: list[Any] | None = None) -> Iterator[str]:
    """The report's lines: shape, weights by dtype, KV cache, and how many requests fit.

    `devices` may be those of a target; None is this machine's. Raises ConfigError or CheckpointError for a model that
    could not be served with these settings.
    """
    plan = ModelPlan.of(config, devices)
    model = plan.model
    mesh = plan.mesh
    layout = plan.one_page
    device = mesh.devices.flat[0]
    params = abstract_weights(plan.decoder, plan.folder, mesh, config)
    yield f"model: {_shape(model)}"
    numbers = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params, is_leaf=_is_weight))
    yield f"parameters: {numbers:,}"
    yield f"devices: {num_devices(mesh)} x {device.device_kind}, computing in {plan.dtype}"
    yield memory.describe_weights(params)
    per_device = f"{layout.device_token_bytes(mesh):,} a device"
    yield f"KV cache per token: {layout.token_bytes:,} bytes in {layout.dtype}, {per_device}"
    weights = sum(memory.bytes_by_dtype(params).values())
    states = layout.state_bytes(mesh)
    encoder = abstract_encoder(plan)
    weights += 0 if encoder is None else encoder.weight_bytes
    slots = 0 if encoder is None else encoder.rows_bytes
    if layout.states is not None:
        of_all = f"{memory.size(states)} a device for {config.max_num_seqs} sequences"
        yield f"states of recurrent layers: {layout.states.slot_bytes:,} bytes a sequence, {of_all}"
        if layout.states.snapshots:
            interval = layout.snapshot_interval(config.state_snapshot_interval)
            yield memory.describe_snapshots(layout.states, interval)
    if devices is None:
        budget = memory.budget(config, device, num_devices(mesh), weights, slots, states)
    else:
        total = target_memory(device)
        budget = memory.Budget(
            total, config.memory_utilization, weights, slots, memory.RESERVE_BYTES, None, True, states
        )
    most = memory.pages_of_longest(config, plan.longest, layout.page_size, layout.groups.windows)
    page_bytes = layout.device_page_bytes(mesh)
    pages = memory.fitting_pages(config, most, page_bytes, budget, memory.Needs())
    yield f"{budget.describe(memory.Needs(), pages * page_bytes)}, before the programs and slots"
    tokens = memory.fitting_tokens(config, replace(layout, num_pages=pages), plan.longest)
    requests = max(pages - 1, 0) // most  # page 0 is the null page, which holds no tokens
    each = "" if (groups := num_groups(mesh)) == 1 else f" of each of {groups} groups"
    yield f"tokens that fit the KV cache{each}: {tokens:,}, or {requests:,} requests of {plan.longest:,} tokens"
    yield f"tokens per page: {layout.page_size}"
    if encoder is not None:
        yield from _eyes(encoder)


def _eyes(encoder: EncoderRunner) -> Iterator[str]:
    shape = encoder.encoder.config
    numbers = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(encoder.params))
    yield (
        f"pictures: an encoder of {len(shape.layers)} layers, hidden {shape.hidden_size}, {numbers:,} parameters; "
        f"{shape.patch_shape[-1]} x {shape.patch_shape[-1]} pixels a patch, {shape.joined} patches a token"
    )
    yield (
        f"  {memory.size(encoder.weight_bytes)} of weights and {memory.size(encoder.rows_bytes)} of features a device, "
        f"which has room for {encoder.rows:,} tokens of pictures; a picture has at most {encoder.sizes[-1]:,} patches"
    )


def _is_weight(x: Any) -> bool:
    return isinstance(x, QuantArray | BlockArray | PanelArray)


def _shape(model: ModelConfig) -> str:
    numbers = " or ".join(map(str, sorted({attention.num_heads for attention in model.attentions})))
    kv_heads = " or ".join(map(str, sorted({attention.num_kv_heads for attention in model.attentions})))
    heads = f"{numbers} heads over {kv_heads} of keys and values" if model.attentions else "no attention"
    return (
        f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {heads}, vocabulary {model.vocab_size}"
    )
