"""The tokens of a picture in a prompt: those in whose place its features stand, and what a model puts around them.

`ImageTokens.layout` names one of LAYOUTS. Each gets the picture, what is known of its tokens, and the ids of the tokens
of its roles (`ImageTokens.texts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxserve.images.processing import Processed
from jaxserve.types import ImageTokens


def tokens_of(picture: Processed, kind: ImageTokens, token_of: Callable[[str], int]) -> list[int]:
    """The tokens of a picture. `token_of`: the id of a text that is one token."""
    others = {role: token_of(text) for role, text in kind.texts.items()}
    return [*kind.around[:1], *LAYOUTS[kind.layout](picture, kind, others), *kind.around[1:]]


def _plain(picture: Processed, kind: ImageTokens, others: Mapping[str, int]) -> list[int]:
    """One for each feature."""
    frames, rows, columns = picture.grid
    return [kind.token] * (frames * rows * columns // kind.side**2)


def _rows(picture: Processed, kind: ImageTokens, others: Mapping[str, int]) -> list[int]:
    """With `row_end` behind each row of features, but `end` behind the last one."""
    frames, rows, columns = picture.grid
    row = [kind.token] * (columns // kind.side) + [others["row_end"]]
    return (row * (frames * rows // kind.side))[:-1] + [others["end"]]


def _enclosed(picture: Processed, kind: ImageTokens, others: Mapping[str, int]) -> list[int]:
    """One for each feature, between `begin` and `end`."""
    return [others["begin"], *_plain(picture, kind, others), others["end"]]


def _tiles(picture: Processed, kind: ImageTokens, others: Mapping[str, int]) -> list[int]:
    """One for each feature, with `beside` between the tiles of a row, and `below` behind the row. The tile of the whole
    picture follows `place`."""
    rows, columns = picture.tiles
    tile = _plain(picture._replace(grid=(1, *picture.grid[1:])), kind, others)
    row = ([*tile, others["beside"]] * columns)[:-1] + [others["below"]]
    parts = row * rows if rows * columns > 1 else []
    return [others["begin"], *parts, others["place"], *tile, others["end"]]


def _area(picture: Processed, kind: ImageTokens, others: Mapping[str, int]) -> list[int]:
    """One for each feature of the tile that shows all of the picture, then of the area, with one behind each row."""
    assert picture.area is not None
    _, rows, columns = picture.grid
    return [kind.token] * (rows * columns + picture.area.rows * (picture.area.columns + 1))


Layout = Callable[[Processed, ImageTokens, Mapping[str, int]], list[int]]
LAYOUTS: dict[str, Layout] = {"plain": _plain, "rows": _rows, "enclosed": _enclosed, "tiles": _tiles, "area": _area}
