"""The messages between front and engine, and how they are framed.

A frame is a 4-byte little-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from jaxserve.scheduling.page_snapshot import PoolSnapshot
from jaxserve.scheduling.stats import EngineStats
from jaxserve.types import Request, StepOutput

MAX_FRAME = 128 * 2**20  # bytes; a longer frame is refused by both sides
LENGTH_BYTES = 4
QUEUE_FULL = "queue_full"  # Rejected.code of a request that may be tried again
INTERNAL_ERROR = "internal_error"  # Rejected.code of a request that failed for no fault of its own
_LENGTH = struct.Struct("<I")


# front -> engine


class Submit(msgspec.Struct, tag="submit"):
    """Requests that differ in their ids and prompts alone: the first, and (id, prompt, its pages' hashes) of the
    others."""

    first: Request
    others: list[tuple[str, list[int], bytes]] = []

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Submit:
        first, *others = requests
        return cls(first, [(one.request_id, one.prompt_token_ids, one.page_hashes) for one in others])

    def requests(self, prefix: str) -> list[Request]:
        """All of them, with `prefix` before their ids; they share one SamplingParams."""
        first = self.first
        prompts = [(first.request_id, first.prompt_token_ids, first.page_hashes), *self.others]
        return [
            msgspec.structs.replace(first, request_id=prefix + name, prompt_token_ids=prompt, page_hashes=hashes)
            for name, prompt, hashes in prompts
        ]


class Abort(msgspec.Struct, tag="abort"):
    """Stops completions: (request id, index of the completion, or None for all of the request's)."""

    targets: list[tuple[str, int | None]]


class Pause(msgspec.Struct, tag="pause"):
    """Sets a request aside whose client does not read, or lets it go on."""

    request_id: str
    paused: bool


class Profile(msgspec.Struct, tag="profile"):
    """Trace the next `steps` steps."""

    steps: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget the pages of earlier prompts."""


class AskPool(msgspec.Struct, tag="ask_pool"):
    """Send a `Pool`."""


class Drain(msgspec.Struct, tag="drain"):
    """Finish what is there, take nothing new, and exit."""


# engine -> front


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """The engine has loaded: what a front has to know about it."""

    model_folder: str
    tokenizer_folder: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size: int
    max_num_seqs: int
    profile_dir: str | None = None
    scheduling_policy: str = "fcfs"


class Update(msgspec.Struct, tag="update"):
    output: StepOutput
    stats: EngineStats | None = None


class Pool(msgspec.Struct, tag="pool"):
    """Who owns which KV page, as an `AskPool` wanted to know."""

    snapshot: PoolSnapshot


class Accepted(msgspec.Struct, tag="accepted"):
    """The requests of a `Submit`, named by the first, passed the engine's checks and wait for their tokens.

    Those with a grammar have no such message: the first update of each says that its grammar is compiled.
    """

    request_id: str


class Rejected(msgspec.Struct, tag="rejected"):
    """The requests of a `Submit`, named by the first, were not taken; `param` and `code` as in InvalidRequestError."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class Beat(msgspec.Struct, tag="beat"):
    """The engine's process runs; its loop has been in the current turn for so many seconds, 0.0 while it compiles."""

    busy: float


class Failed(msgspec.Struct, tag="failed"):
    """The engine is gone, or never came up."""

    message: str


FrontMessage = Submit | Abort | Pause | Profile | ResetPrefixCache | AskPool | Drain
EngineMessage = Ready | Update | Pool | Accepted | Rejected | Beat | Failed

decode_front_message = msgspec.msgpack.Decoder(FrontMessage).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
_encode = msgspec.msgpack.Encoder().encode


def to_frame(message: FrontMessage | EngineMessage) -> bytes:
    """A message as it goes over the wire. Raises ValueError when it is longer than MAX_FRAME."""
    body = _encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes is longer than the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Body length that a frame's first four bytes announce. Raises ValueError when it is beyond MAX_FRAME."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"a frame announces {length} bytes; the limit is {MAX_FRAME}")
    return length
