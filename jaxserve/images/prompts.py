"""Pictures in prompts of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.images.layouts import LAYOUTS, Texts
from jaxserve.images.patches import Processed
from jaxserve.types import Image, ImageTokens, InvalidRequestError


def with_images(
    prompt: Sequence[int], pictures: Sequence[Processed], kind: ImageTokens, texts: Texts
) -> tuple[list[int], list[Image]]:
    """The prompt, with the tokens of each picture in the place of one, and the pictures at their places. `prompt` has
    one token for each picture.

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
        run = LAYOUTS[kind.layout](picture, kind, texts)
        places = [len(tokens) + i for i, one in enumerate(run) if one == kind.token]
        for part in picture.parts:
            count = part.features(kind)
            images.append(Image(places[0], count, part.grid, part.patches.tobytes(), part.digest))
            places = places[count:]
        tokens += run
    return tokens, images
