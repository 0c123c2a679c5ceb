"""The tokens of a picture in a prompt: those in whose place its features stand, and what a model puts around them.

`ImageTokens.layout` names one of LAYOUTS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from jaxserve.images.patches import Processed
from jaxserve.types import ImageTokens


class Texts(Protocol):
    """What a tokenizer tells of texts."""

    def token_of(self, text: str) -> int:
        """The id of a text that is one added token. Raises InvalidRequestError if there is none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""


def place_of(kind: ImageTokens, texts: Texts) -> int:
    """The id of the token that stands for a picture in a prompt."""
    given = kind.token if kind.placeholder is None else kind.placeholder
    return texts.token_of(given) if isinstance(given, str) else given


def tokens_of(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """The tokens of a picture."""
    return [*kind.around[:1], *LAYOUTS[kind.layout](picture, kind, texts), *kind.around[1:]]


def _plain(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """One for each feature."""
    return [kind.token] * picture.features(kind)


def _rows(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """With `row_end` behind each row of features, but `end` behind the last one."""
    frames, rows, columns = picture.grid
    row = [kind.token] * (columns // kind.side) + [texts.token_of(kind.texts["row_end"])]
    return (row * (frames * rows // kind.side))[:-1] + [texts.token_of(kind.texts["end"])]


def _enclosed(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """One for each feature, between `begin` and `end`."""
    begin, end = (texts.token_of(kind.texts[role]) for role in ("begin", "end"))
    return [begin, *_plain(picture, kind, texts), end]


def _tiles(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """One for each feature, with `beside` between the tiles of a row, and `below` behind the row. The tile of the whole
    picture follows the token that stands for one in a prompt."""
    others = {role: texts.token_of(text) for role, text in kind.texts.items()}
    rows, columns = picture.tiles
    tile = _plain(picture._replace(grid=(1, *picture.grid[1:])), kind, texts)
    row = ([*tile, others["beside"]] * columns)[:-1] + [others["below"]]
    parts = row * rows if rows * columns > 1 else []
    return [others["begin"], *parts, place_of(kind, texts), *tile, others["end"]]


def _places(picture: Processed) -> list[tuple[int, int]]:
    """Row and column of each tile, where a picture was cut."""
    return list(np.ndindex(*picture.tiles)) if picture.tiles != (1, 1) else []


def _numbered_tiles(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """Texts before each tile name its row and its column (Idefics3, SmolVLM). They need not be single tokens."""
    columns = picture.tiles[1]
    around = "<fake_token_around_image>"
    names = [f"{around}<row_{row + 1}_col_{column + 1}>" for row, column in _places(picture)]
    before = ["\n" + name if i and i % columns == 0 else name for i, name in enumerate(names)]
    before.append(f"\n\n{around}<global-img>" if names else f"{around}<global-img>")
    features = [kind.token] * (picture.features(kind) // len(before))
    tokens = [one for text in before for one in texts.encode(text, False) + features]
    return tokens + texts.encode(around, False)


def _marked_tiles(picture: Processed, kind: ImageTokens, texts: Texts) -> list[int]:
    """Texts before each tile and before the whole picture, and around them all; a picture that was not cut has the
    latter only (LFM2-VL)."""
    before = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row, column in _places(picture)] or [""]
    features = [kind.token] * (picture.features(kind) // len(before))
    parts = [(text, features) for text in before]
    if picture.thumbnail is not None:
        parts.append(("<|img_thumbnail|>", [kind.token] * picture.thumbnail.features(kind)))
    tokens = [one for text, run in parts for one in (*texts.encode(text, False), *run)]
    return [*texts.encode("<|image_start|>", False), *tokens, *texts.encode("<|image_end|>", False)]


LAYOUTS: dict[str, Callable[[Processed, ImageTokens, Texts], list[int]]] = {
    "plain": _plain,
    "rows": _rows,
    "enclosed": _enclosed,
    "tiles": _tiles,
    "numbered_tiles": _numbered_tiles,
    "marked_tiles": _marked_tiles,
}
