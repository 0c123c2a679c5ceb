"""A model that an API server serves: its state, which is filled while engine and tokenizer load, and its engine."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxserve import __version__, heap
from jaxserve.checkpoints import gguf
from jaxserve.checkpoints.hub import local_folder
from jaxserve.config import EngineConfig
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.messages import Ready
from jaxserve.server.observe.recorder import Recorder
from jaxserve.server.process.engine_process import EngineProcess
from jaxserve.server.process.fingerprint import fingerprint
from jaxserve.server.process.supervisor import Supervisor
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import EngineDeadError

log = logging.getLogger("jaxserve.server")

_BUSY_CORES = 2  # that a starting engine keeps busy


def _warm(tokenizer: Tokenizer) -> None:
    """Has a thread import what the first chat needs; it waits for that."""
    threading.Thread(target=tokenizer.warm, name="tokenizer", daemon=True).start()


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


class ServedModel:
    """The model of a server that has one; a server with several has one of these for each that is in memory.

    Attributes:
      states: its state alone; see `api_server.Served`.
      loaded: set when the engine and the tokenizer have loaded.
    """

    def __init__(self, state: ServerState, engine: EngineOfFront, config: EngineConfig):
        self.states = [state]
        self.loaded = asyncio.Event()
        self._state = state
        self._engine = engine
        self._config = config
        if (file := state.settings.record) is not None:
            state.recorder = Recorder(file, state.settings.record_max_bytes, config)

    async def run(self) -> None:
        """Waits for the engine, then keeps the connection to it. Never returns, unless the server drains meanwhile.
        Raises EngineDeadError if there is no engine any more, and ValueError or OSError if the tokenizer cannot be
        read."""
        await self.load()
        heap.freeze()
        try:
            await self.keep()
        except EngineDeadError:
            if not self._state.draining:
                raise

    @property
    def is_ready(self) -> bool:
        return self._state.client.is_ready

    @property
    def losses(self) -> int:
        return self._state.client.losses

    async def keep(self) -> None:
        await self._engine.keep(self._state)

    async def load(self) -> None:
        """Waits for the engine to load and loads the tokenizer, at the same time if the model's folder is known."""
        state = self._state
        early: asyncio.Future[Tokenizer] | None = None
        model = local_folder(self._config.model)
        source = model if self._config.tokenizer is None else local_folder(self._config.tokenizer)
        if model is not None and source is not None:
            early = asyncio.ensure_future(state.off_loop(lambda: self._tokenizer(model, source)))
            early.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised below, if at all
        info = await self._engine.load(state)
        state.metrics.on_ready(info)
        folders = Path(info.model_folder), Path(info.tokenizer_folder)
        tokenizer = await (early or state.off_loop(lambda: self._tokenizer(*folders)))
        state.fingerprint = await state.off_loop(
            lambda: fingerprint(info, self._config, __version__, tokenizer.chat_template, tokenizer.template_defaults)
        )
        if state.recorder is not None:
            state.recorder.fingerprint = state.fingerprint
        state.tokenizer = tokenizer
        gguf.forget()
        self.loaded.set()
        _warm(tokenizer)
        log.info("ready: %s, context of %d tokens", state.settings.model_name, info.max_model_len)

    def _tokenizer(self, folder: Path, source: Path) -> Tokenizer:
        tokenizer = load_tokenizer(
            folder,
            source=source,
            placeholder=self._config.load_format == "dummy",
            chat_template=self._state.settings.chat_template,
            generation_config=self._config.generation_config,
            override_generation_config=self._config.override_generation_config,
        )
        tokenizer.escape_special_tokens = self._state.settings.escape_special_tokens
        tokenizer.template_defaults = self._state.settings.default_chat_template_kwargs
        if (os.cpu_count() or 1) > _BUSY_CORES:
            _warm(tokenizer)
        return tokenizer

    def refuse_new(self) -> None:
        """See `api_server.Served`."""
        self._state.draining = True

    async def leave(self) -> None:
        """Disconnects from the engine for good, after the last request."""
        await self._engine.leave(self._state)
        if self._state.recorder is not None:
            self._state.recorder.close()
        if self._state.images is not None:
            self._state.images.close()

    def kill(self) -> None:
        """Ends the engine at once, if this process has started it."""
        self._engine.kill()
