"""Connections between hosts that know the same secret.

Both ends prove that they know it, each with a code over two random numbers, one from each end (HMAC-SHA256, RFC 2104).
The first host proves it first; nothing that a stranger sends is decoded. Each frame then carries a code that only the
two ends can make (HMAC-SHA256 cut to 16 bytes), which also counts the frames, so that nobody on the way can change,
repeat or leave out one. Frames are not encrypted.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time

import numpy as np

from jaxserve.hosts.messages import HostError

_MAGIC = b"jaxserve hosts 2"
_NONCE = 32  # bytes
_PROOF = 32  # bytes
_CODE = 16  # bytes
_LENGTH = struct.Struct("<I")
MAX_FRAME = 2**31
MAX_MESSAGE = 2**20  # of frames that hold no arrays: greetings, answers, pings
_MOST_PARTS = 1024  # that the system takes in one call


class WrongSecretError(HostError):
    """The other end does not know the secret."""


class Channel:
    """An authenticated connection. One thread may send while another receives. Methods raise OSError if the connection
    is lost, and TimeoutError after its time limit."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._keys = (send_key, receive_key)
        self._counts = [0, 0]
        self._deadline: float | None = None
        self.address = str(connection.getpeername()[0])

    def send(self, *parts: bytes | memoryview) -> None:
        """A frame of these parts, which are not copied. Memoryviews must be of bytes."""
        frame = [_LENGTH.pack(sum(map(len, parts))) + self._code(0, *parts), *parts]
        _limit(self._socket, self._deadline)
        sent = self._socket.sendmsg(frame[:_MOST_PARTS])
        for part in frame:
            if sent < len(part):
                _limit(self._socket, self._deadline)
                self._socket.sendall(memoryview(part)[sent:])
            sent = max(sent - len(part), 0)

    def receive(self, most: int = MAX_FRAME) -> memoryview:
        """The next frame. Raises EOFError if the other end has closed the connection, and HostError for a frame of more
        than `most` bytes."""
        (length,) = _LENGTH.unpack(_exactly(self._socket, _LENGTH.size, self._deadline))
        if length > most:
            raise HostError(f"it sends a frame of {length} bytes, and at most {most} are taken")
        given = _exactly(self._socket, _CODE, self._deadline)
        body = np.empty(length, np.uint8).data
        _fill(self._socket, body, self._deadline)
        if not hmac.compare_digest(given, self._code(1, body)):
            raise HostError("a frame whose code is wrong: somebody has changed it on the way")
        return body

    def set_timeout(self, seconds: float) -> None:
        """From now on a read may wait for so long, and a write take so long. There is no deadline any more."""
        self._deadline = None
        self._socket.settimeout(seconds)

    def set_deadline(self, deadline: float) -> None:
        """From now on all reads and writes together end at this time of `time.monotonic`, until `set_timeout`. Only for
        connections that one thread uses."""
        self._deadline = deadline

    def has_input(self) -> bool:
        """Whether a read would not wait: the other end has sent something, or closed the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _code(self, side: int, *parts: bytes | memoryview) -> bytes:
        code = hmac.new(self._keys[side], self._counts[side].to_bytes(8, "little"), "sha256")
        self._counts[side] += 1
        for part in parts:
            code.update(part)
        return code.digest()[:_CODE]


class Greeting:
    """The first host's end of a connection that has not proven yet that it knows the secret. It never waits."""

    def __init__(self, connection: socket.socket, secret: bytes):
        connection.setblocking(False)
        self.connection = connection
        self._secret = secret
        self._given = bytearray()
        self._nonces = b""

    def advance(self) -> Channel | None:
        """Takes what has come. Returns the channel once the other end has proven it, None before. Raises
        WrongSecretError, HostError, EOFError or OSError."""
        wanted = _PROOF if self._nonces else len(_MAGIC) + _NONCE
        try:
            some = self.connection.recv(wanted - len(self._given))
        except BlockingIOError:
            return None
        if not some and self._nonces:  # it has seen that the proof below is wrong
            raise WrongSecretError("it has another secret")
        if not some:
            raise EOFError("it closed the connection")
        self._given += some
        if len(self._given) < wanted:
            return None
        given = bytes(self._given)
        if not self._nonces:
            if given[: len(_MAGIC)] != _MAGIC:
                raise HostError("it does not speak this version's protocol")
            mine = os.urandom(_NONCE)
            self._nonces = given[len(_MAGIC) :] + mine
            self._given.clear()
            # A socket that has sent nothing yet has room for this.
            self.connection.sendall(mine + _proof(self._secret, b"first", self._nonces))
            return None
        if not hmac.compare_digest(given, _proof(self._secret, b"other", self._nonces)):
            raise WrongSecretError("it has another secret")
        keys = (_proof(self._secret, way, self._nonces) for way in (b"to other", b"to first"))
        return Channel(self.connection, *keys)


def connect(connection: socket.socket, secret: bytes, seconds: float) -> Channel:
    """The other hosts' end. All of it, and what the channel does until its `set_timeout`, may take so many seconds.
    Raises WrongSecretError, EOFError or OSError."""
    deadline = time.monotonic() + seconds
    mine = os.urandom(_NONCE)
    _limit(connection, deadline)
    connection.sendall(_MAGIC + mine)
    theirs = _exactly(connection, _NONCE, deadline)
    given = _exactly(connection, _PROOF, deadline)
    if not hmac.compare_digest(given, _proof(secret, b"first", mine + theirs)):
        raise WrongSecretError("it has another secret")
    connection.sendall(_proof(secret, b"other", mine + theirs))
    keys = (_proof(secret, way, mine + theirs) for way in (b"to first", b"to other"))
    channel = Channel(connection, *keys)
    channel.set_deadline(deadline)
    return channel


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + nonces, "sha256")


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data), deadline)
    return bytes(data)


def _fill(connection: socket.socket, data: memoryview, deadline: float | None) -> None:
    while data:
        _limit(connection, deadline)
        if not (count := connection.recv_into(data)):
            raise EOFError("it closed the connection")
        data = data[count:]


def _limit(connection: socket.socket, deadline: float | None) -> None:
    """Leaves the next call the time until the deadline, if there is one. Raises TimeoutError if none is left."""
    if deadline is None:
        return
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("it takes too long")
    connection.settimeout(left)
