"""Prompts with pictures: where the pictures are, what stands for them in the prefix cache, and where their tokens lie.

In the host's arrays, a token in whose place a feature of a picture stands is a number below SHOWN that follows from the
picture's digest. So pages are equal only if their pictures are. The devices get the feature's row instead.

Models with three positions a token (M-RoPE, Wang et al. 2024, arXiv:2409.12191, section 2.1) number text as usual, with
three equal positions. The tokens of a picture lie on its grid. The text behind it begins after its largest position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from jaxserve.types import Image, ImageTokens, InvalidRequestError

SHOWN = -2  # on the devices, the token SHOWN - i is row i of the array of features
WORDS = 8  # tokens over which a digest is spread
_BITS = 2**30 - 1


@dataclass(eq=False)
class ImageInPrompt:
    """A picture in a sequence's prompt.

    Attributes:
      image: the picture as it was submitted.
      places: int32 [features], the tokens in whose place its features stand.
      key: names the picture among those of all tenants.
      whole: its tokens are computed in one step.
    """

    image: Image
    places: np.ndarray
    key: bytes
    whole: bool = False

    @property
    def first(self) -> int:
        return int(self.places[0])

    @property
    def end(self) -> int:
        return int(self.places[-1]) + 1


@dataclass(frozen=True)
class EncoderJob:
    """A picture whose features the devices are to compute before a step, and the rows for them, int32 [embeddings]."""

    image: Image
    rows: np.ndarray


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with pictures.

    Attributes:
      tokens: int32 [tokens], with numbers below SHOWN for pictures.
      images: in the order of their places.
      salt: what beside the tokens keeps apart prompts with pictures of fewer than WORDS features.
      positions: int32 [3, tokens]; None: a token's position is its place.
      shift: by how much the positions of later tokens exceed their places.
    """

    tokens: np.ndarray
    images: tuple[ImageInPrompt, ...]
    salt: str
    positions: np.ndarray | None
    shift: int


def read_prompt(prompt: Sequence[int], images: Sequence[Image], salt: str | None, kind: ImageTokens) -> ImagePrompt:
    """Finds the pictures of a prompt. Raises InvalidRequestError if the prompt has not as many tokens for them."""
    tokens = np.array(prompt, np.int32)
    expected = np.flatnonzero(tokens == kind.token)
    found = []
    done = 0
    for image in images:
        places = expected[done:][expected[done:] >= image.first][: image.count]
        if len(places) < image.count or places[0] != image.first:
            wanted = sum(image.count for image in images)
            raise InvalidRequestError(
                f"the prompt has {len(expected)} tokens for pictures, whose features are {wanted}", "prompt"
            )
        done += len(places)
        key = hashlib.sha256(repr(salt).encode() + image.digest).digest()
        found.append(ImageInPrompt(image, places.astype(np.int32), key, kind.whole))
    if done < len(expected):
        raise InvalidRequestError(f"the prompt has {len(expected) - done} tokens for pictures that it lacks", "prompt")
    for one in found:
        tokens[one.places] = tokens_of(one.image)
    small = "".join(one.image.digest.hex() for one in found if len(one.places) < WORDS)
    if not kind.has_three_positions:
        return ImagePrompt(tokens, tuple(found), small, None, 0)
    grids = [(one.first, _merged(one.image.grid, kind.side)) for one in found]
    later = [one.image.later for one in found]
    return ImagePrompt(tokens, tuple(found), small, *positions_of(len(tokens), grids, later))


def tokens_of(image: Image) -> np.ndarray:
    """What stands for a picture in the host's arrays, int32 [features]."""
    words = np.frombuffer(image.digest, np.uint32)[np.arange(image.count) % WORDS]
    return SHOWN - 1 - (words & _BITS).astype(np.int32)


def _merged(grid: tuple[int, int, int], side: int) -> tuple[int, int, int]:
    frames, rows, columns = grid
    return frames, rows // side, columns // side


def positions_of(
    length: int, pictures: Sequence[tuple[int, tuple[int, int, int]]], later: Sequence[int | None] = ()
) -> tuple[np.ndarray, int]:
    """The positions int32 [3, length] of a prompt's tokens, and by how much those of later tokens exceed their places.

    pictures: for each, in order, the place of its first feature in the prompt, and the frames, rows and columns of its
    features, which follow each other. later: of each, `Image.later`.
    """
    positions = np.empty((3, length), np.int32)
    done = 0  # tokens that have their positions
    begin = 0  # of the next token
    origin = 0  # of the last picture, or video
    for (first, (frames, rows, columns)), time in zip_longest(pictures, later):
        count = frames * rows * columns
        if time is None:
            positions[:, done:first] = begin + np.arange(first - done)
            origin = begin + first - done
        positions[:, first : first + count] = origin + np.indices((frames, rows, columns)).reshape(3, count)
        positions[0, first : first + count] += time or 0
        begin = origin + max(rows, columns)
        done = first + count
    positions[:, done:] = begin + np.arange(length - done)
    return positions, begin - done
