"""Pictures in prompts of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.images.processing import Processed
from jaxserve.types import Image, ImageTokens, InvalidRequestError

MOST_NEWLINES = 31  # that Gemma's tokenizers have as one token


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
    placeholder = kind.token if kind.placeholder is None else kind.placeholder
    if (count := sum(token == placeholder for token in prompt)) != len(pictures):
        raise InvalidRequestError(
            f"the prompt has {count} places for pictures (token {placeholder}), and {len(pictures)} pictures are given",
            "images",
        )
    left = iter(pictures)
    lines = Newlines(token_of, kind.newlines if pictures else 0)
    tokens: list[int] = []
    images = []
    for token in prompt:
        if token != placeholder:
            lines.add(tokens, token)
            continue
        picture = next(left)
        frames, rows, columns = picture.grid
        features = frames * rows * columns // kind.side**2
        lines.surround(tokens)
        tokens += kind.around[:1]
        images.append(Image(len(tokens), features, picture.grid, picture.patches.tobytes(), picture.digest))
        if kind.row_end:
            row = [kind.token] * (columns // kind.side) + [token_of(kind.row_end)]
            tokens += (row * (frames * rows // kind.side))[:-1] + [token_of(kind.end or kind.row_end)]
        else:
            tokens += [kind.token] * features
        tokens += kind.around[1:]
        lines.surround(tokens)
    return tokens, images


class Newlines:
    """Writes `count` newlines around pictures as a tokenizer does that has a token for any number of them: those that
    follow each other are one token."""

    def __init__(self, token_of: Callable[[str], int], count: int):
        self._count = count
        self._token_of = token_of
        self._numbers: dict[int, int] = {}  # token -> how many newlines it is
        self._open = False  # whether the last token is newlines behind a picture
        if count:
            for number in range(1, MOST_NEWLINES + 1 - count):
                try:
                    self._numbers[token_of("\n" * number)] = number
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
        tokens.append(self._token_of("\n" * (before + count)))
