"""Stage `server`: a server of the 8B shape with dummy weights: its start with an empty and with a filled compilation
cache, and between them load from `jaxserve bench serve`: time to first token, time between tokens, tokens per second.

Starts and loads are measured alone on the machine. A start that takes longer than ALONE goes on beside others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.model import write_tokenizer

from jaxserve import entry
from jaxserve.bench import startup
from jaxserve.pallas_kernels.alone import RUN, alone
from light.decode import SHAPE, SMALL, folder_of
from light.record import Record

ALONE = 90.0  # seconds
MOST_START = {False: 150.0, True: 400.0}  # seconds
POLL = 0.02
# Requests at a time, and how many in all.
LOADS = {False: ((1, 4), (32, 96), (256, 384)), True: ((1, 2), (4, 8))}
LENGTHS = {False: (1024, 128), True: (24, 8)}  # tokens of a prompt, and of an output
MARGIN = 64


def run(record: Record, *, rehearse: bool) -> None:
    keys = ["cold start", *(f"{open_} at a time" for open_, _ in LOADS[rehearse]), "warm start"]
    if all(record.has(key) for key in keys):
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = folder_of(SMALL if rehearse else SHAPE, Path(folder) / "model")
        write_tokenizer(model, (SMALL if rehearse else SHAPE)["vocab_size"])
        # Without RUN, as the server may measure while this process holds the machine for it.
        env = {name: value for name, value in os.environ.items() if name != RUN}
        env |= {"JAXSERVE_CACHE": f"{folder}/cache", "JAXSERVE_TUNING": f"{folder}/tuning"}
        port = stack.enter_context(_started(record, keys[0], model, env, rehearse))
        if port is None:
            return
        for open_, requests in LOADS[rehearse]:
            if record.take(key := f"{open_} at a time"):
                with record.row(key) as row:
                    row |= {"open": open_} | _load(port, open_, requests, env, Path(folder), rehearse)
        stack.close()  # stops the server
        with _started(record, keys[-1], model, env, rehearse):
            pass


@contextlib.contextmanager
def _started(record: Record, key: str, model: Path, env: dict[str, str], rehearse: bool) -> Iterator[int | None]:
    """A context with a ready server: its port, or None if it does not start. Its start is a row, the first time."""
    port = startup.free_port()
    command = entry.command("jaxserve", "serve", str(model), "--port", str(port), *flags(rehearse))
    with contextlib.ExitStack() as stack:
        if not record.take(key):
            process, _ = stack.enter_context(startup.server_process(command, env))
            yield port if _wait(process, port, time.perf_counter(), MOST_START[rehearse]) is not None else None
            return
        with record.row(key) as row:
            with alone():
                began = time.perf_counter()
                process, log = stack.enter_context(startup.server_process(command, env))
                ready = _wait(process, port, began, ALONE)
            alone_s = time.perf_counter() - began
            if ready is None:
                ready = _wait(process, port, began, MOST_START[rehearse])
            row |= {"ready_s": ready, "alone_s": alone_s, **phases(log.so_far)}
            if ready is None:
                row |= {"status": "failed", "reason": f"not ready after {MOST_START[rehearse]:.0f} s, or ended"}
                row["output"] = log.so_far[-3000:]
        yield port if row["status"] == "ok" else None


def phases(text: str) -> dict[str, float]:
    """What a server's log says of its start."""
    patterns = {
        "loaded_s": r"loaded .* in ([\d.]+) s",
        "compiled_s": r"compiled \d+ executables in ([\d.]+) s",
        "programs": r"compiled (\d+) executables",
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


def flags(rehearse: bool) -> list[str]:
    input_len, output_len = LENGTHS[rehearse]
    longest = input_len + output_len + MARGIN
    most = LOADS[rehearse][-1][0]
    page = 8 if rehearse else 16
    pages = most * -(-longest // page) + 1
    found = ["--load-format", "dummy", "--max-model-len", str(longest), "--kv-pages", str(pages)]
    return found + ["--max-num-seqs", str(most), "--page-size", str(page)] if rehearse else found


def _wait(process: subprocess.Popen[str], port: int, began: float, most: float) -> float | None:
    """Seconds until the server was ready; None if it is not after `most` seconds, or has ended."""
    while startup.status(port, "/ready") != 200:
        if process.poll() is not None or time.perf_counter() - began > most:
            return None
        time.sleep(POLL)
    return time.perf_counter() - began


def _load(port: int, open_: int, requests: int, env: dict[str, str], folder: Path, rehearse: bool) -> dict[str, Any]:
    """The summary of `jaxserve bench serve`, after a warm-up with as many requests as are open at a time."""
    out, (input_len, output_len) = folder / f"{open_}.json", LENGTHS[rehearse]
    vocabulary = (SMALL if rehearse else SHAPE)["vocab_size"]
    command = entry.command(
        "jaxserve", "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--concurrency", str(open_),
        "--num-requests", str(requests), "--warmup", str(min(open_, 32)), "--input-len", str(input_len),
        "--output-len", str(output_len), "--vocab-size", str(vocabulary), "--ignore-eos", "--json", str(out),
    )  # fmt: skip
    with alone():
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ALONE)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-1000:])
    return json.loads(out.read_text())["summary"]
