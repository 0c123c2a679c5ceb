"""What the first host makes of the others, which are only connections here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from serving import free_port

from jaxserve.config import EngineConfig
from jaxserve.execution import commands
from jaxserve.hosts import channel, messages
from jaxserve.hosts.environment import SECRET
from jaxserve.hosts.first_host import FirstHost
from jaxserve.hosts.identity import identity_of
from jaxserve.hosts.token_digests import EVERY

GOOD = "a secret of sixteen or more bytes"


class Group:
    """A first host with two others. `ends`: why it ended."""

    def __init__(self, folder, timeout: float):
        port = free_port()
        settings = {"coordinator": f"127.0.0.1:{free_port()}", "command_port": port, "num_hosts": 3}
        config = EngineConfig(model=str(folder), host_timeout=timeout, **settings)
        self.first, self.ends = FirstHost(config), []
        self.first.on_end = self.ends.append
        self.others = []
        for host_id in (1, 2):
            other = channel.connect(socket.create_connection(("127.0.0.1", port)), GOOD.encode())
            other.send(messages.encode(messages.Join(host_id, identity_of(config))))
            assert messages.decode(other.receive()) == messages.Beat()
            self.others.append(other)
        self.first.gather()

    def send(self, host_id: int, message: messages.Message) -> None:
        self.others[host_id - 1].send(messages.encode(message))

    def received(self, host_id: int, kind: type) -> messages.Message:
        """The next message of a kind."""
        while not isinstance(message := messages.decode(self.others[host_id - 1].receive()), kind):
            pass
        return message

    def beat_until_the_end(self, *beats: tuple[int, messages.Beat]) -> str:
        deadline = time.monotonic() + 20
        while not self.ends:
            assert time.monotonic() < deadline
            for host_id, beat in beats:
                with contextlib.suppress(OSError):
                    self.send(host_id, beat)
            time.sleep(0.1)
        return self.ends[0]


@pytest.fixture
def group(model_folders, monkeypatch):
    monkeypatch.setenv(SECRET, GOOD)
    return lambda timeout=10.0: Group(model_folders("tp_gqa"), timeout)


def test_calls_reach_all(group):
    hosts = group()
    hosts.first.tell(1, commands.Allocate())
    for host_id in (1, 2):
        call = hosts.received(host_id, messages.Call)
        assert (call.runner, commands.decode(call.command)) == (1, commands.Allocate())
    waiting = threading.Thread(target=hosts.first.wait_idle)
    waiting.start()
    hosts.send(1, messages.Beat(1, False))
    hosts.send(2, messages.Beat(1, True))  # it compiles
    waiting.join(0.3)
    assert waiting.is_alive()
    hosts.send(2, messages.Beat(1, False))
    waiting.join(5)
    assert not waiting.is_alive()


def test_answers(group):
    """Those of the latest call. A host that answers late is waited for."""
    hosts = group()
    hosts.first.tell(0, commands.CheckWeights(None))
    hosts.send(1, messages.Answer(0, {"file": "old"}, None))
    hosts.first.tell(0, commands.CheckWeights("folder"))
    assert commands.decode(hosts.received(1, messages.Call).command) == commands.CheckWeights(None)
    found = []
    waiting = threading.Thread(target=lambda: found.append(hosts.first.answers()))
    waiting.start()
    hosts.send(2, messages.Answer(1, {}, "no such folder"))
    waiting.join(0.3)
    assert waiting.is_alive()
    hosts.send(1, messages.Answer(1, {"file": "new"}, None))
    waiting.join(5)
    assert found == [{"host 1 (127.0.0.1)": ({"file": "new"}, None), "host 2 (127.0.0.1)": ({}, "no such folder")}]


def test_other_tokens(group):
    hosts = group()
    for _ in range(EVERY):
        hosts.first.digests.add(b"tokens")
    hosts.send(1, messages.Tokens(EVERY, b"other tokens"))
    reason = hosts.beat_until_the_end((1, messages.Beat()), (2, messages.Beat()))
    assert reason == f"host 1 has sampled other tokens than the first host within {EVERY} steps"
    assert hosts.received(2, messages.End) == messages.End(reason)


def test_a_host_that_lags(group):
    """It is alive, but has not run what it was told. One that compiles may take its time."""
    hosts = group(1.5)
    for _ in range(5):
        hosts.first.tell(0, commands.Allocate())
    reason = hosts.beat_until_the_end((1, messages.Beat(0, True)), (2, messages.Beat(4, False)))
    assert reason == "host 2 (127.0.0.1) is lost: it lags by more than 1.5 s"


def test_a_host_that_failed_because_another_was_lost(group):
    hosts = group()
    hosts.send(1, messages.Failed("its collective failed"))
    hosts.others[1].close()
    assert hosts.beat_until_the_end((1, messages.Beat())) == "host 2 (127.0.0.1) is lost: its process has ended"


def test_a_host_that_failed(group):
    hosts = group()
    hosts.send(1, messages.Failed("no memory"))
    reason = hosts.beat_until_the_end((1, messages.Beat()), (2, messages.Beat()))
    assert reason == "host 1 (127.0.0.1) failed: no memory"
    assert hosts.received(2, messages.End) == messages.End(reason)
