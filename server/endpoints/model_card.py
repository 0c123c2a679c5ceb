"""What a model's files tell about it, for APIs that list models with their size, family and form."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
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
    facts: numbers of the config, such as the layers, by GGUF's names without the family: "block_count".
    """

    format: str
    family: str = "unknown"
    parameters: int = 0
    stored: str = "unknown"
    size: int = 0
    modified: float = 0.0
    facts: dict[str, int | float] = {}


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
    facts = {name: file.metadata.get(f"{family}.{name}") for name in _FACTS}
    return _with_types(card, family, types, facts)


def _of_folder(card: ModelCard, path: Path) -> ModelCard:
    config = read_json(path / "config.json")
    of_text = config.get("text_config")
    own = of_text if isinstance(of_text, dict) else config
    facts = {name: own.get(key) for name, key in _FACTS.items()}
    types: Counter[str] = Counter()
    with contextlib.suppress(CheckpointError):  # a folder without weights
        for tensor in read_folder(path).values():
            types[str(tensor.dtype)] += math.prod(tensor.shape)
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    card = _with_types(card, config.get("model_type"), types, facts)
    return msgspec.structs.replace(card, stored=method) if isinstance(method, str) else card


def _with_types(card: ModelCard, family: object, types: Counter[str], facts: Mapping[str, object]) -> ModelCard:
    """The card with what tensors tell, which is the number of elements of each type, and the config."""
    numbers = {name: value for name, value in facts.items() if type(value) in (int, float)}
    stored = types.most_common(1)[0][0] if types else "unknown"
    name = family if isinstance(family, str) else "unknown"
    return msgspec.structs.replace(
        card, family=name, parameters=types.total(), stored=_SHORT.get(stored, stored), facts=numbers
    )


# GGUF's names of numbers in a config, and those of config.json.
_FACTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
