"""Runs the same requests under random schedules, and counts those whose tokens or log-probabilities differ in any bit.

    python benchmarks/determinism.py --requests 2000 --schedules 10 --dtype bfloat16 --deterministic

A schedule is an engine with its own number of rows, chunks, pages, calls, caching and speculation, in which the
requests arrive in a random order and at random times. Half of the schedules have too few pages, so that requests are
preempted. Every schedule runs in a process of its own. It is killed in the middle of its work, and another process,
with another order, answers the requests that were left. What each process answered before it was killed counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.types import Request, SamplingParams

LONGEST = 256


def make_requests(count: int, vocab: int) -> list[Request]:
    """Prompts of 3 to 180 tokens, a third of which begin like others, with greedy and sampled continuations. Every
    request asks for log-probabilities, every fourth one also for those of its prompt."""
    rng = np.random.default_rng(42)
    shared = [rng.integers(5, vocab, 96).tolist() for _ in range(8)]
    made = []
    for i in range(count):
        prompt = rng.integers(5, vocab, rng.integers(3, 90)).tolist()
        if i % 3 == 0:
            prompt = shared[rng.integers(len(shared))][: rng.integers(16, 97)] + prompt
        if i % 5 == 0:  # repeated text, from which n-grams are proposed
            prompt = prompt[:12] * 4
        params: dict[str, Any] = {"temperature": 0.0}
        if i % 2:
            params = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": i}
        if i % 6 == 1:
            params |= {"frequency_penalty": 0.2, "repetition_penalty": 1.1, "presence_penalty": 0.1}
        if i % 4 == 0:
            params["prompt_logprobs"] = 1
        params |= {"max_tokens": int(rng.integers(8, 33)), "ignore_eos": True, "logprobs": 2}
        made.append(Request(request_id=str(i), prompt_token_ids=prompt, params=SamplingParams(**params)))
    return made


def make_schedule(number: int) -> dict[str, Any]:
    """The settings of a schedule. The first is the plainest: one request at a time."""
    if number == 0:
        return {"max_num_seqs": 1, "prefix_caching": False, "decode_steps": 1, "max_num_batched_tokens": 256}
    rng = np.random.default_rng(1000 + number)
    rows = int(rng.choice([2, 3, 5, 8, 13, 16]))
    options = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": int(rng.choice([24, 32, 48, 100, 256])),
        "prefill_chunk": int(rng.choice([16, 24, 37, 64])),
        "prefix_caching": bool(rng.integers(4)),
        "decode_steps": int(rng.choice([1, 2, 8])),
        "async_scheduling": bool(rng.integers(3)),
        "page_size": int(rng.choice([8, 16, 32])),
    }
    if number % 2:
        options["kv_pages"] = max(LONGEST + 64, rows * 64) // options["page_size"]
    if number % 3 == 0:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": int(rng.integers(2, 8))}
    return options


def bits(values: list[Any]) -> list[Any]:
    """Log-probabilities as the bits of their floats."""

    def of(one: Any) -> Any:
        top = [(token, np.float32(logprob).view(np.uint32).item()) for token, logprob in one.top]
        return None if one is None else (np.float32(one.logprob).view(np.uint32).item(), one.rank, top)

    return [None if one is None else of(one) for one in values]


def answer(arguments: argparse.Namespace) -> None:
    """Answers the requests that are not in the file of answers yet, and appends their answers to it."""
    options = json.loads(arguments.child)
    order = options.pop("order")
    file = Path(options.pop("file"))
    config = EngineConfig(
        model=arguments.model, dtype=arguments.dtype, quantization=arguments.quantization,
        matmul_backend=arguments.matmul_backend, kv_cache_dtype=arguments.kv_cache_dtype, max_model_len=LONGEST,
        deterministic=arguments.deterministic, **({"kv_pages": 2000} | options),
    )  # fmt: skip
    engine = Engine.load(config, progress=False)
    done = {json.loads(line)["id"] for line in file.read_text().splitlines() if line.endswith("}")}
    rng = np.random.default_rng(order)
    requests = make_requests(arguments.requests, engine.model.vocab_size)
    left = [requests[i] for i in rng.permutation(len(requests)) if str(i) not in done]
    found: dict[str, dict[str, Any]] = {}
    print("ready", flush=True)
    with file.open("a") as out:
        while left or engine.has_work:
            for _ in range(rng.integers(0, 4)):
                if left and engine.stats().num_waiting < 20:
                    engine.add_request(left.pop())
            for update in engine.step():
                one = found.setdefault(update.request_id, {"id": update.request_id, "tokens": [], "scores": []})
                one["tokens"] += update.token_ids
                one["scores"] += bits(update.logprobs or [])
                if update.prompt_logprobs:
                    one["prompt"] = bits(update.prompt_logprobs)
                if update.finish_reason is not None:
                    out.write(json.dumps(found.pop(update.request_id)) + "\n")
                    out.flush()
    stats = engine.stats()
    told = {name: getattr(stats, name) for name in ("preemptions", "prefix_hits", "spec_proposed", "spec_accepted")}
    print(json.dumps(told), flush=True)


def run_schedule(number: int, arguments: argparse.Namespace, folder: Path, kill: bool) -> dict[str, dict[str, Any]]:
    """The answers under one schedule, by request id."""
    file = folder / f"{number}.jsonl"
    file.touch()
    flags = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in PASSED]
    flags += ["--deterministic"] * arguments.deterministic
    for attempt in range(2 if kill else 1):
        given = make_schedule(number) | {"order": 10 * number + attempt, "file": str(file)}
        command = [sys.executable, __file__, *flags, "--child", json.dumps(given)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        if kill and attempt == 0:
            child.stdout.readline()
            while child.poll() is None and len(file.read_bytes().splitlines()) < arguments.requests // 2:
                time.sleep(0.05)
            child.kill()
        told = child.stdout.read().split("\n")
        code = child.wait()
        assert (kill and attempt == 0) or code == 0, f"schedule {number} ended with {code}"
        text = file.read_text()
        file.write_text(text[: text.rfind("\n") + 1])  # without the line in whose middle the process was killed
    answers = {one["id"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert len(answers) == arguments.requests, f"schedule {number} answered {len(answers)}"
    print(number, make_schedule(number), told[-2] if len(told) > 1 else "", flush=True)
    return answers


PASSED = ("requests", "model", "dtype", "quantization", "matmul-backend", "kv-cache-dtype")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--schedules", type=int, default=10)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--matmul-backend", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-kill", action="store_true", help="let every process end by itself")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return answer(arguments)
    with tempfile.TemporaryDirectory() as folder:
        first = run_schedule(0, arguments, Path(folder), kill=False)
        differing: dict[str, set[str]] = {"tokens": set(), "scores": set(), "prompt": set()}
        for number in range(1, arguments.schedules + 1):
            start = time.perf_counter()
            other = run_schedule(number, arguments, Path(folder), kill=not arguments.no_kill)
            ids = {kind: {i for i in first if first[i].get(kind) != other[i].get(kind)} for kind in differing}
            print(f"  differ: { {k: len(v) for k, v in ids.items()} }, {time.perf_counter() - start:.0f} s", flush=True)
            for kind, some in ids.items():
                differing[kind] |= some
    every = set().union(*differing.values())
    print(json.dumps({k: len(v) for k, v in differing.items()} | {"any": len(every), "of": len(first)}))
    sys.exit(1 if every and arguments.deterministic else 0)


if __name__ == "__main__":
    main()
