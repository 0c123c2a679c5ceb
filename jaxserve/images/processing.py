"""From decoded pictures to patches, by transformers' own processors, which need Pillow and NumPy only.

The processor leaves out what the encoder does by itself: pixels stay whole numbers, and the devices scale them. So a
picture on its way to the engine has a byte for each number of a patch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image as PILImage

from jaxserve.checkpoints.mistral_native import is_native, native_image_settings
from jaxserve.config import ConfigError
from jaxserve.images import idefics3, internvl_chat, lfm2_vl, moonvit
from jaxserve.images.area import area_of
from jaxserve.images.llama4 import Llama4Tiles
from jaxserve.images.patches import Processed, patches_of, patchify, picture_of
from jaxserve.types import ImageTokens

log = logging.getLogger(__name__)

FILES = "preprocessor_config.json", "processor_config.json"
MOST_PIXELS = 28 * 28 * 1280  # of Qwen2-VL, where the settings do not say
SOFT_TOKENS = 280  # of Gemma 4, where the settings do not say
SOFT_TOKENS_KINDS = 70, 140, 280, 560, 1120  # limits that Gemma 4 knows
LONGEST_EDGE = 1024  # of Pixtral, where the settings do not say
# Side in pixels of a tile, and most parts of a picture, where the settings do not say.
TILES = {"GotOcr2": (384, 12), "Llama4": (336, 16), "LlavaOnevision": (384, 36)}
MODULES = {name: module for module in (idefics3, lfm2_vl, moonvit) for name in module.TYPES}
CUT_HERE = "Qwen2VLImageProcessorPil", "Glm4vImageProcessorPil", "Glm46VImageProcessorPil"  # which make floats of bytes


@dataclass(frozen=True)
class ImageProcessor:
    """What a model's folder says of the processing of pictures.

    Attributes:
      folder: the model's folder, or its GGUF file.
      settings: those of its image processor.
      kind: of the tokens that stand for pictures.
      in_folder: whether transformers finds these settings in the folder.
    """

    folder: Path
    settings: Mapping[str, Any]
    kind: ImageTokens
    in_folder: bool = True

    @classmethod
    def of(cls, folder: Path, kind: ImageTokens) -> ImageProcessor | None:
        """None for a folder or GGUF file without an image processor's settings. Raises ConfigError for those that are
        not valid."""
        if folder.suffix == ".gguf":
            from jaxserve.checkpoints.gguf_mmproj import image_settings  # not imported where no file is a GGUF file

            settings = image_settings(folder)
            return None if settings is None else cls(folder, settings, kind, in_folder=False)
        for name in FILES:
            try:
                values = json.loads((folder / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"{folder / name} is no valid image processor's config: {error}") from None
            settings = values.get("image_processor", values) if isinstance(values, dict) else None
            if isinstance(settings, dict) and isinstance(published := settings.get("media_proc_cfg"), dict):
                settings = moonvit.settings_of(published)
            if isinstance(settings, dict) and ("image_processor_type" in settings or "image_mean" in settings):
                own = internvl_chat.settings_of(folder, settings)
                return cls(folder, settings, kind) if own is None else cls(folder, own, kind, in_folder=False)
        settings = native_image_settings(folder) if is_native(folder) else None
        return None if settings is None else cls(folder, settings, kind, in_folder=False)

    def scaling(self) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """How the encoder reads the numbers of pixels: factor, then mean and deviation of each colour. Raises
        ConfigError for settings that are not valid."""
        given = self.settings
        normed = given.get("do_normalize", not self._counts_tokens)
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
        """Most pixels of a picture that the encoder sees. Raises ConfigError for settings that do not fit it."""
        if self._own is not None:
            return int(self._own.most_pixels(self))
        if self.tile is not None:
            return self.tile**2 * self.most_tiles
        if self.kind.fixed:
            return self.kind.fixed**2
        if self._counts_tokens:
            return int(self.settings.get("max_soft_tokens") or SOFT_TOKENS) * self._square**2
        size = self._size
        if self._limits_edges:
            edge = int(size.get("longest_edge") or LONGEST_EDGE)
            return (-(-edge // self._square) * self._square) ** 2  # filled up to whole squares of patches
        return int(self.settings.get("max_pixels") or size.get("longest_edge") or MOST_PIXELS) // self._counted

    def why_not(self) -> str | None:
        """Why the encoder cannot see what the settings make of pictures; None: it can."""
        size = self._size
        side = self.kind.fixed
        if side and not (self.settings.get("do_resize", True) and size.get("height") == size.get("width") == side):
            return f"the encoder sees pictures of {side} x {side} pixels, and {self.folder} makes others (size={size})"
        if self._pans:
            log.warning("pan and scan is not used: pictures are seen as a whole (do_pan_and_scan of %s)", self.folder)
        return None

    @property
    def _pans(self) -> bool:
        """Whether pictures are to be cut into several, which Gemma 3 may do."""
        return bool(self.settings.get("do_pan_and_scan"))

    @property
    def _type(self) -> str:
        return str(self.settings.get("image_processor_type", "")).removesuffix("Fast")

    @property
    def _own(self) -> Any:
        """The module for this kind of processing; None: it is what this class does."""
        return MODULES.get(self._type)

    @property
    def _limits_edges(self) -> bool:
        """Whether `longest_edge` is what it says, not a number of pixels."""
        return self._is("Pixtral")

    @property
    def _counts_tokens(self) -> bool:
        """Whether the settings limit the tokens of a picture, not its pixels."""
        return self._is("Gemma4")

    @property
    def _counted(self) -> int:
        """How often the settings count a pixel: for each frame of a patch, or once."""
        return 2 if self._is("Glm4v") or self._is("Glm46V") else 1

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
    def processor(self) -> Any:
        """That of transformers."""
        if self._is("Llama4"):
            assert self.tile is not None
            return Llama4Tiles(self.settings, self.tile, self._most_parts)
        from transformers import AutoImageProcessor, Gemma4ImageProcessorPil  # takes a second

        if self.settings.get("image_processor_type") == "Gemma4UnifiedImageProcessor":
            # transformers has it for torchvision only. It is Gemma 4's, whose patches it joins.
            return Gemma4ImageProcessorPil(**self.settings)
        if self.in_folder:
            made = AutoImageProcessor.from_pretrained(str(self.folder), backend="pil", local_files_only=True)
        else:
            with TemporaryDirectory() as folder:
                (Path(folder) / FILES[0]).write_text(json.dumps(dict(self.settings)))
                made = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        if type(made).__name__ in CUT_HERE:
            made.patchify = patchify
        return made

    def load(self) -> None:
        """Imports and makes the processor, which else the first picture does."""
        assert self._own is not None or self.processor is not None

    def __call__(self, picture: PILImage.Image, most_pixels: int | None = None) -> Processed:
        """The patches of a picture in RGB. Raises ValueError for a shape that the model does not read. most_pixels:
        less than the model's own limit, of what the encoder sees."""
        if self._own is not None:
            processed: Processed = self._own.process(self, picture, most_pixels)
            return processed
        options: dict[str, Any] = {}
        if self._limits_edges:
            options["patch_size"] = dict.fromkeys(("height", "width"), self._square)
        if self._pans:
            options["do_pan_and_scan"] = False
        if self._splits:
            options |= self._parts_within(most_pixels)
        elif most_pixels is not None and self._counts_tokens:
            fitting = [
                count for count in SOFT_TOKENS_KINDS if count * self._square**2 <= min(most_pixels, self.most_pixels)
            ]
            options["max_soft_tokens"] = max(fitting, default=SOFT_TOKENS_KINDS[0])
        elif most_pixels is not None and not self.kind.fixed:
            options["size"] = self._size_within(most_pixels)
        made = self.processor(picture, do_rescale=False, do_normalize=False, return_tensors="np", **options)
        values = made["pixel_values"].astype(np.uint8, copy=False)
        values = values[0] if self._has_areas else values
        if self._counts_tokens:
            columns, rows = map(int, made["image_position_ids"][0].max(axis=0) + 1)
            patches, grid = patches_of(picture_of(values[0], rows, columns)[None], self.kind)
        elif self._limits_edges or self._splits or self.kind.fixed:
            patches, grid = patches_of(values, self.kind)
        else:
            frames, rows, columns = map(int, made["image_grid_thw"][0])
            patches, grid = values, (frames, rows, columns)
        if self._has_areas:
            return self._with_area(picture, patches, grid, options)
        down, across = map(int, made["aspect_ratios"][0]) if "aspect_ratios" in made else (1, 1)
        return Processed.of(patches, grid, (down, across))

    def _with_area(
        self, picture: PILImage.Image, patches: np.ndarray, grid: tuple[int, int, int], options: dict[str, Any]
    ) -> Processed:
        from transformers.image_processing_utils import select_best_resolution

        size = picture.height, picture.width
        assert self.tile is not None
        height, width = select_best_resolution(size, options["image_grid_pinpoints"])
        tiles = height // self.tile, width // self.tile
        return Processed.of(patches, grid, tiles, area=area_of(size, tiles, grid[1], self.kind.most_tiles))

    def _parts_within(self, most_pixels: int | None) -> dict[str, Any]:
        """The processor's settings for a picture whose tiles have no more than so many pixels."""
        if self._has_areas:
            canvases = self.processor.image_grid_pinpoints
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
        size = {key: int(value) for key, value in dict(self.processor.size).items() if value is not None}
        if self._limits_edges:
            longest = max(math.isqrt(most_pixels) // self._square, 1) * self._square
            return {"longest_edge": min(size["longest_edge"], longest)}
        return size | {
            "longest_edge": max(min(size["longest_edge"], most_pixels * self._counted), size["shortest_edge"])
        }


def _is_colour(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 3 and all(type(x) in (int, float) for x in given)
