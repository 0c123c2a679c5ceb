"""Prefill and decode apart against one server: time between tokens while prompts arrive, and the cost of a transfer.

python benchmarks/roles.py [--shape 100M] [--streams 4] [--prompts 8] [--prompt 1024] [--rounds 3]

Servers are processes with random weights on this machine's first two cores: one server on both of them, and a prefill
and a decode server on one core each. They take turns. In a turn, streams decode while long prompts with one token to
answer come one after the other. Prints the time between two tokens of the streams (median and 99th percentile) and the
time to the first token of the long prompts. Then, without streams: the time to the first token of a prompt that one
server computes, that a prefill server computes and sends, and that a prefill server has cached and only sends, from
which the bytes per second of a transfer follow.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
from peers.model import SHAPES

MAIN = "import sys; from jaxserve.commands.cli import main; sys.exit(main())"
ADMIN = {"Authorization": "Bearer admin"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def server(folder: str, cores: str, *flags: str) -> Iterator[str]:
    """A server on these cores; its address."""
    port = free_port()
    command = ["taskset", "-c", cores, sys.executable, "-c", MAIN, "serve", folder, "--load-format=dummy",
               "--served-model-name=m", f"--port={port}", "--max-num-seqs=16", "--max-model-len=4096",
               "--max-num-batched-tokens=512", "--kv-pages=1600", "--page-size=16", "--admin-key=admin",
               "--open-metrics", "--kv-offload-gib=1", *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"jaxserve:{name}{{")).rsplit(" ", 1)[1])


def forget(url: str) -> None:
    httpx.post(f"{url}/reset_prefix_cache", headers=ADMIN, json={}).raise_for_status()


def stream(url: str, prompt: list[int], tokens: int) -> list[float]:
    """When the request was sent, and when each event with tokens came."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times = [time.perf_counter()]
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in line, line
                times.append(time.perf_counter())
    return times


def turn(url: str, seed: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Gaps between tokens of the streams while prompts come, and the prompts' times to the first token."""
    rng = np.random.default_rng(seed)
    ended = threading.Event()
    stamps = [[] for _ in range(args.streams)]

    def decode(number: int) -> None:
        prompt = rng.integers(5, 1000, 24).tolist()
        while not ended.is_set():
            stamps[number].append(stream(url, prompt, 96)[1:])

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(args.streams)]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    start = time.perf_counter()
    firsts = []
    for _ in range(args.prompts):
        times = stream(url, rng.integers(5, 1000, args.prompt).tolist(), 1)
        firsts.append(times[1] - times[0])
    end = time.perf_counter()
    ended.set()
    for thread in threads:
        thread.join()
    gaps = [b - a for runs in stamps for run in runs for a, b in itertools.pairwise(run) if start < b < end]
    return gaps, firsts


def first_token(url: str, prompt: list[int]) -> float:
    times = stream(url, prompt, 1)
    return times[1] - times[0]


def report(name: str, gaps: list[float], firsts: list[float]) -> None:
    middle, high = np.percentile(gaps, [50, 99]) * 1000
    print(f"{name}: {len(gaps)} gaps, median {middle:.1f} ms, p99 {high:.1f} ms, longest {max(gaps) * 1000:.0f} ms; "
          f"long prompts' first token, median {np.median(firsts):.2f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="100M", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["JAXSERVE_HOST_SECRET"] = "a secret of the benchmark"
    address = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        alone = stack.enter_context(server(folder, "0,1"))
        prefill = stack.enter_context(server(folder, "0", "--role=prefill", f"--prefill-listen={address}"))
        apart = stack.enter_context(
            server(folder, "1", "--role=decode", f"--prefill-servers={address}", "--prefill-timeout=60")
        )
        while not metric(apart, "prefill_servers_up"):
            time.sleep(0.1)
        totals: dict[str, tuple[list[float], list[float]]] = {"alone": ([], []), "apart": ([], [])}
        for number in range(args.rounds):
            for name, url in (("alone", alone), ("apart", apart)):
                for total, part in zip(totals[name], turn(url, number, args), strict=True):
                    total += part
        for name, found in totals.items():
            report(name, *found)
        print(f"fallbacks: {metric(apart, 'prefill_fallbacks_total'):.0f}")
        rng = np.random.default_rng(99)
        rows = []
        for _ in range(args.rounds):
            prompt = rng.integers(5, 1000, args.prompt).tolist()
            one = first_token(alone, prompt)
            computed = first_token(apart, prompt)
            forget(apart)
            before = metric(apart, "prefill_fetch_bytes_total"), metric(apart, "prefill_fetch_seconds_total")
            sent = first_token(apart, prompt)
            time.sleep(0.3)
            after = metric(apart, "prefill_fetch_bytes_total"), metric(apart, "prefill_fetch_seconds_total")
            rows.append((one, computed, sent, after[0] - before[0], after[1] - before[1]))
        one, computed, sent, size, seconds = np.median(np.asarray(rows), axis=0)
        print(f"first token without streams, medians of {args.rounds}: one server {one:.3f} s, computed by a prefill "
              f"server {computed:.3f} s, cached there {sent:.3f} s; a transfer of {size / 1e6:.1f} MB took "
              f"{seconds:.3f} s, {size / seconds / 1e6:.0f} MB/s")  # fmt: skip
        assert metric(prefill, "prefill_export_pages_total")


if __name__ == "__main__":
    main()
