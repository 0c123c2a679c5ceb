"""Processes that read and process pictures, beside the API server, and what they have processed lately.

A picture is somebody else's file. It is decoded in a process that has so much memory and so much time, whose end is
nothing but an error of one request. The file is sent there in pieces, so that it is whole in no other process.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import hashlib
import io
import logging
import os
import resource
import threading
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.checkpoints import gguf
from jaxserve.images.patches import Processed
from jaxserve.images.processing import ImageProcessor
from jaxserve.images.reading import open_picture
from jaxserve.images.videos import ProcessedVideo, VideoProcessor, open_clip
from jaxserve.server.images.sources import File, Source
from jaxserve.server.images.video_sources import VideoSource
from jaxserve.types import ImageTokens, InvalidRequestError

log = logging.getLogger(__name__)

MAX_WORKERS = 4
SECONDS = 20.0  # for one picture
MEMORY = 2**30  # of a worker's heap, beyond what it has when it starts
KEPT_BYTES = 256 * 2**20  # of processed pictures
LOW_DETAIL = 512 * 512  # pixels that the encoder sees of a picture with detail "low", as OpenAI documents it

_PIECE = 2**16  # bytes that are sent at a time
_PRELOADED = ["jaxserve.server.images.workers", "transformers.models.auto.image_processing_auto"]


class Task(NamedTuple):
    """What a worker is to do with the files that follow.

    files: for each, whether it is in base64.
    seen_pixels: of a picture, most that the model sees; None: as many as it can.
    rate: of a video, frames a second; None: the request does not say.
    """

    files: list[bool]
    is_video: bool = False
    seen_pixels: int | None = None
    rate: float | None = None


# In a worker's process


def _work(connection: Connection, folder: str, kind: ImageTokens, most_pixels: int) -> None:
    """Answers each picture and each video with what it becomes, or with an exception."""
    processor = ImageProcessor.of(Path(folder), kind)
    assert processor is not None
    videos = None if kind.video is None else VideoProcessor.of(Path(folder), processor, kind.video)

    def made(files: list[bytes | None], task: Task) -> Processed | ProcessedVideo:
        given = [file for file in files if file is not None]
        if len(given) < len(files):
            raise InvalidRequestError("a picture cannot be read: its data is not base64", "images")
        if task.is_video:
            assert videos is not None
            return videos(open_clip(given, task.rate, most_pixels))
        return processor(open_picture(given[0], most_pixels), task.seen_pixels)

    gguf.forget()
    processor.load()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, resource.RLIM_INFINITY))
    with contextlib.suppress(EOFError, OSError):  # the server has ended
        connection.send(None)
        while True:
            task: Task = connection.recv()
            answer: Processed | ProcessedVideo | Exception
            try:
                answer = made([_received(connection, in_base64) for in_base64 in task.files], task)
            except (InvalidRequestError, MemoryError) as error:
                answer = error.with_traceback(None)
            except Exception as error:
                answer = RuntimeError("".join(traceback.format_exception(error)))
            connection.send(answer)
            del answer


def _received(connection: Connection, in_base64: bool) -> bytes | None:
    """A file, all pieces of which are received; None: it is not in base64."""
    data = io.BytesIO()
    left = b""
    valid = True
    while piece := connection.recv_bytes():
        if not in_base64:
            data.write(piece)
            continue
        left += piece
        whole = len(left) // 4 * 4
        valid = valid and _decode(left[:whole], data)
        left = left[whole:]
    return data.getvalue() if valid and not left else None


def _decode(text: bytes, data: io.BytesIO) -> bool:
    """Adds the bytes of a text in base64 whose length is a multiple of four. False: it is none, or follows padding."""
    if text and data.tell() % 3:
        return False
    try:
        data.write(binascii.a2b_base64(text, strict_mode=True))
    except binascii.Error:
        return False
    return True


# In the server's


class _Worker:
    """A process, which reads one picture at a time."""

    def __init__(self, folder: str, kind: ImageTokens, most_pixels: int):
        context = get_context("forkserver")  # workers share what their parent has imported
        context.set_forkserver_preload(_PRELOADED)
        self._connection, theirs = context.Pipe()
        given = theirs, folder, kind, most_pixels
        self._process = context.Process(target=_work, args=given, name="pictures", daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    def wait(self) -> None:
        """Waits until the process can read pictures. Raises EOFError if it ends."""
        if not self._is_ready:
            self._connection.recv()
            self._is_ready = True

    def read(self, files: Sequence[File], task: Task) -> Processed | ProcessedVideo | Exception:
        """What the files become, or the reason of their refusal. Raises OSError or EOFError if the process ends or
        takes too long."""
        self.wait()
        self._connection.send(task)
        for file in files:
            for piece in file.pieces:
                for start in range(0, len(piece), _PIECE):
                    self._connection.send_bytes(piece[start : start + _PIECE])
            self._connection.send_bytes(b"")
        if not self._connection.poll(SECONDS):
            raise TimeoutError
        answer: Processed | ProcessedVideo | Exception = self._connection.recv()
        return answer

    def end(self) -> None:
        self._process.kill()


def _key_of(files: Sequence[File], task: Task) -> bytes:
    sizes = [sum(map(len, file.pieces)) for file in files]
    key = hashlib.sha256(f"{task} {sizes} ".encode())
    for file in files:
        for piece in file.pieces:
            key.update(piece)
    return key.digest()


class ImageWorkers:
    """The workers of one API server: each has a thread that sends it pictures."""

    def __init__(self, folder: str, kind: ImageTokens, most_pixels: int):
        self._given = folder, kind, most_pixels
        self._count = min(MAX_WORKERS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="pictures")
        self._workers: dict[int, _Worker] = {}  # by thread
        self._kept: OrderedDict[bytes, Processed | ProcessedVideo] = OrderedDict()
        self._kept_bytes = 0

    def start(self) -> None:
        """Starts the workers, which takes them a few seconds. Without, they start with the first picture."""
        for _ in range(self._count):
            self._threads.submit(lambda: self._worker().wait())

    def _worker(self) -> _Worker:
        """The worker of this thread."""
        thread = threading.get_ident()
        if thread not in self._workers:
            self._workers[thread] = _Worker(*self._given)
        return self._workers[thread]

    async def process(self, file: File, source: Source) -> Processed:
        """The patches of a picture. Raises InvalidRequestError for one that cannot be read."""
        task = Task([file.in_base64], seen_pixels=LOW_DETAIL if source.detail == "low" else None)
        made: Any = await self._made([file], task, source.where)
        return made  # type: ignore[no-any-return]

    async def process_video(self, files: list[File], source: VideoSource) -> ProcessedVideo:
        """The patches of a video's frames. Raises InvalidRequestError for one that cannot be read."""
        made: Any = await self._made(files, Task([f.in_base64 for f in files], True, rate=source.rate), source.where)
        return made  # type: ignore[no-any-return]

    async def _made(self, files: Sequence[File], task: Task, where: str) -> Processed | ProcessedVideo:
        """What a worker makes of the files, or has made of them."""
        key = await asyncio.to_thread(_key_of, files, task)
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, files, task)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}: {error}", "messages", "invalid_image") from None
        self._keep(key, made)
        return made

    def _read(self, files: Sequence[File], task: Task) -> Processed | ProcessedVideo:
        """What the files become. After anything but that or their refusal, the thread gets a new worker."""
        worker = self._worker()
        try:
            answer = worker.read(files, task)
        except (OSError, EOFError) as error:
            answer = error
        if isinstance(answer, Processed | ProcessedVideo):
            return answer
        if isinstance(answer, InvalidRequestError):
            raise answer
        worker.end()
        del self._workers[threading.get_ident()]
        if isinstance(answer, RuntimeError):
            raise answer
        log.warning("a worker that processed a picture was ended (%s)", type(answer).__name__)
        raise InvalidRequestError(
            f"a picture cannot be read: it takes more than {SECONDS:g} seconds or {MEMORY >> 20} MiB", "images"
        )

    def _keep(self, key: bytes, made: Processed | ProcessedVideo) -> None:
        self._kept[key] = made
        self._kept_bytes += made.nbytes
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers.values()):
            worker.end()
