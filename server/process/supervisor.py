"""Keeps an engine running: replaces one that died or hangs, and gives up if that happens too often."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.process.engine_process import EngineProcess
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

RESTART_WINDOW = 600.0  # seconds within which restarts are counted
_LOOK_SECONDS = 1.0  # between two checks whether the engine hangs


class Supervisor:
    """Watches the engine that a client is connected to.

    restarts: most restarts within RESTART_WINDOW.
    watchdog: seconds after which an engine that has work but finishes no step is replaced; 0: never.
    """

    def __init__(
        self,
        client: EngineClient,
        process: EngineProcess,
        *,
        restarts: int,
        watchdog: float,
        on_restart: Callable[[], None] = lambda: None,
    ):
        self._client = client
        self._process = process
        self._on_restart = on_restart
        self._restarts = restarts
        self._watchdog = watchdog
        self._deaths: deque[float] = deque()  # seconds of the event loop's clock

    async def run(self) -> None:
        """Never returns. The engine must be ready. Raises EngineDeadError when it dies after the last restart."""
        clock = asyncio.get_running_loop().time
        self._client.revives = self._client.holds = self._restarts > 0
        look = min(_LOOK_SECONDS, self._watchdog / 4) if self._watchdog else _LOOK_SECONDS
        while True:
            began = clock()
            if await self._client.wait_lost(look):
                await self._start_again()
                continue
            self._client.forgive(clock() - began - look)  # the time for which this process itself stood still
            if self._watchdog and self._client.stalled > self._watchdog:
                self._client.lose(f"the engine has not finished a step for {self._watchdog:g} s")

    async def _start_again(self) -> None:
        """Ends the engine's process and starts another. If that one dies too, the next call handles it."""
        client = self._client
        now = asyncio.get_running_loop().time()
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW:
            self._deaths.popleft()
        self._deaths.append(now)
        is_over = len(self._deaths) > self._restarts
        client.revives = not is_over
        if is_over or not client.ended or not await asyncio.to_thread(self._process.was_killed):
            client.let_go()  # an engine that ended by itself may have done so because of one of these requests
        if is_over:
            often = f" {len(self._deaths)} times in {RESTART_WINDOW / 60:g} minutes, the last time"
            raise EngineDeadError(f"the engine died{often if self._restarts else ''}: {client.error}")
        log.error("%s; starting another engine (%d of %d)", client.error, len(self._deaths), self._restarts)
        self._on_restart()
        await asyncio.to_thread(self._process.kill)  # returns when the process has freed its memory
        if client.info is not None and client.info.max_loras:
            self._process.keep_adapters(client.adapters.values())
        if client.info is not None:
            self._process.keep_weights(client.info.weights)
        try:
            self._process.start()  # on this thread, because the process ends with the thread that started it
            await client.connect(self._process.socket_path, self._process.runs)
            await client.wait_ready()
        except EngineDeadError:
            return
        except OSError as error:
            client.lose(f"the engine could not be started: {error}")
            return
        log.info("ready again after %.1f s", asyncio.get_running_loop().time() - now)
