"""Pictures and videos in prompts of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxserve.images.layouts import Texts, place_of, tokens_of
from jaxserve.images.patches import Processed
from jaxserve.images.videos import ProcessedVideo
from jaxserve.types import Image, ImageTokens, InvalidRequestError, VideoTokens

MOST_NEWLINES = 31  # that Gemma's tokenizers have as one token


def with_images(
    prompt: Sequence[int],
    pictures: Sequence[Processed],
    kind: ImageTokens,
    texts: Texts,
    videos: Sequence[ProcessedVideo] = (),
) -> tuple[list[int], list[Image]]:
    """The prompt, with the tokens of each picture (`layouts`) in the place of one, and the pictures at their places.
    `prompt` has one token for each picture, and one for each video, whose frames are pictures, too.

    Raises InvalidRequestError if the prompt has more or fewer tokens for pictures or videos.
    """
    if videos:
        given = len(videos)
        token = -1 if kind.video is None else kind.video.token
        if (count := sum(one == token for one in prompt)) != given:
            raise InvalidRequestError(f"the prompt has {count} places for videos, and {given} are given", "images")
    place = place_of(kind, texts)
    if (count := sum(token == place for token in prompt)) != len(pictures):
        raise InvalidRequestError(
            f"the prompt has {count} places for pictures (token {place}), and {len(pictures)} pictures are given",
            "images",
        )
    left = iter(pictures)
    clips = iter(videos)
    closes: int | None = None  # a token that is left out behind a video
    lines = Newlines(texts, kind.newlines if pictures else 0)
    tokens: list[int] = []
    images: list[Image] = []
    for token in prompt:
        if videos and kind.video is not None and token == kind.video.token:
            closes = _add_video(tokens, images, next(clips), kind, kind.video, texts)
            continue
        last, closes = closes, None
        if token == last:
            continue
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


def _add_video(
    tokens: list[int], images: list[Image], clip: ProcessedVideo, kind: ImageTokens, video: VideoTokens, texts: Texts
) -> int | None:
    """Adds a video to a prompt. Returns the token that is left out if it comes next: Qwen3-VL has marks around each
    frame, in the place of those around the video."""

    def add(frame: Processed, later: int | None = None) -> None:
        count = frame.features(kind)
        digest = frame.digest
        if later is not None:
            digest = hashlib.sha256(digest + str(later).encode()).digest()
        images.append(Image(len(tokens), count, frame.grid, frame.patches.tobytes(), digest, None, later))
        tokens.extend([kind.token] * count)

    if video.processor == "Qwen2VLVideoProcessor":
        step = np.float32(clip.interval * video.per_second) if video.per_second else np.float32(1)
        for i, frame in enumerate(clip.frames):
            add(frame, int(np.float32(i) * step) if i else None)
        return None
    if video.processor == "Qwen3VLVideoProcessor":
        begin, end = (texts.token_of(f"<|vision_{which}|>") for which in ("start", "end"))
        marked = bool(tokens) and tokens[-1] == begin
        if marked:
            tokens.pop()
        for frame, time in zip(clip.frames, clip.times, strict=True):
            tokens += [*texts.encode(f"<{time:.1f} seconds>", False), begin]
            add(frame)
            tokens.append(end)
        return end if marked else None
    begin, end = (texts.token_of(f"<|{which}_of_image|>") for which in ("begin", "end"))
    for frame, time in zip(clip.frames, clip.times, strict=True):
        tokens.append(begin)
        add(frame)
        said = str(int(time)) if video.processor == "Glm4vVideoProcessor" else f"{time:.1f} seconds"
        tokens += [end, *texts.encode(said, False)]
    return None


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
