"""From decoded pictures to patches, by transformers' own processors, which need Pillow and NumPy only.

The processor leaves out what the encoder does by itself: pixels stay whole numbers, and the devices scale them. So a
picture on its way to the engine has a byte for each number of a patch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PILImage

from jaxserve.config import ConfigError
from jaxserve.types import ImageTokens

FILES = "preprocessor_config.json", "processor_config.json"
MOST_PIXELS = 28 * 28 * 1280  # of Qwen2-VL, where the settings do not say
LONGEST_EDGE = 1024  # of Pixtral, where the settings do not say
CUT_HERE = "Qwen2VLImageProcessorPil", "Glm4vImageProcessorPil"  # whose own patches are of floats


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
      kind: of the tokens that stand for pictures.
    """

    folder: Path
    settings: Mapping[str, Any]
    kind: ImageTokens

    @classmethod
    def of(cls, folder: Path, kind: ImageTokens) -> ImageProcessor | None:
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
                return cls(folder, settings, kind)
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
        if self._limits_edges:
            edge = int(size.get("longest_edge") or LONGEST_EDGE)
            return (-(-edge // self._square) * self._square) ** 2  # filled up to whole squares of patches
        return int(self.settings.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS) // self._counted

    @property
    def _limits_edges(self) -> bool:
        """Whether `longest_edge` is what it says, not a number of pixels."""
        return str(self.settings.get("image_processor_type", "")).startswith("Pixtral")

    @property
    def _counted(self) -> int:
        """How often the settings count a pixel: for each frame of a patch, or once."""
        return 2 if str(self.settings.get("image_processor_type", "")).startswith("Glm4v") else 1

    @property
    def _square(self) -> int:
        """Side in pixels of the square of patches that become one feature."""
        return self.kind.patch * self.kind.side

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor  # takes a second

        made = AutoImageProcessor.from_pretrained(str(self.folder), backend="pil", local_files_only=True)
        if type(made).__name__ in CUT_HERE:
            made.patchify = _cut
        return made

    def load(self) -> None:
        """Imports and makes the processor, which else the first picture does."""
        assert self._processor is not None

    def __call__(self, picture: PILImage.Image, most_pixels: int | None = None) -> Processed:
        """The patches of a picture in RGB. Raises ValueError for a shape that the model does not read. most_pixels:
        less than the model's own limit, of what the encoder sees."""
        options: dict[str, Any] = {}
        if self._limits_edges:
            options["patch_size"] = dict.fromkeys(("height", "width"), self._square)
        if most_pixels is not None:
            options["size"] = self._size_within(most_pixels)
        made = self._processor(picture, do_rescale=False, do_normalize=False, return_tensors="np", **options)
        values = made["pixel_values"].astype(np.uint8, copy=False)
        if self._limits_edges:
            patches, rows, columns = _cut(values[0], self.kind.patch, self.kind.side, 1)
            grid = 1, rows, columns
        else:
            patches = values
            frames, rows, columns = map(int, made["image_grid_thw"][0])
            grid = frames, rows, columns
        return Processed(patches, grid, _digest(patches, grid))

    def _size_within(self, most_pixels: int) -> dict[str, int]:
        """The processor's `size` for a picture that has no more than so many pixels."""
        size = {key: int(value) for key, value in dict(self._processor.size).items() if value is not None}
        if self._limits_edges:
            longest = max(math.isqrt(most_pixels) // self._square, 1) * self._square
            return {"longest_edge": min(size["longest_edge"], longest)}
        return size | {
            "longest_edge": max(min(size["longest_edge"], most_pixels * self._counted), size["shortest_edge"])
        }


def _is_colour(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 3 and all(type(x) in (int, float) for x in given)


def _cut(image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int) -> tuple[np.ndarray, int, int]:
    """The patches of a picture [colours, height, width] in the order of `image_packing.Picture`, each with so many
    equal frames, and the numbers of rows and columns. Named as `patchify` of the processors CUT_HERE."""
    colours, height, width = image.shape
    square = patch_size * merge_size
    squares = colours, height // square, merge_size, patch_size, width // square, merge_size, patch_size
    patches = image.reshape(squares).transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    patches = np.broadcast_to(patches, (*patches.shape[:5], temporal_patch_size, *patches.shape[6:]))
    return patches.reshape(-1, colours * temporal_patch_size * patch_size**2), height // patch_size, width // patch_size


def _digest(patches: np.ndarray, grid: tuple[int, ...]) -> bytes:
    made = hashlib.sha256(repr((patches.shape, grid)).encode())
    made.update(np.ascontiguousarray(patches).data)
    return made.digest()
