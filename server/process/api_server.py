"""One API server: serves HTTP on a listening socket, and passes requests to an engine."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import socket
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn

from jaxserve import __version__, heap
from jaxserve.checkpoints import gguf
from jaxserve.checkpoints.hub import local_folder
from jaxserve.config import EngineConfig
from jaxserve.server.batches.runner import BatchRunner
from jaxserve.server.http.connections import RESERVE
from jaxserve.server.http.protocol import accept
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.recorder import Recorder
from jaxserve.server.process.app import batch_app, build_app
from jaxserve.server.process.engine_process import FLUSH_SECONDS, EngineProcess
from jaxserve.server.process.fingerprint import fingerprint
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

_BUSY_CORES = 2  # that a starting engine keeps busy
_OTHER_FILES = 256  # open files besides connections


def _warm(tokenizer: Tokenizer) -> None:
    """Has a thread import what the first chat needs; it waits for that."""
    threading.Thread(target=tokenizer.warm, name="tokenizer", daemon=True).start()


def http_config(state: ServerState) -> uvicorn.Config:
    """uvicorn's settings of an API server. Raises ValueError for a certificate that cannot be used."""
    settings = state.settings
    config = uvicorn.Config(
        build_app(state),
        lifespan="off",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ws="none",
        access_log=False,  # jaxserve.server.observe.access writes it
        log_config=None,  # uvicorn logs through the handlers that are set already
        log_level=logging.INFO,
        server_header=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    try:
        config.load()
    except OSError as error:
        raise ValueError(f"cannot use the certificate {settings.ssl_certfile}: {error}") from error
    # `accept` does the handshakes, so that it can count them
    tls = config.ssl
    config.ssl = None
    config.http_protocol_class = functools.partial(  # type: ignore[assignment]
        accept, connections=state.connections, client_timeout=settings.client_timeout, tls=tls
    )
    return config


def allow_files(settings: ServerSettings) -> None:
    """Raises this process's limit of open files to what its connections may need, as far as the system allows."""
    count = settings.max_connections + RESERVE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count or soft == resource.RLIM_INFINITY:
        return
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < count:
        log.warning("this process may open %d files, too few for --max-connections; see `ulimit -Hn`", allowed)


class EngineOfFront(Protocol):
    """What an API server does about the engine that it is connected to."""

    async def load(self, state: ServerState) -> Ready:
        """Connects, and waits for the engine to load. Raises EngineDeadError if it cannot."""

    async def keep(self, state: ServerState) -> None:
        """Connects to the next engine whenever one has died. Never returns, unless it raises EngineDeadError."""

    async def leave(self, state: ServerState) -> None:
        """Disconnects for good, after the last request."""

    def kill(self) -> None:
        """Ends what this API server has started at once."""


@dataclass
class OwnEngine:
    """The engine of a server with one API server, which starts, supervises and drains it."""

    process: EngineProcess

    async def load(self, state: ServerState) -> Ready:
        state.client.on_stats = state.metrics.totals.on_stats
        await state.client.connect(self.process.socket_path, self.process.runs)
        return await state.client.wait_ready()

    async def keep(self, state: ServerState) -> None:
        settings = state.settings
        supervisor = Supervisor(
            state.client,
            self.process,
            restarts=settings.engine_restarts,
            watchdog=settings.watchdog_seconds,
            on_restart=state.metrics.totals.on_restart,
        )
        await supervisor.run()

    async def leave(self, state: ServerState) -> None:
        if not state.client.is_ready:
            self.process.kill()  # it reads no message before it has loaded
        await state.client.close(drain=True)

    def kill(self) -> None:
        self.process.__exit__(SystemExit)


class ApiServer(uvicorn.Server):
    """A uvicorn server that also keeps its connection to the engine, and drains.

    Attributes:
      failure: why the server stopped by itself; None if it did not.
      loaded: set when the engine and the tokenizer have loaded.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        engine: EngineOfFront,
        settings: EngineConfig,
        *,
        shares_listener: bool,
    ):
        super().__init__(config)
        self.failure: str | None = None
        self._shares_listener = shares_listener
        self._state = state
        self._engine = engine
        self._settings = settings
        if (file := state.settings.record) is not None:
            state.recorder = Recorder(file, state.settings.record_max_bytes, settings)
        self._batches = None if state.files is None else BatchRunner(state, state.files, batch_app(state))
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.loaded = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references to tasks

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves HTTP at once, while the engine loads."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._run_engine())
        if self._batches is not None:
            self._spawn(self._batches.run())
        await self.listen(sockets)
        await self._stop_batches()
        for task in self._tasks:
            task.cancel()
        await self._engine.leave(self._state)
        if self._state.recorder is not None:
            self._state.recorder.flush()
        self._state.text_threads.executor.shutdown(wait=False, cancel_futures=True)
        if self._state.images is not None:
            self._state.images.close()

    async def listen(self, sockets: list[socket.socket] | None) -> None:
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once."""
        if self._stopping or self._loop is None:
            self._engine.kill()
            os._exit(1)
        self._stopping = True
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain()))

    async def _stop_batches(self) -> None:
        if self._batches is not None:
            await self._batches.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of the server's own tasks, and stops the server if the task fails."""
        try:
            await work
        except Exception as error:
            if not isinstance(error, EngineDeadError | ValueError | OSError):
                log.exception("the server failed")
            self.failure = str(error) or type(error).__name__
            self.should_exit = True

    async def _run_engine(self) -> None:
        """Waits for the engine, then keeps the connection to it until the server stops."""
        await self._load()
        try:
            await self._engine.keep(self._state)
        except EngineDeadError:
            if not self._state.draining:
                raise

    async def _load(self) -> None:
        """Waits for the engine to load and loads the tokenizer, at the same time if the model's folder is known."""
        state = self._state
        early: asyncio.Future[Tokenizer] | None = None
        model = local_folder(self._settings.model)
        source = model if self._settings.tokenizer is None else local_folder(self._settings.tokenizer)
        if model is not None and source is not None:
            early = asyncio.ensure_future(state.off_loop(lambda: self._tokenizer(model, source)))
            early.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised below, if at all
        info = await self._engine.load(state)
        state.metrics.on_ready(info)
        folders = Path(info.model_folder), Path(info.tokenizer_folder)
        tokenizer = await (early or state.off_loop(lambda: self._tokenizer(*folders)))
        state.fingerprint = await state.off_loop(
            lambda: fingerprint(info, self._settings, __version__, tokenizer.chat_template, tokenizer.template_defaults)
        )
        if state.recorder is not None:
            state.recorder.fingerprint = state.fingerprint
        state.tokenizer = tokenizer
        gguf.forget()
        heap.freeze()
        self.loaded.set()
        _warm(tokenizer)
        log.info("ready: %s, context of %d tokens", state.settings.model_name, info.max_model_len)

    def _tokenizer(self, folder: Path, source: Path) -> Tokenizer:
        tokenizer = load_tokenizer(
            folder,
            source=source,
            placeholder=self._settings.load_format == "dummy",
            chat_template=self._state.settings.chat_template,
            generation_config=self._settings.generation_config,
            override_generation_config=self._settings.override_generation_config,
        )
        tokenizer.escape_special_tokens = self._state.settings.escape_special_tokens
        tokenizer.template_defaults = self._state.settings.default_chat_template_kwargs
        if (os.cpu_count() or 1) > _BUSY_CORES:
            _warm(tokenizer)
        return tokenizer

    async def _drain(self) -> None:
        """Stops the server in order.

        For `drain_delay` seconds only /ready tells of it, and load balancers send their requests elsewhere. Then new
        requests are refused, running ones have `drain_seconds` to finish, and those that remain fail.
        """
        state = self._state
        if state.settings.drain_delay:
            log.info("stopping: new requests are accepted for another %g s", state.settings.drain_delay)
            state.leaving = True
            await asyncio.sleep(state.settings.drain_delay)
        state.draining = True
        await self._stop_batches()
        if self._shares_listener:
            for server in self.servers:
                server.close()  # this process's copy of the socket; the next server's copy keeps listening
        log.info("stopping: %d requests may go on for %g s", state.client.num_streams, state.settings.drain_seconds)
        await self._until_idle(state.settings.drain_seconds)
        state.client.fail_streams("the server is shutting down")
        await self._until_idle(FLUSH_SECONDS)
        if self._state.client.num_streams:  # their clients do not even read the error
            for connection in list(self.server_state.connections):
                connection.drop_if_stuck()  # type: ignore[union-attr]
        self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        assert self._loop is not None
        deadline = self._loop.time() + seconds
        while self._state.client.num_streams and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
