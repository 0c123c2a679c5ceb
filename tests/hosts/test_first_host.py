"""What the first host makes of the others, which are only connections here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest
from serving import free_port
from strangers import HELLO, Strangers

from jaxserve.config import EngineConfig
from jaxserve.execution import runner_commands
from jaxserve.hosts import channel, messages
from jaxserve.hosts.first_host import FirstHost
from jaxserve.hosts.greetings import Greetings, bind
from jaxserve.hosts.host_environment import SECRET
from jaxserve.hosts.identity import identity_of
from jaxserve.hosts.messages import EVERY, HostError
from jaxserve.hosts.other_host import OtherHost

GOOD = "a secret of sixteen or more bytes"


class Group:
    """A first host with two others. `ends`: why it ended."""

    def __init__(self, folder, timeout: float, between: Callable[[int], None] = lambda port: None):
        """`between`: called with the port before the others join."""
        port = free_port()
        settings = {"coordinator": f"127.0.0.1:{free_port()}", "command_port": port, "num_hosts": 3}
        config = EngineConfig(model=str(folder), host_timeout=timeout, **settings)
        self.first = FirstHost(config)
        self.ends = []
        self.first.on_end = self.ends.append
        self.others = []
        between(port)
        for host_id in (1, 2):
            other = channel.connect(socket.create_connection(("127.0.0.1", port)), GOOD.encode(), 10.0)
            other.send(messages.encode(messages.Join(host_id, identity_of(config))))
            other.set_timeout(10.0)
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
    return lambda timeout=10.0, **options: Group(model_folders("tp_gqa"), timeout, **options)


def test_calls_reach_all(group):
    hosts = group()
    hosts.first.tell(1, runner_commands.Allocate())
    for host_id in (1, 2):
        call = hosts.received(host_id, messages.Call)
        assert (call.runner, runner_commands.decode(call.command)) == (1, runner_commands.Allocate())
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
    hosts.first.tell(0, runner_commands.CheckWeights(None))
    hosts.send(1, messages.Answer(0, {"file": "old"}, None))
    hosts.first.tell(0, runner_commands.CheckWeights("folder"))
    assert runner_commands.decode(hosts.received(1, messages.Call).command) == runner_commands.CheckWeights(None)
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
        hosts.first.tell(0, runner_commands.Allocate())
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


# Strangers, and hosts that say what makes no sense


def test_hosts_join_while_strangers_hold_connections(group):
    """As many as the system lets in. They hold no threads."""
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        strangers = []

        def come(port: int) -> None:
            strangers.append(stack.enter_context(Strangers(port, 300)))

        start = time.monotonic()
        hosts = group(between=come)
        assert time.monotonic() - start < 8
        time.sleep(1)
        assert strangers[0].came > 300, "those that came first made room for later ones"
        assert threading.active_count() - threads <= 2 * 2 + 4  # two for each host, of the first host, and of the test
        hosts.first.tell(0, runner_commands.Allocate())
        assert hosts.received(1, messages.Call).runner == 0


def test_a_greeting_has_one_limit_however_it_is_cut(group, monkeypatch):
    monkeypatch.setattr("jaxserve.hosts.first_host.GREETING_SECONDS", 1.0)

    def drip(port: int) -> None:
        stranger = socket.create_connection(("127.0.0.1", port), 10)
        start = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in HELLO:
                stranger.sendall(bytes([byte]))
                time.sleep(0.1)
        assert 0.8 < time.monotonic() - start < 3

    group(between=drip)


NONSENSE = {
    "no message": b"\x81\xa4type\xa3Nap",
    "nested": b"\x82\xa4type\xa4Join\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "another message": messages.encode(messages.Beat()),
    "large": bytes(channel.MAX_MESSAGE + 1),
}


def test_nonsense_from_a_host_that_would_join(group, caplog):
    def come(port: int) -> None:
        for body in NONSENSE.values():
            other = channel.connect(socket.create_connection(("127.0.0.1", port)), GOOD.encode(), 10.0)
            with contextlib.suppress(ConnectionError):  # it may be closed before the end of a body
                other.send(body)
            with pytest.raises((EOFError, ConnectionError)):
                other.receive()

    group(between=come)
    assert caplog.text.count("the connection from 127.0.0.1 is closed: it ") == len(NONSENSE)


@pytest.mark.parametrize("kind", [*NONSENSE, "digest"])
def test_nonsense_from_a_host_that_has_joined(kind, group):
    """It cannot go on, and the reason names it."""
    hosts = group()
    others = {"another message": messages.encode(messages.Start()), "digest": messages.encode(messages.Tokens(7, b""))}
    hosts.others[0].send((NONSENSE | others)[kind])
    assert hosts.beat_until_the_end((2, messages.Beat())).startswith("host 1 (127.0.0.1) is lost: it sen")


def test_an_address_that_this_host_does_not_have(model_folders, monkeypatch):
    """It does not wait on all addresses instead, unless it is told to."""
    monkeypatch.setenv(SECRET, GOOD)
    settings = {"model": str(model_folders("tp_gqa")), "num_hosts": 2}
    port = free_port()
    config = EngineConfig(coordinator="192.0.2.1:9", command_port=port, **settings)
    with pytest.raises(HostError, match=rf"cannot listen .* on 192\.0\.2\.1:{port}.* --command-host"):
        FirstHost(config)
    with socket.create_server(("127.0.0.1", port)):
        pass  # nobody listens there
    monkeypatch.setattr("jaxserve.hosts.first_host.RESOLVE_SECONDS", 0.0)
    with pytest.raises(HostError, match=r"on no\.such\.host\.invalid:"):
        FirstHost(EngineConfig(coordinator="no.such.host.invalid:9", **settings))
    FirstHost(EngineConfig(coordinator="192.0.2.1:9", command_host="127.0.0.1", command_port=port, **settings))
    socket.create_connection(("127.0.0.1", port)).close()


def test_a_first_host_that_closes_connections_is_tried_again(model_folders, monkeypatch):
    """It may have too many; what it says after all is heard."""
    monkeypatch.setenv(SECRET, GOOD)
    monkeypatch.setattr("jaxserve.hosts.other_host.RETRY_SECONDS", 0.01)
    listener = bind("127.0.0.1", 0)
    settings = {"num_hosts": 2, "host_id": 1, "command_port": listener.getsockname()[1]}
    config = EngineConfig(model=str(model_folders("tp_gqa")), coordinator="127.0.0.1:9", **settings)
    listener.listen()

    def serve(link: channel.Channel) -> None:
        assert isinstance(messages.decode(link.receive()), messages.Join)
        link.send(messages.encode(messages.Refused("there are enough")))

    def busy() -> None:
        for _ in range(2):
            listener.accept()[0].close()
        Greetings(listener, GOOD.encode(), 5.0, serve, "first")

    threading.Thread(target=busy, daemon=True).start()
    with pytest.raises(HostError, match="refuses this host: there are enough"):
        OtherHost(config)
