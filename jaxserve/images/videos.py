"""Videos: which of their frames a model sees, and how large, as transformers' processors of videos choose them. These
need torchvision; here Pillow resizes. No codec is read: a video is an animation that Pillow reads, or a list of
pictures.

A model sees two frames as one, in patches that have the numbers of both.
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PILImage
from PIL import UnidentifiedImageError

from jaxserve.images.patches import Processed, patches_of, resized
from jaxserve.images.processing import FILES, ImageProcessor
from jaxserve.images.reading import FORMATS, MAX_BYTES, as_picture, check_size, open_picture
from jaxserve.limits import MAX_IMAGE_PIXELS
from jaxserve.types import InvalidRequestError, VideoTokens

log = logging.getLogger(__name__)

FILE = "video_preprocessor_config.json"
MAX_FRAMES = 4096  # of an animation as it is sent
MAX_SEEN = 2**26  # pixels that the model sees of all frames
RATE = 2.0  # frames a second of a list of pictures, where the request does not say
USUAL_DURATION = 100  # milliseconds of a frame of an animation that does not say
PAIR = 2  # frames that are seen as one
CONTAINERS = {b"ftyp": "MP4", b"\x1aE\xdf\xa3": "WebM or Matroska", b"AVI ": "AVI"}
# Of transformers' processors, where the settings do not say.
_LARGE = 28 * 28 * 2 * 30000
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        "shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768, "min_frames": 4, "max_frames": 768,
        "do_sample_frames": False,
    },
    "Qwen3VLVideoProcessor": {
        "shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768, "min_frames": 4, "max_frames": 768, "fps": 2,
    },
    "Glm4vVideoProcessor": {"shortest_edge": 112 * 112, "longest_edge": _LARGE, "fps": 2, "max_duration": 300},
    "Glm46VVideoProcessor": {"shortest_edge": 112 * 112, "longest_edge": _LARGE},
}  # fmt: skip


@dataclass(frozen=True)
class Clip:
    """A video as it is sent.

    Attributes:
      count: its frames.
      rate: frames a second.
      frames: decodes those with these indices, in ascending order, to RGB.
      chosen: whoever sent it has chosen the frames; all of them are used.
    """

    count: int
    rate: float
    frames: Callable[[Sequence[int]], Iterator[PILImage.Image]]
    chosen: bool


class ProcessedVideo(NamedTuple):
    """frames: each of two frames of the video, as a picture. times: of each, in seconds. interval: seconds between
    them."""

    frames: list[Processed]
    times: list[float]
    interval: float

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames)


def open_clip(files: Sequence[bytes], rate: float | None, most_pixels: int) -> Clip:
    """A video from the files of its frames, or from one animation. rate: frames a second; None: as the animation says,
    or RATE. Raises InvalidRequestError for anything else, and for more frames or pixels than are allowed."""
    if len(files) > MAX_FRAMES:
        raise _refused(f"it has {len(files)} frames; at most {MAX_FRAMES} are allowed")
    if len(files) == 1:
        (data,) = files
        name = next((name for mark, name in CONTAINERS.items() if mark in data[:12]), None)
        if name is not None:
            raise _refused(
                f"{name} is not read, as no codec of videos is: send an animated GIF, WebP or PNG, or frames "
                "(data:video/jpeg;base64,FRAME,FRAME,...)"
            )
        if (clip := _animation(data, rate, most_pixels)) is not None:
            return clip

    def frames(wanted: Sequence[int]) -> Iterator[PILImage.Image]:
        return (open_picture(files[i], most_pixels) for i in wanted)

    return Clip(len(files), rate or RATE, frames, chosen=True)


def as_clip(given: Any, rate: float | None) -> Clip:
    """A video from what `LLM` takes: a list of pictures or an array [frames, height, width, 3] of bytes (`as_picture`),
    or the path or bytes of an animation. Raises InvalidRequestError for anything else."""
    if isinstance(given, list | tuple | np.ndarray):

        def frames(wanted: Sequence[int]) -> Iterator[PILImage.Image]:
            return (as_picture(given[i]) for i in wanted)

        return Clip(len(given), rate or RATE, frames, chosen=True)
    if not isinstance(given, bytes):
        try:
            given = Path(given).read_bytes()
        except (OSError, TypeError, ValueError) as error:
            raise _refused(f"{given!r:.80} cannot be opened: {error}") from None
    return open_clip([given], rate, MAX_IMAGE_PIXELS)


def _animation(data: bytes, rate: float | None, most_pixels: int) -> Clip | None:
    """None for data that is no animation."""
    if len(data) > MAX_BYTES:
        raise _refused(f"it has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit on pixels is larger
            file: Any = PILImage.open(io.BytesIO(data), formats=FORMATS)
            if not getattr(file, "is_animated", False):
                return None
    except (UnidentifiedImageError, PILImage.DecompressionBombError):
        return None  # `open_picture` tells why
    except Exception as error:  # Pillow's readers raise whatever they find
        raise _refused(f"its header cannot be read ({type(error).__name__})") from None
    check_size(file.width, file.height, most_pixels)
    count = file.n_frames
    if count > MAX_FRAMES:
        raise _refused(f"it has {count} frames; at most {MAX_FRAMES} are allowed")
    try:
        if rate is None:
            rate = count / (sum(_duration(file, i) for i in range(count)) / 1000)
    except Exception as error:
        raise _refused(f"it cannot be decoded ({type(error).__name__})") from None

    def frames(wanted: Sequence[int]) -> Iterator[PILImage.Image]:
        for i in wanted:
            try:
                file.seek(i)
                yield file.convert("RGB")
            except Exception as error:
                raise _refused(f"frame {i} cannot be decoded ({type(error).__name__})") from None

    return Clip(count, rate, frames, chosen=False)


def _duration(file: Any, frame: int) -> float:
    file.seek(frame)
    return float(file.info.get("duration") or USUAL_DURATION)


@dataclass(frozen=True)
class VideoProcessor:
    """What a model's folder says of the processing of videos.

    Attributes:
      settings: those of its processor of videos, with the usual ones.
      name: of this processor in transformers.
      images: its processor of pictures, whose scaling is that of videos, too.
    """

    settings: Mapping[str, Any]
    name: str
    images: ImageProcessor

    @classmethod
    def of(cls, folder: Path, images: ImageProcessor, kind: VideoTokens) -> VideoProcessor:
        """Raises ConfigError for files that are not valid."""
        given: Mapping[str, Any] = images.settings  # of older files, which have one for both
        for name, key in ((FILE, None), (FILES[1], "video_processor")):
            try:
                values = json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):  # the image processor's files have been checked
                continue
            values = values if key is None else values.get(key)
            if isinstance(values, dict):
                given = values
                break
        named = str(given.get("video_processor_type", kind.processor))
        name = named if named in DEFAULTS else kind.processor
        usual = DEFAULTS[name]
        size: Any = given.get("size") if isinstance(given.get("size"), dict) else {}
        edges = {"shortest_edge": given.get("min_pixels"), "longest_edge": given.get("max_pixels")}
        own = edges | size | given
        return cls(usual | {key: value for key, value in own.items() if value is not None}, name, images)

    def __call__(self, clip: Clip) -> ProcessedVideo:
        """The frames that the model sees. Raises InvalidRequestError for a video that is none."""
        indices = list(range(clip.count)) if clip.chosen else self.indices(clip.count, clip.rate)
        most = int(self.settings.get("max_frames", MAX_FRAMES))
        if not 0 < len(indices) <= most:
            raise _refused(f"{len(indices)} frames of it would be seen; 1 to {most} may be")
        seconds = [i / clip.rate for i in indices]
        interval = PAIR * clip.count / (len(indices) * clip.rate)
        size: tuple[int, int] | None = None
        shown = []
        for picture in clip.frames(indices):
            size = size or self.size(picture.height, picture.width, max(len(indices), PAIR))
            if len(indices) * size[0] * size[1] > MAX_SEEN:
                frames = f"{len(indices)} frames of {size[1]} x {size[0]} pixels"
                raise _refused(f"{frames} would be seen; at most {MAX_SEEN} pixels may be")
            shown.append(resized(picture, size[1], size[0], int(self.settings.get("resample", 3))))
        if len(shown) % PAIR:
            shown.append(shown[-1])
            seconds.append(seconds[-1])
        pairs = [self._pair(shown[i], shown[i + 1]) for i in range(0, len(shown), PAIR)]
        if self.name == "Qwen3VLVideoProcessor":
            times = [(first + last) / 2 for first, last in zip(seconds[::PAIR], seconds[1::PAIR], strict=True)]
        else:
            times = seconds[::PAIR]
        return ProcessedVideo(pairs, times, interval)

    def _pair(self, first: np.ndarray, second: np.ndarray) -> Processed:
        kind = self.images.kind
        (one, grid), (two, _) = (patches_of(frame[None], kind) for frame in (first, second))
        both = np.stack([one.reshape(len(one), 3, -1), two.reshape(len(two), 3, -1)], axis=2)
        return Processed.of(both.reshape(len(one), -1), grid)

    def size(self, height: int, width: int, count: int) -> tuple[int, int]:
        """Height and width of frames, of which there are `count`, as the model sees them. Raises InvalidRequestError
        for shapes that it does not read."""
        check_size(width, height)
        least, most = (int(self.settings[f"{which}_edge"]) for which in ("shortest", "longest"))
        square = self.images.kind.patch * self.images.kind.side
        even = counted = 1
        if self.name != "Qwen2VLVideoProcessor":  # whose limits are of a frame; those of others are of all frames
            even, counted = round(count / PAIR) * PAIR, count
            if min(height, width) < square:
                scale = max(square / height, square / width)
                height, width = int(height * scale), int(width * scale)
        most = min(most, self.images.most_pixels * counted)  # the encoder's largest program
        least = min(least, most // 4)
        made = [round(edge / square) * square for edge in (height, width)]
        if even * made[0] * made[1] > most:
            shrink = math.sqrt(counted * height * width / most)
            made = [max(square, math.floor(edge / shrink / square) * square) for edge in (height, width)]
        elif even * made[0] * made[1] < least:
            grow = math.sqrt(least / (counted * height * width))
            made = [math.ceil(edge * grow / square) * square for edge in (height, width)]
        return made[0], made[1]

    def indices(self, count: int, rate: float) -> list[int]:
        """The frames that are seen of so many at so many a second."""
        given = self.settings
        if not given.get("do_sample_frames", True):
            return list(range(count))
        if self.name == "Glm4vVideoProcessor":
            return _glm4v(count, rate, float(given["fps"]), float(given["max_duration"]))
        if self.name == "Glm46VVideoProcessor":
            return _glm46v(count, rate)
        fps = float(given.get("fps") or RATE)
        least, most = int(given["min_frames"]), int(given["max_frames"])
        if self.name == "Qwen3VLVideoProcessor":
            chosen = min(max(int(count / rate * fps), least), most, count)
            return np.linspace(0, count - 1, chosen).round().astype(int).tolist()
        most = math.floor(min(most, count) / PAIR) * PAIR
        chosen = math.floor(min(max(count / rate * fps, least), most, count) / PAIR) * PAIR
        return np.arange(0, count, count / chosen).astype(int).tolist()[:chosen] if chosen else [0]


def _glm4v(count: int, rate: float, fps: float, longest: float) -> list[int]:
    """As many a second as `fps`, of a video that is not too long; else as many, over all of it."""
    last = count - 1
    seconds = round(last / rate) + 1
    if seconds <= longest:
        found = [min(last, math.ceil(i * rate / fps)) for i in range(max(math.floor(seconds * fps), 1))]
    else:
        wanted = int(longest * fps)
        spread = np.linspace(0, seconds, wanted)
        found = list(range(count)) if wanted >= count else [min(last, math.ceil(t * rate)) for t in spread]
    found = list(dict.fromkeys(found))
    return [*found, found[-1]] if len(found) % PAIR else found


def _glm46v(count: int, rate: float) -> list[int]:
    """Fewer a second the longer the video is."""
    seconds = round((count - 1) / rate) + 1
    long = min(seconds, 2400)
    fps = 3 if long <= 30 else 1 if long <= 300 else 0.5
    wanted = min(int(long * fps * PAIR), 640)
    if count < wanted:
        found = np.linspace(0, count - 1, wanted, dtype=int).tolist()
    else:
        found = []
        due = 0.0
        for i in range(count):
            if i * (1 / rate) >= due:
                due += 1 / (PAIR * fps)
                found.append(i)
                if due >= int(seconds):
                    break
    if len(found) < wanted:
        found = np.linspace(found[0], found[-1], wanted, dtype=int).tolist()
    elif len(found) > wanted:
        found = np.linspace(0, count - 1, wanted, dtype=int).tolist()
    found = list(dict.fromkeys(found))
    return [*found, found[-1]] if len(found) % PAIR else found


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"a video cannot be read: {reason}", "images")
