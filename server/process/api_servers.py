"""Several API servers for one engine: the process that holds the listening socket, and starts and ends all others.

All API servers accept connections from one socket that they inherit. It stays open while one of them is replaced, and
what waits in it is taken by the others; sockets of their own (SO_REUSEPORT) would lose the connections that wait for a
API server that dies. What API servers know in common is in files of a private folder: counts that limits are checked
against (`http/counts.py`), stored responses (`http/shared_responses.py`), metrics (`observe/metrics.py`). So API
servers never wait for this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from jaxserve import entry
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.server.http.counts import BEATS
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.observe.metrics import TOTALS, EngineTotals
from jaxserve.server.process.api_server_process import CANNOT_GO_ON, ApiServerLaunch
from jaxserve.server.process.engine_process import FLUSH_SECONDS, EngineProcess
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

MOST_FRONTS = 64
_LOOK_SECONDS = 1.0  # between two checks whether an API server hangs
_ATTEMPTS = 3  # API servers in succession that may end before their event loop runs


def serve_api_servers(launch: ApiServerLaunch, process: EngineProcess) -> str | None:
    """Serves until a signal ends it; returns why it ended if it failed. `launch` is what all API servers have in
    common.

    An API server that dies, or whose event loop stands still, is replaced; so is an engine, within its limits. The
    first signal drains the API servers and then the engine, the second one ends all processes at once."""
    os.mkdir(launch.shared, mode=0o700)
    return asyncio.run(_Fronts(launch, process).run())


class _Fronts:
    def __init__(self, launch: ApiServerLaunch, engine: EngineProcess):
        self._launch = launch
        self._engine = engine
        self._settings = launch.server_settings()
        self._counts, self._responses = launch.counts(), launch.responses()
        self._totals = EngineTotals(front_restarts=0)
        self._client = EngineClient()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ended = asyncio.Event()  # a signal or a failure has come
        self._failure: str | None = None

    async def run(self) -> str | None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        self._write_totals()
        keeping = asyncio.create_task(self._guard(self._keep_engine()))
        api_servers = [asyncio.create_task(self._guard(self._keep(number))) for number in range(self._launch.count)]
        await self._ended.wait()
        self._signal_api_servers(signal.SIGTERM)
        settings = self._settings
        await asyncio.wait(api_servers, timeout=settings.drain_delay + settings.drain_seconds + 4 * FLUSH_SECONDS)
        self._signal_api_servers(signal.SIGKILL)
        await asyncio.wait(api_servers)
        keeping.cancel()
        if not self._client.is_ready:
            self._engine.kill()  # it reads no message before it has loaded
        await self._client.close(drain=True)
        self._responses.close()
        return self._failure

    def _end(self) -> None:
        if self._ended.is_set():
            self._signal_api_servers(signal.SIGKILL)
            self._engine.__exit__(SystemExit)
            os._exit(1)
        self._ended.set()

    def _signal_api_servers(self, number: int) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one of this process's tasks, and ends the server if the task fails."""
        try:
            await work
        except Exception as error:
            if not isinstance(error, EngineDeadError | OSError):
                log.exception("the server failed")
            self._failure = self._failure or str(error) or type(error).__name__
            self._ended.set()

    async def _keep_engine(self) -> None:
        """Waits for the engine to load, then supervises it."""
        client = self._client
        settings = self._settings
        client.on_stats = self._on_stats
        client.watches = True
        await client.connect(self._engine.socket_path, self._engine.runs)
        await client.wait_ready()
        supervisor = Supervisor(
            client,
            self._engine,
            restarts=settings.engine_restarts,
            watchdog=settings.watchdog_seconds,
            on_restart=self._on_restart,
        )
        await supervisor.run()

    def _on_stats(self, stats: EngineStats) -> None:
        self._totals.on_stats(stats)
        self._write_totals()

    def _on_restart(self) -> None:
        self._totals.on_restart()
        self._write_totals()

    def _write_totals(self) -> None:
        path = Path(self._launch.shared, TOTALS)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(self._totals))
        os.replace(new, path)

    async def _keep(self, number: int) -> None:
        """Starts an API server, and another one whenever it has ended, until the server ends."""
        attempts = 0
        again = False
        while not self._ended.is_set():
            process = self._processes[number] = await self._start(number, again)
            if self._ended.is_set():
                process.terminate()
            code = await self._watch(number, process)
            began = self._counts.each(BEATS)[number] > 0
            self._counts.clear(number)
            self._responses.abandon(number)
            if self._ended.is_set():
                return
            attempts = 0 if began else attempts + 1
            if code == CANNOT_GO_ON or attempts == _ATTEMPTS:
                raise OSError(f"API server {number} cannot go on; what it wrote says why")
            log.error("API server %d ended with code %d; starting another one", number, code)
            self._totals.front_restarts = (self._totals.front_restarts or 0) + 1
            self._write_totals()
            again = True

    async def _start(self, number: int, again: bool) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *entry.command("jaxserve.server.process.api_server_process", python=sys.executable),
            stdin=asyncio.subprocess.PIPE,
            env=entry.child_environment() | {"PROMETHEUS_MULTIPROC_DIR": self._launch.shared},
            pass_fds=[self._launch.listener],
        )
        assert process.stdin is not None
        launch = msgspec.structs.replace(self._launch, number=number, again=again)
        process.stdin.write(
            msgspec.json.encode(launch) + b"\n"
        )  # an API server that has ended already is noticed later
        return process

    async def _watch(self, number: int, process: asyncio.subprocess.Process) -> int:
        """Waits for an API server to end, and returns its exit code. Kills it if its event loop stands still for too
        long, counted in turns of this one's, so that a machine that sleeps is not mistaken for it."""
        beats = 0
        still = 0
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(process.wait(), _LOOK_SECONDS)
            now = self._counts.each(BEATS)[number]
            still = still + 1 if now == beats else 0
            beats = now
            if beats and 0 < self._settings.watchdog_seconds < still * _LOOK_SECONDS:
                log.error("API server %d has stood still for %d s", number, still)
                process.kill()
