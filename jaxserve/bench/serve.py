"""Puts load on an OpenAI-compatible server: sends requests at given times, and records each."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import msgspec
from tqdm import tqdm

from jaxserve.bench.client import Client, HTTPError, Response
from jaxserve.bench.prompts import WORDS, Prompt, Vocabulary
from jaxserve.bench.stats import Checks, RequestRecord

METRICS_SECONDS = 1.0  # after which metrics count all answers


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and the requests' parameters except the prompt.

    Attributes:
      model: the model's name; None is the first that the server lists.
      timeout: longest time of a request, in seconds.
    """

    url: str
    model: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    stream: bool = True
    ignore_eos: bool = False
    temperature: float = 0.0
    timeout: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: Prompt) -> bytes:
        """A request's JSON; `model` must not be None."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": prompt.output_len, "temperature": self.temperature}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            fields["prompt"] = prompt.content
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields)


@dataclass(frozen=True)
class Load:
    """When requests start: in a Poisson process of `request_rate` per second, or so that `concurrency` are open."""

    request_rate: float = math.inf
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0 or (self.concurrency is not None and self.concurrency < 1):
            raise ValueError(
                f"the request rate must be above 0 and the concurrency at least 1, got {self.request_rate} a second "
                f"and {self.concurrency}"
            )

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} a second on average"


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Start times [count] in seconds, the first at 0, of a Poisson process of `rate` per second (inf: all at 0)."""
    if math.isinf(rate):
        return [0.0] * count
    random = Random(seed)
    return [0.0, *itertools.accumulate(random.expovariate(rate) for _ in range(count - 1))]


# The parts of answers that are read: whole answers or chunks, of either endpoint.


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def present(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.present)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_answer_decoder = msgspec.json.Decoder(_Answer)


class _Reader:
    """Reads one answer into a record; `clock` is the run's start on the clock of the events."""

    def __init__(self, record: RequestRecord, clock: float):
        self._record = record
        self._clock = clock
        self._ended = False
        self._usage: _Usage | None = None

    def event(self, now: float, data: bytes) -> None:
        """Reads a chunk. Raises ValueError if it does not conform to the API."""
        if data == b"[DONE]":
            self._ended = True
            return
        chunk = self._read(data)
        if chunk.choices:
            self._record.last = now - self._clock
            if any(choice.has_tokens for choice in chunk.choices):
                self._record.arrivals.append(now - self._clock)

    def finish(self, response: Response, streamed: bool) -> None:
        """Completes the record at the end of the answer: token counts, and the error if there was one."""
        record = self._record
        if response.status != 200:
            record.error = f"HTTP {response.status}: {error_text(response.body)}"
            return
        if response.body or not streamed:
            self._read(response.body)
        if not self._ended and record.error is None:
            record.error = "the answer ended without a finish reason"
        if streamed and not record.arrivals and record.last:
            record.arrivals.append(record.last)  # the tokens had no text
        record.output_tokens = len(record.arrivals)
        if self._usage is not None:
            record.input_tokens = self._usage.prompt_tokens
            if self._usage.completion_tokens is not None:
                record.output_tokens = self._usage.completion_tokens

    def _read(self, data: bytes) -> _Answer:
        answer = _answer_decoder.decode(data)
        self._usage = answer.usage or self._usage
        self._ended |= any(choice.finish_reason for choice in answer.choices)
        if answer.error is not None:
            self._record.error = error_text(data)
        return answer


def error_text(body: bytes) -> str:
    """The message in an error's body, in OpenAI's format or another."""
    try:
        value = msgspec.json.decode(body)
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(key):
                value = value[key]
    except msgspec.DecodeError:
        value = body.decode(errors="replace")
    return str(value)[:300] or "no message"


class Sender:
    """Sends requests to a target and records them."""

    def __init__(self, target: Target, client: Client):
        self._target = target
        self._client = client

    async def send(self, body: bytes, clock: float, input_tokens: int = 0) -> RequestRecord:
        """Sends one request; errors are stored in the record. `clock` is the run's start.

        `input_tokens` is used if the server does not report the prompt's tokens.
        """
        record = RequestRecord(time.perf_counter() - clock, input_tokens=input_tokens)
        reader = _Reader(record, clock)
        try:
            async with asyncio.timeout(self._target.timeout):
                response = await self._client.request("POST", self._target.path, body, reader.event)
            record.end = time.perf_counter() - clock
            reader.finish(response, self._target.stream)
        except TimeoutError:
            record.error = f"no whole answer within {self._target.timeout:g} s"
        except HTTPError as error:
            record.error = str(error)
        except ValueError as error:
            record.error = f"an answer that is not understood: {error}"
        record.end = record.end or time.perf_counter() - clock
        return record


async def run_load(
    send: Callable[[int], Awaitable[RequestRecord]], starts: Sequence[float], concurrency: int | None = None
) -> list[RequestRecord]:
    """Calls `send(0)`, `send(1)`, …, each at its start time in seconds from now, and returns their records.

    With `concurrency` start times are ignored: a request starts when an earlier one has ended.
    """
    records: list[RequestRecord | None] = [None] * len(starts)
    with tqdm(total=len(starts), desc="requests", disable=None, leave=False) as bar:

        async def one(i: int) -> None:
            records[i] = await send(i)
            bar.update()

        async def worker(numbers: itertools.count) -> None:
            while (i := next(numbers)) < len(starts):
                await one(i)

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if concurrency is not None:
                numbers = itertools.count()
                for _ in range(min(concurrency, len(starts))):
                    group.create_task(worker(numbers))
            else:
                for i, start in enumerate(starts):
                    if (wait := begin + start - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    group.create_task(one(i))
    return [record for record in records if record is not None]


# Properties of a server that are needed beforehand.


async def first_model(client: Client) -> str:
    """The first model that the server lists. Raises HTTPError if it lists none."""
    response = await client.request("GET", "/v1/models")
    if response.status != 200:
        raise HTTPError(f"GET /v1/models: HTTP {response.status}: {error_text(response.body)}")
    try:
        return str(msgspec.json.decode(response.body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise HTTPError("GET /v1/models lists no model; name it with --model") from None


async def read_checks(client: Client) -> Checks:
    """What the server's metrics say of speculation once they are up to date; nothing if it has no metrics."""
    await asyncio.sleep(METRICS_SECONDS)
    response = await client.request("GET", "/metrics")
    return Checks.of_metrics(response.body.decode(errors="replace") if response.status == 200 else "")


async def find_vocabulary(client: Client, model: str, vocab_size: int | None = None) -> Vocabulary:
    """Ids below `vocab_size` if given, else ids of common words if the server has /tokenize, else words."""
    if vocab_size is not None:
        return Vocabulary(range(vocab_size))
    body = {"model": model, "prompt": " " + " ".join(WORDS), "add_special_tokens": False}
    response = await client.request("POST", "/tokenize", msgspec.json.encode(body))
    try:
        ids = msgspec.json.decode(response.body, type=dict[str, Any])["tokens"]
        distinct = sorted({int(token) for token in ids})
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return Vocabulary()
    return Vocabulary(distinct, len(ids) / len(WORDS)) if distinct else Vocabulary()


async def takes(sender: Sender, target: Target, content: list[int] | str) -> str | None:
    """None if the server accepts such a prompt, else the error."""
    return (await sender.send(target.body(Prompt(content, 1)), 0.0)).error


async def usable_vocabulary(sender: Sender, target: Target, vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary, without ids if the server accepts only text. Raises HTTPError if it accepts neither."""
    ids = [] if vocabulary.ids is None else [int(token) for token in vocabulary.ids[:4]]
    if ids and target.endpoint == "completions" and await takes(sender, target, ids) is None:
        return vocabulary
    if (why := await takes(sender, target, " ".join(WORDS[:4]))) is not None:
        raise HTTPError(f"the server does not answer a first request: {why}")
    return Vocabulary(None, vocabulary.tokens_per_word)
