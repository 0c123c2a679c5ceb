"""Cost of small bodies: searches for the body of at most 64 KB that blocks a server for the longest time.

  python benchmarks/amplification.py                     the worst bodies known, and 300 more found for each endpoint
  python benchmarks/amplification.py --examples 5000     a long search

The application runs in this process with the demo's tokenizer and a context of 8,192 tokens. An engine without a model
answers: it decodes and admits requests, schedules them, and makes up tokens. The script measures the CPU time of the
event loop's longest callback and of the engine thread's longest piece of work (admission, one step), and Python's peak
memory. CPU time does not depend on other programs.

Prints a table in Markdown; --json FILE keeps the figures and the bodies. Exits with 1 if a limit is exceeded.
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
from amplification_bodies import CONTEXT, ENDPOINTS, LONGEST_BODY, bodies, known_worst
from hypothesis import HealthCheck, Phase, given, settings, target

from jaxserve.config import EngineConfig
from jaxserve.engine.admission import Admission
from jaxserve.engine.constraints import Constraints
from jaxserve.scheduling.beam import Beams
from jaxserve.scheduling.block_manager import BlockManager
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.server.http.settings import ServerSettings
from jaxserve.server.http.state import ServerState
from jaxserve.server.ipc.engine_client import EngineClient
from jaxserve.server.ipc.messages import (
    Accepted,
    Ready,
    Rejected,
    Submit,
    Update,
    decode_api_server_message,
    decode_engine_message,
    to_frame,
)
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.process.app import build_app
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.types import InvalidRequestError, Request, SequenceUpdate, StepOutput, TokenLogprob

DEMO = Path(__file__).resolve().parent.parent / "checkpoints" / "demo"
STEPS = 6  # of the engine; then it ends all running requests
DRAWS = 4  # tokens in each step
MAX_SECONDS = 0.1  # limits of a body's cost
MAX_BYTES = 64 * 2**20  # limits of a body's cost


@dataclass
class Cost:
    """A body's cost: CPU seconds of the longest piece of work, and peak bytes."""

    status: int
    loop_seconds: float
    engine_seconds: float
    memory: int = 0

    @property
    def worst(self) -> float:
        return max(self.loop_seconds, self.engine_seconds)


class HostEngine:
    """The engine thread's work for requests, without devices and grammars."""

    def __init__(self, vocab_size: int):
        self._config = EngineConfig(model="demo", max_waiting=8192)
        self._vocab_size = vocab_size
        self.seconds = 0.0  # CPU time of the longest piece of work

    def submit(self, frame: bytes) -> Iterator[bytes]:
        """The frames that answer a submission, in order."""
        scheduler = Scheduler(
            BlockManager(4 * CONTEXT // 16, 16, prefix_caching=True),
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=2048,
            max_model_len=CONTEXT,
        )
        with self._timed():
            submit = decode_api_server_message(frame[4:])
            assert isinstance(submit, Submit)
            requests = submit.requests("")
            params = submit.first.params
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
        model = SimpleNamespace(vocab_size=self._vocab_size, eos_token_ids=(0,), vision=None)
        constraints, beams = Constraints(model), Beams(scheduler, (0,))  # type: ignore[arg-type]
        admission = Admission(self._config, model, CONTEXT, scheduler, constraints, beams)  # type: ignore[arg-type]
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
            tokens = np.full((len(plan.rows), max(int(plan.rows.num_new.max()), 1)), -1, np.int32)
            for row, num_new in zip(tokens, plan.rows.num_new, strict=True):
                row[:num_new] = 300
            output, details = scheduler.commit(plan.rows, tokens)
        for update, seq, _, is_first in details:
            output.updates.append(update)
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
    """The API server's end of a connection to a HostEngine, whose work does not count as the API server's."""

    def __init__(self, client: EngineClient, engine: HostEngine):
        self._client = client
        self._engine = engine
        self.engine_running = 0.0  # seconds of the engine's work on this thread

    def write(self, frame: bytes) -> None:
        if not isinstance(decode_api_server_message(frame[4:]), Submit):
            return
        asyncio.get_running_loop().call_soon(self._next, self._engine.submit(frame))

    def _next(self, frames: Iterator[bytes]) -> None:
        begin = time.thread_time()
        frame = next(frames, None)
        self.engine_running += time.thread_time() - begin
        if frame is not None:
            self._client._handle(decode_engine_message(frame[4:]))
            asyncio.get_running_loop().call_soon(self._next, frames)


class ApiServer:
    """A server's application, with the cost of a request."""

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
        gc.freeze()  # as in servers and engines

    def cost(self, path: str, body: Any, *, memory: bool = False) -> Cost:
        """A request's cost; with `memory` measured, its seconds are too high."""
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
        """The status, and the CPU seconds of the event loop's longest callback."""
        longest = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            nonlocal longest
            begin = time.thread_time()
            engine = self._wire.engine_running
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
        status = 0
        gone = asyncio.Event()
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


def search(api_server: ApiServer, path: str, examples: int, *, seconds: float = MAX_SECONDS) -> tuple[Cost, Any]:
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
        cost = api_server.cost(path, body)
        assert cost.status < 500, (path, cost)
        if cost.worst > worst[0].worst:
            worst = cost, body
        target(cost.worst)

    attempt()
    return worst


def steadily(api_server: ApiServer, path: str, body: Any, times: int = 3) -> Cost:
    """A body's cost: the least of several measurements, as other work disturbs some of them."""
    costs = [api_server.cost(path, body) for _ in range(times)]
    loop = min(cost.loop_seconds for cost in costs)
    engine = min(cost.engine_seconds for cost in costs)
    return Cost(costs[0].status, loop, engine, api_server.cost(path, body, memory=True).memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300, help="bodies to try for each endpoint; %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    api_server = ApiServer(load_tokenizer(DEMO))
    rows = []
    for path, name, body in known_worst():
        rows.append((path, name, body, steadily(api_server, path, body)))
    if args.examples:
        for path in ENDPOINTS:
            _, body = search(api_server, path, args.examples)
            rows.append((path, "found: " + _outline(body), body, steadily(api_server, path, body)))
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
    """A short description of a body."""
    words = []
    for name, value in body.items():
        if isinstance(value, str | list | dict):
            words.append(f"{name} of {len(value):,}")
        else:
            words.append(f"{name} {value}".lower())
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
