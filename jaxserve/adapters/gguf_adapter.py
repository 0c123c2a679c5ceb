"""Reads LoRA adapters in llama.cpp's GGUF layout, as its convert_lora_to_gguf.py writes them.

Beside the name of each changed weight the file has NAME.lora_a [rank, in] and NAME.lora_b [out, rank]; experts have an
axis in front, and of embeddings lora_a is [vocab, rank]. The scaling is alpha / rank, or 1 without an alpha (llama.cpp,
src/llama-adapter.h). As in files of models, Llama's queries and keys have the rows of each head in pairs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import shown
from jaxserve.checkpoints.gguf import HEADER_ONLY, GGUFFile, StoredTensor, read_gguf
from jaxserve.checkpoints.gguf_architectures import ARCHITECTURES
from jaxserve.checkpoints.gguf_row import HF_TOP, ROLES, TOP, Architecture
from jaxserve.checkpoints.gguf_tensor import GGUFTensor
from jaxserve.checkpoints.mistral_native import halves_of_pairs
from jaxserve.config import ConfigError
from jaxserve.models.changeable import Changeable, LowRank

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.weight\.lora_(?P<side>[ab])")


def read_gguf_adapter(path: Path, changeable: Changeable) -> dict[str, LowRank]:
    """As `peft.read_peft`."""
    file = read_gguf(path)
    metadata = file.metadata
    if HEADER_ONLY in metadata:
        raise ConfigError(f"{path} is the header of a file ({HEADER_ONLY}), without the numbers of its tensors")
    kinds = {"general.type": "adapter", "adapter.type": "lora"}
    for key, wanted in kinds.items():
        found = metadata.get(key)
        if not isinstance(found, str) or found != wanted:
            raise ConfigError(f"{path}: {key} is {shown(found)}, and only {wanted!r} can be added to a model")
    if metadata.get("adapter.alora.invocation_tokens") is not None:
        raise ConfigError(f"{path}: adapters that begin at a token (aLoRA) are not supported")
    architecture = metadata.get("general.architecture", "")
    row = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if row is None:
        raise ConfigError(f"{path}: architecture {shown(architecture)} is not supported")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ConfigError(f"{path}: adapter.lora.alpha must be a number, got {shown(alpha)}")
    if len(file.tensors) > changeable.most_tensors:
        raise CheckpointError(f"{path} has more than {changeable.most_tensors} tensors")
    made: dict[str, LowRank] = {}
    for (layer, part), (a, b) in _pairs(file).items():
        name = _weight(path, layer, part, row, changeable)
        made |= _matrices(path, name, a, b, alpha, changeable, paired=row.paired and part in ("attn_q", "attn_k"))
    return made


def _pairs(file: GGUFFile) -> dict[tuple[str | None, str], tuple[StoredTensor, StoredTensor]]:
    """(layer, part of it) -> the tensors lora_a and lora_b."""
    sides: dict[tuple[str | None, str], dict[str, StoredTensor]] = defaultdict(dict)
    for stored in file.tensors.values():
        match = _NAME.fullmatch(stored.name)
        if match is None:
            raise CheckpointError(
                f"{file.path}: tensor {shown(stored.name)} is neither a lora_a nor a lora_b of a weight"
            )
        sides[match["layer"], match["part"]][match["side"]] = stored
    for (layer, part), pair in sides.items():
        if pair.keys() != {"a", "b"}:
            raise CheckpointError(f"{file.path}: {part} of layer {layer} has only lora_{next(iter(pair))}")
    return {key: (pair["a"], pair["b"]) for key, pair in sides.items()}


def _matrices(
    path: Path, name: str, a: StoredTensor, b: StoredTensor, alpha: float, changeable: Changeable, *, paired: bool
) -> dict[str, LowRank]:
    """The matrices for a weight of the model, or with "{e}" in its name for that of each expert. Shapes are checked
    before numbers are read."""
    names = [name]
    is_table = a.name.startswith("token_embd.")
    shapes = (b.shape[::-1], a.shape) if is_table else (a.shape, b.shape)
    if "{e}" in name:
        count = next(e for e in itertools.count() if name.replace("{e}", str(e)) not in changeable.shapes)
        if not a.shape[0] == b.shape[0] == count:
            raise CheckpointError(
                f"{path}: A {list(a.shape)} and B {list(b.shape)} of {shown(a.name)} are not those of {count} experts"
            )
        names = [name.replace("{e}", str(e)) for e in range(count)]
        shapes = (a.shape[1:], b.shape[1:])
    for one in names:
        changeable.check(path, one, *shapes)
    up = _floats(b) * (alpha / b.shape[-1] if alpha else 1.0)
    down = _floats(a)
    if is_table:
        return {name: (np.ascontiguousarray(up.T), down)}
    if "{e}" in name:
        return dict(zip(names, zip(down, up, strict=True), strict=True))
    return {name: (down, halves_of_pairs(up, changeable.head_dim) if paired else up)}


def _floats(stored: StoredTensor) -> np.ndarray:
    kind = np.dtype(np.float32)
    return GGUFTensor(stored.name, stored.path, kind, stored.shape, stored.start, stored.type).read().astype(kind)


def _weight(path: Path, layer: str | None, part: str, row: Architecture, changeable: Changeable) -> str:
    """The name of a weight of the model, by its name in GGUF files; with "{e}" for experts."""
    role = (ROLES | dict(row.roles) if layer else TOP).get(part)
    name = changeable.roles.get(f"{role}.weight", "").replace("{i}", layer or "")
    if part in row.changed:
        name = ""
    if row.modules and part in (row.modules if layer else HF_TOP):
        name = f"model.layers.{layer}.{row.modules[part]}.weight" if layer else f"{HF_TOP[part]}.weight"
    if name.replace("{e}", "0") not in changeable.shapes:
        where = f"of layer {shown(layer)} " if layer else ""
        raise CheckpointError(f"{path}: the model has no weight {shown(part)} {where}that adapters may change")
    return name
