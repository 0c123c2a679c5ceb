"""`jaxserve models list`: the models on this machine, and the families, architectures, sizes and formats that load."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.checkpoints import formats
from jaxserve.checkpoints.gguf_architectures import gguf_names
from jaxserve.checkpoints.hub import list_models
from jaxserve.commands.published import PUBLISHED, Published
from jaxserve.config import ConfigError
from jaxserve.devices.targets import DEVICE_MEMORY, GPUS
from jaxserve.models.families import Family, families
from jaxserve.models.load import read_model

GIB = 2**30
EXAMPLE_TOKENS = 8192  # of keys and values that an example of a device holds beside the weights
USABLE = 0.9  # of a device's memory
DEVICES = ("l4", "l40s", "h100", "h200", "b200")
SEVERAL = (2, 4, 8, 16)
WIDTH = 100


def local_models(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(name, shape of the model or why it cannot be served) of each model on this machine."""
    for name, folder in list_models(folders):
        try:
            model = read_model(folder)
            what = f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {model.max_position} tokens"
        except ConfigError as error:
            what = f"cannot be served: {error}"
        yield name, what


def listing(folders: Sequence[Path]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "models": [{"name": name, "about": about} for name, about in local_models(folders)],
        "formats": load_formats(),
        "families": [_family(family) for family in families()],
    }


def load_formats() -> list[str]:
    """The names of the formats whose weights load: files, and ways of quantization in config.json."""
    found = ["gguf", "orbax", "safetensors"]
    for info in pkgutil.iter_modules(formats.__path__):
        found += getattr(importlib.import_module(f"{formats.__name__}.{info.name}"), "METHODS", ())
    return sorted(dict.fromkeys(found))


def _family(family: Family) -> dict[str, Any]:
    return {
        "name": family.name,
        "architectures": list(family.architectures),
        "gguf": [name for architecture in family.architectures for name in gguf_names(architecture)],
        "sizes": [_size(model) for model in PUBLISHED if model.family == family.name],
    }


def _size(model: Published) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": model.parameters,
        "bf16_bytes": model.bf16_bytes,
        "int4_bytes": model.int4_bytes,
        "kv_bytes_per_token": model.token_bytes,
        "bf16_device": example_device(model.bf16_bytes, model.token_bytes),
        "int4_device": example_device(model.int4_bytes, model.token_bytes),
    }


def example_device(weights: int, token_bytes: int) -> str:
    """The smallest of some devices, or the fewest H200, that holds weights and the cache of EXAMPLE_TOKENS tokens."""
    needed = (weights + EXAMPLE_TOKENS * token_bytes) / USABLE
    for name in DEVICES:
        if needed <= DEVICE_MEMORY[GPUS[name].kind]:
            return name.upper()
    for count in SEVERAL:
        if needed <= count * DEVICE_MEMORY[GPUS["h200"].kind]:
            return f"{count} x H200"
    return f"more than {SEVERAL[-1]} x H200"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The listing as text of at most WIDTH columns, except for names and errors of models on this machine."""
    for model in found["models"]:
        yield f"{model['name']:40} {model['about']}"
    yield f"\n{'supported families and published sizes':52}{'bf16':>8}{'int4':>8}{'KV/token':>10}  device (bf16, int4)"
    for family in found["families"]:
        yield from _wrapped(f"  {family['name']:12} ", family["architectures"])
        if family["gguf"]:
            yield from _wrapped(f"  {'':12} GGUF: ", family["gguf"])
        for size in family["sizes"]:
            weights = f"{size['bf16_bytes'] / GIB:8.1f}{size['int4_bytes'] / GIB:8.1f}"
            devices = dict.fromkeys((size["bf16_device"], size["int4_device"]))
            cache = f"{size['kv_bytes_per_token'] / 1024:8.1f} K"
            yield f"    {size['name']:48}{weights}{cache}  {', '.join(devices)}"
    yield f"\nWeights are in GiB. The device holds them beside {EXAMPLE_TOKENS:,} tokens of keys and values in bf16."
    yield "Layers with a window keep only the window's tokens. `jaxserve models inspect` plans for a device."
    yield from _wrapped("formats: ", found["formats"])


def _wrapped(start: str, words: Sequence[str]) -> Iterator[str]:
    """The words after `start`, on lines of at most WIDTH columns."""
    line = start
    for i, word in enumerate(words):
        piece = word + ("," if i + 1 < len(words) else "")
        if line.strip() and line != start and len(line) + len(piece) > WIDTH:
            yield line.rstrip()
            line = " " * len(start)
        line += piece + " "
    yield line.rstrip()
