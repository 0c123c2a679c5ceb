"""Keeps an engine running: starts another where one has died, or hangs, and gives up where that happens too often."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

RESTART_WINDOW = 600.0  # seconds within which restarts are counted
_LOOK_SECONDS = 1.0  # between two looks at an engine that may hang


class Process(Protocol):
    """What a supervisor needs of an engine's process (`jaxserve.server.process.run.EngineProcess`)."""

    @property
    def socket_path(self) -> str: ...
    def runs(self) -> bool: ...
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Supervisor:
    """Watches the engine that a client is connected to.

    restarts: how often in RESTART_WINDOW an engine is started in the place of one that died.
    watchdog: seconds for which an engine with work may go without finishing a step; 0: any time.
    """

    def __init__(
        self,
        client: EngineClient,
        process: Process,
        *,
        restarts: int,
        watchdog: float,
        on_restart: Callable[[], None] = lambda: None,
    ):
        self._client, self._process, self._on_restart = client, process, on_restart
        self._restarts, self._watchdog = restarts, watchdog
        self._deaths: deque[float] = deque()  # seconds of the event loop's clock

    async def run(self) -> None:
        """Never returns. The engine must be ready. Raises EngineDeadError where it has died once too often."""
        clock = asyncio.get_running_loop().time
        self._client.revives = self._restarts > 0
        look = min(_LOOK_SECONDS, self._watchdog / 4) if self._watchdog else _LOOK_SECONDS
        while True:
            began = clock()
            if await self._client.wait_lost(look):
                await self._start_again()
                continue
            self._client.forgive(clock() - began - look)  # for so long this process stood still itself
            if self._watchdog and self._client.stalled > self._watchdog:
                self._client.lose(f"the engine has not finished a step for {self._watchdog:g} s")

    async def _start_again(self) -> None:
        """Ends what is left of the engine and starts another; that one's death is for the next call to see."""
        client, now = self._client, asyncio.get_running_loop().time()
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self._restarts:
            client.revives = False
            often = f" {len(self._deaths)} times in {RESTART_WINDOW / 60:g} minutes, the last time"
            raise EngineDeadError(f"the engine died{often if self._restarts else ''}: {client.error}")
        log.error("%s; starting another engine (%d of %d)", client.error, len(self._deaths), self._restarts)
        self._on_restart()
        await asyncio.to_thread(self._process.kill)  # waits until its memory is free
        try:
            self._process.start()  # on this thread, with which it ends
            await client.connect(self._process.socket_path, self._process.runs)
            await client.wait_ready()
        except EngineDeadError:
            return
        except OSError as error:
            client.lose(f"the engine could not be started: {error}")
            return
        log.info("ready again after %.1f s", asyncio.get_running_loop().time() - now)
