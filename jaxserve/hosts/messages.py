"""What the hosts of a replica tell each other, in frames of msgpack. Whatever a message says is checked when it is
decoded, as far as it can be without knowing what was said before."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Join(msgspec.Struct, tag=True, frozen=True):
    """A host asks to join. `identity`: what must be the same on all hosts, see `identity`."""

    host_id: int
    identity: dict[str, str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """All hosts have joined."""


class Call(msgspec.Struct, tag=True, frozen=True):
    """A call, as `jaxserve.execution.runner_commands` encodes it. `runner`: whose; 0: the model's runner, 1: the draft
    model's
    if there is one, the last number: the weights."""

    runner: Number
    command: bytes


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Sent at least every BEAT_SECONDS. `done`: calls that the host has run; `busy`: it loads or compiles."""

    done: Number = 0
    busy: bool = True


class Answer(msgspec.Struct, tag=True, frozen=True):
    """To a call of the kind `commands.Answered`: its number, what it has returned, or why it has failed."""

    call: Number
    found: dict[str, str]
    why_not: str | None


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """A digest of all tokens that the host's devices sampled in the first `count` calls that sample."""

    count: Number
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The host cannot go on."""

    reason: str


class End(msgspec.Struct, tag=True, frozen=True):
    """The replica ends. `reason`: what went wrong; None: the first host has finished."""

    reason: str | None = None


Message = Join | Refused | Start | Call | Beat | Answer | Tokens | Failed | End


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decoder(kinds: Any) -> Callable[[bytes | memoryview], Any]:
    """A function that decodes messages of these kinds. It raises HostError for what is none, whatever that is."""
    decode = msgspec.msgpack.Decoder(kinds).decode

    def decode_or_refuse(body: bytes | memoryview) -> Any:
        try:
            return decode(body)
        except Exception as error:  # also RecursionError and MemoryError
            raise HostError(f"it sends what is no message: {error}") from None

    return decode_or_refuse


decode: Callable[[bytes | memoryview], Message] = decoder(Message)


class HostError(OSError):
    """The hosts of a replica could not come together, or cannot go on; the message names the host."""


# Digests of the tokens that devices have sampled. Each host reads its own devices' copies of them.


EVERY = 64  # calls that sample, between two digests


class TokenDigests:
    """Digests what `add` gets, on a thread of its own, as reading an array waits for the devices.

    found: called on this thread every EVERY calls, with the number of calls so far and the digest of all their tokens.
    failed: called once if tokens cannot be read, because their step failed on the devices.
    """

    def __init__(self, found: Callable[[int, bytes], None], failed: Callable[[str], None]):
        self._found = found
        self._failed = failed
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="digests", daemon=True).start()

    def add(self, tokens: Any) -> None:
        """Tokens as an array that the devices may still be computing."""
        self._queue.put(tokens)

    def _run(self) -> None:
        digest = hashlib.blake2b(digest_size=16)
        count = 0
        while True:
            try:
                digest.update(np.asarray(self._queue.get()).tobytes())
            except Exception as error:  # whatever the devices' runtime raises
                self._failed(f"a step failed on the devices: {error}")
                return
            count += 1
            if count % EVERY == 0:
                self._found(count, digest.digest())
