"""A GGUF file as a Hugging Face checkpoint: its metadata as a config.json, its tensors under Hugging Face's names.

What the architectures' settings and tensors are is in `gguf_architectures`. Tensors of the first architectures get
Hugging Face's names. Those of the others keep the file's, and `names` says which role each has.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.gguf_blocks import FLOATS, needs_package
from jaxserve.checkpoints.gguf import StoredTensor, known_gguf
from jaxserve.checkpoints.gguf_adapted import STREAM_PARTS
from jaxserve.checkpoints.gguf_architectures import ARCHITECTURES
from jaxserve.checkpoints.gguf_config import names_of, read_config
from jaxserve.checkpoints.gguf_keys import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, Keys
from jaxserve.checkpoints.gguf_mmproj import read_mmproj
from jaxserve.checkpoints.gguf_row import BARE, EXPERT_PARTS, HF_TOP, NORMS, ROLES, TOP, Architecture
from jaxserve.checkpoints.gguf_tensor import ComputedTensor, GGUFTensor
from jaxserve.pallas_kernels.types import QuantArray

log = logging.getLogger(__name__)

BESIDE = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors that are settings
LATENT_PARTS = {"attn_k_b": "", "attn_v_b": ""}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?")


@dataclass(frozen=True)
class GGUFReader:
    """The QuantReader of a GGUF file (see `jaxserve.checkpoints.formats`)."""

    tensors: Mapping[str, GGUFTensor]
    description: str
    name: str = "gguf"

    def parts(self, weight: str) -> tuple[str, ...]:
        tensor = self.tensors.get(weight)
        return (weight,) if tensor is not None and tensor.type.name not in FLOATS else ()

    def read(self, weight: str, shape: tuple[int, ...]) -> QuantArray | np.ndarray:
        """Any weight of the file; quantized if its type is one that `decode` keeps quantized."""
        return self._tensor(weight, shape).read_blocks()

    def type_of(self, weight: str) -> str | None:
        """The name of a weight's GGUF type; None if the file has no such weight, or if its columns have another order
        there, so that its bytes are not those of the weight."""
        tensor = self.tensors.get(weight)
        return None if tensor is None or tensor.columns is not None else tensor.type.name

    def read_bytes(self, weight: str, shape: tuple[int, ...]) -> np.ndarray:
        """The bytes in the file: uint8 [rows, bytes of a row], with the rows in Hugging Face's order."""
        return self._tensor(weight, shape).read_bytes()

    def _tensor(self, weight: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = self.tensors.get(weight)
        if tensor is None or tensor.shape != tuple(shape):
            has = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise CheckpointError(f"tensor {weight!r} {has}, but the model asks for {list(shape)}")
        return tensor


@dataclass(frozen=True)
class GGUFModel:
    """A file's model, before its weights are read.

    Attributes:
      config: as in config.json.
      tensors: by Hugging Face's names, or by the file's names if there are `names`.
      names: role -> name of a tensor, in the terms of `jaxserve.models`; empty: the names are Hugging Face's.
      metadata: of the GGUF file.
    """

    config: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    reader: GGUFReader
    metadata: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)


def open_gguf(path: str | Path, ignored: Collection[str] = (), *, sees: bool = False) -> GGUFModel:
    """Reads the headers of a file, of its further parts and of the file with its image encoder, but no weights.
    `ignored` settings of the architecture ("logit_scale", or "llama.logit_scale") count as absent.

    Raises CheckpointError for damaged files, and for unsupported settings and tensors; `sees`: also where the image
    encoder cannot be used.
    """
    file = known_gguf(Path(path))
    keys = Keys(file, ARCHITECTURES, ignored)
    row = ARCHITECTURES[keys.architecture]
    config = read_config(keys, row)
    tensors = {}
    for stored in file.tensors.values():
        tensor = None if stored.name in BESIDE else _tensor(stored, row, config)
        if tensor is not None:
            tensors[tensor.name] = tensor
    if row.latent:
        tensors = _with_joined(tensors, config)
    tensors = row.adapt(tensors, config, file.metadata)
    kinds = {tensor.type for tensor in tensors.values()}
    if others := sorted(kind.name for kind in kinds if needs_package(kind)):
        log.warning("%s: weights of type %s are dequantized to floats as they are read", path, ", ".join(others))
    description = "GGUF " + ", ".join(sorted(kind.name for kind in kinds))
    names = {} if row.modules else names_of(row, file.tensors)
    eyes = read_mmproj(file, config, ignored, must=sees)
    if eyes is not None:
        config = _within(config | eyes.text) | eyes.whole
        tensors = {**tensors, **eyes.tensors}
    elif row.within:
        config = _within(config)
    return GGUFModel(config, tensors, GGUFReader(tensors, description), file.metadata, names)


def _within(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that sees, with these settings of its language model."""
    of_whole = ("architectures", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    return {key: config[key] for key in of_whole} | {"text_config": config}


def _tensor(stored: StoredTensor, row: Architecture, config: dict[str, Any]) -> GGUFTensor | None:
    """A tensor under its Hugging Face name if the architecture has `modules`, else under its own; None if it belongs to
    a layer behind the last one, which predicts further tokens."""
    parsed = _NAME.fullmatch(stored.name)
    layer, part, kind = parsed.groups() if parsed else (None, "", "")
    if layer and int(layer) >= config["num_hidden_layers"]:
        return None
    known: Mapping[str, str] = (row.modules or {**ROLES, **LATENT_PARTS, **row.roles}) if layer else {**TOP, **row.top}
    if part not in known or (part in LATENT_PARTS and not row.latent) or (kind is None and part not in BARE):
        raise CheckpointError(f"{stored.path}: tensor {stored.name!r} is of a kind that is not supported")
    stacked = part in (*EXPERT_PARTS, *STREAM_PARTS, *LATENT_PARTS)
    if stored.type.name not in FLOATS and len(stored.shape) != (3 if stacked else 2):
        raise CheckpointError(f"{stored.path}: tensor {stored.name!r} is quantized, but no matrix")
    pairs = config["head_dim"] if row.paired and part in ("attn_q", "attn_k") else 0
    if pairs and (pairs % 2 or stored.shape[0] % pairs):
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name!r} of {list(stored.shape)} has no whole heads of an even size {pairs}"
        )
    name = stored.name if kind else f"{stored.name}.weight"
    kind = kind or "weight"
    if row.modules:
        name = f"model.layers.{layer}.{known[part]}.{kind}" if layer else f"{HF_TOP[part]}.{kind}"
    dtype = FLOATS.get(stored.type.name, np.dtype(np.float32))
    offset = -1.0 if row.shifted and part in NORMS and kind == "weight" else 0.0
    return GGUFTensor(name, stored.path, dtype, stored.shape, stored.start, stored.type, pairs, offset)


def _join_heads(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """DeepSeek's kv_b [heads * (nope + v), rank] of keys [heads, rank, nope] and values [heads, v, rank]."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


def _with_joined(tensors: dict[str, GGUFTensor], config: dict[str, Any]) -> dict[str, GGUFTensor]:
    """The tensors, with each layer's attn_k_b and attn_v_b as one attn_kv_b, as older files have it."""
    made = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        keys, values = (made.pop(f"blk.{layer}.attn_{part}_b.weight", None) for part in "kv")
        if keys is None and values is None:
            continue
        heads = config["num_attention_heads"]
        rank = config["kv_lora_rank"]
        nope = config["qk_nope_head_dim"]
        dim = config["v_head_dim"]
        expected = (heads, rank, nope), (heads, dim, rank)
        if keys is None or values is None or (keys.shape, values.shape) != expected:
            path = tensors["token_embd.weight"].path
            raise CheckpointError(
                f"{path}: attn_k_b and attn_v_b of layer {layer} are not {expected[0]}, {expected[1]}"
            )
        name = f"blk.{layer}.attn_kv_b.weight"
        made[name] = ComputedTensor.of(name, (heads * (nope + dim), rank), (keys, values), _join_heads)
    return made
