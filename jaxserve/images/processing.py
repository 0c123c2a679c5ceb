"""From decoded pictures to patches, by transformers' own processors, which need Pillow and NumPy only.

The processor leaves out what the encoder does by itself: pixels stay whole numbers, and the devices scale them. So a
picture on its way to the engine has a byte for each number of a patch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PILImage

from jaxserve.config import ConfigError

FILES = "preprocessor_config.json", "processor_config.json"
MOST_PIXELS = 28 * 28 * 1280  # of Qwen2-VL, where the settings do not say


class Processed(NamedTuple):
    """A picture as patches.

    patches: uint8 [patches, numbers of a patch].
    grid: frames, rows and columns.
    digest: of the patches, the grid and how the processor was set, 32 bytes.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    digest: bytes


@dataclass(frozen=True)
class ImageProcessor:
    """What a model's folder says of the processing of pictures.

    Attributes:
      folder: the model's folder.
      settings: those of its image processor.
      side: side of the square of patches that become one embedding.
    """

    folder: Path
    settings: Mapping[str, Any]
    side: int

    @classmethod
    def of(cls, folder: Path, side: int) -> ImageProcessor | None:
        """None for a folder without an image processor's settings. Raises ConfigError for those that are not valid."""
        for name in FILES:
            try:
                values = json.loads((folder / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"{folder / name} is no valid image processor's config: {error}") from None
            settings = values.get("image_processor", values) if isinstance(values, dict) else None
            if isinstance(settings, dict) and ("image_processor_type" in settings or "image_mean" in settings):
                return cls(folder, settings, side)
        return None

    def scaling(self) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """How the encoder reads the numbers of pixels: factor, then mean and deviation of each colour. Raises
        ConfigError for settings that are not valid."""
        given = self.settings
        normed = given.get("do_normalize", True)
        mean: Any = given.get("image_mean") if normed else (0.0,) * 3
        std: Any = given.get("image_std") if normed else (1.0,) * 3
        if not (_is_colour(mean) and _is_colour(std)):
            raise ConfigError(f"image_mean and image_std of {self.folder} must be three numbers each")
        factor = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1.0
        return float(factor), tuple(map(float, mean)), tuple(map(float, std))

    @property
    def most_pixels(self) -> int:
        """Most pixels of a picture that the encoder sees."""
        size = self.settings.get("size") or {}
        return int(self.settings.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor  # takes a second

        return AutoImageProcessor.from_pretrained(str(self.folder), backend="pil", local_files_only=True)

    def load(self) -> None:
        """Imports and makes the processor, which else the first picture does."""
        assert self._processor is not None

    def __call__(self, picture: PILImage.Image, most_pixels: int | None = None) -> Processed:
        """The patches of a picture in RGB. Raises ValueError for a shape that the model does not read. most_pixels:
        less than the model's own limit, of what the encoder sees."""
        options: dict[str, Any] = {}
        if most_pixels is not None:
            size = dict(self._processor.size)
            least = int(size["shortest_edge"])
            options["size"] = size | {"longest_edge": max(min(int(size["longest_edge"]), most_pixels), least)}
        made = self._processor(picture, do_rescale=False, do_normalize=False, return_tensors="np", **options)
        patches = made["pixel_values"].astype(np.uint8)
        grid = tuple(int(n) for n in made["image_grid_thw"][0])
        return Processed(patches, grid, _digest(patches, grid))  # type: ignore[arg-type]

    def features(self, grid: tuple[int, int, int]) -> int:
        """Features of a picture with this grid."""
        frames, rows, columns = grid
        return frames * rows * columns // self.side**2


def _is_colour(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 3 and all(type(x) in (int, float) for x in given)


def _digest(patches: np.ndarray, grid: tuple[int, ...]) -> bytes:
    return hashlib.sha256(repr((patches.shape, grid)).encode() + patches.tobytes()).digest()
