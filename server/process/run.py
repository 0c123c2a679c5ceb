"""Starts a server (port, engine process, HTTP front) and stops it in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import resource
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from jaxserve import __version__, heap
from jaxserve.checkpoints import gguf
from jaxserve.checkpoints.hub import local_folder
from jaxserve.config import EngineConfig
from jaxserve.pallas_kernels import cpu_build
from jaxserve.server.http.connections import RESERVE
from jaxserve.server.http.keys import ApiKey, read_keys
from jaxserve.server.http.origin import is_local
from jaxserve.server.http.protocol import accept
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.engine_server import DEFAULT_ENGINE
from jaxserve.server.observe.access import log_to_stdout
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.output import log_to_stderr, say
from jaxserve.server.process.app import build_app
from jaxserve.server.process.engine_process import FLUSH_SECONDS, EngineProcess
from jaxserve.server.process.fingerprint import fingerprint
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.text.chat_template import read_chat_template
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

_OTHER_FILES = 256  # open files besides connections


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    fd: int | None = None,
    served_model_name: str | Sequence[str] | None = None,
    api_keys: Sequence[str] = (),
    api_key_file: str | None = None,
    allowed_hosts: Sequence[str] = (),
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    max_header_bytes: int = 64 * 2**10,
    client_timeout: float = 60.0,
    engine_class: str = DEFAULT_ENGINE,
    chat_template: str | None = None,
    **settings: Any,
) -> int:
    """Serves until a signal ends it; returns the process's exit code. Must run in the main thread.

    The port is bound before anything is loaded. /health and /ready answer at once, with 503 until the engine has
    loaded. An engine that dies or hangs is started again, within the limits in `settings`. The first SIGTERM or SIGINT
    drains: after `drain_delay` seconds new requests get 503, running ones have `drain_seconds` to finish, then they end
    with an error. A second signal exits at once. Returns 1 if the port is taken, the engine does not start, or it died
    too often.

    `port` 0 takes a free port. `fd` is an inherited listening socket; after this server stops, connections to it wait
    for the next server. `served_model_name` is one name or several, by default `config.model`. `chat_template` is a
    file or a template's text. `settings` are fields of ServerSettings. Raises ValueError or OSError for a certificate,
    a key file or a chat template that cannot be used.
    """
    log_to_stderr(logging.INFO)
    if config.max_waiting is None:
        config = dataclasses.replace(config, max_waiting=config.queue_limit)
    if config.num_hosts > 1:  # an engine's process that stands still keeps the other hosts waiting
        watchdog = settings.get("watchdog_seconds", ServerSettings.watchdog_seconds)
        settings["watchdog_seconds"] = watchdog and min(watchdog, config.host_timeout)
    keys = [*map(ApiKey, api_keys), *(read_keys(api_key_file) if api_key_file else ())]
    names = (served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name or (config.model,))
    template = None if chat_template is None else read_chat_template(chat_template)
    own = ServerSettings(
        model_names=names,
        api_keys=tuple(keys),
        hosts=tuple(allowed_hosts) if is_local(host if fd is None else _host_of(fd)) else None,
        chat_template=template,
        **settings,
    )
    state = ServerState(own, EngineClient(), Metrics(own.model_name, own.metrics_prefix))
    log_to_stdout()
    uvicorn_config = uvicorn.Config(
        build_app(state),
        lifespan="off",
        h11_max_incomplete_event_size=max_header_bytes,
        ws="none",
        access_log=False,  # jaxserve.server.observe.access writes it
        log_config=None,  # uvicorn logs through the handlers that are set already
        log_level=logging.INFO,
        server_header=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    allow_files(own.max_connections + RESERVE + _OTHER_FILES)
    if ssl_keyfile and not ssl_certfile:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    try:
        uvicorn_config.load()
    except OSError as error:
        raise ValueError(f"cannot use the certificate {ssl_certfile}: {error}") from error
    tls, uvicorn_config.ssl = uvicorn_config.ssl, None  # `accept` does the handshakes, so that it can count them
    uvicorn_config.http_protocol_class = functools.partial(  # type: ignore[assignment]
        accept, connections=state.connections, client_timeout=client_timeout, tls=tls
    )
    try:
        listener = bind(host, port) if fd is None else socket.socket(fileno=fd)
    except OSError as error:
        where = f"{host}:{port}" if fd is None else f"file descriptor {fd}"
        say(f"jaxserve: cannot listen on {where}: {error.strerror or error}")
        return 1
    cpu_build.begin()  # builds missing CPU kernels while the engine's process is still importing JAX
    with listener, EngineProcess(config, engine_class) as engine:
        server = _Server(uvicorn_config, state, engine, config, shares_listener=fd is not None)
        server.run(sockets=[listener])
    if server.failure is not None:
        say(f"jaxserve: {server.failure}")
        return 1
    return 0


def _host_of(fd: int) -> str:
    """The address that an inherited socket listens on; "" for a unix socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
        if listener.family != socket.AF_UNIX:
            return listener.getsockname()[0]
    return ""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the address is in use or does not belong to this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def allow_files(count: int) -> None:
    """Raises this process's limit of open files to at least `count`, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count or soft == resource.RLIM_INFINITY:
        return
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < count:
        log.warning("this process may open %d files, too few for --max-connections; see `ulimit -Hn`", allowed)


class _Server(uvicorn.Server):
    """A uvicorn server that also starts, supervises and drains the engine.

    Attributes:
      failure: why the server stopped by itself; None if it did not.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        engine: EngineProcess,
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
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task] = set()  # the event loop keeps only weak references to tasks

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves HTTP at once, while the engine loads."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._run_engine())
        await super().serve(sockets)
        for task in self._tasks:
            task.cancel()
        if not self._state.client.is_ready:
            self._engine.kill()  # it reads no message before it has loaded
        await self._state.client.close(drain=True)
        self._state.text_threads.executor.shutdown(wait=False, cancel_futures=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once."""
        if self._stopping or self._loop is None:
            self._engine.__exit__(SystemExit)
            os._exit(1)
        self._stopping = True
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._drain()))

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
        """Loads the engine, then supervises it until the server stops."""
        await self._load()
        state, settings = self._state, self._state.settings
        supervisor = Supervisor(
            state.client,
            self._engine,
            restarts=settings.engine_restarts,
            watchdog=settings.watchdog_seconds,
            on_restart=state.metrics.on_restart,
        )
        try:
            await supervisor.run()
        except EngineDeadError:
            if not state.draining:
                raise

    async def _load(self) -> None:
        """Waits for the engine to load and loads the tokenizer, at the same time if the model's folder is known."""
        state = self._state
        state.client.on_stats = state.metrics.on_stats
        early: asyncio.Future[Tokenizer] | None = None
        model = local_folder(self._settings.model)
        source = model if self._settings.tokenizer is None else local_folder(self._settings.tokenizer)
        if model is not None and source is not None:
            early = asyncio.ensure_future(state.off_loop(lambda: self._tokenizer(model, source)))
        await state.client.connect(self._engine.socket_path, self._engine.runs)
        info = await state.client.wait_ready()
        state.metrics.on_ready(info)
        folders = Path(info.model_folder), Path(info.tokenizer_folder)
        tokenizer = await (early or state.off_loop(lambda: self._tokenizer(*folders)))
        state.fingerprint = await state.off_loop(
            lambda: fingerprint(info, self._settings, __version__, tokenizer.chat_template)
        )
        state.tokenizer = tokenizer
        gguf.forget()
        heap.settle()
        log.info("ready: %s, context of %d tokens", state.settings.model_name, info.max_model_len)

    def _tokenizer(self, folder: Path, source: Path) -> Tokenizer:
        tokenizer = load_tokenizer(
            folder,
            source=source,
            placeholder=self._settings.load_format == "dummy",
            chat_template=self._state.settings.chat_template,
        )
        tokenizer.escape_special_tokens = self._state.settings.escape_special_tokens
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
