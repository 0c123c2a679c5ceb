"""Measured rates of devices in a file, which take the place of data sheets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.plan.roofline import Constants


def default_path() -> Path:
    """The file with measured rates in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxserve" / "plan-constants.json"


def read(path: Path, required: bool) -> dict[str, Any]:
    """Kind of device -> form of weights -> constants. Raises ConfigError for an invalid file, or a missing one."""
    if not path.exists() and not required:
        return {}
    try:
        given = json.loads(path.read_text())
        return {kind: {form: Constants(**one) for form, one in forms.items()} for kind, forms in given.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no constants of devices: {error}") from None


def of_form(constants: Mapping[str, Any], config: EngineConfig) -> dict[str, Constants]:
    """Kind of device -> constants for this form of weights."""
    return {kind: forms[form(config)] for kind, forms in constants.items() if form(config) in forms}


def form(config: EngineConfig) -> str:
    return f"{config.quantization} {config.dtype}"
