"""What lower tiers of KV pages bring and cost, on random weights; ratios within one run, whose engines take turns.

python benchmarks/offload.py [--shape 100M] [--prefixes 16] [--prefix 512] [--rounds 3]

reuse: requests begin with one of several prefixes, which together take 8 times the pages of the devices, and each comes
again when its pages were evicted long ago. Prints the median time to the first token of requests that come one at a
time, with pages in host memory and without (computed again).

no reuse: requests with prompts of their own, eight at a time, while every page that is evicted is copied. Prints output
tokens per second with and without host memory, which take turns, and the median of the turns' ratios; and the same of
processor time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from peers.model import SHAPES

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.types import Request, SamplingParams

PAGE = 16
ROWS = 8
SMALL_GIB = 0.03  # without reuse: so little that its places are used again soon, as on a server that runs for long


def load(folder: str, pages: int, gib: float, longest: int) -> Engine:
    settings = {"load_format": "dummy", "max_num_seqs": ROWS, "max_num_batched_tokens": 512, "page_size": PAGE}
    config = EngineConfig(model=folder, kv_pages=pages, max_model_len=longest, kv_offload_gib=gib, **settings)
    engine = Engine.load(config, progress=False)
    engine.compile()
    return engine


def add(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))


def first_token(engine: Engine, name: str, prompt: list[int]) -> float:
    """Seconds until a request that runs alone has its first token."""
    start = time.perf_counter()
    add(engine, name, prompt, 1)
    while not len(engine.step()):
        pass
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return seconds


def throughput(engine: Engine, name: str, prompts: list[list[int]], outputs: int) -> tuple[float, float]:
    """Output tokens per second, and per second of this process's processor time, of these requests, ROWS of them at a
    time."""
    start = time.perf_counter()
    busy = time.process_time()
    left = list(enumerate(prompts))
    while left or engine.has_work:
        while left and len(engine.scheduler.running) + engine.num_waiting < ROWS:
            number, prompt = left.pop(0)
            add(engine, f"{name}-{number}", prompt, outputs)
        engine.step()
    made = len(prompts) * outputs
    return made / (time.perf_counter() - start), made / (time.process_time() - busy)


def middle(ratios: list[float]) -> float:
    """The geometric mean of the middle half of these ratios."""
    ratios = sorted(ratios)[len(ratios) // 4 : len(ratios) - len(ratios) // 4]
    return statistics.geometric_mean(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="100M")
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=8, help="of a round without reuse")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt without reuse")
    parser.add_argument("--outputs", type=int, default=32, help="tokens of an answer without reuse")
    parser.add_argument("--only", choices=("reuse", "no reuse"))
    given = parser.parse_args()
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(1, 30_000, count).tolist()

    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[given.shape]))
        if given.only != "no reuse":
            pool = given.prefixes * given.prefix // PAGE // 8 + 1
            engines = {"loaded": load(folder, pool, given.gib, 960), "computed": load(folder, pool, 0.0, 960)}
            prefixes = [tokens(given.prefix) for _ in range(given.prefixes)]
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(1 + given.rounds):
                for number, prefix in enumerate(prefixes):
                    prompt = prefix + tokens(8)
                    for name, engine in engines.items():
                        took = first_token(engine, f"{turn}-{number}", prompt)
                        if turn:
                            seconds[name].append(took)
            p50 = {name: statistics.median(some) for name, some in seconds.items()}
            result["prefixes of so many times the pool"] = given.prefixes * given.prefix / PAGE / (pool - 1)
            result["ttft p50"] = p50
            result["loaded / computed"] = round(p50["loaded"] / p50["computed"], 4)
            result["hits"] = engines["loaded"].stats().offload_hits
            result["costs"] = str(engines["loaded"].blocks.tiers and engines["loaded"].blocks.tiers.costs)
            del engines, engine
        if given.only != "reuse":
            longest = given.prompt + given.outputs
            pages = (ROWS + 1) * (longest // PAGE + 1)
            engines = {"offload": load(folder, pages, SMALL_GIB, longest), "plain": load(folder, pages, 0.0, longest)}
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for turn in range(2 + 4 * given.rounds):
                prompts = [tokens(given.prompt) for _ in range(given.requests)]
                order = list(engines.items())
                for name, engine in order if turn % 2 else order[::-1]:
                    rate = throughput(engine, f"{turn}", prompts, given.outputs)
                    if turn > 1:
                        rates[name].append(rate)
            for which, measure in enumerate(("tokens per second", "tokens per second of processor time")):
                each = {name: [rate[which] for rate in some] for name, some in rates.items()}
                ratios = [a / b for a, b in zip(each["offload"], each["plain"], strict=True)]
                result[measure] = {name: round(statistics.median(some), 1) for name, some in each.items()} | {
                    "offload / plain, median of turns": round(statistics.median(ratios), 4),
                    "offload / plain, mean of the middle half": round(middle(ratios), 4),
                    "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
                }
            result["pages copied"] = engines["offload"].copies and engines["offload"].copies.saved
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
