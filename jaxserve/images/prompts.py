"""Pictures in prompts of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.images.layouts import tokens_of
from jaxserve.images.processing import Processed
from jaxserve.types import Image, ImageTokens, InvalidRequestError


def with_images(
    prompt: Sequence[int],
    pictures: Sequence[Processed],
    kind: ImageTokens,
    token_of: Callable[[str], int],
) -> tuple[list[int], list[Image]]:
    """The prompt, with the tokens of each picture (`layouts`) in the place of one, and the pictures at their places.
    `prompt` has one token for each picture. `token_of`: the id of a text that is one token.

    Raises InvalidRequestError if the prompt has more or fewer tokens for pictures.
    """
    place = token_of(kind.texts["place"]) if "place" in kind.texts else kind.token
    if (count := sum(token == place for token in prompt)) != len(pictures):
        raise InvalidRequestError(
            f"the prompt has {count} places for pictures (token {place}), and {len(pictures)} pictures are given",
            "images",
        )
    left = iter(pictures)
    tokens: list[int] = []
    images = []
    for token in prompt:
        if token != place:
            tokens.append(token)
            continue
        picture = next(left)
        own = tokens_of(picture, kind, token_of)
        first = len(tokens) + own.index(kind.token)
        count = own.count(kind.token)
        patches = picture.patches.tobytes()
        images.append(Image(first, count, picture.grid, patches, picture.digest, picture.area))
        tokens += own
    return tokens, images
