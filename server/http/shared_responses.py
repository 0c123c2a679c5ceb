"""The latest responses of /v1/responses for all API servers of a server, in a database file in the server's own
folder."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from jaxserve.server.http.errors import APIError
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.response_store import MAX_STORED_BYTES, EventLog, ResponseStore, StoredResponse, not_found
from jaxserve.server.http.sse import event

_FOLLOW_SECONDS = 0.02  # between two looks for new events of a response
_CANCEL_SECONDS = 0.05  # between two looks whether another API server wants a response stopped
_BUSY_SECONDS = 10.0  # to wait for another API server's transaction, each of which takes milliseconds
_TABLES = """
    CREATE TABLE IF NOT EXISTS responses (
        name TEXT PRIMARY KEY, size INTEGER, owner TEXT, background INTEGER, has_log INTEGER,
        maker INTEGER, stopping INTEGER DEFAULT 0, response BLOB, messages BLOB, items BLOB);
    CREATE TABLE IF NOT EXISTS outputs (item TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS outputs_by_name ON outputs (name);
    CREATE TABLE IF NOT EXISTS events (name TEXT, number INTEGER, data BLOB, PRIMARY KEY (name, number)) WITHOUT ROWID;
"""  # `maker`: the API server that still works on the response


class SharedResponseStore(ResponseStore):
    """A store that all API servers have in common. It loses nothing when an API server ends, but what this API server
    was making in the background, which the process that supervises API servers marks as failed (`abandon`).

    Every call is a transaction of a file that is never synchronized with the disk: it lives no longer than the server.
    """

    def __init__(self, path: str, limit: int, number: int, max_bytes: int = MAX_STORED_BYTES):
        """`number`: this API server's."""
        super().__init__(limit, max_bytes)
        self._number = number
        self._stopper: asyncio.Task[None] | None = None
        self._database = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.executescript(_TABLES)

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._database.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.run("ROLLBACK")
            raise
        self.run("COMMIT")

    def log_for(self, name: str) -> EventLog:
        return SharedEventLog(self, name)

    def put(self, name: str, stored: StoredResponse) -> None:
        with self.transaction():
            ((logged,),) = self.run("SELECT total(length(data)) FROM events WHERE name = ?", name)
            size = stored.size + int(logged)
            maker = self._number if stored.running else None
            self.run("DELETE FROM outputs WHERE name = ?", name)
            self.run(
                "REPLACE INTO responses (name, size, owner, background, has_log, maker, response, messages, items) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                name, size, _owner(stored.owner), stored.background, stored.log is not None, maker, stored.response,
                stored.messages, stored.items,
            )  # fmt: skip
            for item in stored.output_ids:
                self.run("REPLACE INTO outputs VALUES (?, ?)", item, name)
            ((count, total),) = self.run("SELECT count(*), sum(size) FROM responses")
            while count > self._limit or total > self._max_bytes:
                ((oldest, size),) = self.run("SELECT name, size FROM responses ORDER BY rowid LIMIT 1")
                self._delete(oldest)
                count = count - 1
                total = total - size

    def get(self, name: str, owner: ApiKey | None, param: str | None = None) -> StoredResponse:
        rows = self.run(
            "SELECT response, messages, items, background, maker, has_log FROM responses WHERE name = ? AND owner = ?",
            name, _owner(owner),
        )  # fmt: skip
        if not rows:
            raise not_found(name, param)
        ((response, messages, items, background, maker, has_log),) = rows
        log = self.log_for(name) if has_log else None
        return StoredResponse(
            owner, response, messages, items=items, log=log, background=bool(background), running=maker is not None
        )

    def with_item(self, item_id: str, owner: ApiKey | None) -> StoredResponse | None:
        for (name,) in self.run("SELECT name FROM outputs WHERE item = ?", item_id):
            try:
                return self.get(name, owner)
            except APIError:
                break
        return None

    def remove(self, name: str) -> None:
        with self.transaction():
            self._delete(name)

    def _delete(self, name: str) -> None:
        for table in ("responses", "outputs", "events"):
            self.run(f"DELETE FROM {table} WHERE name = ?", name)

    def watch(self, name: str, task: asyncio.Task[None]) -> None:
        super().watch(name, task)
        if self._stopper is None or self._stopper.done():
            self._stopper = asyncio.create_task(self._stop_what_others_want())

    async def _stop_what_others_want(self) -> None:
        while self._tasks:
            for (name,) in self.run("SELECT name FROM responses WHERE maker = ? AND stopping", self._number):
                await super().stop(name)
            await asyncio.sleep(_CANCEL_SECONDS)

    async def stop(self, name: str) -> None:
        """Stops the task that makes a response, in whichever API server, and waits until it has ended."""
        if name in self._tasks:
            await super().stop(name)
            return
        self.run("UPDATE responses SET stopping = 1 WHERE name = ?", name)
        while self.is_running(name):
            await asyncio.sleep(_FOLLOW_SECONDS)

    def is_running(self, name: str) -> bool:
        return bool(self.run("SELECT 1 FROM responses WHERE name = ? AND maker IS NOT NULL", name))

    def abandon(self, number: int) -> None:
        """Marks what an API server was making when it ended as failed."""
        with self.transaction():
            for name, response in self.run("SELECT name, response FROM responses WHERE maker = ?", number):
                error = {"code": "server_error", "message": "the server's process that made this response has ended"}
                body = msgspec.json.decode(response) | {"status": "failed", "error": error}
                ((count,),) = self.run("SELECT count(*) FROM events WHERE name = ?", name)
                kind = "response.failed"
                data = event(kind, {"type": kind, "sequence_number": count, "response": body})
                self.run("INSERT INTO events VALUES (?, ?, ?)", name, count, data)
                encoded = msgspec.json.encode(body)
                self.run("UPDATE responses SET maker = NULL, response = ? WHERE name = ?", encoded, name)

    def close(self) -> None:
        self._database.close()


class SharedEventLog(EventLog):
    """The events of a response, which clients can follow from any API server."""

    def __init__(self, store: SharedResponseStore, name: str):
        super().__init__()
        self._store = store
        self._name = name
        self._count = 0

    @property
    def size(self) -> int:
        return 0  # SharedResponseStore.put adds the events' sizes

    def add(self, events: list[bytes]) -> None:
        with self._store.transaction():
            for number, data in enumerate(events, start=self._count):
                self._store.run(
                    "INSERT INTO events SELECT name, ?, ? FROM responses WHERE name = ?", number, data, self._name
                )
        self._count += len(events)

    def close(self) -> None:
        self._store.run("UPDATE responses SET maker = NULL WHERE name = ?", self._name)

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        yield b""  # so that EventStream sends the head at once
        while True:
            running = self._store.is_running(self._name)
            rows = self._store.run(
                "SELECT number, data FROM events WHERE name = ? AND number > ? ORDER BY number", self._name, after
            )
            if rows:
                after = rows[-1][0]
                yield b"".join(data for _, data in rows)
            elif not running:
                return
            else:
                await asyncio.sleep(_FOLLOW_SECONDS)


def _owner(key: ApiKey | None) -> str:
    return "" if key is None else key.digest.hex()
