"""The process of one of several API servers. `jaxserve.server.process.api_servers` starts it, and `main` is what runs
in it.

It is started through `jaxserve.entry` and reads its settings from standard input. Like the engine's process, it ends
with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn

from jaxserve.config import EngineConfig
from jaxserve.server.http.counts import BEATS, SharedCounts, names_of
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.one_model import OneModel
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.shared_responses import SharedResponseStore
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.access import log_to_stdout
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.observe.output import log_to_stderr, say
from jaxserve.server.process.api_server import ApiServer, allow_files, http_config
from jaxserve.server.process.engine_process import end_with_parent, watch_parent
from jaxserve.server.process.served_model import ServedModel
from jaxserve.types import EngineDeadError

CANNOT_GO_ON = 3  # exit code after an error that other API servers would meet, too
BEAT_SECONDS = 1.0  # between two beats of the event loop
_AGAIN_SECONDS = 0.1  # before another attempt to reach an engine
_PATIENCE = 10.0  # seconds that an API server which replaces another one leaves to the others before it listens
_COUNTS = "counts"
_RESPONSES = "responses.sqlite"


class ApiServerLaunch(msgspec.Struct, kw_only=True):
    """The line of JSON that the parent writes to standard input.

    Attributes:
      config, settings: the fields of EngineConfig and ServerSettings.
      socket_path: where the engine listens.
      shared: the folder of the files that all API servers share.
      created: seconds since the epoch; when the server was started.
      shares_listener: see `ApiServer`.
      count: number of API servers.
      listener: file descriptor of the listening socket.
      number: of this API server, from 0.
      again: it replaces one that has ended.
    """

    config: dict[str, Any]
    settings: dict[str, Any]
    socket_path: str
    shared: str
    created: int
    shares_listener: bool
    count: int
    listener: int
    number: int = 0
    again: bool = False

    def server_settings(self) -> ServerSettings:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.settings.items()
        }
        fields["api_keys"] = tuple(ApiKey(**key) for key in fields["api_keys"])
        return ServerSettings(**fields)

    def counts(self) -> SharedCounts:
        names = names_of(self.server_settings().api_keys)
        return SharedCounts(os.path.join(self.shared, _COUNTS), names, self.number, self.count)

    def responses(self) -> SharedResponseStore:
        limit = self.server_settings().max_stored_responses
        return SharedResponseStore(os.path.join(self.shared, _RESPONSES), limit, self.number)


class SharedEngine:
    """An engine that another process starts and ends."""

    def __init__(self, socket_path: str):
        self._socket_path = socket_path
        self._beating: asyncio.Task[None] | None = None

    async def load(self, state: ServerState) -> Ready:
        state.client.revives = True
        self._beating = asyncio.create_task(self._beat(state))
        return await self._connect(state.client)

    async def keep(self, state: ServerState) -> None:
        while True:
            if await state.client.wait_lost(BEAT_SECONDS):
                await self._connect(state.client)

    async def _connect(self, client: EngineClient) -> Ready:
        """Waits for an engine that is ready. If there never is one, the parent ends this process."""
        while True:
            await client.connect(self._socket_path, lambda: True)
            with contextlib.suppress(EngineDeadError):
                return await client.wait_ready()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def leave(self, state: ServerState) -> None:
        if self._beating is not None:
            self._beating.cancel()
        await state.client.close()

    def kill(self) -> None:
        pass

    async def _beat(self, state: ServerState) -> None:
        while True:
            state.counts.add(BEATS, 1)
            await asyncio.sleep(BEAT_SECONDS)


class _SharedApiServer(ApiServer):
    """One of several API servers. If it replaces another one, it listens only when it can serve, because the others
    can: `after` is set then; None: it replaces none."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        served: ServedModel,
        *,
        shares_listener: bool,
        after: asyncio.Event | None,
    ):
        super().__init__(config, state, served, shares_listener=shares_listener)
        self._after = after

    async def listen(self, sockets: list[socket.socket] | None) -> None:
        if self._after is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._after.wait(), _PATIENCE)
        await super().listen(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM drains. A terminal sends SIGINT to all processes, and the parent acts on it."""
        if sig != signal.SIGINT:
            super().handle_exit(sig, frame)


class _TakingTurns(socket.socket):
    """A listening socket that several processes share. asyncio takes all connections that wait at once; this one gives
    one of them for each time that the socket is found readable, so that a burst spreads over the processes."""

    _given = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._given:
            self._given = False
            raise BlockingIOError
        accepted = super().accept()
        self._given = True
        return accepted


def main() -> int:
    """Serves until SIGTERM, or until the parent ends. Returns an exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    log_to_stderr(logging.INFO)
    log_to_stdout()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiServerLaunch)
    watch_parent()
    settings = launch.server_settings()
    metrics = Metrics(settings.model_name, settings.metrics_prefix, Path(launch.shared))
    state = ServerState(
        settings, EngineClient(), metrics, created=launch.created, number=launch.number, counts=launch.counts()
    )
    state.responses = launch.responses()
    state.models = OneModel(state, launch.config["model"])
    allow_files(settings)
    served = ServedModel(state, SharedEngine(launch.socket_path), EngineConfig(**launch.config))
    api_server = _SharedApiServer(
        http_config(state),
        state,
        served,
        shares_listener=launch.shares_listener,
        after=served.loaded if launch.again else None,
    )
    with _TakingTurns(fileno=launch.listener) as listener:
        api_server.run(sockets=[listener])
    if api_server.failure is None:
        return 0
    say(f"jaxserve: {api_server.failure}")
    return CANNOT_GO_ON


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # skips the interpreter's shutdown, which would wait for threads
