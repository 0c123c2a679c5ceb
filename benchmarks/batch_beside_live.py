"""Time to the first token of live requests, with and without a batch of 10,000 requests behind them.

    python benchmarks/batch_beside_live.py --requests 100

Starts a server on a model of random weights (8 layers of 512). Clients stream 32 tokens after a prompt of `--prompt`
tokens that the cache does not have: one after the other with short pauses, or, with `--rate`, so many begin a second,
at random. This is done in turns without and with a batch in progress, of `--batch` requests of 100 tokens that ask for
64 more. Prints the median and the 90th percentile of both in milliseconds, their ratios, and how many requests of the
batch were answered meanwhile."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "server")]
SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "intermediate_size": 1536, "max_position_embeddings": 1024}  # fmt: skip


def model_folder() -> Path:
    from serving import DEMO

    folder = Path(tempfile.mkdtemp())
    for path in DEMO.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SIZES))
    return folder


def first_token(client: httpx.Client, prompt: list[int]) -> float:
    """Seconds until the first token of one request."""
    body = {"prompt": prompt, "max_tokens": 32, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    first = None
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and first is None:
                first = time.perf_counter() - began
    assert first is not None
    return first


def live(client: httpx.Client, count: int, length: int, rate: float | None, rng: random.Random) -> list[float]:
    """Seconds until the first token of each of `count` requests."""
    with ThreadPoolExecutor(64) as threads:
        started = []
        for _ in range(count):
            prompt = [rng.randrange(50, 400) for _ in range(length)]
            started.append(threads.submit(first_token, client, prompt))
            if rate is None:
                started[-1].result()
            time.sleep(rng.random() * 0.3 if rate is None else rng.expovariate(rate))
        return [one.result() for one in started]


def start_batch(client: httpx.Client, count: int, rng: random.Random) -> str:
    lines = []
    for i in range(count):
        body = {"prompt": [rng.randrange(50, 400) for _ in range(100)], "max_tokens": 64, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}))
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b", "\n".join(lines).encode())}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    name = client.post("/v1/batches", json=body).json()["id"]
    while status(client, name)["status"] == "validating":
        time.sleep(0.1)
    return name


def status(client: httpx.Client, name: str) -> dict[str, Any]:
    return client.get(f"/v1/batches/{name}").json()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] * 1000


def main() -> None:
    from serving import running_server

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="live requests of each kind")
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=400, help="tokens of a prompt of a live request")
    parser.add_argument("--rate", type=float, help="live requests a second; None: one after the other")
    args = parser.parse_args()
    rng = random.Random(1)
    folder = Path(tempfile.mkdtemp())
    config = {"load_format": "dummy", "max_num_seqs": 16, "max_model_len": 512, "max_num_batched_tokens": 256}
    with running_server(
        model_folder(), folder / "log", engine=None, config=config, files_dir=str(folder / "state")
    ) as server:
        client = server.http()
        found: dict[str, list[float]] = {"alone": [], "beside": []}
        answered = 0
        seconds = 0.0
        live(client, 5, args.prompt, None, rng)
        for _ in range(args.turns):
            for kind, times in found.items():
                name = start_batch(client, args.batch, rng) if kind == "beside" else None
                time.sleep(2.0 if name else 0.2)
                began = time.perf_counter()
                times += live(client, args.requests // args.turns, args.prompt, args.rate, rng)
                if name is not None:
                    seconds += time.perf_counter() - began
                    answered += status(client, name)["request_counts"]["completed"]
                    client.post(f"/v1/batches/{name}/cancel")
                    while status(client, name)["status"] != "cancelled":
                        time.sleep(0.1)
    for share, label in ((0.5, "p50"), (0.9, "p90")):
        alone, beside = (percentile(found[kind], share) for kind in ("alone", "beside"))
        print(f"{label}: {alone:.1f} ms alone, {beside:.1f} ms beside the batch, {beside / alone:.3f} times")
    means = [statistics.mean(times) * 1000 for times in found.values()]
    print(f"mean: {means[0]:.1f} ms, {means[1]:.1f} ms, {means[1] / means[0]:.3f} times")
    print(f"{answered} requests of the batch answered in {seconds:.0f} s of live requests and the pauses before them")


if __name__ == "__main__":
    main()
