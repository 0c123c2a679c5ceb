"""The first host's side of a replica on several hosts: lets the others join, sends them every call, and watches them.

The first host schedules. Whatever its runners do on its devices is sent to the other hosts, whose runners do the same.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from jaxserve.config import EngineConfig
from jaxserve.execution import runner_commands
from jaxserve.hosts import channel, messages
from jaxserve.hosts.greetings import Greetings, bind
from jaxserve.hosts.host_environment import listen_address, read_secret
from jaxserve.hosts.identity import difference, identity_of
from jaxserve.hosts.messages import EVERY, HostError, TokenDigests
from jaxserve.hosts.peer import Peer
from jaxserve.hosts.start_jax import JOIN_SECONDS, stop_jax

log = logging.getLogger(__name__)

# A connection has this time to prove that it knows the secret, and to join.
GREETING_SECONDS = 10.0
# The coordinator's name has this time to resolve to this host; in a new pod that takes a while.
RESOLVE_SECONDS = 60.0
# A failure on the devices is reported after this time: the loss of a host may turn out to be its cause.
GRACE_SECONDS = 2.0


def end_process(reason: str) -> None:
    """Ends this process at once: its other threads may wait for devices that never answer."""
    os.write(2, f"jaxserve: {reason}\n".encode())
    os._exit(1)


class FirstHost:
    """Holds the connections to all other hosts of a replica.

    Attributes:
      on_end: called once, on any thread, with the reason when the replica cannot go on. By default `end_process`.
    """

    def __init__(self, config: EngineConfig):
        """Listens; `gather` waits for the others. Raises ConfigError, CheckpointError or HostError."""
        self._timeout = config.host_timeout
        self._count = config.num_hosts
        self._secret, self._identity = read_secret(config), identity_of(config)
        self.on_end: Callable[[str], None] = end_process
        self._peers: dict[int, Peer] = {}
        self._beats: dict[int, messages.Beat] = {}  # the latest of each host
        self._answers: dict[int, messages.Answer] = {}  # the latest of each host
        self._sent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])  # calls sent so far, at each look
        self._calls = 0
        self._started = False
        self._over = False
        self._changed = threading.Condition()  # guards all of these
        self._digested: dict[int, int] = {}  # host -> count of its latest digest
        self._digests: dict[int, dict[int, bytes]] = {}  # count -> host -> digest, until all hosts have sent theirs
        self.digests = TokenDigests(partial(self._compare, 0), self.fail)
        Greetings(_listener(config), self._secret, GREETING_SECONDS, self._greet, "hosts")

    def gather(self) -> None:
        """Waits until all hosts have joined. Raises HostError if they do not come."""
        log.info("waiting for %d other hosts", self._count - 1)
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._peers) == self._count - 1, JOIN_SECONDS):
                missing = [str(i) for i in range(1, self._count) if i not in self._peers]
                raise HostError(f"host {', '.join(missing)} of {self._count} did not join within {JOIN_SECONDS} s")
            self._started = True
        self._send_all(messages.Start())
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def tell(self, runner: int, command: runner_commands.Command) -> None:
        """Sends a call to the other hosts, and returns without waiting for it. `runner`: as in `messages.Call`."""
        self._send_all(messages.Call(runner, runner_commands.encode(command)))
        self._calls += 1

    def wait_idle(self) -> None:
        """Waits until all hosts have run the calls so far. If one does not, `_watch` declares it lost and ends this
        process."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or all(self._done(i) >= self._calls for i in self._peers))

    def answers(self) -> dict[str, tuple[dict[str, str], str | None]]:
        """Waits until all hosts have answered the latest call, which must be of the kind `runner_commands.Answered`.

        Returns the fields of each host's `messages.Answer`, by the host's name. If a host is lost meanwhile, this
        process ends.
        """
        with self._changed:
            latest = self._calls - 1
            self._changed.wait_for(lambda: [one.call for one in self._answers.values()] == [latest] * len(self._peers))
            given = sorted(self._answers.items())
        return {f"host {i} ({self._peers[i].address})": (one.found, one.why_not) for i, one in given}

    def fail(self, reason: str) -> None:
        """Ends the replica after a failure here or on a host.

        If a host is lost within GRACE_SECONDS, its loss is given as the reason instead.
        """
        time.sleep(GRACE_SECONDS)
        self._end(reason)

    def close(self) -> None:
        """Tells the other hosts to end, and leaves the group of JAX processes."""
        with self._changed:
            if self._over:
                return
            self._over = True
        self._send_all(messages.End())
        stop_jax()

    def _send_all(self, message: messages.Message) -> None:
        body = messages.encode(message)
        for peer in self._peers.values():
            peer.send(body)

    # Joining

    def _greet(self, link: channel.Channel) -> None:
        join = messages.decode(link.receive(channel.MAX_MESSAGE))
        if not isinstance(join, messages.Join):
            raise HostError("it does not ask to join")
        with self._changed:
            reason = self._why_not(join)
            if reason is None:
                self._add(join.host_id, link)
                return
        link.send(messages.encode(messages.Refused(reason)))
        raise HostError(reason)

    def _why_not(self, join: messages.Join) -> str | None:
        if not 1 <= join.host_id < self._count:
            return f"it is host {join.host_id}, but the other hosts are 1 to {self._count - 1}"
        if join.host_id in self._peers:
            return f"host {join.host_id} is here already, at {self._peers[join.host_id].address}"
        differs = difference(self._identity, join.identity)
        return differs and f"host {join.host_id} does not fit: {differs}"

    def _add(self, host: int, link: channel.Channel) -> None:
        log.info("host %d has joined from %s", host, link.address)
        self._beats[host] = messages.Beat()
        self._digested[host] = 0
        receive = partial(self._take, host)
        lose = partial(self._lose, host)
        self._peers[host] = Peer(link, self._timeout, messages.Beat, receive, lose, channel.MAX_MESSAGE)
        self._changed.notify_all()

    # Watching

    def _take(self, host: int, message: messages.Message) -> None:
        match message:
            case messages.Beat():
                with self._changed:
                    self._beats[host] = message
                    self._changed.notify_all()
            case messages.Answer():
                with self._changed:
                    self._answers[host] = message
                    self._changed.notify_all()
            case messages.Tokens(count, digest):
                if count != self._digested[host] + EVERY:
                    raise HostError(f"it sent a digest of {count} calls after that of {self._digested[host]}")
                self._digested[host] = count
                self._compare(host, count, digest)
            case messages.Failed(reason):
                self.fail(f"host {host} ({self._peers[host].address}) failed: {reason}")
            case _:
                raise HostError(f"it sent a {type(message).__name__}")

    def _lose(self, host: int, reason: str) -> None:
        with self._changed:
            if not self._started:
                del self._peers[host]  # another process may take its place
                log.warning("host %d has left before the start: %s", host, reason)
                return
            address = self._peers[host].address
        self._end(f"host {host} ({address}) is lost: {reason}")

    def _done(self, host: int) -> int:
        """The calls that a host has run; -1 while it loads or compiles."""
        beat = self._beats[host]
        return -1 if beat.busy else beat.done

    def _watch(self) -> None:
        """Ends the replica if a host has not run what was sent `host_timeout` ago."""
        while not self._over:
            time.sleep(self._timeout / 8)
            now = time.monotonic()
            self._sent.append((now, self._calls))
            while self._sent[0][0] < now - self._timeout:
                _, due = self._sent.popleft()
                for host, beat in list(self._beats.items()):
                    if not beat.busy and beat.done < due:
                        self._end(
                            f"host {host} ({self._peers[host].address}) is lost: it lags by more than "
                            f"{self._timeout:g} s"
                        )

    def _compare(self, host: int, count: int, digest: bytes) -> None:
        """Takes a digest of sampled tokens. All hosts' digests of the same count must be equal."""
        with self._changed:
            known = self._digests.setdefault(count, {})
            known[host] = digest
            wrong = [other for other in known if known[other] != known.get(0, digest)]
            if len(known) == self._count:
                del self._digests[count]
        if wrong:
            self._end(f"host {wrong[0]} has sampled other tokens than the first host within {count} steps")

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._over:
                return
            self._over = True
            self._changed.notify_all()
        log.error("%s; the replica ends", reason)
        self._send_all(messages.End(reason))
        for peer in self._peers.values():
            peer.flush(1.0)
        sys.stderr.flush()
        self.on_end(reason)


def _listener(config: EngineConfig) -> socket.socket:
    """A socket that has the address at which the other hosts connect. Raises HostError."""
    host, port = listen_address(config)
    deadline = time.monotonic() + (RESOLVE_SECONDS if _is_name(host) else 0)
    while True:
        try:
            return bind(host, port)
        except OSError as error:
            waits = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            if waits and time.monotonic() < deadline:
                time.sleep(1.0)
                continue
            raise HostError(
                f"cannot listen for the other hosts on {host}:{port}: {error.strerror or error}; where this host does "
                "not have the coordinator's address, as behind a load balancer, give one of its own with "
                "--command-host (0.0.0.0: all of them), and where the port is taken, another one with --command-port"
            ) from error


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False
