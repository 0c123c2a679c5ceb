"""The forms that a model's weights will have on the devices, as abstract arrays, without loading them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.checkpoints.load import RowReader, Stack, member_of, read_weight
from jaxserve.checkpoints.mixed import by_type
from jaxserve.checkpoints.quantized import StoredRows
from jaxserve.config import EngineConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.expert_stacks import abstract_stack
from jaxserve.models.load import Checkpoint
from jaxserve.models.panels import Packing, is_matrix
from jaxserve.models.quantized import (
    FORMS,
    SCHEMES,
    STACKS,
    Rounding,
    abstract_like,
    arranged,
    as_blocks,
    keeps_blocks,
    quantized_abstract,
    rounded_form,
)
from jaxserve.models.weights import abstract_params
from jaxserve.models.wide_experts import as_in_files, filled
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import BLOCK_KINDS, BlockArray, MixedArray, QuantArray


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
        scheme = config.quantization if config.quantization in FORMS and not config.dequantize else None
        made = plain if scheme is None else quantized_abstract(plain, scheme)
        return packing.rounded(made) if packing else made
    source = Checkpoint.open(path, config.quantization, config.ignore_config_keys)
    pieces = source.pieces(decoder)
    reader = source.reader
    if packing:
        plain |= packing.stored(plain, pieces, source.tensors)
    in_files = abstract_params(as_in_files(decoder), mesh)
    if reader is None:
        scheme = config.quantization
        if scheme not in SCHEMES:
            return plain
        return {name: _rounded(name, scheme, in_files[name], target, packing, mesh) for name, target in plain.items()}
    as_stored = packing.types if packing else BLOCK_KINDS if keeps_blocks(mesh) and not config.dequantize else ()
    known: dict[Any, Any] = {}
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
            made = _one_of_a_kind(host, read, one, packing, mesh, keep_mixed=not stacked)
            known[kind] = abstract_stack(made, target, packing, mesh) if stacked and made is not None else made
        if known[kind] is not None:
            plain[weight] = known[kind]
    return plain


def _rounded(
    name: str,
    scheme: str,
    in_file: jax.ShapeDtypeStruct,
    target: jax.ShapeDtypeStruct,
    packing: Packing | None,
    mesh: Mesh,
) -> Any:
    """The form of a weight that files hold as floats and that is rounded while it is read, before packing."""
    stacked = name.endswith(STACKS)
    own, one = (member_of(in_file), member_of(target)) if stacked else (target, target)
    host = rounded_form(name, own.shape, scheme)
    if host is None:
        return target
    host = filled(name, host, one)
    made = host if packing and packing.fits(host) else abstract_like(host, one.sharding)
    return abstract_stack(made, target, packing, mesh) if stacked else made


def _one_of_a_kind(
    host: Any,
    again: Callable[[], Any],
    target: jax.ShapeDtypeStruct,
    packing: Packing | None,
    mesh: Mesh,
    keep_mixed: bool = True,
) -> Any:
    """The form that a weight of the host will have on the devices, before packing, as `models.load.load_params` makes
    it; None: floats. `again` reads the weight without keeping rows as the file stores them. `keep_mixed`: rows of
    several types may become a MixedArray."""
    if isinstance(host, StoredRows) and (packing is None or packing.abstract(host, mesh) is None):
        blocks = None if packing else as_blocks(host, target.sharding)
        host = blocks or (by_type(host) if keep_mixed else None) or again()
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
    tensor = source.tensors[part]
    reader = source.reader
    kind = reader.type_of(part) if isinstance(reader, RowReader) else None
    return kind, tensor.dtype, tensor.shape
