"""How InternVL's own files say that pictures are processed: in config.json, beside the settings of CLIP's processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARCHITECTURE = "InternVLChatModel"
SIDE = 448  # pixels of a tile, where the settings do not say
MOST_TILES = 6


def settings_of(folder: Path, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of transformers' processor for InternVL; None: the folder's files are not InternVL's own."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads the model tells
    if not isinstance(config, dict) or ARCHITECTURE not in (config.get("architectures") or ()):
        return None
    cuts = config.get("dynamic_image_size", True)
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": dict.fromkeys(("height", "width"), config.get("force_image_size") or SIDE),
        "min_patches": config.get("min_dynamic_patch") or 1,
        "max_patches": (config.get("max_dynamic_patch") or MOST_TILES) if cuts else 1,
        "resample": 3,  # bicubic
        "image_mean": given.get("image_mean"),
        "image_std": given.get("image_std"),
    }
