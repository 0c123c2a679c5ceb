"""Writes model folders in Hugging Face format, with quantized weights in layouts that other engines read.

Layouts: "compressed-tensors" (https://github.com/vllm-project/compressed-tensors: "pack-quantized" integers,
"float-quantized" fp8) and "awq" (AutoAWQ's gemm kernel, int4 only).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.awq import ORDER
from jaxserve.checkpoints.quantized import INT4, refine
from jaxserve.pallas_kernels.types import Activations, QuantArray

LAYOUTS = ("compressed-tensors", "awq")
_COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned values [rows, n] of 4 or 8 bits -> int32 [rows, ceil(n / per word)], the first in the lowest bits."""
    per = 32 // bits
    padded = np.pad(values.astype(np.uint32), ((0, 0), (0, -values.shape[1] % per)))
    words = padded.reshape(len(values), -1, per) << (np.arange(per, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


def compress(module: str, w: QuantArray, layout: str = LAYOUTS[0]) -> dict[str, np.ndarray]:
    """The tensors, by name, that store the weight of a module ("model.layers.0.mlp.down_proj").

    Raises CheckpointError for a weight that the layout cannot store.
    """
    w = jax.tree.map(np.asarray, refine(w, (1, w.block[1])))
    if w.order is not None or w.bias is not None:
        raise CheckpointError(f"{module}: neither {' nor '.join(LAYOUTS)} has a place for its column order or biases")
    if layout == "awq":
        return {f"{module}.{name}": values for name, values in _awq(module, w).items()}
    tensors: dict[str, Any] = {f"{module}.weight_scale": w.scale}
    if w.input_scale is not None:
        tensors[f"{module}.input_scale"] = w.input_scale.reshape(1)
    if not _is_packed(w):
        return tensors | {f"{module}.weight": w.codes}
    bits = _bits(w)
    tensors[f"{module}.weight_packed"] = pack(_unsigned(w.codes, bits), bits)
    tensors[f"{module}.weight_shape"] = np.array(w.shape, np.int64)
    if w.zero is not None:
        tensors[f"{module}.weight_zero_point"] = pack(_unsigned(w.zero, bits).T, bits).T
    return tensors


def _is_packed(w: QuantArray) -> bool:
    """Whether codes are packed into int32 words: integers are, except symmetric int8 with rounded inputs (W8A8)."""
    return w.codes.dtype in (INT4, np.int8) and not (w.activations and w.codes.dtype == np.int8 and w.zero is None)


def _format(w: QuantArray) -> str:
    if w.codes.dtype not in (INT4, np.int8):
        return "float-quantized"
    return "pack-quantized" if _is_packed(w) else "int-quantized"


def _bits(w: QuantArray) -> int:
    return 4 if w.codes.dtype == INT4 else 8


def _unsigned(values: Any, bits: int) -> np.ndarray:
    return values.astype(np.int32) + (1 << bits - 1)


def _awq(module: str, w: QuantArray) -> dict[str, Any]:
    """AutoAWQ's tensors: outputs are the last axis, eight of them in a word."""
    if w.codes.dtype != INT4 or w.shape[0] % 8:
        raise CheckpointError(f"{module}: the awq layout holds int4 for multiples of 8 outputs, not {w.shape[0]}")

    def packed(values: Any) -> np.ndarray:
        rows = _unsigned(values, 4).T
        return pack(rows.reshape(len(rows), -1, 8)[..., ORDER].reshape(rows.shape), 4)

    zero = np.zeros(w.scale.shape, np.int8) if w.zero is None else w.zero
    return {"qweight": packed(w.codes), "qzeros": packed(zero), "scales": w.scale.T.astype(np.float16)}


def quantization_config(weights: Mapping[str, QuantArray], plain: list[str], layout: str = LAYOUTS[0]) -> dict:
    """The quantization_config for quantized weights by module. `plain` are the linear modules that are not quantized.

    Only dtypes and shapes of the weights matter.
    """
    if layout == "awq":
        sizes = {min(w.block[1], w.shape[1]) for w in weights.values()}
        size = sizes.pop() if len(sizes) == 1 else -1  # all inputs
        extra = {"group_size": size, "zero_point": True, "version": "gemm", "modules_to_not_convert": plain or None}
        return {"quant_method": "awq", "bits": 4, **extra}
    sizes = {w.block[1] for w in weights.values() if w.block[1] < w.shape[1]}
    kinds: dict[str, list[str]] = {}
    for module, w in weights.items():
        kinds.setdefault(json.dumps([_arguments(w, sizes), _inputs(w.activations)]), []).append(module)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(kinds) == 1 else modules,
            "weights": json.loads(kind)[0],
            "input_activations": json.loads(kind)[1],
            "output_activations": None,
        }
        for i, (kind, modules) in enumerate(kinds.items())
    }
    formats = {_format(w) for w in weights.values()}
    if len(formats) > 1:
        raise CheckpointError(
            f"a checkpoint cannot mix {' and '.join(sorted(formats))} in the compressed-tensors layout"
        )
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(w: QuantArray, sizes: set[int]) -> dict[str, Any]:
    """A config group's `weights`. A weight whose only group has one of these `sizes` joins the group strategy."""
    whole = w.block[1] >= w.shape[1] and w.block[1] not in sizes
    return {
        "num_bits": _bits(w),
        "type": "int" if w.codes.dtype in (INT4, np.int8) else "float",
        "symmetric": w.zero is None,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else w.block[1],
        "dynamic": False,
    }


def _inputs(wanted: Activations | None) -> dict[str, Any] | None:
    """A config group's `input_activations`, which cannot express a ceiling; it is left out."""
    if wanted is None:
        return None
    return {
        "num_bits": 8,
        "type": "int" if wanted.dtype == "int8" else "float",
        "symmetric": True,
        "strategy": "tensor" if wanted.static else "token" if wanted.group is None else "group",
        "group_size": wanted.group,
        "dynamic": not wanted.static,
    }


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, and renames that file to `path` at the end, so that `path` is never incomplete."""
    partial = path.with_name(f".{path.name}.partial")
    yield partial
    os.replace(partial, path)


def write_shard(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    with complete_file(path) as partial:
        save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, partial, {"format": "pt"})
        partial.chmod(0o644)


def write_json(path: Path, content: Any) -> None:
    with complete_file(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_index(folder: Path, shards: Mapping[str, Mapping[str, int]]) -> None:
    """Writes model.safetensors.index.json; `shards`: file name -> tensor name -> bytes."""
    total = sum(size for tensors in shards.values() for size in tensors.values())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_rest(source: Path, folder: Path) -> None:
    """Copies a model's other files than weights and config.json: tokenizer, generation defaults, templates."""
    for path in (path for pattern in _COPIED for path in source.glob(pattern)):
        if path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, folder / path.name)
