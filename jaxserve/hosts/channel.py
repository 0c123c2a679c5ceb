"""Connections between hosts that know the same secret.

Both ends prove that they know it, each with a code over two random numbers, one from each end (HMAC-SHA256, RFC 2104).
The first host proves it first; nothing that a stranger sends is decoded. Each frame then carries a code that only the
two ends can make (HMAC-SHA256 cut to 16 bytes), which also counts the frames, so that nobody on the way can change,
repeat or leave out one. Frames are not encrypted.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct

import numpy as np

from jaxserve.hosts.errors import HostError

_MAGIC = b"jaxserve hosts 2"
_NONCE, _PROOF, _CODE = 32, 32, 16  # bytes
_LENGTH = struct.Struct("<I")
MAX_FRAME = 2**31


class WrongSecretError(HostError):
    """The other end does not know the secret."""


class Channel:
    """An authenticated connection. One thread may send while another receives. Methods raise OSError if the connection
    is lost, and TimeoutError after the socket's time limit."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._keys, self._counts = connection, (send_key, receive_key), [0, 0]
        self.address = str(connection.getpeername()[0])

    def send(self, *parts: bytes | memoryview) -> None:
        """A frame of these parts, which are not copied. Memoryviews must be of bytes."""
        frame = [_LENGTH.pack(sum(map(len, parts))) + self._code(0, *parts), *parts]
        sent = self._socket.sendmsg(frame)
        for part in frame:
            if sent < len(part):
                self._socket.sendall(memoryview(part)[sent:])
            sent = max(sent - len(part), 0)

    def receive(self) -> memoryview:
        """The next frame. Raises EOFError if the other end has closed the connection."""
        (length,) = _LENGTH.unpack(_exactly(self._socket, _LENGTH.size))
        if length > MAX_FRAME:
            raise HostError(f"a frame of {length} bytes")
        given = _exactly(self._socket, _CODE)
        body = np.empty(length, np.uint8).data
        _fill(self._socket, body)
        if not hmac.compare_digest(given, self._code(1, body)):
            raise HostError("a frame whose code is wrong: somebody has changed it on the way")
        return body

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()

    def _code(self, side: int, *parts: bytes | memoryview) -> bytes:
        code = hmac.new(self._keys[side], self._counts[side].to_bytes(8, "little"), "sha256")
        self._counts[side] += 1
        for part in parts:
            code.update(part)
        return code.digest()[:_CODE]


def accept(connection: socket.socket, secret: bytes) -> Channel:
    """The first host's end. Raises WrongSecretError, EOFError or OSError."""
    if _exactly(connection, len(_MAGIC)) != _MAGIC:
        raise HostError("it does not speak this version's protocol")
    theirs, mine = _exactly(connection, _NONCE), os.urandom(_NONCE)
    connection.sendall(mine + _proof(secret, b"first", theirs + mine))
    try:
        given = _exactly(connection, _PROOF)
    except EOFError:
        given = b""  # it has seen that the proof above is wrong
    if not hmac.compare_digest(given, _proof(secret, b"other", theirs + mine)):
        raise WrongSecretError("it has another secret")
    keys = (_proof(secret, way, theirs + mine) for way in (b"to other", b"to first"))
    return Channel(connection, *keys)


def connect(connection: socket.socket, secret: bytes) -> Channel:
    """The other hosts' end. Raises WrongSecretError, EOFError or OSError."""
    mine = os.urandom(_NONCE)
    connection.sendall(_MAGIC + mine)
    theirs, given = _exactly(connection, _NONCE), _exactly(connection, _PROOF)
    if not hmac.compare_digest(given, _proof(secret, b"first", mine + theirs)):
        raise WrongSecretError("it has another secret")
    connection.sendall(_proof(secret, b"other", mine + theirs))
    keys = (_proof(secret, way, mine + theirs) for way in (b"to first", b"to other"))
    return Channel(connection, *keys)


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + nonces, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, data: memoryview) -> None:
    while data:
        if not (count := connection.recv_into(data)):
            raise EOFError("it closed the connection")
        data = data[count:]
