"""Pictures as clients send them: files of somebody else, of which nothing is believed before it is checked."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from PIL import Image as PILImage
from PIL import UnidentifiedImageError

from jaxserve.limits import MAX_IMAGE_PIXELS
from jaxserve.types import InvalidRequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 32 * 2**20
MAX_RATIO = 200  # of a picture's sides


def open_picture(data: bytes, most_pixels: int = MAX_IMAGE_PIXELS) -> PILImage.Image:
    """A picture in RGB; of an animation the first frame. Size and format are read before anything is decoded.

    Raises InvalidRequestError for data that is no picture of one of FORMATS, that is larger than allowed, or that ends
    early.
    """
    if len(data) > MAX_BYTES:
        raise _refused(f"it has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit on pixels is larger
            picture = PILImage.open(io.BytesIO(data), formats=FORMATS)
    except PILImage.DecompressionBombError:
        raise _refused(f"it has more pixels than are allowed, {most_pixels} (--max-image-pixels)") from None
    except UnidentifiedImageError:
        raise _refused(f"it is no file of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise whatever they find
        raise _refused(f"its header cannot be read ({type(error).__name__})") from None
    check_size(picture.width, picture.height, most_pixels)
    try:
        return picture.convert("RGB")
    except Exception as error:
        raise _refused(f"it cannot be decoded ({type(error).__name__})") from None


def check_size(width: int, height: int, most_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Raises InvalidRequestError for sizes that are not read."""
    if width < 1 or height < 1:
        raise _refused(f"it has {width} x {height} pixels")
    if width * height > most_pixels:
        raise _refused(f"it has {width} x {height} pixels; at most {most_pixels} are allowed (--max-image-pixels)")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _refused(f"it has {width} x {height} pixels; one side may be {MAX_RATIO} times as long as the other")


def as_picture(given: Any) -> PILImage.Image:
    """A picture from what `LLM` takes: an image of Pillow, an array [height, width, 3] of bytes, a path, or a file's
    bytes. Raises InvalidRequestError for anything else."""
    if isinstance(given, bytes | bytearray | memoryview):
        return open_picture(bytes(given))
    if isinstance(given, PILImage.Image):
        check_size(*given.size)
        return given.convert("RGB")
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
            raise _refused(f"an array must be uint8 [height, width, 3], got {given.dtype} {list(given.shape)}")
        check_size(given.shape[1], given.shape[0])
        return PILImage.fromarray(given)
    try:
        with open(given, "rb") as file:
            return open_picture(file.read(MAX_BYTES + 1))
    except (OSError, TypeError, ValueError) as error:
        raise _refused(f"{given!r:.80} cannot be opened: {error}") from None


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"a picture cannot be read: {reason}", "images")
