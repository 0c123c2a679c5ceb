"""Reads LoRA adapters in llama.cpp's GGUF layout, as its convert_lora_to_gguf.py writes them.

Beside the name of each changed weight the file has NAME.lora_a [rank, in] and NAME.lora_b [out, rank]; experts have an
axis in front, and of embeddings lora_a is [vocab, rank]. The scaling is alpha / rank, or 1 without an alpha (llama.cpp,
src/llama-adapter.h). As in files of models, Llama's queries and keys have the rows of each head in pairs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.gguf import read_gguf
from jaxserve.checkpoints.gguf_architectures import ARCHITECTURES, HF_TOP, ROLES, TOP, Architecture
from jaxserve.checkpoints.gguf_tensor import GGUFTensor
from jaxserve.checkpoints.mistral_native import in_halves
from jaxserve.config import ConfigError
from jaxserve.models.adapter_targets import AdapterTargets, LowRank

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.weight\.lora_(?P<side>[ab])")


def read_gguf_adapter(path: Path, targets: AdapterTargets) -> dict[str, LowRank]:
    """As `peft.read_peft`."""
    file = read_gguf(path)
    metadata = file.metadata
    kinds = {"general.type": "adapter", "adapter.type": "lora"}
    for key, wanted in kinds.items():
        if metadata.get(key) != wanted:
            raise ConfigError(f"{path}: {key} is {metadata.get(key)!r}, and only {wanted!r} can be added to a model")
    if metadata.get("adapter.alora.invocation_tokens") is not None:
        raise ConfigError(f"{path}: adapters that begin at a token (aLoRA) are not supported")
    row = ARCHITECTURES.get(metadata.get("general.architecture", ""))
    if row is None:
        raise ConfigError(f"{path}: architecture {metadata.get('general.architecture')!r} is not supported")
    alpha = float(metadata.get("adapter.lora.alpha", 0.0))
    sides: dict[tuple[str | None, str], dict[str, np.ndarray]] = defaultdict(dict)
    for stored in file.tensors.values():
        match = _NAME.fullmatch(stored.name)
        if match is None:
            raise CheckpointError(f"{path}: tensor {stored.name!r} is neither a lora_a nor a lora_b of a weight")
        tensor = GGUFTensor(stored.name, stored.path, np.dtype(np.float32), stored.shape, stored.start, stored.type)
        sides[match["layer"], match["part"]][match["side"]] = tensor.read().astype(np.float32)
    found: dict[str, LowRank] = {}
    for (layer, part), pair in sides.items():
        if pair.keys() != {"a", "b"}:
            raise CheckpointError(f"{path}: {part} of layer {layer} has only lora_{next(iter(pair))}")
        a, b = pair["a"], pair["b"]
        b = b * (alpha / b.shape[-1] if alpha else 1.0)
        name = _weight(path, layer, part, row, targets)
        if "{e}" in name:
            found |= {name.format(e=e): matrices for e, matrices in enumerate(zip(a, b, strict=True))}
        elif part == "token_embd":
            found[name] = np.ascontiguousarray(b.T), a
        else:
            paired = row.paired and part in ("attn_q", "attn_k")
            found[name] = a, in_halves(b, targets.head_dim) if paired else b
    return found


def _weight(path: Path, layer: str | None, part: str, row: Architecture, targets: AdapterTargets) -> str:
    """The name of a weight of the model, by its name in GGUF files; with "{e}" for experts."""
    role = (ROLES | dict(row.roles) if layer else TOP).get(part)
    name = targets.roles.get(f"{role}.weight", "").replace("{i}", layer or "")
    if row.modules and part in (row.modules if layer else HF_TOP):
        name = f"model.layers.{layer}.{row.modules[part]}.weight" if layer else f"{HF_TOP[part]}.weight"
    if name.replace("{e}", "0") not in targets.shapes:
        where = f"of layer {layer} " if layer else ""
        raise CheckpointError(f"{path}: the model has no weight {part} {where}that adapters may change")
    return name
