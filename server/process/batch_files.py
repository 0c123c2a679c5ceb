"""Answers a file of requests in the OpenAI batch format, through the handlers of the HTTP endpoints.

Each line of the input is {"custom_id", "method": "POST", "url", "body"}. Each line of the output is {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}, in the order in which the requests end. A request with a
URL that a batch does not take gets an error as its answer. A killed run leaves whole lines, of which the last may be
cut short. The next run removes such a line, then answers the requests that have no answer yet.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import os
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from jaxserve import __version__
from jaxserve.config import EngineConfig
from jaxserve.server.http.errors import APIError
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.run_engine import DEFAULT_ENGINE
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import build_app
from jaxserve.server.process.engine_process import EngineProcess
from jaxserve.server.process.fingerprint import fingerprint
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.text.tokenizer import load_tokenizer
from jaxserve.types import EngineDeadError

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
_AHEAD = 2  # requests in flight per sequence that the engine can run, so that the engine never waits for one
_LOOK_SECONDS = 0.1  # between two checks whether a restarted engine is ready
_OPENING = b'{"id":"batch_req_'  # every line of the output begins with this


class BatchLine(msgspec.Struct):
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class _Answered(msgspec.Struct):
    """The field of an output line that tells which request it answers."""

    custom_id: str


class BatchError(ValueError):
    """The input or output file cannot be used; the message names the file and the line."""


def answer_file(config: EngineConfig, source: Path, target: Path, engine_class: str = DEFAULT_ENGINE) -> int:
    """Answers all requests of `source` that `target` does not answer yet; returns the process's exit code.

    An invalid request gets its error as its answer. Raises BatchError for a file that is not a batch.
    """
    if target.resolve() == source.resolve():
        raise BatchError(f"input and output are the same file: {source}")
    asked = check_input(source)
    with open(target, "ab+", buffering=0) as output:
        done = recover_output(output, target)
        if strangers := done - asked:
            raise BatchError(f"{target} answers {min(strangers)!r}, which {source} does not ask: not its output")
        left = asked - done
        if not left:
            print(f"all {len(asked)} requests are answered in {target}", file=sys.stderr)
            return 0
        if done:
            print(f"{len(done)} of {len(asked)} requests are answered already; {len(left)} to go", file=sys.stderr)
        # no limit on the queue: a request that is turned away would never be answered
        config = dataclasses.replace(config, max_waiting=None, max_waiting_tokens=None, prompts_first=True)
        with EngineProcess(config, engine_class) as engine:
            try:
                asyncio.run(_answer_all(config, engine, source, output, left))
            except (EngineDeadError, OSError, ExceptionGroup) as error:
                if not isinstance(first := _first(error), EngineDeadError | OSError):
                    raise
                print(f"jaxserve: {first}", file=sys.stderr)
                return 1
    return 0


def read_lines(source: Path) -> Iterator[BatchLine]:
    """The requests of a file, which may begin with a byte order mark. Raises BatchError, naming the line, for a line
    that is not a request."""
    decoder = msgspec.json.Decoder(BatchLine)
    with open(source, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BatchError(f"{source}:{number}: {error}") from None
            yield line


def model_of(source: Path) -> str:
    """The one model that all requests of a file name. Raises BatchError if they name none or several."""
    names = {line.body.get("model") for line in read_lines(source)}
    if len(names) == 1 and isinstance(name := names.pop(), str):
        return name
    listed = ", ".join(sorted(map(repr, names))[:5]) or "none"
    raise BatchError(f"{source}: the requests must name one model, or --model must; they name {listed}")


def check_input(source: Path) -> set[str]:
    """The custom_ids of the input, read before a model is loaded. Raises BatchError if one occurs twice."""
    seen: set[str] = set()
    for line in read_lines(source):
        if line.custom_id in seen:
            raise BatchError(f"{source}: custom_id {line.custom_id!r} stands on several lines; each must be unique")
        seen.add(line.custom_id)
    return seen


def recover_output(output: FileIO, target: Path) -> set[str]:
    """The custom_ids that the output answers. Removes a last line that a killed run left unfinished.

    Raises BatchError and leaves the file as it is if it holds anything but output lines.
    """
    decoder = msgspec.json.Decoder(_Answered)
    done: set[str] = set()
    output.seek(0)
    end = 0
    for raw in output:
        torn = not raw.endswith(b"\n")
        try:
            if raw[: len(_OPENING)] != _OPENING[: len(raw)]:
                raise msgspec.DecodeError
            if not torn:
                done.add(decoder.decode(raw).custom_id)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BatchError(f"{target} is not the output of a batch: {raw[:80]!r}") from None
        if not torn:
            end += len(raw)
    output.truncate(end)
    output.seek(end)
    return done


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _answer_all(config: EngineConfig, engine: EngineProcess, source: Path, file: FileIO, left: set[str]) -> None:
    client = EngineClient()
    output = BatchOutput(file)
    dummy = config.load_format == "dummy"
    settings = ServerSettings(model_names=(config.model,), access_log=False)
    state = ServerState(settings, client, Metrics(settings.model_name))
    supervisor = Supervisor(client, engine, restarts=settings.engine_restarts, watchdog=settings.watchdog_seconds)
    try:
        await client.connect(engine.socket_path, engine.runs)
        info = await client.wait_ready()
        state.tokenizer = tokenizer = await state.off_loop(
            lambda: load_tokenizer(
                info.model_folder,
                source=info.tokenizer_folder,
                placeholder=dummy,
                generation_config=config.generation_config,
                override_generation_config=config.override_generation_config,
            )
        )
        state.fingerprint = await state.off_loop(
            lambda: fingerprint(info, config, __version__, tokenizer.chat_template)
        )
        app = build_app(state)
        places = asyncio.Semaphore(_AHEAD * config.max_num_seqs)
        with tqdm(total=len(left), desc="answering", unit="request") as bar:

            async def answer(line: BatchLine) -> None:
                try:
                    losses = None
                    while losses != client.losses:  # if the engine died meanwhile, ask the next engine
                        while not client.is_ready:
                            await asyncio.sleep(_LOOK_SECONDS)
                        losses = client.losses
                        status, body = await _post(app, line)
                        if status == 200:
                            break
                    await output.append(_line(line, status, body))
                    bar.update()
                finally:
                    places.release()

            async def watch() -> None:
                try:
                    await supervisor.run()
                except EngineDeadError as error:
                    raise EngineDeadError(f"{error}; run the same command again to go on") from None

            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch())
                async with asyncio.TaskGroup() as answers:
                    for line in read_lines(source):
                        if line.custom_id in left:
                            await places.acquire()
                            answers.create_task(answer(line))
                watching.cancel()
    finally:
        output.close()
        await client.close(drain=True)
        state.text_threads.executor.shutdown(wait=False, cancel_futures=True)
        if state.images is not None:
            state.images.close()


def _line(line: BatchLine, status: int, body: bytes) -> bytes:
    """The output line with the answer to `line`."""
    answer = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": uuid.uuid4().hex, "body": msgspec.Raw(body)},
        "error": None,
    }
    return msgspec.json.encode(answer) + b"\n"


async def _post(app: Any, line: BatchLine) -> tuple[int, bytes]:
    """Sends one request through the application, without a network."""
    if line.method != "POST" or line.url not in URLS:
        text = f"a batch takes POST to {' or '.join(URLS)}, got {line.method[:16]} {line.url[:128]}"
        return 404, APIError(404, text, param="url", code="url_not_found").body()
    payload = msgspec.json.encode({**line.body, "model": None, "stream": False})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())],
        "server": ("batch", 0),
        "client": ("batch", 0),
    }
    incoming = iter([{"type": "http.request", "body": payload, "more_body": False}])
    status = 500
    parts = []

    async def receive() -> dict[str, Any]:
        for message in incoming:
            return message
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


class BatchOutput:
    """Appends to an unbuffered file in its own thread, so that the event loop never waits for the disk. Lines that come
    during a write go into the next one together."""

    def __init__(self, file: FileIO):
        self._file = file
        self._lines: list[bytes] = []
        self._thread = ThreadPoolExecutor(1, "batch-output")
        self._turn = asyncio.Lock()
        self._error: str | None = None

    async def append(self, line: bytes) -> None:
        """Returns when the line is on the disk. Raises OSError if writing fails, for example because the disk is full;
        the file may then end in a part of a line."""
        self._lines.append(line)
        async with self._turn:
            if self._lines and self._error is None:  # otherwise the write before this one has included the line
                lines = self._lines
                self._lines = []
                try:
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._write, b"".join(lines))
                except OSError as error:
                    self._error = str(error)
            if self._error is not None:  # the file may end in a part of a line, which nothing may follow
                raise OSError(self._error)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Waits for the current write to end."""
        self._thread.shutdown()
