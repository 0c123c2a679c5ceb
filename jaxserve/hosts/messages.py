"""What the hosts of a replica tell each other, in frames of msgpack."""

from __future__ import annotations

import msgspec


class Join(msgspec.Struct, tag=True, frozen=True):
    """A host asks to join. `identity`: what must be the same on all hosts, see `identity`."""

    host_id: int
    identity: dict[str, str]


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """All hosts have joined."""


class Call(msgspec.Struct, tag=True, frozen=True):
    """A call of a runner (0: the model's, 1: the draft model's), as `jaxserve.execution.commands` encodes it."""

    runner: int
    command: bytes


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Sent at least every BEAT_SECONDS. `done`: calls that the host has run; `busy`: it loads or compiles."""

    done: int = 0
    busy: bool = True


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """A digest of all tokens that the host's devices sampled in the first `count` calls that sample."""

    count: int
    digest: bytes


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The host cannot go on."""

    reason: str


class End(msgspec.Struct, tag=True, frozen=True):
    """The replica ends. `reason`: what went wrong; None: the first host has finished."""

    reason: str | None = None


Message = Join | Refused | Start | Call | Beat | Tokens | Failed | End


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(body: bytes | memoryview) -> Message:
    """Raises msgspec.DecodeError for what is no message."""
    return msgspec.msgpack.decode(body, type=Message)
