"""`jaxserve replay`: runs recorded requests again in this process, and shows the first bit that differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.records import PRIVATE, VERSION, Output, Record, pack_bits, processor_name, unpack_bits
from jaxserve.types import Request, TokenLogprob


@dataclass(frozen=True)
class Line:
    """A record, and where it stands."""

    file: Path
    number: int
    record: Record

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}, request {self.record.request.request_id}"


@dataclass
class Answer:
    """What an engine generates for a request: the completions, and the prompt's log-probabilities as in `Record`."""

    outputs: dict[int, Output] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)
    prompt_logprobs: str | None = None
    error: str | None = None


def replay(files: Sequence[Path], *, model: str | None, settings: dict[str, Any], limit: int | None) -> int:
    """Runs the records of all files, on one engine after the other for each kind of settings in them. Returns the exit
    code: 0 only if there are records, and everything is equal.

    model: used in place of the recorded one. settings: replace recorded settings. Raises ValueError for a line that is
    no record.
    """
    lines = [line for file in files for line in read(file)][:limit]
    if not lines:
        raise ValueError(f"no records in {', '.join(map(str, files))}")
    others = {line.record.processor for line in lines} - {processor_name()}
    for other in sorted(others):
        print(f"note: some records were made on {other or 'an unknown processor'}, this is {processor_name()}")
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(json.dumps(line.record.settings, sort_keys=True), []).append(line)
    differing = 0
    first = None
    for some in kinds.values():
        config = config_of(some[0].record, model, settings)
        if not config.deterministic:
            print("note: these records were made without --deterministic, which does not promise equal bits")
        answers = run(config, [line.record.request for line in some])
        for line, answer in zip(some, answers, strict=True):
            if (found := difference(line.record, answer)) is not None:
                differing += 1
                first = first or f"{line.place}: {found}"
    tokens = sum(len(output.tokens) for line in lines for output in line.record.outputs)
    print(f"{len(lines)} requests with {tokens} tokens: {differing} differ")
    if first is not None:
        print(f"first difference: {first}")
    return 1 if differing else 0


def read(file: Path) -> Iterator[Line]:
    """The records of a file. A last line without an end, of a server that was killed, is passed over with a note."""
    decoder = msgspec.json.Decoder(Record)
    with file.open("rb") as source:
        for number, line in enumerate(source, 1):
            if not line.endswith(b"\n"):
                print(f"note: {file}:{number} is incomplete and left out", file=sys.stderr)
                return
            try:
                record = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{file}:{number} is not a record of `jaxserve serve --record`: {error}") from None
            if record.version != VERSION:
                raise ValueError(f"{file}:{number} has version {record.version}; this jaxserve reads {VERSION}")
            yield Line(file, number, record)


def config_of(record: Record, model: str | None, settings: dict[str, Any]) -> EngineConfig:
    """The settings of the engine that made a record, with these changes. Raises ValueError for settings that this
    version does not know, or that would make the process one of several hosts."""
    made = record.settings | settings | ({"model": model} if model is not None else {})
    if unknown := sorted(set(made) - (set(EngineConfig.__dataclass_fields__) - PRIVATE)):
        raise ValueError(f"a record has settings that are not understood: {', '.join(unknown)}")
    values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in made.items()}
    return EngineConfig(**values)


def run(config: EngineConfig, requests: Sequence[Request]) -> list[Answer]:
    """Answers requests on an engine of this process, as many at a time as it takes."""
    from jaxserve.engine.engine import Engine
    from jaxserve.types import InvalidRequestError

    engine = Engine.load(config)
    answers = [Answer() for _ in requests]
    waiting = list(enumerate(requests))[::-1]
    while waiting or engine.has_work:
        while waiting and engine.stats().num_waiting < config.max_num_seqs:
            number, request = waiting.pop()
            try:  # ids from several servers, or several runs, may be equal
                engine.add_request(msgspec.structs.replace(request, request_id=str(number)))
            except InvalidRequestError as error:
                answers[number].error = str(error)
        if not engine.has_work:
            continue
        for update in engine.step():
            answer = answers[int(update.request_id)]
            output = answer.outputs.setdefault(update.index, Output([]))
            output.tokens += update.token_ids
            output.ended = update.finish_reason or output.ended
            answer.logprobs.setdefault(update.index, []).extend(update.logprobs or ())
            answer.error = update.error or answer.error
            if update.prompt_logprobs is not None:
                answer.prompt_logprobs = pack_bits(update.prompt_logprobs)
    return answers


def difference(record: Record, answer: Answer) -> str | None:
    """The first difference between a record and what was generated now; None: all bits are equal. Completions that the
    engine did not end itself, because of a stop string, are compared as far as they were recorded."""
    if answer.error is not None:
        return f"it fails now: {answer.error}"
    if record.prompt_logprobs is not None:
        now = unpack_bits(answer.prompt_logprobs or "")
        if (found := _unequal(unpack_bits(record.prompt_logprobs), now)) is not None:
            return f"prompt token {found[0] + 1}: log-probability {found[1]}"
    for index, output in enumerate(record.outputs):
        made = answer.outputs.get(index, Output([]))
        was = None if output.logprobs is None else unpack_bits(output.logprobs)
        now = unpack_bits(pack_bits(answer.logprobs.get(index, [])))
        at = next(
            (i for i, pair in enumerate(zip(output.tokens, made.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        bits = None if was is None else _unequal(was, now[: len(was)] if output.ended is None else now)
        place = f"completion {index}, token"
        if bits is not None and (at is None or bits[0] <= at):
            tokens = _pair(output.tokens, made.tokens, bits[0])
            return f"{place} {bits[0]}: log-probability {bits[1]}; tokens {tokens}"
        if at is not None:
            return f"{place} {at}: tokens {_pair(output.tokens, made.tokens, at)}"
        if len(made.tokens) < len(output.tokens) or (output.ended and made.ended != output.ended):
            ends = f"{len(output.tokens)} tokens, {output.ended}", f"{len(made.tokens)} tokens, {made.ended}"
            return f"completion {index} ended otherwise: was {ends[0]}; now {ends[1]}"
    return None


def _unequal(was: np.ndarray, now: np.ndarray) -> tuple[int, str] | None:
    """The first place at which two arrays of float32 have other bits, and both values."""
    size = min(len(was), len(now))
    places = np.flatnonzero(was[:size].view("<u4") != now[:size].view("<u4"))
    if not len(places) and len(was) == len(now):
        return None
    at = int(places[0]) if len(places) else size
    return at, f"was {_shown(was, at)}; now {_shown(now, at)}"


def _shown(values: np.ndarray, at: int) -> str:
    return f"{values[at]:.9g} ({values[at].view('<u4'):#010x})" if at < len(values) else "missing"


def _pair(was: Iterable[int], now: Iterable[int], at: int) -> str:
    before = list(was)
    after = list(now)
    return f"was {before[at] if at < len(before) else 'none'}; now {after[at] if at < len(after) else 'none'}"
