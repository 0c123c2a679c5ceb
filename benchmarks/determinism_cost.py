"""What `--deterministic` costs in tokens per second, in each mode: engines in turns on one CPU, and an estimate for
devices that are not here by their data sheets.

    python benchmarks/determinism_cost.py [--model FOLDER] [--concurrency 1 8 32] [--turns 5]
    python benchmarks/determinism_cost.py --estimate h200x1 --model FOLDER_WITH_CONFIG [--concurrency 1 8 32 256]

Without --model it is the 100 M shape of `peers/model.py`. Ratios are seconds of a mode over those of the usual one in
neighbouring turns, because other work on the machine slows both. The estimate counts reading the weights and the cached
keys and values, the arithmetic, and the host's time between a check and the next call; usual steps overlap with the
host.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.devices.targets import rates
from jaxserve.engine.verify_mode import tokens_of_step
from jaxserve.execution.cost import BANDWIDTH_SHARE
from jaxserve.llm import LLM
from jaxserve.plan.deployment import Deployment
from jaxserve.types import SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "usual": {},
    "kernels": {"deterministic": True},
    "verify": {"deterministic": True, "deterministic_mode": "verify"},
}
# Of the host between a check and the next call: measured for 32 rows with steps that do nothing, on a Zen 4 core of a
# server. XLA's call of an empty step on CPU, 0.19 ms, is included.
HOST_SECONDS = 0.7e-3


def load(arguments: argparse.Namespace, model: str, mode: str) -> LLM:
    options = {name: getattr(arguments, name) for name in ("dtype", "quantization", "matmul_backend")}
    llm = LLM(model, max_num_seqs=32, max_model_len=512, prefix_caching=False, kv_pages=2000, **options, **MODES[mode])
    llm.engine.compile()
    return llm


def seconds(llm: LLM, rows: int, answer: int) -> float:
    rng = np.random.default_rng(rows)
    prompts = rng.integers(1, llm.engine.vocab_size, (rows, 128)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace, model: str) -> None:
    engines = {mode: load(arguments, model, mode) for mode in arguments.modes}
    print("| rows | " + " | ".join(f"{mode}: seconds over usual, quartiles" for mode in arguments.modes[1:]) + " |")
    print("|---" * len(arguments.modes) + "|", flush=True)
    for rows in arguments.concurrency:
        ratios: dict[str, list[float]] = {mode: [] for mode in arguments.modes[1:]}
        for turn in range(1 + arguments.turns):
            order = arguments.modes[:: 1 if turn % 2 else -1]
            took = {mode: seconds(engines[mode], rows, arguments.answer) for mode in order}
            for mode, some in ratios.items():
                some.append(took[mode] / took["usual"])
        cells = [" ".join(f"{x:.2f}" for x in np.quantile(some[1:], (0.25, 0.5, 0.75))) for some in ratios.values()]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)
    stats = engines["verify"].engine.stats() if "verify" in engines else None
    if stats is not None:
        print(f"decoded ahead: {stats.spec_proposed} tokens in {stats.spec_drafts} windows, kept {stats.spec_accepted}")


def estimate(arguments: argparse.Namespace, model: str) -> None:
    """Seconds for a token of each row, usually and verified. A step of T tokens checks rows of T / rows tokens each; if
    there are as many rows, it decodes."""
    options: Any = {"dtype": "bfloat16", "quantization": arguments.quantization, "load_format": "dummy"}
    found = Deployment.of(EngineConfig(model=model, **options), arguments.estimate)
    cost = found.cost
    device = rates(found.device)
    assert cost is not None
    tokens = tokens_of_step(cost)
    context = found.plan.one_page.token_bytes * arguments.context / found.devices
    kv = context / (device.bandwidth * BANDWIDTH_SHARE)
    print(f"{arguments.estimate}: steps of {tokens} tokens, context {arguments.context}")
    print("| rows | decoded ahead | a decode | a check | usual, a token | verified, a token | ratio |")
    print("|---|---|---|---|---|---|---|")
    for rows in arguments.concurrency:
        ahead = max(min(arguments.window, tokens // rows - 1), 0)
        decode = cost(rows) + rows * kv
        check = cost(tokens) + min(rows, tokens) * kv
        checks = -(-rows * (ahead + 1) // tokens)
        verified = (ahead * decode + checks * check + HOST_SECONDS * (ahead > 0)) / (ahead + 1)
        times = " | ".join(f"{1000 * x:.2f} ms" for x in (decode, check, decode, verified))
        print(f"| {rows} | {ahead} | {times} | {verified / decode:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--estimate", metavar="TARGET")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--window", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--matmul-backend", default="auto")
    arguments = parser.parse_args()
    run = estimate if arguments.estimate else measure
    if arguments.model:
        return run(arguments, arguments.model)
    from peers.model import make_model

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        run(arguments, folder)


if __name__ == "__main__":
    main()
