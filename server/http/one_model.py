"""The model of a server that has one, as handlers that may meet several models ask for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator

from starlette.requests import Request

from jaxserve.server.http.errors import APIError
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.listing import Listed, ModelState
from jaxserve.server.http.state import ServerState, key_of


class OneModel:
    """The model of a server that has one, which is always in memory."""

    def __init__(self, state: ServerState, source: str):
        self._state = state
        self._source = source
        self.shown: dict[str, bytes] = {}

    def listed(self, key: ApiKey | None = None) -> list[Listed]:
        state = self._state
        name, *aliases = state.settings.model_names
        kinds: dict[str, ModelState] = {"ready": "ready", "loading": "starting", "restarting": "starting"}
        kind = kinds.get(state.status, "failed" if state.client.is_dead else "unloading")
        kind = "unloaded" if state.sleeps else kind
        reason = state.client.error or ""
        expires = math.inf if kind == "ready" else None
        return [Listed(name, tuple(aliases), self._source, True, kind, reason, None, expires, state.client.info)]

    def find(self, name: str, key: ApiKey | None = None) -> Listed:
        self._state.check_model(name)
        return self.listed()[0]

    def adapters_of(self, name: str) -> list[str]:
        return list(self._state.client.adapters)

    @contextlib.asynccontextmanager
    async def hold(self, http: Request, name: str) -> AsyncIterator[ServerState]:
        self.find(name, key_of(http))
        yield self._state

    def keep(self, name: str, seconds: float) -> None:
        self.find(name)

    async def load(self, name: str) -> None:
        self.find(name)
        self._state.require_ready()

    async def unload(self, name: str) -> None:
        self.find(name)
        raise APIError(400, "this server has one model, which stays in memory; --models and --model-dir serve several")
