"""Properties of a server besides throughput, measured over HTTP.

  python benchmarks/serving.py streaming    256 clients, streaming and not: what streaming costs the engine
  python benchmarks/serving.py prefix       32 requests with a common prefix of 1,000 tokens, cached and not
  python benchmarks/serving.py stall        16 decoding clients beside a prompt of 3,000 tokens, by chunk size
  python benchmarks/serving.py soak         10,000 requests of mixed shape: compilations, pages and memory afterwards

Each prints a table; --json FILE keeps the figures, and `stall --plot PNG` and `soak --plot PNG` draw them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.model import make_model

from jaxserve import entry
from jaxserve.bench import startup
from jaxserve.bench.client import Client, run
from jaxserve.bench.prompts import Prompt
from jaxserve.bench.serve import Sender, Target, first_model, run_load
from jaxserve.bench.stats import RequestRecord

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path(tempfile.gettempdir(), "jaxserve-compare")  # the 100 million parameters of compare.py
MEGABYTE = 2**20


@dataclass
class Server:
    """A running server, its output, and a client to it."""

    client: Client
    model: str
    process: subprocess.Popen[str]
    log: startup.ProcessLog

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, bytes]:
        response = await self.client.request("POST", path, json.dumps({"model": self.model, **body}).encode())
        return response.status, response.body

    async def metric(self, name: str, **labels: str) -> float:
        """A value of /metrics, summed over the labels that are not given."""
        text = (await self.client.request("GET", "/metrics")).body.decode()
        total = 0.0
        found = False
        for line in text.splitlines():
            match = re.fullmatch(r"jaxserve:(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name and all(f'{k}="{v}"' in (match[2] or "") for k, v in labels.items()):
                total = total + float(match[3])
                found = True
        if not found:
            raise LookupError(f"/metrics has no {name}")
        return total

    def resident(self) -> int:
        """Bytes of memory of the server's processes together, without pages of libraries, which the system maps and
        drops as needed."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                status = (folder / "status").read_text()
                parent = int(re.search(r"PPid:\s+(\d+)", status)[1])  # type: ignore[index]
                if self.process.pid in (int(folder.name), parent):
                    kinds = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)
                    total += 1024 * sum(map(int, kinds))
        return total

    async def idle(self) -> None:
        """Waits until the statistics report that nothing runs."""
        while await self.metric("num_requests_running") or await self.metric("num_requests_waiting"):
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.3)


@contextlib.asynccontextmanager
async def serve(model: str, *flags: str) -> AsyncIterator[Server]:
    """A context with `jaxserve serve` with these flags in other processes, ready."""
    port = startup.free_port()
    command = entry.command("jaxserve", "serve", model, "--port", str(port), "--forbid-compile", *flags)
    with startup.server_process(command, dict(os.environ)) as (process, log):
        while startup.status(port, "/ready") != 200:
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.text(last=10)}")
            await asyncio.sleep(0.1)
        with contextlib.closing(Client(f"http://127.0.0.1:{port}")) as client:
            yield Server(client, await first_model(client), process, log)


async def load(
    server: Server, prompts: Sequence[list[int]], output_len: int, concurrency: int | None = None, stream: bool = True
) -> list[RequestRecord]:
    """Sends requests, all at once or `concurrency` at a time; all must succeed."""
    target = Target(url=server.client.url, model=server.model, ignore_eos=True, stream=stream)
    sender = Sender(target, server.client)
    bodies = [target.body(Prompt(prompt, output_len)) for prompt in prompts]
    clock = time.perf_counter()

    async def send(i: int) -> RequestRecord:
        return await sender.send(bodies[i], clock, len(prompts[i]))

    records = await run_load(send, [0.0] * len(bodies), concurrency)
    if error := next((record.error for record in records if record.error), None):
        raise SystemExit(f"a request failed: {error}")
    return records


def draw(rng: np.random.Generator, count: int, length: int, vocab: int) -> list[list[int]]:
    return rng.integers(1, vocab, (count, length)).tolist()


def table(rows: Sequence[Sequence[Any]]) -> None:
    """Rows in columns; the first is the header."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


# Streaming


async def streaming(args: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second and the engine's time per step, with and without streaming, in turns on one server."""
    rng = np.random.default_rng(0)
    turns: dict[str, list[dict[str, float]]] = {"streaming": [], "whole answers": []}
    async with serve("demo", "--no-prefix-caching") as server:
        await load(server, draw(rng, 64, 32, 4000), 8)
        for turn in range(2 * args.repeat):
            name = ("streaming", "whole answers")[turn % 2]
            await server.idle()
            before = [await server.metric(f"step_seconds_{kind}", phase="device") for kind in ("sum", "count")]
            start = time.perf_counter()
            await load(server, draw(rng, args.clients, 32, 4000), 128, stream=name == "streaming")
            seconds = time.perf_counter() - start
            await server.idle()
            after = [await server.metric(f"step_seconds_{kind}", phase="device") for kind in ("sum", "count")]
            device, steps = (b - a for a, b in zip(before, after, strict=True))
            turns[name].append({"tokens_per_s": args.clients * 128 / seconds, "step_ms": 1e3 * device / steps})
    medians = {
        name: {key: float(np.median([turn[key] for turn in some])) for key in some[0]} for name, some in turns.items()
    }
    table([("", "output tok/s", "step ms"), *((name, m["tokens_per_s"], m["step_ms"]) for name, m in medians.items())])
    ratio = {key: medians["streaming"][key] / medians["whole answers"][key] for key in ("tokens_per_s", "step_ms")}
    print(f"streaming / whole answers: tok/s {ratio['tokens_per_s']:.3f}, step {ratio['step_ms']:.3f}")
    return {"clients": args.clients, "medians": medians, "ratio": ratio, "turns": turns}


# Shared prefixes


async def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Time to first token of requests with a common prefix, all at once, with and without prefix caching."""
    rng = np.random.default_rng(1)
    medians: dict[str, list[float]] = {"cached": [], "not cached": []}
    for _ in range(args.repeat):
        for name, flags in (("cached", ()), ("not cached", ("--no-prefix-caching",))):
            common = draw(rng, 1, args.prefix_len, 4000)[0]
            prompts = [common + tail for tail in draw(rng, args.requests, 32, 4000)]
            async with serve("demo", *flags) as server:
                await load(server, draw(rng, 4, 64, 4000), 4)
                records = await load(server, prompts, 16)
            medians[name].append(float(np.median([record.ttft for record in records if record.ttft])))
    cached, plain = (float(np.median(medians[name])) for name in ("cached", "not cached"))
    table([("", "TTFT p50, s"), ("cached", cached), ("not cached", plain)])
    print(f"cached / not cached: {cached / plain:.3f}")
    return {"prefix_len": args.prefix_len, "requests": args.requests, "ttft_p50_s": medians, "ratio": cached / plain}


# Long prompts beside others


async def stall(args: argparse.Namespace) -> dict[str, Any]:
    """Inter-token latency of decoding clients, undisturbed and while a long prompt is computed, by chunk size."""
    rng = np.random.default_rng(2)
    model = make_model(MODEL)
    rows = []
    for chunk in args.chunks:
        async with serve(str(model), "--prefill-chunk", str(chunk), "--no-prefix-caching") as server:
            await load(server, draw(rng, 4, 64, 30_000), 4)
            rows.append({"chunk": chunk} | await _stall(server, rng, args))
        row = rows[-1]
        print(f"chunk {chunk}: {row}", file=sys.stderr)
    header = ("chunk", "undisturbed p50 ms", "p99 ms beside the prompt", "ratio", "prompt's TTFT, s")
    table([header, *((r["chunk"], r["quiet_p50_ms"], r["beside_p99_ms"], r["ratio"], r["ttft_s"]) for r in rows)])
    if args.plot:
        _plot_stall(rows, args.plot)
    return {"decoding": args.decoding, "prompt_len": args.prompt_len, "chunks": rows}


async def _stall(server: Server, rng: np.random.Generator, args: argparse.Namespace) -> dict[str, float]:
    target = Target(url=server.client.url, model=server.model, ignore_eos=True)
    sender = Sender(target, server.client)
    clock = time.perf_counter()
    decoding = [
        asyncio.create_task(sender.send(target.body(Prompt(prompt, args.output_len)), clock))
        for prompt in draw(rng, args.decoding, 64, 30_000)
    ]
    await asyncio.sleep(args.settle)
    (long,) = draw(rng, 1, args.prompt_len, 30_000)
    record = await sender.send(target.body(Prompt(long, 1)), clock)
    records = await asyncio.gather(*decoding)
    if error := next((r.error for r in [record, *records] if r.error), None):
        raise SystemExit(f"a request failed: {error}")
    first = record.start
    last = record.start + (record.ttft or 0.0)
    if min(r.end for r in records) < last:
        raise SystemExit("the decoding clients ended before the prompt was computed: give them more --output-len")
    gaps = [(at, gap) for r in records for at, gap in zip(r.arrivals[1:], r.itl, strict=True)]
    started = max(r.arrivals[0] for r in records)
    quiet = [gap for at, gap in gaps if started < at - gap and at < first]
    beside = [gap for at, gap in gaps if first < at and at - gap < last]
    figures = {"quiet_p50_ms": 1e3 * np.median(quiet), "beside_p99_ms": 1e3 * np.percentile(beside, 99)}
    figures |= {"beside_p50_ms": 1e3 * np.median(beside), "ttft_s": record.ttft}
    return {k: float(v) for k, v in figures.items()} | {"ratio": figures["beside_p99_ms"] / figures["quiet_p50_ms"]}


def _plot_stall(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(7, 4), layout="constrained")
    chunks = [str(row["chunk"]) for row in rows]
    left.plot(chunks, [row["ratio"] for row in rows], "o-", color="tab:blue")
    left.axhline(3.0, color="tab:blue", linestyle=":", linewidth=1)
    left.set(xlabel="--prefill-chunk, tokens", ylim=(0, None))
    left.set_ylabel("p99 gap between tokens / undisturbed p50", color="tab:blue")
    right = left.twinx()
    right.plot(chunks, [row["ttft_s"] for row in rows], "s--", color="tab:red")
    right.set_ylabel("prompt's time to first token, s", color="tab:red")
    right.set_ylim(0, None)
    left.set_title("What a long prompt costs those who decode, and itself")
    figure.savefig(path, dpi=120)


# Soak


async def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Many requests of mixed shape, some of them aborted; then compilations, pages and memory."""
    rng = random.Random(3)
    samples: list[tuple[int, float]] = []  # requests so far, resident MiB
    async with serve("demo") as server:
        before = await server.metric("compilations_total")
        done = failed = left = 0
        numbers = iter(range(args.requests))
        start = time.perf_counter()

        async def worker() -> None:
            nonlocal done, failed, left
            for _ in numbers:
                body, patience = _mixed_body(rng)
                try:
                    async with asyncio.timeout(patience):
                        status, _ = await server.post(body)
                    failed += status != 200
                except TimeoutError:
                    left += 1
                done += 1
                if done % max(args.requests // 50, 1) == 0:
                    samples.append((done, server.resident() / MEGABYTE))
                    print(f"{done} requests, {samples[-1][1]:.0f} MiB", file=sys.stderr)

        await asyncio.gather(*(worker() for _ in range(args.concurrency)))
        seconds = time.perf_counter() - start
        await server.idle()
        result = {
            "requests": args.requests,
            "seconds": seconds,
            "failed": failed,
            "left_midway": left,
            "compilations_after_ready": await server.metric("compilations_total") - before,
            "kv_cache_usage": await server.metric("kv_cache_usage_perc"),
            "generation_tokens": await server.metric("generation_tokens_total"),
            "preemptions": await server.metric("num_preemptions_total"),
        }
    half = [size for at, size in samples if at >= args.requests / 2]
    result |= {"resident_mib": samples, "last_half_growth": half[-1] / half[0] - 1, "spread": max(half) / min(half) - 1}
    table([(key, value) for key, value in result.items() if key != "resident_mib"])
    if args.plot:
        _plot_soak(samples, args.plot)
    return result


def _mixed_body(rng: random.Random) -> tuple[dict[str, Any], float | None]:
    """A request of random shape, and how long its client waits (None: to the end)."""
    length = min(int(rng.expovariate(1 / 40)) + 1, 1200)
    prompt = [rng.randrange(5, 4000) for _ in range(length)]
    if rng.random() < 0.3:
        prompt = [7] * rng.choice([64, 200]) + prompt  # a prefix shared with other requests
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": min(int(rng.expovariate(1 / 15)) + 1, 300),
        "temperature": rng.choice([0, 0.7, 1.0]),
        "seed": rng.randrange(2**31),
        "stream": rng.random() < 0.5,
    }
    options: list[tuple[float, Callable[[], dict[str, Any]]]] = [
        (0.1, lambda: {"n": rng.randrange(2, 4)}),
        (0.1, lambda: {"logprobs": rng.randrange(0, 5)}),
        (0.05, lambda: {"echo": True, "logprobs": 1}),
        (0.1, lambda: {"top_p": 0.9, "top_k": 50}),
        (0.1, lambda: {"presence_penalty": 0.5, "repetition_penalty": 1.2}),
        (0.1, lambda: {"stop": ["the", "\n\n"]}),
        (0.05, lambda: {"logit_bias": {"9": 5}}),
        (0.1, lambda: {"min_tokens": 1}),
    ]
    for share, option in options:
        if rng.random() < share:
            body |= option()
    return body, rng.uniform(0.05, 1.0) if rng.random() < 0.05 else None


def _plot_soak(samples: list[tuple[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(*zip(*samples, strict=True))
    axes.set(xlabel="requests", ylabel="resident memory of all processes, MiB", ylim=(0, None), title="Soak")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="MEASUREMENT")

    def command(run: Callable, **options: Any) -> None:
        one = commands.add_parser(run.__name__, help=run.__doc__)
        one.set_defaults(run=run)
        one.add_argument("--json", type=Path, help="write the figures to this file")
        for name, default in options.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(default, list):
                one.add_argument(flag, type=int, nargs="+", default=default, help="default: %(default)s")
            else:
                one.add_argument(flag, type=type(default) if default is not None else Path, default=default,
                                 help="default: %(default)s")  # fmt: skip

    command(streaming, clients=256, repeat=3)
    command(prefix, requests=32, prefix_len=1000, repeat=3)
    command(stall, decoding=16, prompt_len=3000, output_len=500, settle=5.0, chunks=[32, 48, 64, 128], plot=None)
    command(soak, requests=10_000, concurrency=32, plot=None)
    args = parser.parse_args()
    result = run(args.run(args))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
