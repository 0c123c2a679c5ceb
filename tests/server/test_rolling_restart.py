"""Servers that are replaced one after the other behind a load balancer, as Kubernetes does it."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import ServerUnderTest, wait_until

BODY = {"model": "test-model", "prompt": [50, 51], "max_tokens": 8}
NEWS_SECONDS = 0.4  # after which clients learn that a server is ready, or is not


class Balancer:
    """Asks servers whether they are ready; `targets` are those that were, some time ago."""

    def __init__(self) -> None:
        self.servers: list[ServerUnderTest] = []
        self.targets: list[ServerUnderTest] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            ready = [server for server in list(self.servers) if server.status("/ready") == 200]
            time.sleep(NEWS_SECONDS)
            self.targets = ready

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_rolling_restart(start_server, delay):
    """With --drain-delay no request is refused, and without it some are."""
    balancer = Balancer()
    over = threading.Event()
    statuses: list[int] = []

    def client() -> None:
        while not over.is_set():
            server = random.choice(balancer.targets)
            try:
                statuses.append(httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30).status_code)
            except httpx.HTTPError:
                statuses.append(0)
            time.sleep(0.01)

    try:
        balancer.servers = [start_server("ParrotEngine") for _ in range(2)]
        old = [start_server("ParrotEngine", drain_delay=delay) for _ in range(2)]
        news = balancer.servers
        balancer.servers = old
        wait_until(lambda: len(balancer.targets) == 2 and old[0] in balancer.targets)
        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client) for _ in range(4)]
            for leaving, new in zip(old, news, strict=True):
                balancer.servers = [*balancer.servers, new]
                wait_until(lambda new=new: new in balancer.targets)
                leaving.process.send_signal(signal.SIGTERM)
                if delay:
                    wait_until(lambda leaving=leaving: leaving.status("/ready") == 503)
                    assert leaving.status("/health") == 200
                assert leaving.process.wait(20) == 0
                balancer.servers = [server for server in balancer.servers if server is not leaving]
            over.set()
            for one in clients:
                one.result()
    finally:
        over.set()
        balancer.stop()
    assert len(statuses) > 50
    assert set(statuses) <= {200, 503, 0}
    assert all(status == 200 for status in statuses) == bool(delay)
