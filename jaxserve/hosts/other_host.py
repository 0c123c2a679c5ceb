"""The side of the hosts that follow the first one."""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable, Iterator

from jaxserve.config import EngineConfig
from jaxserve.hosts import channel, messages
from jaxserve.hosts.first_host import GRACE_SECONDS, GREETING_SECONDS, end_process
from jaxserve.hosts.host_environment import command_address, read_secret
from jaxserve.hosts.identity import identity_of
from jaxserve.hosts.messages import HostError, TokenDigests
from jaxserve.hosts.peer import Peer
from jaxserve.hosts.start_jax import JOIN_SECONDS

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
TRIES = 10  # connections that the first host closes, or leaves without an answer


class OtherHost:
    """A host's link to the first host. If the replica ends for another reason than that the first host has finished,
    it ends this process.

    Attributes:
      busy, compiles: whether the host loads or compiles, which may take longer than a step; `compiles` is called
        for each beat.
    """

    def __init__(self, config: EngineConfig):
        """Joins. Raises ConfigError, CheckpointError or HostError, also with the first host's reason to refuse."""
        self._host_id = config.host_id
        self._done = 0
        self._over = False
        self.busy = True
        self.compiles: Callable[[], bool] = lambda: False
        self._first = "{}:{}".format(*command_address(config))
        secret = read_secret(config)
        identity = identity_of(config)
        link, answer = self._join(command_address(config), secret, messages.Join(config.host_id, identity))
        self._inbox: queue.SimpleQueue[messages.Call | messages.Start | messages.End] = queue.SimpleQueue()
        if isinstance(answer, messages.Refused):
            raise HostError(f"the first host at {self._first} refuses this host: {answer.reason}")
        self._take(answer)
        self._peer = Peer(link, config.host_timeout, self._beat, self._take, self._lose)
        self.digests = TokenDigests(self._tell_tokens, self.fail)
        log.info("host %d has joined %s", config.host_id, self._first)

    def wait_start(self) -> None:
        """Waits until all hosts have joined."""
        self._inbox.get()

    def calls(self) -> Iterator[messages.Call]:
        """The first host's calls, until it ends the replica. A call counts as run when the next one is asked for."""
        while isinstance(message := self._inbox.get(), messages.Call):
            yield message
            self._done += 1
            self.busy = False  # not before, as a host that is not busy and has not run a call lags

    def answer(self, found: dict[str, str], why_not: str | None) -> None:
        """Answers the present call."""
        self._peer.send(messages.encode(messages.Answer(self._done, found, why_not)))

    def fail(self, reason: str) -> None:
        """Tells the first host that this one cannot go on. Does not return."""
        self._peer.send(messages.encode(messages.Failed(reason)))
        time.sleep(3 * GRACE_SECONDS)  # the first host's answer ends this process
        end_process(f"host {self._host_id} failed: {reason}")

    def _join(
        self, address: tuple[str, int], secret: bytes, join: messages.Join
    ) -> tuple[channel.Channel, messages.Message]:
        """The connection to the first host, and its answer. A first host that is not there yet, or has too many
        connections, is tried again."""
        deadline = time.monotonic() + JOIN_SECONDS
        tries = TRIES
        while True:
            try:
                connection = socket.create_connection(address, GREETING_SECONDS)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise HostError(f"the first host does not answer at {self._first}: {error}") from error
                time.sleep(RETRY_SECONDS)
                continue
            try:
                link = channel.connect(connection, secret, GREETING_SECONDS)
                link.send(messages.encode(join))
                return link, messages.decode(link.receive(channel.MAX_MESSAGE))
            except (OSError, EOFError) as error:
                connection.close()
                tries -= 1
                if isinstance(error, HostError) or not tries:
                    raise HostError(f"the first host at {self._first} cannot be joined: {error}") from error
                time.sleep(RETRY_SECONDS)

    def _beat(self) -> messages.Beat:
        return messages.Beat(self._done, self.busy or self.compiles())

    def _take(self, message: messages.Message) -> None:
        match message:
            case messages.End(reason) if reason is not None:
                end_process(f"host {self._host_id} ends: {reason}")
            case messages.Call() | messages.Start() | messages.End():
                self._over = isinstance(message, messages.End)
                self._inbox.put(message)

    def _tell_tokens(self, count: int, digest: bytes) -> None:
        self._peer.send(messages.encode(messages.Tokens(count, digest)))

    def _lose(self, reason: str) -> None:
        if not self._over:
            end_process(f"host {self._host_id} ends: the first host ({self._first}) is lost: {reason}")
