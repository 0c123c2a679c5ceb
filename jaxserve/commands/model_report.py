"""`jaxserve models inspect`: a model's use of each device's memory, computed without loading it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoints.load import RowReader, Stack, member_of, read_weight
from jaxserve.checkpoints.mixed import by_type
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.config import EngineConfig
from jaxserve.devices.mesh import num_devices
from jaxserve.devices.targets import target_memory
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.execution import memory
from jaxserve.models.decoder import Decoder
from jaxserve.models.expert_stacks import abstract_stack
from jaxserve.models.load import Checkpoint
from jaxserve.models.panels import Packing, is_matrix
from jaxserve.models.quantized import (
    FORMS,
    Rounding,
    abstract_like,
    arranged,
    as_blocks,
    keeps_blocks,
    quantized_abstract,
)
from jaxserve.models.spec import ModelConfig
from jaxserve.models.weights import abstract_params
from jaxserve.models.wide_experts import as_in_files, filled
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray, MixedArray, PanelArray, QuantArray


def describe_model(config: EngineConfig, devices: list[Any] | None = None) -> Iterator[str]:
    """The report's lines: shape, weights by dtype, KV cache, and how many requests fit.

    `devices` may be those of a target; None is this machine's. Raises ConfigError or CheckpointError for a model that
    could not be served with these settings.
    """
    plan = ModelPlan.of(config, devices)
    model, mesh, layout = plan.model, plan.mesh, plan.one_page
    device = mesh.devices.flat[0]
    params = abstract_weights(plan.decoder, plan.folder, mesh, config)
    yield f"model: {_shape(model)}"
    numbers = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params, is_leaf=_is_weight))
    yield f"parameters: {numbers:,}"
    yield f"devices: {num_devices(mesh)} x {device.device_kind}, computing in {plan.dtype}"
    yield memory.describe_weights(params)
    per_device = f"{layout.token_bytes // layout.ways(mesh):,} a device"
    yield f"KV cache per token: {layout.token_bytes:,} bytes in {layout.dtype}, {per_device}"
    weights, states = sum(memory.bytes_by_dtype(params).values()), layout.state_bytes(mesh)
    if layout.states is not None:
        of_all = f"{memory.size(states)} a device for {config.max_num_seqs} sequences"
        yield f"states of recurrent layers: {layout.states.slot_bytes:,} bytes a sequence, {of_all}"
    if devices is None:
        budget = memory.budget(config, device, num_devices(mesh), weights, 0, states)
    else:
        total = target_memory(device)
        budget = memory.Budget(total, config.memory_utilization, weights, 0, memory.RESERVE_BYTES, None, True, states)
    page_bytes = layout.page_bytes // layout.ways(mesh)
    most = memory.pages_of_longest(config, plan.longest, layout.page_size, layout.groups.windows)
    pages = memory.fitting_pages(config, most, page_bytes, budget, memory.Needs())
    yield f"{budget.describe(memory.Needs(), pages * page_bytes)}, before the programs and slots"
    tokens = memory.fitting_tokens(config, replace(layout, num_pages=pages), plan.longest)
    requests = max(pages - 1, 0) // most  # page 0 is the null page, which holds no tokens
    yield f"tokens that fit the KV cache: {tokens:,}, or {requests:,} requests of {plan.longest:,} tokens"
    yield f"tokens per page: {layout.page_size}"


def abstract_weights(decoder: Decoder, path: Path, mesh: Mesh, config: EngineConfig) -> dict[str, Any]:
    """Path -> the form that the weight will have on the devices, as abstract arrays. Reads only one quantized weight of
    each kind from the checkpoint."""
    packing = Packing.of(config, mesh)
    rounding = Rounding(config.rounding, Device.of(mesh.devices.flat[0]), decoder.dtype)
    weights = {name: rounding(name, w) for name, w in _as_read(decoder, path, mesh, config, packing).items()}
    if packing is None:
        return arranged(weights, mesh, decoder.dtype, config.matmul_backend)
    return {name: packing.abstract(w, mesh) if is_matrix(name) else w for name, w in weights.items()}


def _as_read(decoder: Decoder, path: Path, mesh: Mesh, config: EngineConfig, packing: Packing | None) -> dict[str, Any]:
    """The weights' forms as they are read, before rounding of inputs and packing."""
    plain: dict[str, Any] = dict(abstract_params(decoder, mesh))
    if config.load_format == "dummy":
        return quantized_abstract(plain, config.quantization) if config.quantization in FORMS else plain
    source = Checkpoint.open(path, config.quantization, config.ignore_config_keys)
    pieces, reader = source.pieces(decoder), source.reader
    if packing:
        plain |= packing.stored(plain, pieces, source.tensors)
    if reader is None:
        return plain
    as_stored = packing.types if packing else BLOCK_KINDS if keeps_blocks(mesh) and not config.dequantize else ()
    known: dict[Any, Any] = {}
    in_files = abstract_params(as_in_files(decoder), mesh)
    for weight, target in plain.items():
        parts = [part for piece in pieces[weight] for part in reader.parts(piece.name)]
        if not parts:
            continue
        stored = tuple(_form(source, part) for part in parts)
        kind = (re.sub(r"^layers_\d+/", "", weight), stored)
        if kind not in known:
            some = pieces[weight]
            stacked = isinstance(some, Stack)
            first, one = (some.members[0], member_of(target)) if isinstance(some, Stack) else (some, target)
            in_file = member_of(in_files[weight]) if stacked else one
            read = partial(read_weight, first, source.tensors, in_file, reader)
            host = filled(weight, read(as_stored, not config.dequantize and not stacked), one)
            made = _one_of_a_kind(host, read, one, packing, mesh, apart=not stacked)
            known[kind] = abstract_stack(made, target, packing, mesh) if stacked and made is not None else made
        if known[kind] is not None:
            plain[weight] = known[kind]
    return plain


def _one_of_a_kind(
    host: Any,
    again: Callable[[], Any],
    target: jax.ShapeDtypeStruct,
    packing: Packing | None,
    mesh: Mesh,
    apart: bool = True,
) -> Any:
    """The form that a weight of the host will have on the devices, before packing, as `models.load.load_params` makes
    it; None: floats. `again` reads the weight without keeping rows as the file stores them. `apart`: rows of several
    types may become a MixedArray."""
    if isinstance(host, StoredRows) and (packing is None or packing.abstract(host, mesh) is None):
        blocks = None if packing else as_blocks(host, target.sharding)
        host = blocks or (by_type(host) if apart else None) or again()
    if isinstance(host, MixedArray):
        parts = [_one_of_a_kind(part, again, target, packing, mesh) for part in host.parts]
        floats = [jax.ShapeDtypeStruct(part.shape, target.dtype, sharding=target.sharding) for part in host.parts]
        made = tuple(other if part is None else part for part, other in zip(parts, floats, strict=True))
        return replace(host, parts=made)
    if packing and isinstance(host, QuantArray) and packing.fits(host):
        return host
    if isinstance(host, QuantArray | BlockArray):
        return abstract_like(host, target.sharding)
    return host if isinstance(host, StoredRows) else None


def _form(source: Checkpoint, part: str) -> tuple[Any, ...]:
    """How a tensor is stored, which determines its weight's form. The dtype of quantized GGUF tensors is float32, so
    their GGUF type is needed too."""
    tensor, reader = source.tensors[part], source.reader
    kind = reader.type_of(part) if isinstance(reader, RowReader) else None
    return kind, tensor.dtype, tensor.shape


def _is_weight(x: Any) -> bool:
    return isinstance(x, QuantArray | BlockArray | PanelArray)


def _shape(model: ModelConfig) -> str:
    heads = f"{model.num_heads} heads over {model.num_kv_heads} of keys and values"
    return (
        f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {heads}, vocabulary {model.vocab_size}"
    )
