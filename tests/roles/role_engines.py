"""Engines with roles in one process, each in a thread of its own as in a server, and proxies between them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engines import Completion, make_engine
from serving import free_port, wait_until

from jaxserve.engine.engine import Engine
from jaxserve.types import Request

SECRET = "a secret of the tests' servers"


def begin(engine: Engine) -> Engine:
    """As `Engine.compile` does, without compiling what is not used. Pages are loaded whatever it costs."""
    assert engine.copies is not None
    engine.copies.begin(engine, engine._parts)
    engine.blocks.tiers.costs = None
    return engine


@contextmanager
def prefill_engine(folder: Any, **settings: Any) -> Iterator[tuple[Engine, str]]:
    """A prefill server's engine, stepped by a thread as its server would; and its address."""
    address = f"127.0.0.1:{free_port()}"
    engine = begin(make_engine(folder, **settings, role="prefill", prefill_listen=address))
    end = threading.Event()
    failed = list[BaseException]()

    def loop() -> None:
        try:
            while not end.is_set():
                if engine.has_work:
                    engine.step()
                    engine.scheduler.check_integrity()
                else:
                    time.sleep(0.001)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield engine, address
    finally:
        end.set()
        thread.join()
        assert not failed


def decode_engine(folder: Any, *addresses: str, up: int | None = None, **settings: Any) -> Engine:
    """A decode server's engine. Waits until `up` prefill servers are up, by default all."""
    given = {"prefill_min_tokens": 16, **settings}
    engine = begin(make_engine(folder, **given, role="decode", prefill_servers=addresses))
    wait_until(lambda: engine.stats().prefill_servers_up >= (len(addresses) if up is None else up))
    return engine


def answers(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    """The tokens of all completions of requests that come at the same time."""
    results: dict[tuple[str, int], Completion] = {}
    for one in requests:
        engine.add_request(one)
    while engine.has_work:
        for update in engine.step():
            completion = results.setdefault((update.request_id, update.index), Completion())
            completion.token_ids += update.token_ids
            assert update.finish_reason != "error", update.error
        engine.scheduler.check_integrity()
    return {name: completion.token_ids for name, completion in results.items()}


def as_it_is(data: bytes, before: int) -> bytes:
    return data


class Proxy:
    """Passes bytes between decode servers and a prefill server. `change` gets what the prefill server sends, with the
    number of its bytes before it, and returns what is passed on; it may wait, and may raise OSError to cut."""

    def __init__(self, target: str):
        host, port = target.split(":")
        self._target = (host, int(port))
        self.change = as_it_is
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            for source, sink, changes in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, sink, changes), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, changes: bool) -> None:
        count = 0
        try:
            while data := source.recv(2**16):
                sink.sendall(self.change(data, count) if changes else data)
                count += len(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
