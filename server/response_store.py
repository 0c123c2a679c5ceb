"""Responses that can be asked for again: in this process's memory, the latest of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from server.errors import APIError
from server.keys import ApiKey

MAX_STORED_BYTES = 256 * 2**20  # of responses and their conversations together


@dataclass
class StoredResponse:
    """A response that can be asked for again, as JSON, and the conversation that led to it, its output included."""

    owner: ApiKey | None
    response: bytes
    messages: bytes
    task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """The latest responses, bounded in number and in bytes. Each is there for the key alone that it was made under."""

    def __init__(self, limit: int, max_bytes: int = MAX_STORED_BYTES):
        self._limit, self._max_bytes = limit, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def put(self, name: str, stored: StoredResponse) -> None:
        """Keeps a response, in place of what had its name, and forgets the oldest beyond the bounds."""
        self.remove(name)
        self._stored[name] = stored
        self._bytes += stored.size
        while len(self._stored) > self._limit or self._bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def get(self, name: str, owner: ApiKey | None, param: str | None = None) -> StoredResponse:
        """Raises APIError (404) where there is none, or none of this owner's."""
        stored = self._stored.get(name)
        if stored is None or stored.owner != owner:
            raise APIError(404, f"no response {name[:80]!r} is stored here", param=param, code="response_not_found")
        return stored

    def remove(self, name: str) -> None:
        if (stored := self._stored.pop(name, None)) is not None:
            self._bytes -= stored.size
