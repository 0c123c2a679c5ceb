"""The latest responses of /v1/responses, kept in this process's memory so that clients can ask for them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from jaxserve.server.http.errors import APIError
from jaxserve.server.http.keys import ApiKey

MAX_STORED_BYTES = 256 * 2**20  # all responses and their conversations together


class EventLog:
    """The events of a response that is made in the background. Any number of clients can follow it."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def size(self) -> int:
        return sum(map(len, self._events))

    def add(self, events: list[bytes]) -> None:
        """Appends events. An event's number is its position in the log."""
        self._events += events
        self._tell()

    def close(self) -> None:
        """Marks the log as complete."""
        self._is_closed = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events after number `after`, until the log is complete. Waits for events that are still to come."""
        place = after + 1
        yield b""  # so that EventStream sends the head at once
        while True:
            changed = self._changed
            if place < len(self._events):
                events = self._events[place:]
                place = len(self._events)
                yield b"".join(events)
            elif self._is_closed:
                return
            else:
                await changed.wait()


@dataclass
class StoredResponse:
    """A stored response.

    Attributes:
      owner: the key that it was made under; None if the server requires no keys.
      response: the response as JSON.
      messages: the conversation as JSON, with the response's output; empty until the response is complete.
      items: the items of its input, as JSON.
      output_ids: the ids of the items of its output.
      background: it was asked for with `background`.
      running: a task still makes it.
    """

    owner: ApiKey | None
    response: bytes
    messages: bytes
    items: bytes = b""
    output_ids: tuple[str, ...] = ()
    log: EventLog | None = None
    background: bool = False
    running: bool = False

    def __post_init__(self) -> None:
        log = self.log.size if self.log else 0
        self.size = len(self.response) + len(self.messages) + len(self.items) + log


class ResponseStore:
    """The latest responses, bounded in number and in bytes. Only the key that made a response can get it."""

    def __init__(self, limit: int, max_bytes: int = MAX_STORED_BYTES):
        self._limit = limit
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._by_item: dict[str, str] = {}  # id of an output item -> id of its response
        self._bytes = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}  # make the responses of these names

    def log_for(self, name: str) -> EventLog:
        """A new log for the response with this name."""
        return EventLog()

    def watch(self, name: str, task: asyncio.Task[None]) -> None:
        """Notes the task that makes a response, for `stop`."""
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name))

    async def stop(self, name: str) -> None:
        """Stops the task that makes a response, if it has not ended, and waits until it has."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def put(self, name: str, stored: StoredResponse) -> None:
        """Stores a response, replacing one of the same name, and removes the oldest beyond the bounds."""
        self.remove(name)
        self._stored[name] = stored
        self._by_item.update(dict.fromkeys(stored.output_ids, name))
        self._bytes += stored.size
        while len(self._stored) > self._limit or self._bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def get(self, name: str, owner: ApiKey | None, param: str | None = None) -> StoredResponse:
        """The response with this name. Raises APIError (404) if there is none that belongs to `owner`."""
        stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise not_found(name, param)
        return stored

    def with_item(self, item_id: str, owner: ApiKey | None) -> StoredResponse | None:
        """The response whose output has an item with this id; None if there is none that belongs to `owner`."""
        stored = self._stored.get(self._by_item.get(item_id, ""))
        return stored if stored is not None and stored.owner == owner else None

    def remove(self, name: str) -> None:
        if (stored := self._stored.pop(name, None)) is not None:
            self._bytes -= stored.size
            for item_id in stored.output_ids:
                self._by_item.pop(item_id, None)


def not_found(name: str, param: str | None) -> APIError:
    return APIError(404, f"no response {name[:80]!r} is stored here", param=param, code="response_not_found")
