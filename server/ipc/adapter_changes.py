"""Adapters that fronts load and unload while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxserve.adapters.registry import AdapterError, Registry, ServedAdapter
from jaxserve.server.ipc import messages


@dataclass
class AdapterRead:
    """A thread has read the files of an adapter, or could not."""

    asked: messages.LoadAdapter
    future: Future[Any]

    @property
    def ticket(self) -> int:
        return self.asked.ticket


AdapterChange = messages.LoadAdapter | messages.UnloadAdapter | AdapterRead


def change_adapters(
    engine: Any, message: AdapterChange, then: Callable[[AdapterRead], object]
) -> list[ServedAdapter] | None:
    """Returns all adapters that are served after the change; None if files are to be read first, after which a thread
    calls `then`. Raises ValueError or OSError for an adapter that cannot be loaded or unloaded."""
    adapters = getattr(engine, "adapters", None)
    if adapters is None:
        raise AdapterError("the engine serves no adapters")
    registry: Registry = adapters.registry
    if isinstance(message, messages.UnloadAdapter):
        registry.remove(message.name)
        return registry.served
    asked = message.asked if isinstance(message, AdapterRead) else message
    if registry.find(asked.name) is not None and not asked.replaces:
        raise AdapterError(f"there is an adapter {asked.name!r} already; unload it, or give load_inplace")
    if isinstance(message, AdapterRead):
        registry.add(message.future.result(), asked.path, asked.parent)
        return registry.served
    registry.read(asked.name, asked.path).add_done_callback(lambda future: then(AdapterRead(asked, future)))
    return None
