"""Pictures in prompts of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.images.layouts import Texts, place_of, tokens_of
from jaxserve.images.patches import Processed
from jaxserve.types import Image, ImageTokens, InvalidRequestError

MOST_NEWLINES = 31  # that Gemma's tokenizers have as one token


def with_images(
    prompt: Sequence[int], pictures: Sequence[Processed], kind: ImageTokens, texts: Texts
) -> tuple[list[int], list[Image]]:
    """The prompt, with the tokens of each picture (`layouts`) in the place of one, and the pictures at their places.
    `prompt` has one token for each picture.

    Raises InvalidRequestError if the prompt has more or fewer tokens for pictures.
    """
    place = place_of(kind, texts)
    if (count := sum(token == place for token in prompt)) != len(pictures):
        raise InvalidRequestError(
            f"the prompt has {count} places for pictures (token {place}), and {len(pictures)} pictures are given",
            "images",
        )
    left = iter(pictures)
    lines = Newlines(texts, kind.newlines if pictures else 0)
    tokens: list[int] = []
    images = []
    for token in prompt:
        if token != place:
            lines.add(tokens, token)
            continue
        picture = next(left)
        own = tokens_of(picture, kind, texts)
        lines.surround(tokens)
        places = [len(tokens) + i for i, one in enumerate(own) if one == kind.token]
        for part in picture.parts:
            count = part.features(kind)
            images.append(Image(places[0], count, part.grid, part.patches.tobytes(), part.digest, part.area))
            places = places[count:]
        tokens += own
        lines.surround(tokens)
    return tokens, images


class Newlines:
    """Writes `count` newlines around pictures as a tokenizer does that has a token for any number of them: those that
    follow each other are one token."""

    def __init__(self, texts: Texts, count: int):
        self._count = count
        self._texts = texts
        self._numbers: dict[int, int] = {}  # token -> how many newlines it is
        self._open = False  # whether the last token is newlines behind a picture
        if count:
            for number in range(1, MOST_NEWLINES + 1 - count):
                try:
                    self._numbers[texts.token_of("\n" * number)] = number
                except InvalidRequestError:
                    break

    def surround(self, tokens: list[int]) -> None:
        """Adds the newlines before or behind a picture."""
        if self._count:
            self._append(tokens, self._count)
            self._open = True

    def add(self, tokens: list[int], token: int) -> None:
        """Adds a token of the prompt."""
        if self._open and token in self._numbers:
            self._append(tokens, self._numbers[token])
        else:
            tokens.append(token)
        self._open = False

    def _append(self, tokens: list[int], count: int) -> None:
        before = self._numbers.get(tokens[-1], 0) if tokens else 0
        if before:
            tokens.pop()
        tokens.append(self._texts.token_of("\n" * (before + count)))
