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
    """A call, as `jaxserve.execution.commands` encodes it. `runner`: whose; 0: the model's runner, 1: the draft model's
    if there is one, the last number: the weights."""

    runner: int
    command: bytes


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Sent at least every BEAT_SECONDS. `done`: calls that the host has run; `busy`: it loads or compiles."""

    done: int = 0
    busy: bool = True


class Answer(msgspec.Struct, tag=True, frozen=True):
    """To a call of the kind `commands.Answered`: its number, what it has returned, or why it has failed."""

    call: int
    found: dict[str, str]
    why_not: str | None


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


Message = Join | Refused | Start | Call | Beat | Answer | Tokens | Failed | End


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(body: bytes | memoryview) -> Message:
    """Raises msgspec.DecodeError for what is no message."""
    return msgspec.msgpack.decode(body, type=Message)
