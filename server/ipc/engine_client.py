"""The API server's end of the connection to the engine's process: requests go out, updates come in as async streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from jaxserve.adapters.registry import AdapterError, ServedAdapter
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.page_snapshot import PoolSnapshot
from jaxserve.server.ipc import messages
from jaxserve.server.ipc.messages import LoadAdapter, Sleep, UnloadAdapter, UpdateWeights, WakeUp
from jaxserve.server.ipc.update_stream import UpdateStream, weight
from jaxserve.types import EngineDeadError, InvalidRequestError, QueueFullError, Request, SequenceUpdate

log = logging.getLogger("jaxserve.server")

POOL_SECONDS = 0.5  # shortest time between two `AskPool` messages
MAX_UNREAD = 2**16  # updates (see `weight`) that a stream's reader may leave unread before its requests pause
MAX_ALL_UNREAD = 2**21  # of all streams together; above it, requests pause at an eighth of MAX_UNREAD
EngineStatus = Literal["loading", "ready", "restarting", "dead"]


class EngineClient:
    """One API server's connection to an engine process, and to the next one after that died. Belongs to one event loop.

    Attributes:
      info: the latest `Ready` message; None before the first.
      adapters: the LoRA adapters that the engine serves, by name.
      stats: the engine's latest statistics.
      error: why the engine died; None before that, and again once the next engine is ready.
      losses: number of engines that have died.
      ended: the latest of them ended its process without a word.
      revives: a supervisor replaces an engine that died and connects this client to the new one.
      holds: that supervisor says by `let_go` whether an engine that is gone has ended by itself. Requests without any
        output wait for that, and are given to the next engine if theirs was killed; each only once.
      watches: other clients may have given the engine work, so it counts as stalled even if this one has not.
      on_stats, on_ready: called with each message of these kinds.
      on_stream: called with 1 when a `generate` call begins, and with -1 when it ends.
    """

    def __init__(self) -> None:
        self.info: messages.Ready | None = None
        self.stats = EngineStats()
        self.error: str | None = None
        self.losses = 0
        self.ended = False
        self.revives = False
        self.holds = False
        self.watches = False
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None
        self.on_ready: Callable[[messages.Ready], None] = lambda info: None
        self.on_stream: Callable[[int], None] = lambda change: None
        self._streams: dict[str, UpdateStream] = {}
        self._unread = 0  # sum of all streams' `unread`
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()  # set once the current engine is ready or has died
        self._lost = asyncio.Event()  # set once the current engine has died
        self._alive_at = -math.inf  # event-loop time at which the engine last made progress
        self.adapters: dict[str, ServedAdapter] = {}
        self._tickets: dict[int, asyncio.Future[messages.ChangeDone]] = {}
        self._pool: asyncio.Future[PoolSnapshot] | None = None
        self._numbers = itertools.count()
        self._pool_asked = -math.inf  # event-loop time of the latest `AskPool`

    async def connect(self, socket_path: str, engine_runs: Callable[[], bool]) -> None:
        """Connects as soon as the engine listens. Raises EngineDeadError if `engine_runs()` turns false before that."""
        self._ready.clear()
        self._lost.clear()
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(socket_path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if not engine_runs():
                    self.lose("the engine process ended before it could be reached", ended=True)
                    raise EngineDeadError(self.error) from None
                await asyncio.sleep(0.02)
        if self._writer is not None:
            self._writer.close()  # the connection to the engine that died
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader))

    async def wait_ready(self) -> messages.Ready:
        """Waits for the engine to load. Raises EngineDeadError with the engine's message if it failed."""
        await self._ready.wait()
        if self.info is None or self.error is not None:
            raise EngineDeadError(self.error)
        return self.info

    async def wait_lost(self, seconds: float) -> bool:
        """Waits at most `seconds` for the engine to die; returns whether it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), seconds)
        return self._lost.is_set()

    @property
    def status(self) -> EngineStatus:
        if self.error is not None:
            return "restarting" if self.revives else "dead"
        return "loading" if self.info is None else "ready"

    @property
    def stalled(self) -> float:
        """Seconds for which the engine has had work and made no progress. Compiling counts as progress."""
        works = self.is_ready and (self.watches or any(stream.running for stream in self._streams.values()))
        return asyncio.get_running_loop().time() - self._alive_at if works else 0.0

    def forgive(self, seconds: float) -> None:
        """Leaves `seconds` out of `stalled`, because this process stood still and not the engine."""
        self._alive_at += seconds

    def _note_life(self) -> None:
        self._alive_at = asyncio.get_running_loop().time()

    @property
    def is_ready(self) -> bool:
        return self.info is not None and self.error is None

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    @property
    def num_streams(self) -> int:
        """Number of `generate` calls in progress."""
        return len({id(stream) for stream in self._streams.values()})

    async def generate(
        self,
        requests: Sequence[Request],
        timeout: float | None = None,
        on_accepted: Callable[[messages.ServedWeights], None] = lambda weights: None,
    ) -> AsyncGenerator[list[SequenceUpdate], None]:
        """Submits requests that differ only in id and prompt. Yields lists of the updates that have arrived meanwhile.

        The first list comes as soon as the engine has accepted all requests, and is empty if no token has arrived.
        `on_accepted` is called when the engine has accepted the first request, with the weights that compute all.

        Ends when every completion of every request has ended in the engine. Closing the generator aborts what still
        runs, so callers that leave early must close it (`contextlib.aclosing`).

        Raises:
          InvalidRequestError, QueueFullError: the engine refused the requests or one request's grammar. The others are
            aborted.
          EngineDeadError: the engine has died, see `holds`, or `fail_streams` was called.
          TimeoutError: `timeout` seconds have passed.
        """
        if self.error is not None:
            raise self._dead()
        weights = messages.ServedWeights()
        stream = UpdateStream(requests, lambda: on_accepted(self.info.weights if self.info else weights))
        if not self._streams:
            self._note_life()  # the engine had no work until now, so it cannot have stalled
        for request in requests:
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._streams[request.request_id] = stream
        self.on_stream(1)
        late = None
        if timeout is not None:
            error = TimeoutError(f"the request took longer than {timeout:g} s, the longest that this server allows")
            late = asyncio.get_running_loop().call_later(timeout, stream.fail, error)
        try:
            self._send(messages.Submit.of(requests))
            yield await stream.start()
            while not stream.over:
                updates = await stream.take()
                self._unread -= stream.unread
                stream.unread = 0
                for request_id in stream.paused:
                    self._send(messages.Pause(request_id, False))
                stream.paused.clear()
                yield updates
        finally:
            if late is not None:
                late.cancel()
            self.on_stream(-1)
            self._unread -= stream.unread
            for request in requests:
                del self._streams[request.request_id]
            if stream.running:
                self._send(messages.Abort([(request_id, None) for request_id in stream.running]))

    def abort(self, request_id: str, index: int) -> None:
        """Stops one completion. Its stream no longer waits for it to end."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.close(request_id, index)
            self._send(messages.Abort([(request_id, index)]))

    def fail_streams(self, message: str) -> None:
        """Makes every open stream raise EngineDeadError. The engine itself keeps running."""
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(message))

    async def close(self, drain: bool = False) -> None:
        """Disconnects. With `drain` the engine is first asked to finish its requests and exit."""
        if drain:
            self._send(messages.Drain())
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def profile(self, steps: int) -> None:
        """Has the engine trace its next `steps` steps (1 to 10000) into its `profile_dir`."""
        self._send(messages.Profile(steps))

    def reset_prefix_cache(self) -> None:
        """Has the engine forget the cached pages of earlier prompts."""
        self._send(messages.ResetPrefixCache())

    async def change_adapter(self, kind: type[LoadAdapter] | type[UnloadAdapter], *fields: Any) -> None:
        """Has the engine load or unload an adapter. `fields` are those of the message behind `ticket`. Raises
        AdapterError with the engine's reason if it cannot, and EngineDeadError if the engine has died."""
        done = await self._change(kind, *fields)
        if done.error is not None:
            raise AdapterError(done.error)

    async def change_weights(self, kind: Callable[..., Sleep | WakeUp | UpdateWeights], *fields: Any) -> None:
        """Has the engine sleep, wake up or replace its weights. `fields` are those of the message behind `ticket`.

        Raises InvalidRequestError if that is not possible, QueueFullError if it is not possible now, RuntimeError if it
        failed, and EngineDeadError if the engine has died.
        """
        done = await self._change(kind, *fields)
        if done.error is not None:
            raise _rejection(done.error, None, done.code)

    async def _change(self, kind: Callable[..., Any], *fields: Any) -> messages.ChangeDone:
        if self.error is not None:
            raise self._dead()
        ticket = next(self._numbers)
        done = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self._send(kind(ticket, *fields))
        try:
            return await done
        finally:
            del self._tickets[ticket]

    async def pool(self) -> PoolSnapshot:
        """Who owns which KV page. An answer is kept for POOL_SECONDS before the engine is asked again.

        Raises EngineDeadError if the engine has died.
        """
        now = asyncio.get_running_loop().time()
        if self.error is not None:
            raise self._dead()
        if self._pool is None or (self._pool.done() and now - self._pool_asked >= POOL_SECONDS):
            self._pool = asyncio.get_running_loop().create_future()
            self._pool_asked = now
            self._send(messages.AskPool())
        return await asyncio.shield(self._pool)

    def _send(self, message: messages.ApiServerMessage) -> None:
        if self._writer is not None and self.error is None:
            self._writer.write(messages.to_frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = messages.frame_length(await reader.readexactly(messages.LENGTH_BYTES))
                self._handle(messages.decode_engine_message(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            self.lose("the engine process ended", ended=True)
        except ValueError as error:
            self.lose(f"the engine sent something unreadable: {error}")
        except Exception as error:
            log.exception("what the engine sent could not be handled")
            self.lose(f"what the engine sent could not be handled: {type(error).__name__}: {error}")

    def _handle(self, message: messages.EngineMessage) -> None:
        self._note_life()
        match message:
            case messages.Beat(busy):
                self._alive_at -= busy
            case messages.Update(output, stats):
                for update in output:
                    if (stream := self._streams.get(update.request_id)) is not None:
                        if update.error_param is None:
                            self._put(stream, update)
                        else:
                            stream.close(update.request_id, update.index)
                            stream.fail(InvalidRequestError(update.error or "", update.error_param))
                if stats is not None:
                    self.stats = stats
                    self.on_stats(stats)
            case messages.Pool(snapshot):
                if self._pool is not None and not self._pool.done():
                    self._pool.set_result(snapshot)
            case messages.Accepted(request_id):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.accept(*stream.unaccepted)
            case messages.Rejected(request_id, text, param, code):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.running.clear()
                    stream.fail(_rejection(text, param, code))
            case messages.ChangeDone(ticket):
                if (done := self._tickets.get(ticket)) is not None and not done.done():
                    done.set_result(message)
            case messages.Ready():
                self.info = message
                self.error = None
                self.adapters = {adapter.name: adapter for adapter in message.adapters}
                self.on_ready(message)
                self._ready.set()
                self._submit_held()
            case messages.Failed(text):
                self.lose(text)

    def _put(self, stream: UpdateStream, update: SequenceUpdate) -> None:
        """Adds an update to a stream. Pauses its request in the engine if the stream's reader is too far behind."""
        stream.put(update)
        more = weight(update)
        stream.unread += more
        self._unread += more
        most = MAX_UNREAD if self._unread <= MAX_ALL_UNREAD else MAX_UNREAD // 8
        if stream.unread > most and update.request_id in stream.running:
            stream.paused.add(update.request_id)
            self._send(messages.Pause(update.request_id, True))

    def lose(self, message: str, *, ended: bool = False) -> None:
        """Marks the engine as dead. Everything that waits for the engine fails with `message`, unless the engine's
        process has `ended` without a word and the supervisor will say why."""
        if self._lost.is_set():
            return  # later errors follow from the first one
        self.error = message
        self.ended = ended
        self.losses += 1
        self._lost.set()
        self._ready.set()
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()  # nothing that the dead engine sent is of use
        if self._pool is not None and not self._pool.done():
            self._pool.set_exception(self._dead())
        self._pool = None
        for done in self._tickets.values():
            if not done.done():
                done.set_exception(self._dead())
        for stream in set(self._streams.values()):
            if ended and self.holds and stream.is_whole:
                stream.is_held = True
                stream.is_whole = False  # once
            elif not stream.is_held:
                stream.fail(self._dead())

    def let_go(self) -> None:
        """Fails the requests that wait for another engine."""
        for stream in set(self._streams.values()):
            if stream.is_held:
                stream.fail(self._dead())

    def _submit_held(self) -> None:
        """Gives the requests that have waited to the engine that is ready now."""
        for stream in dict.fromkeys(self._streams.values()):
            if stream.is_held:
                stream.is_held = False
                self._send(messages.Submit.of(stream.requests))

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"{self.error}; it is being started again: try again" if self.revives else self.error)


def _rejection(message: str, param: str | None, code: str | None) -> Exception:
    if code == messages.QUEUE_FULL:
        return QueueFullError(message)
    if code == messages.INTERNAL_ERROR:
        return RuntimeError(message)
    return InvalidRequestError(message, param, code)
