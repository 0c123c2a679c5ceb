"""Pictures in prompts of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.images.processing import Processed
from jaxserve.types import Image, ImageTokens, InvalidRequestError


def with_images(
    prompt: Sequence[int], pictures: Sequence[Processed], kind: ImageTokens
) -> tuple[list[int], list[Image]]:
    """The prompt, with as many tokens for each picture as it has features, and the pictures at their places. `prompt`
    has one token for each picture. Raises InvalidRequestError if it has more or fewer."""
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
        tokens += [token] * features
    return tokens, images
