"""What small bodies cost a server: searches for the body of at most 64 KB that holds it up the longest.

  python benchmarks/amplification.py                     the worst bodies known, and 300 more found for each endpoint
  python benchmarks/amplification.py --examples 5000     a long search

The application runs in this process with the demo's tokenizer and a context of 8,192 tokens. An engine without a model
answers: it decodes and admits what the front sends, schedules it, and draws tokens by itself. Measured are the CPU
time of the longest step of the event loop (a callback) and of the engine's thread (admission, one step), and the
memory that Python allocates at the highest. CPU time, because it does not depend on what else the machine does.

Prints a table in Markdown; --json FILE keeps the figures and the bodies. Exits with 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import strategies as st

from jaxserve.admission import Admission
from jaxserve.beam import Beams
from jaxserve.block_manager import BlockManager
from jaxserve.config import EngineConfig
from jaxserve.limits import MAX_STOP_STRINGS
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence
from jaxserve.structured import Structured
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import InvalidRequestError, Request, SequenceUpdate, StepOutput, TokenLogprob
from server.app import build_app
from server.client import EngineClient
from server.messages import (
    Accepted,
    Ready,
    Rejected,
    Submit,
    Update,
    decode_engine_message,
    decode_front_message,
    to_frame,
)
from server.metrics import Metrics
from server.state import ServerSettings, ServerState

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
LONGEST_BODY = 64 * 2**10  # bytes
CONTEXT = 8192
STEPS, DRAWS = 6, 4  # of the engine, and tokens in each, after which it ends all that runs
MAX_SECONDS, MAX_BYTES = 0.1, 64 * 2**20  # what a body may hold up, and cost

ENDPOINTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip
_CHATS = ENDPOINTS[1:6]


@dataclass
class Cost:
    """What a body cost: seconds of CPU at the longest, and bytes at the highest."""

    status: int
    loop_seconds: float
    engine_seconds: float
    memory: int = 0

    @property
    def worst(self) -> float:
        return max(self.loop_seconds, self.engine_seconds)


class HostEngine:
    """The host's side of an engine: what its thread does for requests, without the devices and without grammars."""

    def __init__(self, vocab_size: int):
        self._config = EngineConfig(model="demo", max_waiting=8192)
        self._vocab_size = vocab_size
        self.seconds = 0.0  # of the longest piece of work

    def submit(self, frame: bytes) -> Iterator[bytes]:
        """The frames that answer a submission, in their order."""
        scheduler = Scheduler(
            BlockManager(4 * CONTEXT // 16, 16, prefix_caching=True),
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=2048,
            max_model_len=CONTEXT,
        )
        with self._timed():
            submit = decode_front_message(frame[4:])
            assert isinstance(submit, Submit)
            requests, params = submit.requests(""), submit.first.params
        try:
            with self._timed():
                self._admit(scheduler, requests)
        except InvalidRequestError as error:
            yield to_frame(Rejected(submit.first.request_id, str(error), error.param))
            return
        yield to_frame(Accepted(submit.first.request_id))
        going = {(request.request_id, index) for request in requests for index in range(params.n)}
        for _ in range(STEPS):
            if (output := self._step(scheduler)) is None:
                break
            yield to_frame(Update(output))
            going -= {(u.request_id, u.index) for u in output.updates if u.finish_reason}
        with self._timed():
            for request in requests:
                scheduler.abort(request.request_id)
        yield to_frame(Update(StepOutput(updates=[SequenceUpdate(*one, [], "length") for one in sorted(going)])))

    def _admit(self, scheduler: Scheduler, requests: list[Request]) -> None:
        model = SimpleNamespace(vocab_size=self._vocab_size, eos_token_ids=(0,))
        structured, beams = Structured(model), Beams(scheduler, (0,))  # type: ignore[arg-type]
        admission = Admission(self._config, model, CONTEXT, scheduler, structured, beams)  # type: ignore[arg-type]
        admission.check_queue(requests)
        stop_ids = frozenset(admission.check(requests))
        for arrival, request in enumerate(requests):
            room = CONTEXT - len(request.prompt_token_ids)
            limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
            scheduler.add(Sequence(request, 0, 1, limit, stop_ids, arrival))

    def _step(self, scheduler: Scheduler) -> StepOutput | None:
        with self._timed():
            plan = scheduler.schedule(DRAWS)
            if plan is None:
                return None
            tokens = np.full((len(plan.rows), max(int(plan.rows.draws.max()), 1)), -1, np.int32)
            for row, draws in zip(tokens, plan.rows.draws, strict=True):
                row[:draws] = 300
            output, notable = scheduler.commit(plan.rows, tokens)
        for update, seq, _, is_first in notable:
            if (count := seq.params.logprobs) is not None:
                update.logprobs = [_score(count)] * len(update.token_ids)
            if is_first and seq.index == 0 and (count := seq.params.prompt_logprobs) is not None:
                update.prompt_logprobs = [None, *[_score(count)] * (seq.prompt_len - 1)]
        return output

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.thread_time()
        try:
            yield
        finally:
            self.seconds = max(self.seconds, time.thread_time() - begin)


def _score(count: int) -> TokenLogprob:
    return TokenLogprob(300, -1.0, 1, [(301 + i, -1.0) for i in range(count)])


class _Wire:
    """The front's end of a connection to a HostEngine, whose work is not counted as the front's."""

    def __init__(self, client: EngineClient, engine: HostEngine):
        self._client, self._engine = client, engine
        self.engine_running = 0.0  # seconds of the engine's work on this thread

    def write(self, frame: bytes) -> None:
        if not isinstance(decode_front_message(frame[4:]), Submit):
            return
        asyncio.get_running_loop().call_soon(self._next, self._engine.submit(frame))

    def _next(self, frames: Iterator[bytes]) -> None:
        begin = time.thread_time()
        frame = next(frames, None)
        self.engine_running += time.thread_time() - begin
        if frame is not None:
            self._client._handle(decode_engine_message(frame[4:]))
            asyncio.get_running_loop().call_soon(self._next, frames)


class Front:
    """The application of a server, and what a request costs it."""

    def __init__(self, tokenizer: Tokenizer):
        client = EngineClient()
        client.info = Ready(
            model_folder=str(DEMO),
            tokenizer_folder=str(DEMO),
            dtype="float32",
            max_model_len=CONTEXT,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            page_size=16,
            max_num_seqs=256,
        )
        self._engine = HostEngine(tokenizer.vocab_size)
        self._wire = _Wire(client, self._engine)
        client._writer = self._wire  # type: ignore[assignment]
        settings = ServerSettings(model_names=("m",), tool_call_parser="hermes", max_stored_responses=1)
        self._state = ServerState(settings, client, Metrics("m", "jaxserve"), tokenizer)
        self._app = build_app(self._state)
        gc.collect()
        gc.freeze()  # as servers and engines do

    def cost(self, path: str, body: Any, *, memory: bool = False) -> Cost:
        """What a request costs; with `memory`, the seconds mean little."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self._engine.seconds = 0.0
        if memory:
            gc.collect()
            tracemalloc.start()
        try:
            status, seconds = asyncio.run(self._measure(path, data))
            peak = tracemalloc.get_traced_memory()[1] if memory else 0
        finally:
            tracemalloc.stop()
        return Cost(status, seconds, self._engine.seconds, peak)

    async def _measure(self, path: str, data: bytes) -> tuple[int, float]:
        """The status, and the CPU seconds of the longest callback of the loop."""
        longest, run = 0.0, asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            nonlocal longest
            begin, engine = time.thread_time(), self._wire.engine_running
            run(handle)
            spent = time.thread_time() - begin - (self._wire.engine_running - engine)
            longest = max(longest, spent)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            status = await self._request(path, data)
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
        return status, longest

    async def _request(self, path: str, data: bytes) -> int:
        status, gone = 0, asyncio.Event()
        incoming = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("m", 0),
            "client": ("m", 0),
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
        }  # fmt: skip
        await self._app(scope, receive, send)
        return status


# The bodies

_UNITS = ("a", " ", "a ", "ab", "\n", "\u00e9", "\U0001f600", "\u4e2d", "0", "{", '\\"', "<", "<|im_end|>", "the ")


def _fill(unit: str, size: int) -> str:
    """The unit again and again, as long as its JSON is no longer than this."""
    return unit * max(1, size // max(1, len(msgspec.json.encode(unit)) - 2))


def _nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


def _schema(kind: str, size: int) -> Any:
    count = max(1, size // 40)
    return {
        "wide": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}},
        "enum": {"enum": [f"v{i}" for i in range(size // 10)]},
        "bomb": {"type": "object", "x": [{}] * (size // 3)},
        "nested": {"type": "object", **_nested(min(60, size // 20))},
        "any": {"anyOf": [{"const": i} for i in range(size // 12)]},
    }[kind]


_SCHEMAS = st.sampled_from(("wide", "enum", "bomb", "nested", "any"))
_unit = st.sampled_from(_UNITS)


@st.composite
def _text(draw: st.DrawFn, size: int) -> str:
    return _fill(draw(_unit), size)


@st.composite
def _prompt(draw: st.DrawFn, size: int) -> Any:
    """A prompt or many, in text or tokens."""
    count = draw(st.sampled_from((1, 8, 128, 1024)))
    each = max(1, size // count - 3)
    if draw(st.booleans()):
        tokens = [draw(st.sampled_from((1, 7, 300)))] * max(1, min(each // 2, CONTEXT - 1 if count > 1 else each))
        return tokens if count == 1 else [tokens] * count
    text = draw(_text(each))
    return text if count == 1 else [text] * count


@st.composite
def _sampling(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """Parameters, one of which may be large."""
    fields: dict[str, Any] = {
        "n": draw(st.sampled_from((1, 2, 8, 128))),
        "max_tokens": draw(st.sampled_from((1, 64, 5000))),
        "stream": draw(st.booleans()),
    }
    large = {
        "allowed_token_ids": lambda: [5] * (size // 2),
        "logit_bias": lambda: {str(i): 1 for i in range(min(512, size // 8 + 1))},
        "bad_words": lambda: [draw(_text(min(256, max(1, size // 128))))[:256]] * 128,
        "stop": lambda: [
            draw(_text(min(1000, max(1, size // 64)))) + str(i)
            for i in range(draw(st.sampled_from((1, 4, MAX_STOP_STRINGS))))
        ],
        "stop_token_ids": lambda: list(range(14)),
        "response_format": lambda: {
            "type": "json_schema", "json_schema": {"name": "x", "schema": _schema(draw(_SCHEMAS), size)}
        },
        "structured_outputs": lambda: draw(
            st.sampled_from(
                (
                    {"regex": _fill("(a|b)*", size)},
                    {"choice": [str(i) for i in range(min(1024, size // 8))]},
                    {"grammar": _fill("start: A\n", size)},
                )
            )
        ),
        "metadata": lambda: {str(i): "x" for i in range(size // 12)},
        "user": lambda: _fill("x", size),
        "unknown": lambda: [[]] * (size // 3),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(large)), max_size=2, unique=True)):
        fields[name] = large[name]()
    return fields


@st.composite
def _messages(draw: st.DrawFn, size: int, path: str) -> list[dict[str, Any]]:
    count = draw(st.sampled_from((1, 16, 500)))
    text = draw(_text(max(1, size // count - 40)))
    roles = ("user",) if path.startswith("/v1/messages") else ("user", "system")
    role = draw(st.sampled_from(roles))
    if draw(st.booleans()):
        kind = "input_text" if path == "/v1/responses" else "text"
        content: Any = [{"type": kind, "text": text[: max(1, len(text) // 8)]}] * 6
    else:
        content = text
    return [{"role": role, "content": content}] * count


@st.composite
def _tools(draw: st.DrawFn, size: int, path: str) -> list[dict[str, Any]]:
    count = draw(st.sampled_from((1, 8, 128)))
    schema = _schema(draw(_SCHEMAS), max(1, size // count - 80))
    if path.startswith("/v1/messages"):
        return [{"name": f"f{i}", "input_schema": schema} for i in range(count)]
    if path == "/v1/responses":
        return [{"type": "function", "name": f"f{i}", "parameters": schema} for i in range(count)]
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """Bodies for an endpoint that are likely to cost much."""
    share = draw(st.sampled_from((0.1, 0.5, 0.9)))
    bulk, rest = int(LONGEST_BODY * share), int(LONGEST_BODY * (0.95 - share))
    if path == "/detokenize":
        return {"tokens": [draw(st.integers(0, 2000))] * (LONGEST_BODY // 6)}
    body: dict[str, Any] = draw(_sampling(rest)) if path != "/tokenize" else {"return_token_strs": draw(st.booleans())}
    if path == "/v1/completions" or (path == "/tokenize" and draw(st.booleans())):
        body["prompt"] = draw(_prompt(bulk)) if path == "/v1/completions" else draw(_text(bulk))
        if path == "/v1/completions":
            body |= draw(st.sampled_from(({}, {"echo": True}, {"logprobs": 20}, {"echo": True, "logprobs": 5})))
            if isinstance(body["prompt"], list) and isinstance(body["prompt"][0], list | str):
                body["n"] = min(body["n"], max(1, 1024 // len(body["prompt"])))
    else:
        body["input" if path == "/v1/responses" else "messages"] = draw(_messages(bulk, path))
        if draw(st.booleans()):
            body["tools"] = draw(_tools(rest, path))
            if path != "/tokenize":
                kind = {"type": "any"} if path.startswith("/v1/messages") else "required"
                body["tool_choice"] = draw(st.sampled_from((kind, None)))
    if path.startswith("/v1/messages"):
        body["model"] = "m"
    if body.get("stream") and draw(st.booleans()) and path in ENDPOINTS[:2]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


def known_worst() -> Iterator[tuple[str, str, Any]]:
    """Bodies that cost much once, by hand: (endpoint, name, body)."""
    user = [{"role": "user", "content": "hi"}]
    yield "/v1/completions", "1,024 prompts, allowed tokens", {
        "prompt": [[1]] * 1024, "allowed_token_ids": [5] * 25_000, "max_tokens": 4}  # fmt: skip
    yield "/v1/completions", "1,024 prompts with n of 128", {"prompt": ["a"] * 1024, "n": 128}
    yield "/v1/completions", "1,024 prompts", {"prompt": ["a"] * 1024, "max_tokens": 64}
    yield "/v1/completions", "1,024 prompts, usage in each chunk", {
        "prompt": ["a"] * 1024, "max_tokens": 64, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    yield "/v1/completions", "n of 128, a long prompt", {"prompt": [300] * 8000, "n": 128, "max_tokens": 64}
    yield "/v1/completions", "8 long prompts with n of 128", {"prompt": [[7] * 3900] * 8, "n": 128, "max_tokens": 64}
    yield "/v1/completions", "the same, a token each", {"prompt": [[7] * 3900] * 8, "n": 128, "max_tokens": 1}
    stops = ["a" * 900 + str(i) for i in range(MAX_STOP_STRINGS)]
    yield "/v1/completions", "long stop strings, n of 128", {"prompt": "a", "n": 128, "stop": stops, "max_tokens": 64}
    yield "/v1/completions", "bad words", {"prompt": "a", "bad_words": ["the " * 15] * 128}
    yield "/v1/completions", "echo with log-probabilities", {"prompt": [300] * 8000, "echo": True, "logprobs": 5}
    for path in _CHATS[:2]:
        name = "input" if path == "/v1/responses" else "messages"
        flat = path == "/v1/responses"
        function = {"name": "f", "parameters": {"x": [{}] * 20_000}}
        tool = {"type": "function", **(function if flat else {"function": function})}
        yield path, "a tool of empty objects", {name: user, "tools": [tool], "tool_choice": "required"}
    yield "/v1/chat/completions", "3,000 system messages", {"messages": [{"role": "system", "content": "a"}] * 1900}
    yield "/v1/messages", "a tool of empty objects", {
        "model": "m", "max_tokens": 9, "messages": user,
        "tools": [{"name": "f", "input_schema": {"x": [{}] * 20_000}}]}  # fmt: skip
    yield "/v1/messages/count_tokens", "1,900 messages", {"model": "m", "messages": user * 1500}
    yield "/tokenize", "each token's text", {"prompt": "a" * 8000, "return_token_strs": True}
    yield "/detokenize", "the same token", {"tokens": [300] * 16_000}


def search(front: Front, path: str, examples: int, *, seconds: float = MAX_SECONDS) -> tuple[Cost, Any]:
    """The most expensive body found for an endpoint."""
    worst: tuple[Cost, Any] = (Cost(0, 0.0, 0.0), None)

    @settings(
        max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(bodies(path))
    def attempt(body: Any) -> None:
        nonlocal worst
        if len(msgspec.json.encode(body)) > LONGEST_BODY:
            return
        cost = front.cost(path, body)
        assert cost.status < 500, (path, cost)
        if cost.worst > worst[0].worst:
            worst = cost, body
        target(cost.worst)

    attempt()
    return worst


def steadily(front: Front, path: str, body: Any, times: int = 3) -> Cost:
    """A body's cost, the least of some measurements: what comes between is not its own."""
    costs = [front.cost(path, body) for _ in range(times)]
    loop, engine = min(cost.loop_seconds for cost in costs), min(cost.engine_seconds for cost in costs)
    return Cost(costs[0].status, loop, engine, front.cost(path, body, memory=True).memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300, help="bodies to try for each endpoint; %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    front = Front(load_tokenizer(DEMO))
    rows = []
    for path, name, body in known_worst():
        rows.append((path, name, body, steadily(front, path, body)))
    if args.examples:
        for path in ENDPOINTS:
            _, body = search(front, path, args.examples)
            rows.append((path, "found: " + _outline(body), body, steadily(front, path, body)))
            print(path, rows[-1][1], rows[-1][3], file=sys.stderr, flush=True)
    print("| endpoint | body | bytes | status | loop ms | engine ms | MiB |\n|---|---|---|---|---|---|---|")
    for path, name, body, cost in rows:
        size = len(msgspec.json.encode(body))
        figures = f"{1000 * cost.loop_seconds:.0f} | {1000 * cost.engine_seconds:.0f} | {cost.memory / 2**20:.1f}"
        print(f"| {path} | {name} | {size:,} | {cost.status} | {figures} |")
    if args.json:
        kept = [{"endpoint": p, "name": n, "body": b, "cost": dataclasses.asdict(c)} for p, n, b, c in rows]
        args.json.write_text(json.dumps(kept, indent=1))
    return int(any(cost.worst > MAX_SECONDS or cost.memory > MAX_BYTES for *_, cost in rows))


def _outline(body: dict[str, Any]) -> str:
    """A body in a few words."""
    words = []
    for name, value in body.items():
        if isinstance(value, str | list | dict):
            words.append(f"{name} of {len(value):,}")
        else:
            words.append(f"{name} {value}".lower())
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
