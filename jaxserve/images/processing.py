"""From decoded pictures to patches, by transformers' own processors, which need Pillow and NumPy only.

The processor leaves out what the encoder does by itself: pixels stay whole numbers, and the devices scale them. So a
picture on its way to the engine has a byte for each number of a patch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PILImage

from jaxserve.config import ConfigError
from jaxserve.images.area import area_of
from jaxserve.images.llama4 import Llama4Tiles
from jaxserve.types import Area, ImageTokens

FILES = "preprocessor_config.json", "processor_config.json"
MOST_PIXELS = 28 * 28 * 1280  # of Qwen2-VL, where the settings do not say
LONGEST_EDGE = 1024  # of Pixtral, where the settings do not say
# Side in pixels of a tile, and most parts of a picture, where the settings do not say.
TILES = {"GotOcr2": (384, 12), "Llama4": (336, 16), "LlavaOnevision": (384, 36)}


class Processed(NamedTuple):
    """A picture as patches.

    patches: uint8 [patches, numbers of a patch].
    grid: frames, rows and columns. The tiles of a picture are frames.
    digest: of the patches, the grid and how the processor was set, 32 bytes.
    tiles: rows and columns of the tiles into which a picture was split.
    area: see `area.area_of`.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    digest: bytes
    tiles: tuple[int, int] = (1, 1)
    area: Area | None = None


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
    def tile(self) -> int | None:
        """Side in pixels of a tile, where pictures are split into such; None: they are not split."""
        return int(self._size.get("height") or self._usual[0]) if self._splits else None

    @property
    def most_tiles(self) -> int:
        """Most tiles of a picture. One of several parts has a tile more, which shows all of it."""
        return 1 if self._most_parts == 1 and not self._has_areas else self._most_parts + 1

    @property
    def most_pixels(self) -> int:
        """Most pixels of a picture that the encoder sees."""
        if self.tile is not None:
            return self.tile**2 * self.most_tiles
        size = self._size
        if self._limits_edges:
            edge = int(size.get("longest_edge") or LONGEST_EDGE)
            return (-(-edge // self._square) * self._square) ** 2  # filled up to whole squares of patches
        return int(self.settings.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS) // self._counted

    @property
    def _limits_edges(self) -> bool:
        """Whether `longest_edge` is what it says, not a number of pixels."""
        return self._is("Pixtral")

    @property
    def _counted(self) -> int:
        """How often the settings count a pixel: for each frame of a patch, or once."""
        return 2 if self._is("Glm4v") else 1

    @property
    def _size(self) -> Mapping[str, Any]:
        size = self.settings.get("size")
        return size if isinstance(size, dict) else {}

    @property
    def _splits(self) -> bool:
        """Whether pictures are split into tiles."""
        return any(map(self._is, TILES))

    @property
    def _usual(self) -> tuple[int, int]:
        """Its entry of TILES."""
        return next(usual for kind, usual in TILES.items() if self._is(kind))

    @property
    def _most_parts(self) -> int:
        """Most tiles into which a picture is split."""
        if self.settings.get("image_grid_pinpoints"):
            return max(map(self._parts_of, self.settings["image_grid_pinpoints"]))
        return max(int(self.settings.get("max_patches") or self._usual[1]), 1)

    @property
    def _has_areas(self) -> bool:
        """Whether the features of a picture are those of an area of its tiles."""
        return self.kind.most_tiles > 0

    def _parts_of(self, canvas: Sequence[int]) -> int:
        """Tiles of a canvas of this height and width."""
        assert self.tile is not None
        return int(canvas[0]) // self.tile * (int(canvas[1]) // self.tile)

    def _is(self, kind: str) -> bool:
        """Whether the settings are those of transformers' processor of this name."""
        return str(self.settings.get("image_processor_type", "")).startswith(kind)

    @property
    def _square(self) -> int:
        """Side in pixels of the square of patches that become one feature."""
        return self.kind.patch * self.kind.side

    @cached_property
    def _processor(self) -> Any:
        if self._is("Llama4"):
            assert self.tile is not None
            return Llama4Tiles(self.settings, self.tile, self._most_parts)
        from transformers import AutoImageProcessor  # takes a second

        return AutoImageProcessor.from_pretrained(str(self.folder), backend="pil", local_files_only=True)

    def load(self) -> None:
        """Imports and makes the processor, which else the first picture does."""
        assert self._processor is not None

    def __call__(self, picture: PILImage.Image, most_pixels: int | None = None) -> Processed:
        """The patches of a picture in RGB. Raises ValueError for a shape that the model does not read. most_pixels:
        less than the model's own limit, of what the encoder sees."""
        options: dict[str, Any] = {}
        if self._limits_edges:
            options["patch_size"] = dict.fromkeys(("height", "width"), self._square)
        if self._splits:
            options |= self._parts_within(most_pixels)
        elif most_pixels is not None:
            options["size"] = self._size_within(most_pixels)
        made = self._processor(picture, do_rescale=False, do_normalize=False, return_tensors="np", **options)
        values = made["pixel_values"].astype(np.uint8)
        values = values[0] if self._has_areas else values
        if self._limits_edges or self._splits:
            patches, grid = _patches_of(values, self.kind)
        else:
            frames, rows, columns = map(int, made["image_grid_thw"][0])
            patches, grid = values, (frames, rows, columns)
        if self._has_areas:
            return self._with_area(picture, patches, grid, options)
        rows, columns = map(int, made["aspect_ratios"][0]) if "aspect_ratios" in made else (1, 1)
        return Processed(patches, grid, _digest(patches, grid), (rows, columns))

    def _with_area(
        self, picture: PILImage.Image, patches: np.ndarray, grid: tuple[int, int, int], options: dict[str, Any]
    ) -> Processed:
        from transformers.image_processing_utils import select_best_resolution

        size = picture.height, picture.width
        assert self.tile is not None
        height, width = select_best_resolution(size, options["image_grid_pinpoints"])
        tiles = height // self.tile, width // self.tile
        area = area_of(size, tiles, grid[1], self.kind.most_tiles)
        return Processed(patches, grid, _digest(patches, (*grid, *area)), tiles, area)

    def _parts_within(self, most_pixels: int | None) -> dict[str, Any]:
        """The processor's settings for a picture whose tiles have no more than so many pixels."""
        if self._has_areas:
            canvases = self._processor.image_grid_pinpoints
            most = most_pixels or max(height * width for height, width in canvases)
            small = min(canvases, key=lambda canvas: canvas[0] * canvas[1])
            return {"image_grid_pinpoints": [x for x in canvases if x[0] * x[1] <= most] or [small]}
        most = self._most_parts
        if most_pixels is not None:
            assert self.tile is not None
            most = min(most, max(most_pixels // self.tile**2 - 1, 1))
        return {"crop_to_patches": True, "max_patches": most}  # InternVL's own processor splits, whatever they say

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


def _patches_of(picture: np.ndarray, kind: ImageTokens) -> tuple[np.ndarray, tuple[int, int, int]]:
    """The patches of a picture [frames, colours, height, width] in the order of `image_packing.Frame`, and its grid."""
    frames, colours, height, width = picture.shape
    square = kind.patch * kind.side
    down, across = height // square, width // square
    picture = picture[:, :, : down * square, : across * square]  # what is left is not read
    squares = frames, colours, down, kind.side, kind.patch, across, kind.side, kind.patch
    patches = picture.reshape(squares).transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, colours * kind.patch**2)
    return patches, (frames, down * kind.side, across * kind.side)


def _digest(patches: np.ndarray, grid: tuple[int, ...]) -> bytes:
    return hashlib.sha256(repr((patches.shape, grid)).encode() + patches.tobytes()).digest()
