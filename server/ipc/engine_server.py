"""The engine's end of the connections to the API servers: typed msgpack messages in frames, over a unix socket.

The engine listens, and any number of API servers connect (`jaxserve.server.ipc.engine_client`). Each API server gets
one `Update` per step that concerns it. Threads read and write the sockets; the engine itself runs in one plain loop. If
more than `api_server_connection.MAX_BACKLOG` bytes wait for an API server, the loop makes no steps, or disconnects this
API server if there are others."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from jaxserve.adapters.registry import AdapterError, Registry, ServedAdapter
from jaxserve.checkpoints.files import clipped
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.page_snapshot import PoolSnapshot
from jaxserve.server.ipc import messages
from jaxserve.server.ipc.api_server_connection import ApiServerConnection
from jaxserve.server.ipc.weight_changes import UpdateChecked, WeightChange, WeightChanges
from jaxserve.types import InvalidRequestError, QueueFullError, Request, SequenceUpdate, StepOutput

log = logging.getLogger("jaxserve.engine")

BACKLOG_SECONDS = 0.01  # between two checks whether an API server's backlog has shrunk
TAKE_SECONDS = 0.01  # for messages between two steps
TIDY_SECONDS = 0.002  # between two pieces of an idle engine's own work
MAX_SCORED = 1024  # prompt tokens whose log-probabilities go into one message, so that no message takes long to read
STATS_SECONDS = 0.1  # engine statistics are sent at most this often
BEAT_SECONDS = 1.0  # between two `Beat` messages


class EngineLike(Protocol):
    """The part of `jaxserve.engine.engine.Engine` that the loop uses."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_folder: Path
    page_size: int

    @property
    def compiling(self) -> bool: ...
    def compile(self) -> None: ...
    def add_requests(self, requests: list[Request]) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def pause(self, request_id: str, paused: bool) -> None: ...
    def step(self) -> StepOutput: ...
    @property
    def has_work(self) -> bool: ...
    def idle(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def profile(self, steps: int) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def pool(self) -> PoolSnapshot: ...


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


Message = messages.ApiServerMessage | AdapterRead | UpdateChecked


class EngineServer:
    """Serves one engine to the API servers that connect to a unix socket.

    API servers may connect before the engine has loaded. `run` sends them `Ready`, `fail` sends them `Failed`.
    """

    def __init__(self, socket_path: str):
        self._inbox: queue.SimpleQueue[tuple[ApiServerConnection, Message | None] | None]
        self._inbox = queue.SimpleQueue()
        self._api_servers: dict[int, ApiServerConnection] = {}
        self._api_servers_lock = threading.Lock()  # guards _fronts and _greeting, which the accepting thread uses too
        self._greeting: messages.EngineMessage | None = None
        self._draining = False
        self._changes: WeightChanges
        self._stats_due: float | None = None  # time.monotonic() at which to send statistics; None: unchanged
        self._turn_began: float | None = None  # time.monotonic(); None while the loop waits for messages
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path)
        self._listener.listen()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def run(self, engine: EngineLike, ready: messages.Ready) -> None:
        """The loop: take messages, step, deliver. Returns when drained; losing the last API server drains as well."""
        self._announce(ready)
        self._changes = WeightChanges(engine, ready.weights)
        threading.Thread(target=self._beat, args=(engine,), name="beat", daemon=True).start()
        self._stats_due = time.monotonic()
        while True:
            if self._changes.waits:
                self._change_weights(engine)
            held_up = self._held_up()
            tidies = not engine.has_work and engine.idle()
            self._take_messages(engine, held_up, tidies)
            if self._draining and not engine.has_work and not self._changes.waits:
                return
            if engine.has_work and not held_up:
                self._deliver(engine.step())
                self._stats_due = self._stats_due or time.monotonic()
            if self._stats_due is not None and time.monotonic() >= self._stats_due:
                self._send_stats(engine)

    def wake(self) -> None:
        """Has the loop look whether the engine has work, and send statistics. Any thread may call it."""
        self._inbox.put(None)

    def fail(self, message: str, patience: float = 5.0) -> bool:
        """Tells every API server that the engine is dead. Waits up to `patience` seconds for an API server; False if
        none came."""
        self._announce(messages.Failed(message))
        deadline = time.monotonic() + patience
        while not self._api_servers and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(self._api_servers)

    def end_process(self, message: str) -> None:
        """Tells every API server that the engine is dead, and ends the process, whose engine may wait for its
        devices."""
        self.fail(message, patience=0.0)
        self.close()
        os._exit(1)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        with self._api_servers_lock:
            api_servers = list(self._api_servers.values())
        for api_server in api_servers:
            api_server.close(seconds=2.0)

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                log.error("cannot take an API server's connection: %s", error)
                time.sleep(BEAT_SECONDS)  # the cause, such as too many open files, may pass
                continue
            with self._api_servers_lock:
                api_server = self._api_servers[number] = ApiServerConnection(number, connection, self._inbox)
                if self._greeting is not None:
                    api_server.send(self._greeting)
            number += 1

    def _beat(self, engine: EngineLike) -> None:
        """Sends `Beat` to every API server, every BEAT_SECONDS until `close`."""
        while not self._closed.wait(BEAT_SECONDS):
            now = time.monotonic()
            if (began := self._turn_began) is not None and (engine.compiling or self._changes.running):
                self._turn_began = began = now
            beat = messages.Beat(0.0 if began is None else now - began)
            with self._api_servers_lock:
                for api_server in self._api_servers.values():
                    api_server.send(beat)

    def _announce(self, message: messages.EngineMessage) -> None:
        with self._api_servers_lock:
            self._greeting = message
            for api_server in self._api_servers.values():
                api_server.send(message)

    def _held_up(self) -> bool:
        """Whether the only API server must read before the engine may make another step. Of several API servers, one
        that does not read loses its connection instead, because the others must not wait for it."""
        with self._api_servers_lock:
            behind = [api_server for api_server in self._api_servers.values() if api_server.is_behind]
            if len(self._api_servers) == 1:
                return bool(behind)
        for api_server in behind:
            log.error("API server %d has not read for too long; its requests end", api_server.number)
            api_server.cut()
        return False

    def _take_messages(self, engine: EngineLike, held_up: bool, tidies: bool = False) -> None:
        """Handles the messages that have arrived; if the engine has work, only those of TAKE_SECONDS, as thousands of
        requests may arrive at once. Waits for one if the engine is idle, at most until statistics are due. If a API
        server is held up, waits at most BACKLOG_SECONDS; if the engine `tidies` up, at most TIDY_SECONDS."""
        timeout = TIDY_SECONDS if tidies else None
        if self._stats_due is not None:
            due = max(0.0, self._stats_due - time.monotonic())
            timeout = due if timeout is None else min(timeout, due)
        if self._changes.waits:
            left = self._changes.seconds_left()
            timeout = left if timeout is None else min(timeout, left)
        block = held_up or (not engine.has_work and not self._draining)
        if held_up:
            timeout = BACKLOG_SECONDS if timeout is None else min(timeout, BACKLOG_SECONDS)
        end: float | None = None  # TAKE_SECONDS after the first message
        try:
            while end is None or not engine.has_work or time.monotonic() < end:
                self._turn_began = None if block else time.monotonic()
                item = self._inbox.get(block=block, timeout=timeout)
                self._turn_began = time.monotonic()
                end = end or self._turn_began + TAKE_SECONDS
                if item is None:
                    self._stats_due = self._stats_due or time.monotonic()
                else:
                    self._handle(engine, *item)
                block = False
        except queue.Empty:
            return

    def _handle(self, engine: EngineLike, api_server: ApiServerConnection, message: Message | None) -> None:
        match message:
            case messages.Submit():
                self._add(engine, api_server, message)
            case messages.Abort(targets):
                for request_id, index in targets:
                    _forget(api_server, request_id, index)
                    self._changes.drop(api_server, request_id)
                    engine.abort(f"{api_server.number}/{request_id}", index)
                self._stats_due = self._stats_due or time.monotonic()
            case messages.Pause(request_id, paused):
                engine.pause(f"{api_server.number}/{request_id}", paused)
            case messages.Profile(steps):
                engine.profile(steps)
            case messages.ResetPrefixCache():
                engine.reset_prefix_cache()
            case messages.AskPool():
                api_server.send(messages.Pool(engine.pool()))
            case messages.LoadAdapter() | messages.UnloadAdapter() | AdapterRead():
                self._change_adapters(engine, api_server, message)
            case messages.Sleep() | messages.WakeUp() | messages.UpdateWeights() | UpdateChecked():
                self._ask_for_change(engine, api_server, message)
            case messages.Drain():
                self._draining = True
            case None:
                self._changes.drop(api_server)
                for request_id in api_server.running:
                    engine.abort(f"{api_server.number}/{request_id}")
                api_server.close(seconds=0.0)
                with self._api_servers_lock:
                    del self._api_servers[api_server.number]
                    self._draining = self._draining or not self._api_servers

    def _change_adapters(self, engine: EngineLike, api_server: ApiServerConnection, message: AdapterChange) -> None:
        """Loads or unloads an adapter. A thread reads its files, and then puts an AdapterRead into the inbox. API
        servers learn of the change before the answer."""
        try:
            changed = change_adapters(engine, message, lambda read: self._inbox.put((api_server, read)))
        except Exception as error:  # whatever an adapter's files hold, the engine goes on
            if not isinstance(error, ValueError | OSError):
                log.exception("an adapter could not be loaded")
            api_server.send(messages.ChangeDone(message.ticket, clipped(str(error) or type(error).__name__)))
            return
        if changed is not None:
            assert isinstance(self._greeting, messages.Ready)
            self._announce(msgspec.structs.replace(self._greeting, adapters=changed))
            api_server.send(messages.ChangeDone(message.ticket))

    def _ask_for_change(
        self, engine: EngineLike, api_server: ApiServerConnection, message: WeightChange | UpdateChecked
    ) -> None:
        """Notes a change of the weights; `_change_weights` makes it. Ends all running requests if it aborts them."""
        if not self._changes.ask(api_server, message, lambda checked: self._inbox.put((api_server, checked))):
            return
        with self._api_servers_lock:
            api_servers = list(self._api_servers.values())
        for one in api_servers:
            for request_id in list(one.running):
                engine.abort(f"{one.number}/{request_id}")
                text = "the request was ended, because the engine's weights are replaced or put aside; try again"
                one.send(messages.Rejected(request_id, text, code=messages.QUEUE_FULL))
            one.running.clear()

    def _change_weights(self, engine: EngineLike) -> None:
        """Makes a change of the weights for which no request runs any more. A paused request, whose client does not
        read, runs too."""
        with self._api_servers_lock:
            runs = engine.has_work or any(api_server.running for api_server in self._api_servers.values())
        for api_server, submit in self._changes.make(at_rest=not runs, announce=self._announce_weights):
            self._add(engine, api_server, submit)

    def _announce_weights(self) -> None:
        assert isinstance(self._greeting, messages.Ready)
        state = {"sleep_level": self._changes.level, "weights": self._changes.served}
        self._announce(msgspec.structs.replace(self._greeting, **state))

    def _add(self, engine: EngineLike, api_server: ApiServerConnection, submit: messages.Submit) -> None:
        """Adds all requests of a message to the engine, or none. The API server's number makes their ids unique."""
        name = submit.first.request_id
        prefix = f"{api_server.number}/"
        try:
            if self._draining:
                raise QueueFullError("the engine is shutting down")
            if self._changes.waits and self._changes.holds(api_server, submit):
                return
            requests = submit.requests(prefix)
            engine.add_requests(requests)
            for request in requests:
                api_server.running[request.request_id.removeprefix(prefix)] = set(range(request.params.n))
            if submit.first.params.grammar is None:
                api_server.send(messages.Accepted(name))
        except InvalidRequestError as error:
            api_server.send(messages.Rejected(name, str(error), error.param, error.code))
        except QueueFullError as error:
            api_server.send(messages.Rejected(name, str(error), code=messages.QUEUE_FULL))
        except Exception as error:  # an unexpected error in one request must not affect the others
            log.exception("a request could not be added")
            api_server.send(
                messages.Rejected(name, f"the engine could not take the request: {error}", code=messages.INTERNAL_ERROR)
            )

    def _deliver(self, output: StepOutput) -> None:
        """Sends each API server the updates of its own requests, if there are any."""
        with self._api_servers_lock:
            api_servers = list(self._api_servers.values())
        for api_server in api_servers:
            if not api_server.running and len(api_servers) > 1:
                continue
            mine = output.of(f"{api_server.number}/")
            for update in mine.updates:
                if update.finish_reason is not None:
                    _forget(api_server, update.request_id, update.index)
            for update in mine.updates:
                if update.prompt_logprobs is not None:
                    _send_scores(api_server, update)
            if len(mine):
                _send_output(api_server, mine)

    def _send_stats(self, engine: EngineLike) -> None:
        stats = engine.stats()
        with self._api_servers_lock:
            for api_server in self._api_servers.values():
                api_server.send(messages.Update(StepOutput(), stats))
        self._stats_due = time.monotonic() + STATS_SECONDS if engine.has_work else None


def _forget(api_server: ApiServerConnection, request_id: str, index: int | None) -> None:
    running = api_server.running.get(request_id, set())
    running.discard(index)  # type: ignore[arg-type]
    if index is None or not running:
        api_server.running.pop(request_id, None)


def _send_scores(api_server: ApiServerConnection, update: SequenceUpdate) -> None:
    """Sends an update's prompt log-probabilities ahead of it in messages of MAX_SCORED; the last ones stay in it."""
    scores = update.prompt_logprobs
    while scores is not None and len(scores) > MAX_SCORED:
        ahead = SequenceUpdate(update.request_id, update.index, [], prompt_logprobs=scores[:MAX_SCORED])
        api_server.send(messages.Update(StepOutput(updates=[ahead])))
        update.prompt_logprobs = scores = scores[MAX_SCORED:]


def _send_output(api_server: ApiServerConnection, output: StepOutput) -> None:
    """Sends an output in one frame, or in halves if it is too long. An update that fits in no frame becomes an error
    that ends its completion."""
    try:
        api_server.send(messages.Update(output))
    except ValueError as error:
        updates = list(output)
        if len(updates) == 1:
            lost = updates[0]
            updates = [SequenceUpdate(lost.request_id, lost.index, [], "error", error=str(error))]
            api_server.send(messages.Update(StepOutput(updates=updates)))
        else:
            half = len(updates) // 2
            _send_output(api_server, StepOutput(updates=updates[:half]))
            _send_output(api_server, StepOutput(updates=updates[half:]))
