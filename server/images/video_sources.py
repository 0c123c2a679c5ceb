"""The bytes of videos: from data URLs, or from addresses at hosts that the operator allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.images.videos import MAX_FRAMES
from jaxserve.server.images.long_strings import whole
from jaxserve.server.images.sources import File, Source, read
from jaxserve.types import InvalidRequestError


class VideoSource(NamedTuple):
    """A video in a message.

    urls: data URLs or addresses: of an animation, or of each frame.
    rate: frames a second; None: the request does not say.
    where: for errors, the part of the request that holds it.
    """

    urls: tuple[str, ...]
    rate: float | None
    where: str


def read_video(source: VideoSource, allowed_hosts: Sequence[str]) -> list[File]:
    """The files of the video's frames, or of one animation; as `sources.read`."""
    urls = list(source.urls)
    if len(urls) == 1 and urls[0].startswith("data:video/"):
        head, _, body = whole(urls[0]).partition(",")
        kind = head.removeprefix("data:video/").partition(";")[0]
        if kind not in ("jpeg", "gif", "webp", "png", "apng"):
            raise InvalidRequestError(
                f"{source.where}: a video cannot be read: video/{kind[:32]} is not, as no codec of videos is: send "
                "an animated GIF, WebP or PNG, or frames (data:video/jpeg;base64,FRAME,FRAME,...)",
                "messages",
                "invalid_image",
            )
        head = head.replace("data:video/", "data:image/", 1)
        urls = [f"{head},{frame}" for frame in body.split(",", MAX_FRAMES + 1)]
    if len(urls) > MAX_FRAMES:
        raise InvalidRequestError(
            f"{source.where}: a video has more than {MAX_FRAMES} frames", "messages", "invalid_image"
        )
    return [read(Source(url, "auto", source.where), allowed_hosts) for url in urls]
