"""Tests a server under load and abuse: exact answers, rejected bad requests, no delays, no leaks.

  python benchmarks/abuse.py                       all scenarios in turn, against one server
  python benchmarks/abuse.py streams malformed     these
  python benchmarks/abuse.py --scale 0.02          with a fiftieth of the clients

It starts `jaxserve serve demo`, with the 1,024 open files that most systems allow a process at first. The
expected completions are computed beforehand by the engine in this process, and compared with the server's.
After each scenario the server must answer a completion, run nothing and keep nothing waiting, have no KV page in use
(cached ones are free), and hold no more than 10% more memory than before, all its processes together. `streams`
and `large-bodies` run once before that, as Python's heap and the allocator's arenas grow with the first load.

Prints a table in Markdown; --json FILE keeps the figures. Exits with 1 if any check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from abuse_bodies import amplified_bodies
from abuse_client import PATIENCE, Case, Row, Run, is_error, make_cases, post, read_answer
from malformed import Malformed
from serving import MEGABYTE, serve

from jaxserve.bench import startup
from jaxserve.bench.client import Response
from jaxserve.config import EngineConfig

T = TypeVar("T")

CONFIG = EngineConfig(model="demo", kv_pages=4096)
GROWTH = 0.10  # of the memory; largest growth after a scenario, or
LEAST_GROWTH = 96  # MiB, if that is more: pages of the KV cache take memory when they are first used
HELD_UP = 0.5  # seconds; longest delay of /health by a request, with other programs on the machine
BODIES = 768  # MiB; most memory of the bodies of `large-bodies` while they arrive, 6 times their length


async def streams(run: Run) -> None:
    """1,000 streams at once."""
    await asyncio.gather(*map(run.complete, run.cases(1000)))


async def storm(run: Run) -> None:
    """2,000 connections within seconds, half of which are closed at a random time."""

    async def later(work: Awaitable[Any]) -> None:
        await asyncio.sleep(run.random.uniform(0.0, 5.0))
        await work

    works = [run.complete(case) if i % 2 else _leave(run, case) for i, case in enumerate(run.cases(2000))]
    await asyncio.gather(*map(later, works))


async def _leave(run: Run, case: Case) -> None:
    moment = run.random.choice(("before the request was whole", "after it", "in the stream"))
    reader, writer = await run.connect()
    data = post(case.body(max_tokens=500, ignore_eos=True))
    try:
        async with asyncio.timeout(PATIENCE):
            if moment.startswith("before"):
                data = data[: run.random.randrange(len(data))]
            writer.write(data)
            await asyncio.sleep(run.random.random())
            if moment == "in the stream":
                await reader.readuntil(b"data: ")
                await reader.read(run.random.randrange(1, 1000))
        run.note(f"left {moment}")
    except (OSError, EOFError) as error:
        run.note(f"{moment}: {type(error).__name__}", ok=False)
    if run.random.random() < 0.5:  # with a reset instead of a normal close
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def slow_readers(run: Run) -> None:
    """300 streams are read at 8 bytes per second; measures ordinary clients beside them and without them."""
    readers = [asyncio.create_task(_read_slowly(run, case)) for case in run.cases(300)]
    await asyncio.sleep(1.0)
    await run.server.idle()
    run.row.memory["beside slow readers"] = run.server.resident() / MEGABYTE
    beside = await _ordinary(run)
    run.row.details["still reading"] = sum(not reader.done() for reader in readers)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers)
    alone = await _ordinary(run)
    run.row.details |= {"ttft_s_beside_them": beside, "ttft_s_alone": alone}
    held_up = beside["p99"] > 2 * alone["p99"] + 1.0
    run.note("ordinary clients wait" if held_up else "ordinary clients are not held up", not held_up)


async def _ordinary(run: Run) -> dict[str, float]:
    """Quantiles of the time to the first token, in seconds, of 400 streams, 8 at a time."""
    cases = iter(run.cases(400))

    async def worker() -> list[float]:
        return [await run.complete(case) for case in cases]

    times = np.concatenate(await asyncio.gather(*(worker() for _ in range(8))))
    return {"p50": float(np.quantile(times, 0.5)), "p99": float(np.quantile(times, 0.99))}


async def _read_slowly(run: Run, case: Case) -> None:
    reader, writer = await run.connect(receive_buffer=4096)
    try:
        writer.write(post(case.body(max_tokens=200, ignore_eos=True, logprobs=20)))
        while await reader.read(8):
            await asyncio.sleep(1.0)
        run.note("disconnected as too slow")
    except asyncio.CancelledError:
        run.note("left while reading")
    except OSError:
        run.note("disconnected as too slow")
    finally:
        writer.transport.abort()


async def large_bodies(run: Run) -> None:
    """Bodies of 10 MB and more, with true and false lengths, 12 at a time."""
    size = 10_000_000
    garbage = run.random.randbytes(size)
    text = "word " * (size // 5)
    prompt = {"model": "demo", "prompt": text}
    chat = {"model": "demo", "messages": [{"role": "user", "content": text}]}
    chunked = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunks = [b"%x\r\n%b\r\n" % (2**16, garbage[: 2**16])] * (size // 2**16)
    kinds: dict[str, tuple[int, Sequence[bytes]]] = {
        "prompt": (400, [post(json.dumps(prompt).encode())]),
        "prompt of tokens": (400, [post(json.dumps(prompt | {"prompt": [7] * (size // 3)}).encode())]),
        "chat": (400, [post(json.dumps(chat).encode(), "/v1/chat/completions")]),
        "to tokenize": (400, [post(json.dumps(prompt).encode(), "/tokenize")]),
        "garbage": (400, [post(garbage)]),
        "nested": (400, [post(b'{"model":"demo","prompt":' + b"[" * size)]),
        "chunks": (400, [chunked, *chunks, b"0\r\n\r\n"]),
        "endless chunks": (413, [chunked, *chunks * 5]),
        "length of 1 TB": (413, [post(garbage, length=10**12)]),
        "length too short": (400, [post(garbage, length=10)]),
        "negative length": (400, [post(garbage, length=-1)]),
    }
    watch = asyncio.create_task(_watch_memory(run))
    late = asyncio.create_task(run.refused("length too long", 408, post(garbage, length=size + 1)))
    for _ in range(run.count(100) // 8):
        await asyncio.gather(*(run.refused(kind, status, *data) for kind, (status, data) in kinds.items()))
    await late
    watch.cancel()
    grown = run.row.memory["highest"] - run.row.memory.get("before", 0.0)
    run.note("memory is bounded" if grown < BODIES else f"{grown:.0f} MiB more meanwhile", grown < BODIES)


async def amplification(run: Run) -> None:
    """Sends small bodies that ask for much work, one after the other, while /health is requested."""
    await _probe(run, "alone", asyncio.sleep(2.0))
    for name, (path, body) in amplified_bodies("demo").items():
        watch = asyncio.create_task(_watch_memory(run))
        before = run.server.resident() / MEGABYTE
        run.row.memory["highest"] = 0.0
        status = await _probe(run, name, _status(run, path, body))
        watch.cancel()
        grown = run.row.memory["highest"] - before
        run.row.details[name] |= {"bytes": len(body), "status": status, "grown_MiB": grown}
        run.note(f"{name}: {status}", status in (200, 400))
        await run.server.idle()


async def _status(run: Run, path: str, body: bytes) -> int:
    """The answer's status; 0 if there is none within a minute."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.0):
            return (await run.server.client.request("POST", path, body)).status
    return 0


async def _probe(run: Run, name: str, work: Awaitable[T]) -> T:
    """Awaits `work`, and records the longest time of /health meanwhile."""
    task = asyncio.ensure_future(work)
    slowest = 0.0
    while not task.done():
        begin = time.perf_counter()
        await run.server.client.request("GET", "/health")
        slowest = max(slowest, time.perf_counter() - begin)
        await asyncio.sleep(0.005)
    run.row.details[name] = {"health_s": slowest}
    limit = HELD_UP + 5 * run.row.details["alone"]["health_s"]
    if slowest > limit:
        run.note(f"{name} holds up others for {slowest:.1f} s", ok=False)
    return await task


async def _watch_memory(run: Run) -> None:
    while True:
        now = run.server.resident() / MEGABYTE
        run.row.memory["highest"] = max(run.row.memory.get("highest", now), now)
        await asyncio.sleep(0.1)


async def headers(run: Run) -> None:
    """700 heads that are too long or never complete."""
    start = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    many = b"".join(b"X-Header-%d: value\r\n" % i for i in range(5000))
    endless = [b"y" * 2**16] * 1000
    kinds: dict[str, tuple[int, list[bytes], float]] = {
        "5,000 headers": (431, [start + many + b"\r\n"], 0.0),
        "header of 1 MB": (431, [start + b"X: " + b"y" * 10**6 + b"\r\n\r\n"], 0.0),
        "endless header": (431, [start + b"X: ", *endless], 0.0),
        "endless request line": (431, [b"GET /", *endless], 0.0),
        "a byte at a time": (408, [bytes([byte]) for byte in start + many], 0.5),
        "a body's byte at a time": (408, [post(b"", length=1000), *[b"x"] * 1000], 0.5),
        "silence": (408, [b""], 0.0),
    }
    works = [(kind, *rest) for kind, rest in kinds.items() for _ in range(run.count(100) // 4)]
    run.random.shuffle(works)
    await asyncio.gather(*(run.refused(kind, status, *data, every=every) for kind, status, data, every in works))


async def malformed(run: Run) -> None:
    """100,000 invalid requests, one after the other on 32 connections, reused if the server keeps them open."""
    requests = Malformed(seed=0)
    left = itertools.repeat(None, run.count(100_000))

    async def worker() -> None:
        line = None
        for _ in left:
            kind, data = requests.draw()
            answer = None
            while answer is None:
                fresh = line is None
                reader, writer = line = line or await run.connect()
                try:
                    async with asyncio.timeout(30.0):
                        writer.write(data)
                        answer = await read_answer(reader)
                except OSError as error:
                    writer.transport.abort()
                    line = None
                    if fresh or isinstance(error, TimeoutError):  # else closed after an earlier request
                        answer = Response(0, {}, f"{type(error).__name__} {error}".encode())
            ok = 400 <= answer.status < 500 and is_error(answer)
            run.note(f"{kind}: {answer.status}" if ok else f"{data[:300]!r}: {answer.status} {answer.body!r}", ok)
            if line is not None and kind == "header":  # later bytes would belong to the announced body
                line[1].transport.abort()
                line = None
        if line is not None:
            line[1].transport.abort()

    await asyncio.gather(*(worker() for _ in range(32)))


async def terminate(run: Run) -> None:
    """SIGTERM during 300 streams, some of which cannot finish in time, with slow readers and an incomplete request."""
    process = run.server.process
    short = [asyncio.create_task(run.complete(case)) for case in run.cases(100)]
    long = [asyncio.create_task(_to_the_end(run, case)) for case in run.cases(200)]
    slow = [asyncio.create_task(_read_slowly(run, case)) for case in run.cases(20)]
    _, part = await run.connect()
    part.write(post(b"{}", length=10))
    while await run.server.metric("num_requests_running") < min(len(long), CONFIG.max_num_seqs) / 2:
        await asyncio.sleep(0.05)
    begin = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    await run.refused("new request", 503, post(Case("x", 1, "").body()))
    await asyncio.gather(*short, *long)
    answered = time.perf_counter() - begin
    code = await asyncio.to_thread(process.wait, PATIENCE)
    run.row.details |= {"answered_s": answered, "exited_s": time.perf_counter() - begin}
    for reader in slow:  # more remains than they will ever read
        reader.cancel()
    await asyncio.gather(*slow)
    part.close()
    run.note(f"exit code {code}", code == 0)
    run.note(f"all answered within {run.drain_seconds:g} s and 2", answered < run.drain_seconds + 2.0)


async def _to_the_end(run: Run, case: Case) -> None:
    """A stream that takes longer than the server has left must end with an error or a finish reason."""
    events: list[bytes] = []
    body = case.body(max_tokens=1500, ignore_eos=True)
    try:
        async with asyncio.timeout(PATIENCE):
            await run.server.client.request("POST", "/v1/completions", body, lambda _, data: events.append(data))
    except OSError as error:
        return run.note(f"{type(error).__name__} {error}", ok=False)
    *_, last, done = events
    whole = b'"finish_reason":"length"' in last
    run.note("whole" if whole else "ended by an error", done == b"[DONE]" and (whole or b"shutting down" in last))


SCENARIOS: dict[str, Callable[[Run], Awaitable[None]]] = {
    function.__name__.replace("_", "-"): function
    for function in (streams, storm, slow_readers, large_bodies, amplification, headers, malformed, terminate)
}


async def measure(run: Run, name: str) -> Row:
    """Runs a scenario and checks the server afterwards."""
    row = run.row = Row(name, memory={"before": run.server.resident() / MEGABYTE})
    begin = time.perf_counter()
    await SCENARIOS[name](run)
    row.seconds = time.perf_counter() - begin
    row.requests = sum((row.good + row.bad).values())
    if name != "terminate":
        await run.complete(run.cases(8)[0])
        await asyncio.wait_for(run.server.idle(), 30.0)
        row.pages = round(await run.server.metric("kv_cache_usage_perc") * (CONFIG.kv_pages or 0))
        row.memory["after"] = run.server.resident() / MEGABYTE
        if row.pages:
            run.note("pages are in use", ok=False)
        if row.memory["after"] - row.memory["before"] > max(GROWTH * row.memory["before"], LEAST_GROWTH):
            run.note("memory grew", ok=False)
    return row


async def run_scenarios(names: Sequence[str], scale: float, client_timeout: float, drain_seconds: float) -> list[Row]:
    """The rows of these scenarios, in the order of SCENARIOS."""
    cases = await asyncio.to_thread(make_cases, CONFIG, max(round(1000 * scale), 8))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    flags = ["--drain-seconds", str(drain_seconds), "--client-timeout", str(client_timeout)]
    async with serve("demo", *startup.engine_flags(CONFIG), *flags) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        run = Run(server, cases, scale, drain_seconds)
        for warm_up in (streams, large_bodies):
            await warm_up(run)
        rows = []
        for name in sorted(names, key=list(SCENARIOS).index):
            rows.append(await measure(run, name))
            print(f"{name}: {rows[-1].seconds:.0f} s, {rows[-1].bad or 'as it must be'}", file=sys.stderr, flush=True)
    for failure in server.log.text().split("Traceback (most recent call last)")[1:]:
        rows[-1].bad[f"in the server's log: {failure[:2000]}"] += 1
    return rows


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| scenario | requests | outcomes | s | MiB before, after | pages |", "|---|---|---|---|---|---|"]
    for row in rows:
        outcomes = ", ".join(f"{count:,} {what}" for what, count in sorted((row.good + row.bad).items()))
        memory = ", ".join(f"{row.memory[when]:.0f}" for when in ("before", "after") if when in row.memory)
        cells = (row.scenario, f"{row.requests:,}", outcomes, f"{row.seconds:.0f}", memory, str(row.pages))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of clients; default: %(default)s")
    parser.add_argument("--client-timeout", type=float, default=60.0, help="the server's; default: %(default)s")
    parser.add_argument("--drain-seconds", type=float, default=10.0, help="the server's; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    if unknown := set(args.scenarios) - set(SCENARIOS):
        parser.error(f"there is no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    names = args.scenarios or list(SCENARIOS)
    rows = asyncio.run(run_scenarios(names, args.scale, args.client_timeout, args.drain_seconds))
    print(markdown(rows))
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    return int(any(row.bad for row in rows))


if __name__ == "__main__":
    sys.exit(main())
