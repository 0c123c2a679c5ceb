"""The messages between an API server and the engine's process, and how they are framed.

A frame is a 4-byte little-endian length, then a message of that many bytes in msgpack.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import cast

import msgspec

from jaxserve.adapters.registry import ServedAdapter
from jaxserve.limits import MAX_LOGPROBS
from jaxserve.scheduling.engine_stats import EngineStats
from jaxserve.scheduling.page_snapshot import PoolSnapshot
from jaxserve.types import ImageTokens, Request, SamplingParams, StepOutput

MAX_FRAME = 128 * 2**20  # bytes of a message; both sides refuse longer ones
LENGTH_BYTES = 4
QUEUE_FULL = "queue_full"  # Rejected.code: the request is valid and may be tried again
INTERNAL_ERROR = "internal_error"  # Rejected.code: the engine failed; the request is not at fault
INVALID = "invalid"  # ChangeDone.code: what was asked for is not possible
_LENGTH = struct.Struct("<I")


# API server -> engine


class CheckedParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters as the engine receives them: the API server has built them, and thereby checked them."""

    def __post_init__(self) -> None:
        pass


class SubmittedRequest(Request, kw_only=True, omit_defaults=True):
    """A request as the engine receives it."""

    params: CheckedParams


class Submit(msgspec.Struct, tag="submit"):
    """Requests that differ only in id and prompt: the first one without its prompt, and (id, prompt, hashes of the
    prompt's pages) of each. A prompt is int32 in the machine's order: as a list, one of 131,072 tokens would take each
    side milliseconds to read and to check, and the garbage collector to visit."""

    first: SubmittedRequest
    prompts: list[tuple[str, bytes, bytes]]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Submit:
        first = msgspec.structs.replace(requests[0], prompt_token_ids=[], page_hashes=b"")
        prompts = [(one.request_id, array("i", one.prompt_token_ids).tobytes(), one.page_hashes) for one in requests]
        return cls(cast(SubmittedRequest, first), prompts)

    def requests(self, prefix: str) -> list[Request]:
        """All requests, with `prefix` before their ids. They share one SamplingParams object."""
        return [
            msgspec.structs.replace(
                self.first, request_id=prefix + name, prompt_token_ids=array("i", prompt), page_hashes=hashes
            )
            for name, prompt, hashes in self.prompts
        ]


class Abort(msgspec.Struct, tag="abort"):
    """Stops completions, each given as (request id, index). Index None stands for all completions of the request."""

    targets: list[tuple[str, int | None]]


class Pause(msgspec.Struct, tag="pause"):
    """Pauses a request whose client does not read its answer, or resumes it."""

    request_id: str
    paused: bool


class Profile(msgspec.Struct, tag="profile"):
    """Asks the engine to trace its next `steps` steps."""

    steps: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Asks the engine to forget the cached pages of earlier prompts."""


class AskPool(msgspec.Struct, tag="ask_pool"):
    """Asks for a `Pool` message."""


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Asks the engine to read a LoRA adapter and to serve it; see `ServedAdapter`. `ticket` is the API server's number
    for the answer. `replaces`: an adapter that is served under this name is replaced, which is an error otherwise."""

    ticket: int
    name: str
    path: str
    parent: str | None = None
    replaces: bool = False


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Asks the engine to serve an adapter no more. Requests that ask for it already keep it."""

    ticket: int
    name: str


class Sleep(msgspec.Struct, tag="sleep"):
    """Asks the engine to free its devices' memory once its requests have ended; see `Weights.sleep`. New requests are
    refused from now on. `ticket` is the API server's number for the answer. `aborts`: running requests end with an
    error. Nothing happens if they have not ended after `timeout` seconds."""

    ticket: int
    level: int = 1
    aborts: bool = False
    timeout: float = 300.0


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Asks the engine to end its sleep."""

    ticket: int


class UpdateWeights(msgspec.Struct, tag="update_weights"):
    """Asks the engine to replace its weights once its requests have ended; see `Weights.update`. New requests wait, and
    are computed with the new weights. `path`: a folder or file. `version`: its name in answers; None: the number of the
    update. For the other fields see `Sleep`."""

    ticket: int
    path: str
    version: str | None = None
    aborts: bool = False
    timeout: float = 300.0


class Drain(msgspec.Struct, tag="drain"):
    """Asks the engine to refuse new requests, finish the others, and exit."""


# engine -> API server


class ServedWeights(msgspec.Struct, frozen=True):
    """The weights that an engine serves.

    Attributes:
      version: their name in answers; "0" before the first update.
      updates: how often the weights were replaced.
      path: the folder or file from which they were read; "": that of the start.
      digest: of samples of these files; "" for those of the start.
    """

    version: str = "0"
    updates: int = 0
    path: str = ""
    digest: str = ""


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """The engine has loaded. Holds the facts about it that an API server needs."""

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
    max_logprobs: int = MAX_LOGPROBS
    task: str = "generate"  # or "embed" or "score"
    result_size: int = 0  # numbers of an embedding or score
    score_prompt: str = "plain"  # see `jaxserve.text.score_prompt`
    sees: ImageTokens | None = None  # None: the model reads text only
    max_loras: int = 0  # adapters that fit on the devices at a time; 0: none are served
    # Sent again, with all other fields, when one of the following changes.
    adapters: list[ServedAdapter] = []
    sleep_level: int = 0  # 0: the engine is awake
    weights: ServedWeights = ServedWeights()


class Update(msgspec.Struct, tag="update"):
    """The part of a step's output that concerns one API server, or new statistics with an empty output."""

    output: StepOutput
    stats: EngineStats | None = None


class Pool(msgspec.Struct, tag="pool"):
    """Who owns which KV page; the answer to `AskPool`."""

    snapshot: PoolSnapshot


class Accepted(msgspec.Struct, tag="accepted"):
    """The requests of a `Submit` have passed the engine's checks and are queued. `request_id` is that of the first.

    Not sent for requests with a grammar. The first update of each one tells that its grammar was compiled.
    """

    request_id: str


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine refused the requests of a `Submit`. `request_id` is that of the first; `param` and `code` are those of
    InvalidRequestError."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class ChangeDone(msgspec.Struct, tag="change_done"):
    """The answer to messages with a `ticket`. `error`: why nothing has changed; `code` is then INVALID, QUEUE_FULL or
    INTERNAL_ERROR."""

    ticket: int
    error: str | None = None
    code: str = INVALID


class Beat(msgspec.Struct, tag="beat"):
    """The engine's process is alive. `busy`: seconds since its loop's current turn began; 0.0 while it compiles."""

    busy: float


class Failed(msgspec.Struct, tag="failed"):
    """The engine has died, or it could not be loaded."""

    message: str


ApiServerMessage = (
    Submit | Abort | Pause | Profile | ResetPrefixCache | AskPool | LoadAdapter | UnloadAdapter | Sleep | WakeUp
    | UpdateWeights | Drain
)  # fmt: skip
EngineMessage = Ready | Update | Pool | Accepted | Rejected | ChangeDone | Beat | Failed

decode_api_server_message = msgspec.msgpack.Decoder(ApiServerMessage).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
_encode = msgspec.msgpack.Encoder().encode


def to_frame(message: ApiServerMessage | EngineMessage) -> bytes:
    """A message as a frame. Raises ValueError if the message is longer than MAX_FRAME."""
    body = _encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes is longer than the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """The length of a message from its frame's first LENGTH_BYTES. Raises ValueError if it exceeds MAX_FRAME."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"a frame announces {length} bytes; the limit is {MAX_FRAME}")
    return length
