"""Quantization settings in a separate file beside config.json, where early tools of some formats wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.files import read_json
from jaxserve.checkpoints.formats.packing import quant_config

AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


def with_settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """A config.json with its quantization_config, or else with that of a separate file in the folder.

    Raises CheckpointError if that file is not a JSON object.
    """
    if quant_config(config):
        return config
    for name, read in (
        ("hf_quant_config.json", _modelopt),
        ("quantize_config.json", _gptq),
        ("quant_config.json", _awq),
    ):
        path = folder / name
        if path.is_file() and (settings := read(_object(path))):
            return {**config, "quantization_config": settings}
    return config


def _object(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _modelopt(found: dict[str, Any]) -> dict[str, Any]:
    settings = found.get("quantization")
    if not isinstance(settings, dict) or settings.get("quant_algo") is None:
        return {}  # the file describes only the KV cache
    return {"quant_method": "modelopt", **settings}


def _gptq(found: dict[str, Any]) -> dict[str, Any]:
    """The settings of AutoGPTQ; some conversions by AutoAWQ have a file of this name too."""
    return _awq(found) if AWQ_NAMES.keys() & found.keys() else {"quant_method": "gptq", **found}


def _awq(found: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "awq", **{AWQ_NAMES.get(key, key): value for key, value in found.items()}}
