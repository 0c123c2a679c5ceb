"""Pictures in prompts of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.images.processing import Processed
from jaxserve.types import Image, ImageTokens, InvalidRequestError


def with_images(
    prompt: Sequence[int],
    pictures: Sequence[Processed],
    kind: ImageTokens,
    token_of: Callable[[str], int],
) -> tuple[list[int], list[Image]]:
    """The prompt, with the tokens of each picture in the place of one, and the pictures at their places. `prompt` has
    one token for each picture. `token_of`: the id of a text that is one token.

    Raises InvalidRequestError if the prompt has more or fewer tokens for pictures.
    """
    if (count := sum(token == kind.token for token in prompt)) != len(pictures):
        raise InvalidRequestError(
            f"the prompt has {count} places for pictures (token {kind.token}), and {len(pictures)} pictures are given",
            "images",
        )
    left = iter(pictures)
    tokens: list[int] = []
    images = []
    for token in prompt:
        if token != kind.token:
            tokens.append(token)
            continue
        picture = next(left)
        frames, rows, columns = picture.grid
        features = frames * rows * columns // kind.side**2
        images.append(Image(len(tokens), features, picture.grid, picture.patches.tobytes(), picture.digest))
        if kind.row_end:
            row = [token] * (columns // kind.side) + [token_of(kind.row_end)]
            tokens += (row * (frames * rows // kind.side))[:-1] + [token_of(kind.end or kind.row_end)]
        else:
            tokens += [token] * features
    return tokens, images
