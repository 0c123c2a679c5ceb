"""Converts a model's folder: to safetensors with Hugging Face's names, or to an Orbax checkpoint of the parameters.

Host memory holds the whole model once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxserve.checkpoints import orbax
from jaxserve.checkpoints.export import compress, copy_rest, quantization_config, write_index, write_json, write_shard
from jaxserve.checkpoints.hub import resolve_model
from jaxserve.checkpoints.load import Piece, Pieces, Stack
from jaxserve.checkpoints.quantized import refine
from jaxserve.config import ConfigError
from jaxserve.devices.mesh import make_mesh, padded_vocab, replicated
from jaxserve.models.decoder import Decoder
from jaxserve.models.families import find_family
from jaxserve.models.load import load_params, read_hf_config, read_model
from jaxserve.models.spec import AttentionSpec, ModelConfig
from jaxserve.models.splitting import sharded_kv_heads
from jaxserve.models.weights import weight_pieces
from jaxserve.pallas_kernels.types import QuantArray

FORMATS = ("orbax", "safetensors")


def convert_model(model: str, out: Path, form: str, tensor_parallel_size: int = 1) -> None:
    """Writes a copy of a model in one of FORMATS; the model may already be in either.

    `tensor_parallel_size` is the largest with which an Orbax checkpoint will be loaded. If it exceeds the model's KV
    heads, these are repeated in the checkpoint. Raises ConfigError or CheckpointError.
    """
    folder = resolve_model(model)
    if form not in FORMATS:
        raise ConfigError(f"the format must be one of {', '.join(FORMATS)}, got {form!r}")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; only folders are converted")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new folder")
    decoder, params = _read(folder, tensor_parallel_size)
    out.mkdir(parents=True, exist_ok=True)
    copy_rest(folder, out)
    source = read_hf_config(folder)
    values = source.values
    if form == "orbax":
        orbax.save(out, params)
    else:
        quantized = _write_safetensors(out, decoder, find_family(source).roles(decoder.config), params)
        values = {name: value for name, value in values.items() if name != "quantization_config"} | quantized
    write_json(out / "config.json", values)


def _read(folder: Path, tensor_parallel_size: int) -> tuple[Decoder, dict[str, Any]]:
    """The model's decoder, and its parameters by path."""
    config = read_model(folder)
    mesh = make_mesh(1, jax.devices("cpu"))
    if orbax.is_saved(folder):
        stored = orbax.describe(folder)
        place = replicated(mesh)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), stored)
        return stored_decoder(config, stored), orbax.restore(folder, abstract)
    kv_heads = sharded_kv_heads(config, tensor_parallel_size)
    rows = padded_vocab(config.vocab_size, tensor_parallel_size)
    decoder = Decoder(config, kv_heads, rows, np.dtype(config.dtype))
    return decoder, flatten_dict(load_params(decoder, folder, mesh), sep="/")


def stored_decoder(config: ModelConfig, stored: Mapping[str, orbax.Abstract]) -> Decoder:
    """The decoder whose parameters have the shapes of the Orbax checkpoint `stored`."""
    found = []
    for layer, spec in enumerate(one.attention for one in config.layers):
        # Its heads may be stored repeated. Those of latent attention never are.
        if isinstance(spec, AttentionSpec) and not spec.shares_kv:
            rows = stored[f"layers_{layer}/attention/qkv/kernel"].shape[0] // spec.head_dim
            found.append((rows - spec.num_heads) // 2)
    kv_heads = min(found, default=sharded_kv_heads(config, 1))
    dtype = jax.tree.leaves(stored["norm/scale"])[0].dtype
    return Decoder(config, kv_heads, stored["embed/table"].shape[0], dtype)


def take(value: np.ndarray | QuantArray, piece: Piece) -> np.ndarray | QuantArray:
    """The tensor that `piece` loads into the parameter `value`: the reverse of loading."""
    if isinstance(value, QuantArray):
        rows = np.broadcast_to(np.arange(value.shape[0])[:, None], value.shape)
        chosen = _inside(rows, piece)[..., 0].ravel()
        value = refine(value, (1, value.block[1]))
        parts = {name: getattr(value, name) for name in ("codes", "scale", "zero", "bias", "gain")}
        return replace(value, **{name: part[chosen] for name, part in parts.items() if part is not None})
    made = _inside(value, piece).reshape(piece.shape)
    return np.ascontiguousarray(made.T) if piece.transposed else made


def _pieces_of(value: Any, pieces: Pieces) -> Iterator[tuple[Piece, np.ndarray | QuantArray]]:
    """The tensors that make up a parameter, with their values; of a stack one member after another."""
    if not isinstance(pieces, Stack):
        yield from ((piece, take(value, piece)) for piece in pieces)
        return
    for number, member in enumerate(pieces.members):
        own = jax.tree.map(itemgetter(number), value)
        yield from ((piece, take(own, piece)) for piece in member)


def _inside(value: np.ndarray, piece: Piece) -> np.ndarray:
    """The part of a parameter that a piece fills, without padding rows and repeated entries."""
    sizes = piece.split or piece.shape
    return piece.view(value)[tuple(slice(None if size == -1 else size) for size in sizes)]


def _write_safetensors(
    out: Path, decoder: Decoder, names: Mapping[str, str], params: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes one file per layer, and one for the rest. Returns the entries to add to config.json."""
    pieces = weight_pieces(decoder, names)
    if any(piece.take is not None for some in pieces.values() for piece in some):
        raise ConfigError(
            f"models of the family {decoder.config.family} can be saved as orbax, but not written as safetensors: "
            "parts of their tensors are reordered or split when they are loaded"
        )
    shards: dict[str, list[str]] = {}
    for path in pieces:
        shards.setdefault(path.split("/")[0] if path.startswith("layers_") else "rest", []).append(path)
    sizes = {}
    weights = {}
    plain = {names["head.weight"].removesuffix(".weight")}
    for i, paths in enumerate(shards.values()):
        tensors: dict[str, np.ndarray] = {}
        for path in paths:
            whole = jax.tree.map(np.asarray, params[path])
            for piece, value in _pieces_of(whole, pieces[path]):
                module = piece.name.removesuffix(".weight")
                if isinstance(value, QuantArray):
                    tensors |= compress(module, value)
                    weights[module] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), value)
                else:
                    tensors[piece.name] = value
                    plain |= {module} if path.endswith("/kernel") else set()
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(out / file, tensors)
        sizes[file] = {name: value.nbytes for name, value in tensors.items()}
    write_index(out, sizes)
    return {"quantization_config": quantization_config(weights, sorted(plain - weights.keys()))} if weights else {}
