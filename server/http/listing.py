"""What handlers ask about the models of a server, whether it has one (`one_model`) or several (`server/models`)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from starlette.requests import Request

from jaxserve.server.http.keys import ApiKey
from jaxserve.server.ipc.messages import Ready

MODEL_STATES = ("unloaded", "waiting", "starting", "ready", "unloading", "failed")
ModelState = Literal["unloaded", "waiting", "starting", "ready", "unloading", "failed"]


@dataclass(frozen=True)
class Listed:
    """A model, as lists of models show it.

    Attributes:
      name, aliases, source, pinned: see `catalog.Model`.
      state: "waiting": for memory; "unloading": it answers its last requests, or its process is ending.
      reason: why it failed; "": it has not.
      size: bytes that it takes on each of its devices; None: not known yet.
      expires: seconds until it is stopped if no request comes; infinite: never; None: it is not ready.
      info: what its engine said when it was last ready; None: it has not been.
    """

    name: str
    aliases: tuple[str, ...]
    source: str
    pinned: bool
    state: ModelState
    reason: str
    size: int | None
    expires: float | None
    info: Ready | None


class ServerModels(Protocol):
    """The models of a server.

    Attributes:
      shown: answers to Ollama's /api/show by name, so that a model need not be in memory to be shown again.
    """

    shown: dict[str, bytes]

    def listed(self, key: ApiKey | None = None) -> list[Listed]:
        """The models that a key may use; None: all."""

    def find(self, name: str, key: ApiKey | None = None) -> Listed:
        """The model that has this name, as its own, an alias or that of an adapter. Raises APIError (404) if there is
        none that the key may use."""

    def adapters_of(self, name: str) -> list[str]:
        """The names of a model's LoRA adapters, as far as they are known."""

    def hold(self, http: Request, name: str) -> contextlib.AbstractAsyncContextManager[Any]:
        """Has a model in memory, which is started first if need be, until the context is left: its ServerState. Raises
        APIError: 404 for an unknown name, and 503 if the model cannot be started, or not within
        `ModelsSettings.model_wait`."""

    def keep(self, name: str, seconds: float) -> None:
        """Sets for how long a model stays without a request, until it is stopped; infinite: for good. Raises APIError
        (404) for an unknown name."""

    async def load(self, name: str) -> None:
        """Starts a model, and returns when it is ready. Raises what `hold` raises."""

    async def unload(self, name: str) -> None:
        """Stops a model after its running requests, and returns when its memory is free. Raises APIError: 404 for an
        unknown name, 503 if requests run for longer than `ModelsSettings.model_wait`, and 400 if this cannot be."""
