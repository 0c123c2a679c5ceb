"""Processes that read and process pictures, beside the API server, and what they have processed lately.

A picture is somebody else's file. It is decoded in a process that has so much memory and so much time, whose end is
nothing but an error of one request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jaxserve.checkpoints import gguf
from jaxserve.images.patches import Processed
from jaxserve.images.processing import ImageProcessor
from jaxserve.images.reading import open_picture
from jaxserve.images.videos import ProcessedVideo, VideoProcessor, open_clip
from jaxserve.server.images.sources import Source
from jaxserve.server.images.video_sources import VideoSource
from jaxserve.types import ImageTokens, InvalidRequestError

log = logging.getLogger(__name__)

MAX_WORKERS = 4
SECONDS = 20.0  # for one picture
MEMORY = 2**30  # of a worker's heap, beyond what it has when it starts
KEPT_BYTES = 256 * 2**20  # of processed pictures
LOW_DETAIL = 512 * 512  # pixels that the encoder sees of a picture with detail "low", as OpenAI documents it

_PRELOADED = ["jaxserve.server.images.workers", "transformers.models.auto.image_processing_auto"]
_processor: ImageProcessor | None = None  # of a worker
_videos: VideoProcessor | None = None


def _begin(folder: str, kind: ImageTokens) -> None:
    global _processor, _videos
    _processor = ImageProcessor.of(Path(folder), kind)
    assert _processor is not None
    if kind.video is not None:
        _videos = VideoProcessor.of(Path(folder), _processor, kind.video)
    gguf.forget()
    _processor.load()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, resource.RLIM_INFINITY))


def _is_there() -> bool:
    return _processor is not None


def _process(data: bytes, most_pixels: int, seen_pixels: int | None) -> Processed:
    assert _processor is not None
    return _processor(open_picture(data, most_pixels), seen_pixels)


def _process_video(files: list[bytes], rate: float | None, most_pixels: int) -> ProcessedVideo:
    assert _videos is not None
    return _videos(open_clip(files, rate, most_pixels))


def _key_of(files: Sequence[bytes], detail: str) -> bytes:
    key = hashlib.sha256(f"{detail} {[len(data) for data in files]} ".encode())
    for data in files:
        key.update(data)
    return key.digest()


class ImageWorkers:
    """The workers of one API server."""

    def __init__(self, folder: str, kind: ImageTokens, most_pixels: int):
        self._folder = folder
        self._kind = kind
        self._most_pixels = most_pixels
        self._pool: ProcessPoolExecutor | None = None
        self._kept: OrderedDict[bytes, Processed | ProcessedVideo] = OrderedDict()
        self._kept_bytes = 0

    def start(self) -> None:
        """Starts the workers, which takes them a few seconds. Without, they start with the first picture."""
        pool = self._running_pool()
        for _ in range(pool._max_workers):  # type: ignore[attr-defined]
            pool.submit(_is_there)

    async def process(self, data: bytes, source: Source) -> Processed:
        """The patches of a picture. Raises InvalidRequestError for one that cannot be read."""
        key = await asyncio.to_thread(_key_of, [data], source.detail)
        seen = LOW_DETAIL if source.detail == "low" else None
        made: Processed = await self._made(key, source.where, _process, data, self._most_pixels, seen)
        return made

    async def process_video(self, files: list[bytes], source: VideoSource) -> ProcessedVideo:
        """The patches of a video's frames. Raises InvalidRequestError for one that cannot be read."""
        key = await asyncio.to_thread(_key_of, files, f"video {source.rate}")
        made: ProcessedVideo = await self._made(
            key, source.where, _process_video, files, source.rate, self._most_pixels
        )
        return made

    async def _made(self, key: bytes, where: str, work: Callable[..., Any], *given: Any) -> Any:
        """What a worker makes of what was given, or has made of it."""
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        pool = self._running_pool()
        try:
            making = asyncio.get_running_loop().run_in_executor(pool, work, *given)
            made = await asyncio.wait_for(making, SECONDS)
        except (TimeoutError, BrokenExecutor, MemoryError) as error:
            log.warning("a worker that processed a picture was ended (%s)", type(error).__name__)
            self._end(pool)
            raise InvalidRequestError(
                f"{where}: a picture cannot be read: it takes more than {SECONDS:g} seconds or {MEMORY >> 20} MiB",
                "messages",
                "invalid_image",
            ) from None
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}: {error}", "messages", "invalid_image") from None
        self._keep(key, made)
        return made

    def _running_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            count = min(MAX_WORKERS, os.cpu_count() or 1)
            context = get_context("forkserver")  # workers share what their parent has imported
            context.set_forkserver_preload(_PRELOADED)
            given = (self._folder, self._kind)
            self._pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=given)
        return self._pool

    def _keep(self, key: bytes, made: Processed | ProcessedVideo) -> None:
        self._kept[key] = made
        self._kept_bytes += made.nbytes
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes

    def _end(self, pool: ProcessPoolExecutor) -> None:
        """Ends the workers of a pool; the next picture starts new ones."""
        if self._pool is pool:
            self._pool = None
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        if self._pool is not None:
            self._end(self._pool)
