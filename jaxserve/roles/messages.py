"""What servers with the roles decode and prefill tell each other, in frames of msgpack (see `jaxserve.hosts.channel`).

The decode server connects, and says `Hello`. Then it sends `Ask` or `Ping`, one at a time. An `Ask` is answered by any
number of `Pages` and a `Done`. A decode server that gives up closes the connection.

Whatever a message says is checked when it is decoded, as far as that needs no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from jaxserve.hosts.channel import MAX_MESSAGE
from jaxserve.hosts.messages import Number, decoder

KEY_BYTES = 33


class Hello(msgspec.Struct, tag=True, frozen=True):
    """`identity`: what the contents of pages depend on beside tokens, see `jaxserve.engine.page_fingerprint`."""

    identity: dict[str, str]


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The other server's pages are like those here."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Ask(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for pages of a prompt.

    Attributes:
      tokens: int32, the prompt's full blocks and one token more.
      wanted: int32, the pages in their order, each as block * groups of layers + group.
      page_hashes: of the full blocks, as in `jaxserve.types.Request`, where the other fields are explained, too.
    """

    tokens: bytes
    wanted: bytes
    page_hashes: bytes
    cache_salt: str | None = None
    tenant: str = ""
    priority: int = 0
    adapter: str = ""
    adapter_digest: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError, which a decoder turns into its own error."""
        for name in ("tokens", "wanted"):
            if (count := len(getattr(self, name))) % 4:
                raise ValueError(f"{name} has {count} bytes, which is no multiple of 4")


def most_bytes(tokens: int, page_size: int, groups: int) -> int:
    """Bytes of an `Ask` for a prompt of so many tokens, with room for the other fields."""
    return MAX_MESSAGE + 4 * tokens + tokens // page_size * (32 + 4 * groups)


class Pages(msgspec.Struct, tag=True, frozen=True):
    """Pages whose contents are the next frame: the arrays of the first page, one after the other, then those of the
    second, and so on. `places`: their indices in `Ask.wanted`. `keys`: the key of each (see `page_tiers`), one after
    the other."""

    places: list[Number]
    keys: bytes

    def __post_init__(self) -> None:
        """Raises ValueError, which a decoder turns into its own error."""
        if len(self.keys) != KEY_BYTES * len(self.places):
            raise ValueError(f"keys has {len(self.keys)} bytes for {len(self.places)} pages")


class Done(msgspec.Struct, tag=True, frozen=True):
    """No more pages follow. `reason`: why some are missing; None: all were sent."""

    reason: str | None = None


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Asks whether the server is alive."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """`load`: requests that run or wait there."""

    load: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


Message = Hello | Welcome | Refused | Ask | Pages | Done | Ping | Pong

encode = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes | memoryview], Message] = decoder(Message)  # raises HostError for what is no message
