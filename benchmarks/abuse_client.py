"""Clients and counters for the scenarios of abuse.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from serving import ROOT, Server

from jaxserve.bench.client import HTTPError, Response, ResponseParser
from jaxserve.config import EngineConfig

PATIENCE = 300.0  # seconds after which a request counts as hanging


@dataclass(frozen=True)
class Case:
    """A greedy completion with its expected text."""

    prompt: str
    max_tokens: int
    text: str

    def body(self, **options: Any) -> bytes:
        fields = {"model": "demo", "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0}
        return json.dumps(fields | {"stream": True} | options).encode()


def make_cases(config: EngineConfig, count: int) -> list[Case]:
    """Prompts of many lengths with their completions, computed by the engine in this process."""
    from jaxserve.llm import LLM, SamplingParams

    rng = random.Random(1)
    text = (ROOT / "checkpoints" / "demo" / "heldout.txt").read_text()
    starts = [rng.randrange(len(text) - 1000) for _ in range(count)]
    prompts = [text[start : start + min(int(rng.expovariate(1 / 120)) + 1, 1000)] for start in starts]
    lengths = [rng.randint(1, 48) for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    outputs = LLM(**asdict(config)).generate(prompts, params)
    texts = [output.outputs[0].text for output in outputs]
    return [Case(*case) for case in zip(prompts, lengths, texts, strict=True)]


@dataclass
class Row:
    """The results of a scenario. `good` and `bad` count outcomes; `bad` must be empty. Memory in MiB."""

    scenario: str = ""
    good: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    seconds: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    pages: int = 0
    details: dict[str, Any] = field(default_factory=dict)


class Run:
    """One server, the cases, and the row of the current scenario."""

    def __init__(self, server: Server, cases: Sequence[Case], scale: float, drain_seconds: float):
        self.server = server
        self._cases = cases
        self._scale = scale
        self.drain_seconds = drain_seconds
        self.random = random.Random(0)
        self.row = Row()

    def count(self, full: int) -> int:
        return max(round(full * self._scale), 8)

    def cases(self, full: int) -> list[Case]:
        """The number of cases for `full` at this scale."""
        return list(itertools.islice(itertools.cycle(self._cases), self.count(full)))

    def note(self, outcome: str, ok: bool = True) -> None:
        (self.row.good if ok else self.row.bad)[outcome] += 1

    async def complete(self, case: Case) -> float:
        """Streams a completion and checks its text; returns the seconds to its first token."""
        events: list[tuple[float, bytes]] = []
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE):
                path, on_event = "/v1/completions", lambda *event: events.append(event)
                answer = await self.server.client.request("POST", path, case.body(), on_event)
        except OSError as error:
            self.note(f"{type(error).__name__} {error}", ok=False)
        else:
            outcome = _outcome(answer, [data for _, data in events], case)
            self.note(outcome, outcome == "exact")
        return events[0][0] - begin if events else PATIENCE

    async def connect(self, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection; `receive_buffer` is about the number of bytes that arrive without being read."""
        raw = socket.socket()
        raw.setblocking(False)
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        port = int(self.server.client.url.rpartition(":")[2])
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=raw, limit=receive_buffer or 2**16)

    async def refused(self, kind: str, status: int, *pieces: bytes, every: float = 0.0) -> None:
        """Sends pieces, one `every` so many seconds, and checks that the answer is an API error with this status."""
        reader, writer = await self.connect()
        sending = asyncio.create_task(_send(writer, pieces, every))
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await read_answer(reader)
            self.note(f"{kind}: {answer.status}", answer.status == status and is_error(answer))
        except OSError as error:
            self.note(f"{kind}: {type(error).__name__} {error}", ok=False)
        finally:
            sending.cancel()
            writer.transport.abort()


def _outcome(answer: Response, events: list[bytes], case: Case) -> str:
    if answer.status != 200:
        return f"{answer.status}"
    if not events or events[-1] != b"[DONE]":
        return "cut off"
    chunks = [json.loads(event) for event in events[:-1]]
    if "error" in chunks[-1]:
        return "an error in the stream"
    return "exact" if "".join(chunk["choices"][0]["text"] for chunk in chunks) == case.text else "another text"


async def _send(writer: asyncio.StreamWriter, pieces: Sequence[bytes], every: float) -> None:
    with contextlib.suppress(OSError):  # the server may close the connection earlier
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every)


async def read_answer(reader: asyncio.StreamReader) -> Response:
    """Raises OSError if the connection ends before the answer."""
    parser = ResponseParser(None)
    while not parser.done:
        if not (data := await reader.read(2**16)):
            parser.end()
            break
        parser.feed(0.0, data)
    if parser.response is None:
        raise HTTPError("no answer")
    return parser.response


def is_error(answer: Response) -> bool:
    """Whether the body is an error in OpenAI's or Anthropic's format."""
    try:
        return isinstance(json.loads(answer.body)["error"]["message"], str)
    except (ValueError, KeyError, TypeError):
        return False


def post(body: bytes, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """A request; `length` replaces the body's length in its head."""
    length = len(body) if length is None else length
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    return head.encode() + body
