"""Measures a server with several models: swaps, a hot model beside a server of its own, and random requests.

python benchmarks/several_models.py prepare FOLDER      makes bundles of the demo model, one for each seed
python benchmarks/several_models.py swaps FOLDER        seconds from a request to its answer, two models in turns
python benchmarks/several_models.py hot FOLDER          latencies of one model: alone, and as one of twelve
python benchmarks/several_models.py random FOLDER       names by Zipf's law, memory for four, engines are killed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COUNT = 12
SETTINGS = {"max-num-seqs": 8, "max-num-batched-tokens": 128, "max-model-len": 512, "kv-pages": 130}
BUNDLES = 2
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "swaps", "hot", "random"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="demo", help="what the models are made of")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("FLAG", "VALUE"), help="of `prepare`")
    parser.add_argument("--requests", type=int, default=2000, help="of `random`")
    parser.add_argument("--seconds", type=float, default=240, help="`random` ends after so long")
    args = parser.parse_args()
    globals()[f"run_{args.what}"](args)


def run_prepare(args: argparse.Namespace) -> None:
    """Two bundles, and a file of models with random weights, which their seeds tell apart."""
    settings = SETTINGS | dict(args.set) | {"load-format": "dummy"}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    for seed in range(BUNDLES):
        out = args.folder / f"m-{seed}"
        command = [sys.executable, "-m", "jaxserve", "bundle", args.model, "--out", str(out), *flags]
        subprocess.run([*command, "--seed", str(seed)], check=True)
    models = [
        {"name": f"m-{seed}", "source": args.model, "settings": settings | {"seed": seed}} for seed in range(COUNT)
    ]
    (args.folder / "models.json").write_text(json.dumps({"models": models}))


def run_swaps(args: argparse.Namespace) -> None:
    """Memory for one model, two in turns."""
    with several(["--model-dir", str(args.folder)], models=1.5) as (port, process):
        size = max(card["memory_bytes"] for card in cards(port).values())
        times = []
        for turn in range(9):
            began = time.perf_counter()
            assert ask(port, f"m-{turn % 2}")[0] == 200
            times.append(time.perf_counter() - began)
            anonymous = [memory_of(child) for child in children(process)]
        print(f"swaps: first {times[0]:.2f} s; then median {statistics.median(times[1:]):.2f} s, {times[1:]}")
        print(f"counted {size / MIB:.0f} MiB; an engine's memory of its own {[one // MIB for one in anonymous]} MiB")


def run_hot(args: argparse.Namespace) -> None:
    """One request at a time, to either server by chance, so that the machine's mood is the same for both."""
    choose = random.Random(1)
    models = ["--models", str(args.folder / "models.json")]
    with several(models, models=4.5) as (port, _), one_model(args.folder / "models.json") as alone:
        for number in range(4):
            assert ask(port, f"m-{number}")[0] == 200
        times: dict[str, list[float]] = {"alone": [], "one of several": []}
        for turn in range(1200):
            servers = [("alone", alone), ("one of several", port)]
            for name, where in choose.sample(servers, 2):
                began = time.perf_counter()
                status, _ = ask(where, "m-0", 16)
                assert status == 200
                if turn >= 50:
                    times[name].append(time.perf_counter() - began)
        figures = {name: (percentile(each, 50), percentile(each, 99)) for name, each in times.items()}
        for name, (p50, p99) in figures.items():
            print(f"{name}: p50 {1000 * p50:.2f} ms, p99 {1000 * p99:.2f} ms")
        (a50, a99), (b50, b99) = figures.values()
        print(f"slower by {100 * (b50 / a50 - 1):.1f}% at p50, {100 * (b99 / a99 - 1):.1f}% at p99")


def run_random(args: argparse.Namespace) -> None:
    choose = random.Random(1)
    names = choose.choices(range(COUNT), [1 / (rank + 1) for rank in range(COUNT)], k=args.requests)
    seen: Counter[str] = Counter()
    most_counted = most_real = 0.0
    hot: list[float] = []
    with several(["--models", str(args.folder / "models.json")], models=4.5) as (port, process):
        expected = {}
        for number in range(COUNT):
            status, mark = ask(port, f"m-{number}", 8)
            assert status == 200
            expected[number] = mark
        end = time.monotonic() + args.seconds
        assert len(set(expected.values())) == COUNT, f"the models' answers tell them apart, not {expected}"

        def one(number: int) -> None:
            if time.monotonic() > end:
                seen["not asked"] += 1
                return
            began = time.perf_counter()
            status, mark = ask(port, f"m-{number}", 8)
            if status != 200:
                seen[mark] += 1
                return
            seen["answered"] += 1
            seen["by the wrong model"] += mark != expected[number]
            if number == 0:
                hot.append(time.perf_counter() - began)

        kills = 0
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(one, number) for number in names]
            while not all(request.done() for request in asked):
                engines = children(process)
                listed = cards(port)
                resident = [one for one in listed.values() if one["state"] in ("starting", "ready", "unloading")]
                most_counted = max(most_counted, sum(one["memory_bytes"] for one in resident))
                most_real = max(most_real, sum(map(memory_of, engines)))
                if engines and choose.random() < 0.2:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(choose.choice(engines), signal.SIGKILL)
                        kills += 1
                time.sleep(1)
            for request in asked:
                request.result()
        print(f"{dict(seen)}, {kills} kills")
        print(f"memory: at most {most_counted / MIB:.0f} MiB counted, {most_real / MIB:.0f} MiB in the processes")
        print(f"hot model: p50 {1000 * percentile(hot, 50):.1f} ms, p99 {1000 * percentile(hot, 99):.1f} ms")
        for line in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines():
            if line.startswith(("jaxserve:model_starts_total", "jaxserve:models_memory_limit")):
                print(line)


@contextlib.contextmanager
def several(flags: list[str], models: float) -> Iterator[tuple[int, subprocess.Popen]]:
    """A server with models, and memory for so many of them."""
    port = free_port()
    with running([*flags, "--no-access-log"], port, "several.log"):
        size = max(card["memory_bytes"] for card in known(port).values())
    flags = [*flags, "--models-memory", str(models * size / 2**30), "--engine-restarts", "100", "--model-wait", "120"]
    with running([*flags, "--no-access-log"], port, "several.log") as process:
        known(port)
        yield port, process


def known(port: int) -> dict[str, dict]:
    """The models, once their sizes are known."""
    found = cards(port)
    while any(card["memory_bytes"] is None for card in found.values()):
        reasons = [card["reason"] for card in found.values() if card["reason"]]
        assert not reasons, reasons
        time.sleep(0.1)
        found = cards(port)
    return found


@contextlib.contextmanager
def one_model(file: Path) -> Iterator[int]:
    """A server with the first model of the file."""
    port = free_port()
    model = json.loads(file.read_text())["models"][0]
    flags = [word for name, value in model["settings"].items() for word in (f"--{name}", str(value))]
    with running([model["source"], *flags, "--served-model-name", "m-0", "--no-access-log"], port, "alone.log"):
        yield port


@contextlib.contextmanager
def running(flags: list[str], port: int, log: str) -> Iterator[subprocess.Popen]:
    with open(log, "w") as output:
        command = [sys.executable, "-m", "jaxserve", "serve", *flags, "--port", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready")
                break
            assert process.poll() is None, f"see {log}"
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(30)


def ask(port: int, model: str, tokens: int = 1) -> tuple[int, str]:
    """The status, and the code of the error or the log-probability of the answer's first token, which tells models of
    random weights apart: all of them repeat the prompt's last token."""
    body = {"model": model, "prompt": [70, 71, 72, 73], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["logprobs"] = 0
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, f"{json.load(answer)['choices'][0]['logprobs']['token_logprobs'][0]:.3f}"
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]


def cards(port: int) -> dict[str, dict]:
    found = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models"))["data"]
    return {card["id"]: card for card in found}


def children(process: subprocess.Popen) -> list[int]:
    return [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def memory_of(process: int) -> int:
    """Bytes of a process that no file backs; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
