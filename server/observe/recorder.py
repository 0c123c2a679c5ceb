"""Records answered requests in a file, for `jaxserve replay` (`serve --record`). Off unless the operator names a file:
it then holds the tokens of all prompts and answers."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve import records
from jaxserve.config import EngineConfig
from jaxserve.records import Output, Record
from jaxserve.server.observe.output import Output as Lines
from jaxserve.types import Request, SequenceUpdate, TokenLogprob

log = logging.getLogger(__name__)


def open_records(path: str) -> int:
    """The descriptor of a file of records, to be appended to. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class Recorder:
    """Appends records to a file that only this user can read. One thread writes, so that no request waits for it.

    fingerprint: the server's, once it is known.
    """

    def __init__(self, path: str, max_bytes: int, config: EngineConfig):
        """Raises OSError if the file cannot be opened. `max_bytes`: the file's size from which on nothing is added."""
        self.fingerprint = ""
        self._settings, self._processor = records.settings_of(config), records.processor_name()
        self._draws_seeds = not config.deterministic
        self._file = open_records(path)
        self._max_bytes = max_bytes
        self._full = False
        self._lines = Lines(self._file)

    def seed(self) -> int | None:
        """A seed for a request that names none, without which a sampled answer could not be repeated. None from a
        deterministic engine, which makes the seed of the request."""
        return secrets.randbits(63) if self._draws_seeds else None

    def begin(self, requests: Sequence[Request]) -> RecordedRequests:
        return RecordedRequests(self, requests)

    def add(self, request: Request, outputs: list[Output], prompt_logprobs: str | None) -> None:
        """Queues a record. The request's tenant and cache salt are not recorded: the answer does not depend on them."""
        if self._full:
            return
        if os.fstat(self._file).st_size >= self._max_bytes:
            self._full = True
            log.warning("the file of --record has reached %d bytes; nothing is recorded any more", self._max_bytes)
            return
        kept = msgspec.structs.replace(request, tenant="", cache_salt=None, page_hashes=b"", streams=False)
        fields: dict[str, Any] = {"fingerprint": self.fingerprint, "processor": self._processor}
        record = Record(
            **fields, settings=self._settings, request=kept, outputs=outputs, prompt_logprobs=prompt_logprobs
        )
        self._lines.write(msgspec.json.encode(record).decode())

    def close(self) -> None:
        """Waits for the last lines, a second at most, and closes the file."""
        self._full = True
        self._lines.flush()
        self._lines.close()


class RecordedRequests:
    """What has been generated so far for the prompts of one HTTP request."""

    def __init__(self, recorder: Recorder, requests: Sequence[Request]):
        self._recorder = recorder
        self._requests = {request.request_id: request for request in requests}
        self._outputs: dict[str, dict[int, Output]] = {request.request_id: {} for request in requests}
        self._logprobs: dict[tuple[str, int], list[TokenLogprob | None]] = {}
        self._prompts: dict[str, str] = {}

    def take(self, update: SequenceUpdate) -> None:
        """Adds what the engine generated. What it generated after the answer's end (a stop string) counts, too."""
        output = self._outputs[update.request_id].setdefault(update.index, Output([]))
        output.tokens += update.token_ids
        if update.finish_reason != "abort":
            output.ended = update.finish_reason or output.ended
        if update.logprobs:
            self._logprobs.setdefault((update.request_id, update.index), []).extend(update.logprobs)
        if update.prompt_logprobs is not None:
            self._prompts[update.request_id] = records.pack_bits(update.prompt_logprobs)

    def end(self) -> None:
        """Records every prompt that has tokens. Answers that failed in the engine are left out."""
        for name, request in self._requests.items():
            found = self._outputs[name]
            if not any(one.tokens for one in found.values()) or any(one.ended == "error" for one in found.values()):
                continue
            for index, output in found.items():
                if (logprobs := self._logprobs.get((name, index))) is not None:
                    output.logprobs = records.pack_bits(logprobs)
            self._recorder.add(
                request, [found.get(i, Output([])) for i in range(max(found) + 1)], self._prompts.get(name)
            )
