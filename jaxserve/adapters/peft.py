"""Reads LoRA adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

Source: peft.tuners.lora (github.com/huggingface/peft, release 0.21). An adapter adds scaling * B A to a module's
weight, with A [rank, in] and B [out, rank]. The scaling is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(arXiv:2312.03732).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.load import FLOATS
from jaxserve.checkpoints.safetensors import TensorInfo, read_header
from jaxserve.config import ConfigError
from jaxserve.models.adapter_targets import AdapterTargets, LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings that need no care: they are read here, describe training, or say which modules the tensors' names show.
HARMLESS = {
    *("peft_type", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("auto_mapping", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout"),
    *("fan_in_fan_out", "init_lora_weights", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
CHANGED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")  # `init_lora_weights` that change the base's weights
MOST_PATTERN = 256  # characters of a regular expression in `alpha_pattern`
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
_EXPERTS = re.compile(r"(?:.+\.)?layers\.(?P<layer>\d+)\.(?:.+\.)?experts(?:\.base_layer)*")


def read_peft(folder: Path, targets: AdapterTargets) -> dict[str, LowRank]:
    """Name of a weight of the model -> the matrices that the adapter adds to it, B with the scaling; in float32.

    Raises CheckpointError for damaged files and for modules that the model does not have, and ConfigError for adapters
    that are more than added matrices.
    """
    settings = _Settings.read(folder / CONFIG)
    found: dict[str, LowRank] = {}
    for (module, is_table), (a, b) in _pairs(folder / WEIGHTS, targets).items():
        name = targets.weight_of(module)
        if name is None and (match := _EXPERTS.fullmatch(module)):
            found |= _of_experts(folder, module, int(match["layer"]), a, b, settings, targets)
            continue
        if name is None:
            known = ", ".join(sorted({one.rpartition(".")[2] for one in targets.by_module}))
            raise CheckpointError(f"{folder}: adapters can change {known} of this model, not {module}")
        b = b * settings.scaling(module, len(a))
        found[name] = (np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)) if is_table else (a, b)
    return found


class _Settings:
    """What adapter_config.json says of scalings."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self._path, self._values = path, values
        if values.get("peft_type", "LORA") != "LORA":
            raise ConfigError(f"{path}: peft_type is {values['peft_type']!r}, and only LORA is supported")
        for key, value in values.items():
            if key not in HARMLESS and value not in (None, False, "none") and value != [] and value != {}:
                raise ConfigError(f"{path}: {key}={value!r} is not supported: only matrices A and B can be added")
        begun = values.get("init_lora_weights", True)
        if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASES):
            raise ConfigError(
                f"{path}: init_lora_weights={begun!r} has changed the weights of the model itself; convert the adapter "
                "with PEFT's path_initial_model_for_weight_conversion"
            )
        for key in ("rank_pattern", "alpha_pattern"):
            patterns = values.get(key) or {}
            if not isinstance(patterns, dict) or any(len(pattern) > MOST_PATTERN for pattern in patterns):
                raise ConfigError(f"{path}: {key} must map patterns of at most {MOST_PATTERN} characters")

    @classmethod
    def read(cls, path: Path) -> _Settings:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must be a JSON object")
        return cls(path, values)

    def scaling(self, module: str, rank: int) -> float:
        """The factor of B A for a module whose matrices have this rank."""
        alpha = self._of("alpha_pattern", "lora_alpha", module, 8)
        if (stated := self._of("rank_pattern", "r", module, 8)) != rank:
            raise CheckpointError(f"{self._path}: {module} should have rank {stated}, and its matrices have {rank}")
        return float(alpha) / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def _of(self, patterns: str, key: str, module: str, default: int) -> float:
        """A module's own setting, by the first pattern that matches the end of its name, or that for all modules."""
        value = self._values.get(key, default)
        for pattern, own in (self._values.get(patterns) or {}).items():
            try:
                matches = re.match(rf"(.*\.)?({pattern})$", module)
            except re.error as error:
                raise ConfigError(f"{self._path}: {patterns} has no valid pattern {pattern!r}: {error}") from None
            if matches:
                value = own
                break
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{self._path}: {key} of {module} must be a number, got {value!r}")
        return value


def _pairs(path: Path, targets: AdapterTargets) -> dict[tuple[str, bool], LowRank]:
    """(module, whether it is a table of embeddings) -> A and B as in the file, in float32."""
    sides: dict[tuple[str, bool], dict[str, np.ndarray]] = defaultdict(dict)
    if not path.exists() and path.with_suffix(".bin").exists():
        raise CheckpointError(
            f"{path.with_suffix('.bin')} is a pickle, which is not read: save the adapter as safetensors"
        )
    for name, tensor in read_header(path).items():
        plain = name.removeprefix("base_model.model.")
        match = _KEY.fullmatch(plain)
        if match:
            sides[match["module"], bool(match["table"])][match["side"]] = _floats(tensor)
        elif plain.endswith("magnitude_vector") or ".lora_magnitude_vector" in plain:
            raise ConfigError(f"{path}: DoRA is not supported, and {name!r} belongs to it")
        elif not (plain.endswith(".base_layer.weight") and _is_copy(plain, tensor, targets)):
            raise CheckpointError(f"{path}: {name!r} is neither a lora_A nor a lora_B; nothing else can be added")
    for (module, _), pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{path}: {module} has only lora_{next(iter(pair))}")
        a, b = pair["A"], pair["B"]
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            raise CheckpointError(f"{path}: A {list(a.shape)} and B {list(b.shape)} of {module} do not fit each other")
    return {key: (pair["A"], pair["B"]) for key, pair in sides.items()}


def _is_copy(name: str, tensor: TensorInfo, targets: AdapterTargets) -> bool:
    """Whether a tensor can be the model's own, which PEFT saves beside adapters of embeddings."""
    own = targets.weight_of(name.removesuffix(".base_layer.weight"))
    return own is not None and targets.shapes[own] == tensor.shape


def _floats(tensor: TensorInfo) -> np.ndarray:
    if tensor.dtype.name not in FLOATS:
        raise CheckpointError(f"{tensor.path}: {tensor.name!r} has dtype {tensor.dtype.name}, not a plain float")
    return tensor.read().astype(np.float32)


def _of_experts(
    folder: Path, module: str, layer: int, a: np.ndarray, b: np.ndarray, settings: _Settings, targets: AdapterTargets
) -> dict[str, LowRank]:
    """The matrices of each expert, from those of a parameter with all experts' weights (`target_parameters`).

    A is [experts * rank, in] and B is [out, rank * experts], where the expert is the last index. PEFT nests several
    such parameters of a module in any order, so that only shapes tell which parameter is meant.
    """
    known = targets.experts_of(layer)
    if known is None:
        raise CheckpointError(f"{folder}: layer {layer} of this model has no experts, which {module} would change")
    count = known[0].experts
    assert count is not None
    fits = [t for t in known if t.shape == (b.shape[0], a.shape[1])]
    if not fits or len(a) % count:
        shapes = " and ".join(f"[{count} * rank, {t.shape[1]}] and [{t.shape[0]}, rank * {count}]" for t in known)
        raise CheckpointError(
            f"{folder}: A {list(a.shape)} and B {list(b.shape)} of {module} do not fit the model's experts, which "
            f"need {shapes}"
        )
    target, rank = fits[0], len(a) // count
    parameter = "gate_up_proj" if target is known[0] else "down_proj"
    plain = module.replace(".base_layer", "")
    downs = a.reshape(count, rank, -1)
    ups = b.reshape(len(b), rank, count).transpose(2, 0, 1) * settings.scaling(f"{plain}.{parameter}", rank)
    found: dict[str, LowRank] = {}
    for pieces, down, up in zip(target.members, downs, ups, strict=True):
        names = list(dict.fromkeys(piece.name for piece in pieces))
        for name, rows in zip(names, np.split(up, len(names)), strict=True):
            found[name] = down, rows
    return found
