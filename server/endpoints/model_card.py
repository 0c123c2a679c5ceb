"""What a model's files tell about it, for APIs that list models with their size, family and form."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path

import msgspec

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import read_json
from jaxserve.checkpoints.gguf import read_gguf
from jaxserve.checkpoints.hub import local_folder
from jaxserve.checkpoints.safetensors import read_folder
from jaxserve.server.ipc.messages import Ready


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    format: of the files: "gguf", "safetensors" or "orbax".
    family: the model's kind in its config, such as "llama".
    parameters: number of weights; 0: not known.
    stored: the type in which most of them are stored, such as "Q4_K" or "BF16", or the method that quantized them.
    size: bytes of the files.
    modified: time of the newest file, in seconds since 1970.
    """

    format: str
    family: str = "unknown"
    parameters: int = 0
    stored: str = "unknown"
    size: int = 0
    modified: float = 0.0


def model_card(info: Ready) -> ModelCard:
    """The card of the weights that are served. Reads headers of files the first time: call it off the event loop."""
    return _card(Path(info.weights.path or info.model_folder))


def card_of(source: str) -> ModelCard:
    """The card of a model that has not been loaded yet, if its files are on this machine."""
    path = local_folder(source)
    return ModelCard(format="unknown") if path is None else _card(path)


@lru_cache(maxsize=64)
def _card(path: Path) -> ModelCard:
    """A file that cannot be read any more leaves what it would tell unknown."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    size = modified = 0.0
    for file in files:
        with contextlib.suppress(OSError):
            size += file.stat().st_size
            modified = max(modified, file.stat().st_mtime)
    kind = "gguf" if path.is_file() else "orbax" if (path / "orbax").is_dir() else "safetensors"
    card = ModelCard(format=kind, size=int(size), modified=modified)
    try:
        return _of_gguf(card, path) if path.is_file() else _of_folder(card, path)
    except (CheckpointError, OSError, ValueError):
        return card


def _of_gguf(card: ModelCard, path: Path) -> ModelCard:
    file = read_gguf(path)
    types: Counter[str] = Counter()
    for tensor in file.tensors.values():
        types[tensor.type.name] += math.prod(tensor.shape)
    family = file.metadata.get("general.architecture")
    return _with_types(card, family, types)


def _of_folder(card: ModelCard, path: Path) -> ModelCard:
    config = read_json(path / "config.json")
    card = _with_types(card, config.get("model_type"), Counter())
    types: Counter[str] = Counter()
    for tensor in read_folder(path).values():
        types[str(tensor.dtype)] += math.prod(tensor.shape)
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    card = _with_types(card, card.family, types)
    return msgspec.structs.replace(card, stored=method) if isinstance(method, str) else card


def _with_types(card: ModelCard, family: object, types: Counter[str]) -> ModelCard:
    """The card with what tensors tell: the number of elements of each type."""
    stored = types.most_common(1)[0][0] if types else "unknown"
    name = family if isinstance(family, str) else "unknown"
    return msgspec.structs.replace(card, family=name, parameters=types.total(), stored=_SHORT.get(stored, stored))


_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
