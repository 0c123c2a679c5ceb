"""Quantization settings in a file of their own beside config.json, as the first tools of a format wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import quant_config

AWQ_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}


def with_settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """A config.json with the quantization_config that it has, or that a file of its folder has instead.

    Raises CheckpointError for such a file that is no JSON object.
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _modelopt(found: dict[str, Any]) -> dict[str, Any]:
    settings = found.get("quantization")
    if not isinstance(settings, dict) or settings.get("quant_algo") is None:
        return {}  # what it speaks of is the KV cache alone
    return {"quant_method": "modelopt", **settings}


def _gptq(found: dict[str, Any]) -> dict[str, Any]:
    """AutoGPTQ's; some conversions by AutoAWQ have this name too."""
    return _awq(found) if AWQ_NAMES.keys() & found.keys() else {"quant_method": "gptq", **found}


def _awq(found: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "awq", **{AWQ_NAMES.get(key, key): value for key, value in found.items()}}
