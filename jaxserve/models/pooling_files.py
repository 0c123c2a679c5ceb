"""Reads from a model's files how it computes embeddings or scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxserve.checkpoints.files import read_json
from jaxserve.checkpoints.safetensors import FLOATS, TensorInfo, read_folder
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.models.families import families
from jaxserve.models.load import Checkpoint, read_hf_config
from jaxserve.models.pooling import ACTIVATIONS, Dense, Method, Pooler, Task
from jaxserve.models.spec import ModelConfig

CLASSIFIER = "ForSequenceClassification"
MODULES = "modules.json"
READ_BYTES = 2**24  # an output head, of which two rows are needed, is read in parts of this size
_MODES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # sentence-transformers' name -> method
_FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def find_task(config: EngineConfig, path: Path) -> Task:
    """The task that the operator chose, or the one that the model's files are made for."""
    if config.task != "auto":
        return config.task
    if path.is_dir() and (path / MODULES).is_file():
        kinds = [str(module.get("type", "")) for module in _modules(path)]
        return "score" if any("cross_encoder" in kind for kind in kinds) else "embed"
    names = [str(n) for n in read_hf_config(path, config.ignore_config_keys).values.get("architectures") or [""]]
    if names[0].endswith(CLASSIFIER):
        return "score"
    generates = {name for family in families() for name in family.architectures}  # GPT2LMHeadModel is one of them
    return "embed" if names[0].endswith("Model") and names[0] not in generates else "generate"


def read_pooler(config: EngineConfig, path: Path, model: ModelConfig, token_of: Callable[[str], int]) -> Pooler | None:
    """The Pooler of a model that embeds or scores; None for a model that generates.

    `token_of` returns the id of a text that is a single token.
    Raises ConfigError for a way to pool that is not supported, and CheckpointError for broken files.
    """
    task = find_task(config, path)
    if task == "generate":
        return None
    values = read_hf_config(path, config.ignore_config_keys).values
    if values.get("is_causal") is False:
        raise ConfigError(f"{path}: is_causal=false is not supported: attention here sees earlier tokens only")
    if task == "score":
        method = "last" if config.pooling == "auto" else config.pooling
        classifier = any(name.endswith(CLASSIFIER) for name in values.get("architectures") or ())
        head = _head(config, path, model, classifier, token_of)
        prompt = ("plain" if classifier else "qwen3") if config.score_prompt == "auto" else config.score_prompt
        return Pooler(task, method, model.hidden_size, head=head, prompt=prompt)
    return _embedder(config, path, model.hidden_size)


def _embedder(config: EngineConfig, path: Path, hidden_size: int) -> Pooler:
    method: Method = "last"
    dense: list[Dense] = []
    modules = _modules(path) if path.is_dir() and (path / MODULES).is_file() else None
    for module in modules or ():
        kind = str(module.get("type", "")).rpartition(".")[2]
        folder = path / str(module.get("path", ""))
        if not folder.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"{path / MODULES}: the module {kind} lies outside of the model's folder")
        if kind == "Pooling":
            method = _method(folder / "config.json")
        elif kind == "Dense":
            dense.append(_dense(folder))
        elif kind not in ("Transformer", "Normalize"):
            raise ConfigError(f"{path / MODULES}: the module {kind!r} is not supported")
    sizes = [hidden_size, *(len(layer.bias) for layer in dense)]
    for layer, size in zip(dense, sizes, strict=False):
        if layer.weight.shape[1] != size:
            raise ConfigError(f"{path}: a dense module has {layer.weight.shape[1]} inputs for {size} numbers")
    normalized = modules is None or any(str(module.get("type", "")).endswith(".Normalize") for module in modules)
    if config.pooling != "auto":
        method = config.pooling
    return Pooler("embed", method, hidden_size, tuple(dense), normalized)


def _modules(path: Path) -> list[Mapping[str, Any]]:
    modules = _json(path / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path / MODULES} must hold a list of objects")
    return modules


def _method(file: Path) -> Method:
    """The method of sentence-transformers' Pooling module. Older versions write a flag per mode, newer ones a name."""
    values = _json(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    if "pooling_mode" in values:
        mode = values["pooling_mode"]
        named = list(mode) if isinstance(mode, list) else [mode]
        found = [_MODES.get(str(name)) for name in named]
    else:
        named = [key for key, value in values.items() if key.startswith("pooling_mode_") and value]
        found = [_FLAGS.get(key) for key in named]
    for method in get_args(Method):
        if found == [method]:
            return method
    raise ConfigError(f"{file}: pooling by {named} is not supported (only one of lasttoken, mean and cls)")


def _dense(folder: Path) -> Dense:
    values = _json(folder / "config.json")
    tensors = read_folder(folder)
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{folder}: the activation {activation!r} is not supported (only {', '.join(ACTIVATIONS)})")
    weight = _floats(tensors, "linear.weight", folder)
    bias = _floats(tensors, "linear.bias", folder) if values.get("bias", True) else np.zeros(len(weight), np.float32)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ConfigError(f"{folder}: weight {weight.shape} and bias {bias.shape} do not fit each other")
    return Dense(weight, bias, activation)


def _head(
    config: EngineConfig, path: Path, model: ModelConfig, classifier: bool, token_of: Callable[[str], int]
) -> Dense:
    """A dense layer whose one output is the score: of a classifier's head, or the log-odds of "yes" against "no"."""
    if config.load_format == "dummy":
        rows = np.random.default_rng(config.seed).normal(0, 0.02, (1, model.hidden_size)).astype(np.float32)
        return Dense(rows, np.zeros(1, np.float32), "Identity")
    source = Checkpoint.open(path, config.quantization, config.ignore_config_keys)
    if classifier:
        weight = _floats(source.tensors, "score.weight", path)
        bias = _floats(source.tensors, "score.bias", path) if "score.bias" in source.tensors else np.zeros(len(weight))
        if weight.ndim != 2 or weight.shape[1] != model.hidden_size or len(weight) not in (1, 2):
            raise ConfigError(f"{path}: score.weight is {list(weight.shape)}; scores need one label or two")
        if len(weight) == 2:
            weight = weight[1:] - weight[:1]
            bias = bias[1:] - bias[:1]
        return Dense(weight, bias.astype(np.float32), "Identity")
    if model.logit_softcap is not None or model.embed_size is not None or model.head_bias:
        raise ConfigError(f"{path}: scores by two tokens are not supported for a head with a softcap or a projection")
    roles = source.family.roles(model, source.tensors.__contains__)
    name = roles["embed.weight"] if model.tie_embeddings else roles.get("head.weight", "lm_head.weight")
    no, yes = _rows(source.tensors, name, [token_of(text) for text in config.score_tokens], path)
    return Dense((yes - no)[None] * np.float32(model.logit_scale), np.zeros(1, np.float32), "Identity")


def _rows(tensors: Mapping[str, TensorInfo], name: str, wanted: Sequence[int], path: Path) -> list[np.ndarray]:
    """The rows `wanted` of a matrix of floats [rows, columns], which is read in parts."""
    found: dict[int, np.ndarray] = {}
    for first, rows in _tensor(tensors, name, path).read_rows(READ_BYTES):
        for row in wanted:
            if first <= row < first + len(rows):
                found[row] = rows[row - first].astype(np.float32)
    return [found[row] for row in wanted]


def _floats(tensors: Mapping[str, TensorInfo], name: str, path: Path) -> np.ndarray:
    return _tensor(tensors, name, path).read().astype(np.float32)


def _tensor(tensors: Mapping[str, TensorInfo], name: str, path: Path) -> TensorInfo:
    if name not in tensors or tensors[name].dtype.name not in FLOATS:
        raise ConfigError(f"{path} holds no floats called {name!r}, which the model's scores or embeddings need")
    return tensors[name]


def _json(file: Path) -> Any:
    try:
        return read_json(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
