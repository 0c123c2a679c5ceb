"""Reads LoRA adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

Source: peft.tuners.lora (github.com/huggingface/peft, release 0.21). An adapter adds scaling * B A to a module's
weight, with A [rank, in] and B [out, rank]. The scaling is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError, TooLongError
from jaxserve.checkpoints.files import read_json, shortened, shown
from jaxserve.checkpoints.safetensors import FLOATS, TensorInfo, read_header
from jaxserve.config import ConfigError
from jaxserve.models.changeable import Changeable, LowRank

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
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
PATTERN_SECONDS = 0.5  # for one name and expression
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<table>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")
_EXPERTS = re.compile(r"(?:.+\.)?layers\.(?P<layer>\d+)\.(?:.+\.)?experts(?:\.base_layer)*")


def read_peft(folder: Path, changeable: Changeable) -> dict[str, LowRank]:
    """Name of a weight of the model -> the matrices that the adapter adds to it, B with the scaling; in float32.

    Raises CheckpointError for damaged files and for modules that the model does not have, and ConfigError for adapters
    that are more than added matrices.
    """
    settings = _Settings.read(folder / CONFIG)
    found: dict[str, LowRank] = {}
    for (module, is_table), (a, b) in _pairs(folder / WEIGHTS, changeable).items():
        name = changeable.weight_of(module)
        if name is None and (match := _EXPERTS.fullmatch(module)):
            found |= _of_experts(folder, module, int(match["layer"][:9]), a, b, settings, changeable)
            continue
        if name is None:
            known = ", ".join(sorted({one.rpartition(".")[2] for one in changeable.modules}))
            raise CheckpointError(f"{folder}: adapters can change {known} of this model, not {shortened(module)}")
        changeable.check(folder, name, *((b.shape[::-1], a.shape[::-1]) if is_table else (a.shape, b.shape)))
        scaling = settings.scaling(module, a.shape[0])
        down = _floats(a)
        up = _floats(b) * scaling
        found[name] = (np.ascontiguousarray(up.T), np.ascontiguousarray(down.T)) if is_table else (down, up)
    return found


class _Settings:
    """What adapter_config.json says of scalings."""

    def __init__(self, path: Path, values: dict[str, Any]):
        self._path = path
        self._values = values
        if values.get("peft_type", "LORA") != "LORA":
            raise ConfigError(f"{path}: peft_type is {shown(values['peft_type'])}, and only LORA is supported")
        for key, value in values.items():
            if key not in HARMLESS and value not in (None, False, "none") and value != [] and value != {}:
                raise ConfigError(
                    f"{path}: {shortened(key)}={shown(value)} is not supported: only matrices A and B can be added"
                )
        begun = values.get("init_lora_weights", True)
        if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASES):
            raise ConfigError(
                f"{path}: init_lora_weights={shown(begun)} has changed the weights of the model itself; convert the "
                "adapter with PEFT's path_initial_model_for_weight_conversion"
            )
        self._own = {key: _Patterns(path, key, values.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")}

    @classmethod
    def read(cls, path: Path) -> _Settings:
        try:
            values = read_json(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must be a JSON object")
        return cls(path, values)

    def scaling(self, module: str, rank: int) -> float:
        """The factor of B A for a module whose matrices have this rank."""
        alpha = self._of("alpha_pattern", "lora_alpha", module)
        if (stated := self._of("rank_pattern", "r", module)) != rank:
            raise CheckpointError(
                f"{self._path}: {shortened(module)} should have rank {shown(stated)}, and its matrices have {rank}"
            )
        return alpha / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def _of(self, patterns: str, key: str, module: str) -> float:
        """A module's own setting, or else that for all modules."""
        value = self._own[patterns].find(module, self._values.get(key, 8))
        try:
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer that no float can hold
            pass
        raise ConfigError(f"{self._path}: {key} of {shortened(module)} must be a number, got {shown(value)}")


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises TooLongError after PATTERN_SECONDS of computing, also within an expression. Signals interrupt only the
    main thread, which reads the files in a process of their own (`reading`)."""

    def stop(*_: object) -> None:
        raise TooLongError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATTERN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _Patterns:
    """Settings of single modules, by regular expressions for the ends of their names, of which the first that matches
    counts. Nearly all are plain names, which are looked up."""

    def __init__(self, path: Path, key: str, given: Any):
        if not isinstance(given, dict) or any(len(pattern) > MOST_PATTERN for pattern in given):
            raise ConfigError(f"{path}: {key} must map patterns of at most {MOST_PATTERN} characters")
        self._path, self._key, self._values = path, key, list(given.values())
        self._plain = {pattern: i for i, pattern in enumerate(given) if _PLAIN.fullmatch(pattern)}
        self._others = [
            (i, pattern, self._compiled(pattern)) for i, pattern in enumerate(given) if pattern not in self._plain
        ]

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{self._path}: {self._key} has no valid pattern {shown(pattern)}: {error}") from None

    def find(self, module: str, default: Any) -> Any:
        parts = module.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        first = min((self._plain[end] for end in ends if end in self._plain), default=len(self._values))
        for i, pattern, compiled in self._others:
            if i > first:
                break
            try:
                with _time_limit():
                    found = compiled.match(module)
                if found:
                    return self._values[i]
            except TooLongError:
                raise ConfigError(
                    f"{self._path}: {self._key} has a pattern that takes too long to match: {shown(pattern)}"
                ) from None
        return self._values[first] if first < len(self._values) else default


def _pairs(path: Path, changeable: Changeable) -> dict[tuple[str, bool], tuple[TensorInfo, TensorInfo]]:
    """(module, whether it is a table of embeddings) -> the tensors A and B."""
    sides: dict[tuple[str, bool], dict[str, TensorInfo]] = defaultdict(dict)
    if not path.exists() and path.with_suffix(".bin").exists():
        raise CheckpointError(
            f"{path.with_suffix('.bin')} is a pickle, which is not read: save the adapter as safetensors"
        )
    for name, tensor in read_header(path, changeable.most_tensors).items():
        plain = name.removeprefix("base_model.model.")
        match = _KEY.fullmatch(plain)
        if match:
            if tensor.dtype.name not in FLOATS:
                raise CheckpointError(f"{path}: {shown(name)} has dtype {tensor.dtype.name}, not a plain float")
            sides[match["module"], bool(match["table"])][match["side"]] = tensor
        elif plain.endswith("magnitude_vector") or ".lora_magnitude_vector" in plain:
            raise ConfigError(f"{path}: DoRA is not supported, and {shown(name)} belongs to it")
        elif not (plain.endswith(".base_layer.weight") and _is_copy(plain, tensor, changeable)):
            raise CheckpointError(f"{path}: {shown(name)} is neither a lora_A nor a lora_B; nothing else can be added")
    for (module, _), pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{path}: {shortened(module)} has only lora_{next(iter(pair))}")
        a = pair["A"].shape
        b = pair["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise CheckpointError(f"{path}: A {list(a)} and B {list(b)} of {shortened(module)} do not fit each other")
    return {key: (pair["A"], pair["B"]) for key, pair in sides.items()}


def _is_copy(name: str, tensor: TensorInfo, changeable: Changeable) -> bool:
    """Whether a tensor can be the model's own, which PEFT saves beside adapters of embeddings."""
    own = changeable.weight_of(name.removesuffix(".base_layer.weight"))
    return own is not None and changeable.shapes[own] == tensor.shape


def _floats(tensor: TensorInfo) -> np.ndarray:
    return tensor.read().astype(np.float32)


def _of_experts(
    folder: Path, module: str, layer: int, a: TensorInfo, b: TensorInfo, settings: _Settings, changeable: Changeable
) -> dict[str, LowRank]:
    """The matrices of each expert, from those of a parameter with all experts' weights (`target_parameters`).

    A is [experts * rank, in] and B is [out, rank * experts], where the expert is the last index. PEFT nests several
    such parameters of a module in any order, so that only shapes tell which parameter is meant.
    """
    known = changeable.experts.get(layer)
    if known is None:
        raise CheckpointError(
            f"{folder}: layer {layer} of this model has no experts, which {shortened(module)} would change"
        )
    count = len(known[0].members)
    fits = [one for one in known if one.shape == (b.shape[0], a.shape[1])]
    if not fits or a.shape[0] % count:
        shapes = " and ".join(f"[{count} * rank, {t.shape[1]}] and [{t.shape[0]}, rank * {count}]" for t in known)
        raise CheckpointError(
            f"{folder}: A {list(a.shape)} and B {list(b.shape)} of {shortened(module)} do not fit the model's experts, "
            f"which need {shapes}"
        )
    target = fits[0]
    rank = a.shape[0] // count
    for name in target.members[0]:
        changeable.check(folder, name, (rank, a.shape[1]), (b.shape[0] // len(target.members[0]), rank))
    parameter = "gate_up_proj" if target is known[0] else "down_proj"
    plain = module.replace(".base_layer", "")
    scaling = settings.scaling(f"{plain}.{parameter}", rank)
    downs = _floats(a).reshape(count, rank, -1)
    ups = _floats(b).reshape(b.shape[0], rank, count).transpose(2, 0, 1) * scaling
    found: dict[str, LowRank] = {}
    for names, down, up in zip(target.members, downs, ups, strict=True):
        for name, rows in zip(names, np.split(up, len(names)), strict=True):
            found[name] = down, rows
    return found
