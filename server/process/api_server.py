"""One API server: serves HTTP on a listening socket, and passes requests to an engine."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
import socket
from collections.abc import Coroutine
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware

from jaxserve.server.batches.runner import BatchRunner
from jaxserve.server.http.connections import RESERVE
from jaxserve.server.http.protocol import accept
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.process.app import batch_app, build_app
from jaxserve.server.process.engine_process import FLUSH_SECONDS
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

_OTHER_FILES = 256  # open files besides connections


def http_config(state: ServerState, app: Starlette | None = None) -> uvicorn.Config:
    """uvicorn's settings of an API server, by default with the application for one model. Raises ValueError for a
    certificate that cannot be used."""
    settings = state.settings
    config = uvicorn.Config(
        app or build_app(state),
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


class Served(Protocol):
    """What an API server serves: one model (`served_model.ServedModel`) or several.

    Attributes:
      states: those of the models that are in memory.
      is_ready: whether a request would be taken.
      losses: number of engines that have died.
    """

    @property
    def states(self) -> list[ServerState]: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def losses(self) -> int: ...

    async def run(self) -> None:
        """Starts, and goes on until the server stops. Raises an exception if the server cannot go on."""

    def refuse_new(self) -> None:
        """The server drains: new requests are refused from now on."""

    async def leave(self) -> None:
        """Ends for good, after the last request."""

    def kill(self) -> None:
        """Ends what this API server has started at once."""


class ApiServer(uvicorn.Server):
    """A uvicorn server that also keeps its models' connections to their engines, and drains.

    Attributes:
      failure: why the server stopped by itself; None if it did not.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        served: Served,
        *,
        shares_listener: bool,
        routing: Middleware | None = None,
    ):
        """routing: finds the model of a request; None: there is one."""
        super().__init__(config)
        self.failure: str | None = None
        self._shares_listener = shares_listener
        self._state = state
        self._served = served
        self._batches: BatchRunner | None = None
        if state.files is not None:
            self._batches = BatchRunner(state, state.files, batch_app(state, routing), served)
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references to tasks

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves HTTP at once, while the engine loads."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._served.run())
        if self._batches is not None:
            self._spawn(self._batches.run())
        await self.listen(sockets)
        await self._stop_batches()
        for task in self._tasks:
            task.cancel()
        await self._served.leave()
        self._state.text_threads.executor.shutdown(wait=False, cancel_futures=True)

    async def listen(self, sockets: list[socket.socket] | None) -> None:
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once."""
        if self._stopping or self._loop is None:
            self._served.kill()
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

    async def _drain(self) -> None:
        """Stops the server in order.

        For `drain_delay` seconds only /ready tells of it, and load balancers send their requests elsewhere. Then new
        requests are refused, running ones have `drain_seconds` to finish, and those that remain fail.
        """
        settings = self._state.settings
        if settings.drain_delay:
            log.info("stopping: new requests are accepted for another %g s", settings.drain_delay)
            for state in self._states:
                state.leaving = True
            await asyncio.sleep(settings.drain_delay)
        self._served.refuse_new()
        await self._stop_batches()
        if self._shares_listener:
            for server in self.servers:
                server.close()  # this process's copy of the socket; the next server's copy keeps listening
        log.info("stopping: %d requests may go on for %g s", self._num_streams, settings.drain_seconds)
        await self._until_idle(settings.drain_seconds)
        for state in self._states:
            state.client.fail_streams("the server is shutting down")
        await self._until_idle(FLUSH_SECONDS)
        if self._num_streams:  # their clients do not even read the error
            for connection in list(self.server_state.connections):
                connection.drop_if_stuck()  # type: ignore[union-attr]
        self.should_exit = True

    @property
    def _states(self) -> list[ServerState]:
        """The states of the models, and the server's own where that is another."""
        return [self._state, *(state for state in self._served.states if state is not self._state)]

    @property
    def _num_streams(self) -> int:
        return sum(state.client.num_streams for state in self._states)

    async def _until_idle(self, seconds: float) -> None:
        assert self._loop is not None
        deadline = self._loop.time() + seconds
        while self._num_streams and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
