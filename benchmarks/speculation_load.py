"""Does speculation slow a busy server down? Tokens per second with many requests at a time, speculation on and off in
turns, for each method that the demo model has a draft for.

Ratios are given of wall time and of the process's own time, which other work on the machine disturbs less. The latter
does not show whether host and devices overlap; pin the process to one core (`taskset -c 0`), where threads do not poll.

Prompts are windows of the files that neither the demo nor its drafts saw, so that little is repeated and most proposals
fail. Each turn runs the same requests on an engine without speculation, then on one with it; ratios are of neighbouring
turns, because other work on the machine slows both.

    python benchmarks/speculation_load.py [METHOD ...] [--concurrency 32] [--turns 9]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from demo_text import is_heldout, read_sources
from tokenizers import Tokenizer

from jaxserve.llm import LLM
from jaxserve.types import SamplingParams

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
METHODS = {
    "ngram": {"num_speculative_tokens": 8},
    "suffix": {"num_speculative_tokens": 8},
    "draft_model": {"model": str(CHECKPOINTS / "demo-draft"), "num_speculative_tokens": 3},
    "eagle3": {"model": str(CHECKPOINTS / "demo-eagle3"), "num_speculative_tokens": 3},
}
PROMPT = 128
ANSWER = 128


def prompts(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "demo" / "tokenizer.json"))
    texts = [text for name, text in read_sources().items() if is_heldout(name)]
    ids = np.concatenate([tokenizer.encode(text).ids for text in texts])
    return [ids[at : at + PROMPT].tolist() for at in np.linspace(0, len(ids) - PROMPT, count).astype(int)]


def load(concurrency: int, speculation: dict | None) -> LLM:
    llm = LLM("demo", speculative_config=speculation, max_num_seqs=concurrency, max_model_len=512, prefix_caching=False)
    llm.engine.compile()
    return llm


def seconds(llm: LLM, given: list[list[int]]) -> np.ndarray:
    """Seconds that the answers take, of wall time and of processor time."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    start = np.array([time.perf_counter(), time.process_time()])
    llm.generate(given, params, progress=False)
    return np.array([time.perf_counter(), time.process_time()]) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    given = prompts(args.requests)
    plain = load(args.concurrency, None)
    print("| method | tokens/s against none, quartiles | the same by processor time | checks | tokens a check |")
    print("|---|---|---|---|---|", flush=True)
    for method in args.methods:
        quick = load(args.concurrency, {"method": method} | METHODS[method])
        ratios = []
        for turn in range(1 + args.turns):
            order = (plain, quick) if turn % 2 else (quick, plain)
            took = {llm: seconds(llm, given) for llm in order}
            ratios.append(took[plain] / took[quick])
        stats = quick.engine.stats()
        quartiles = np.quantile(ratios[1:], (0.25, 0.5, 0.75), axis=0).T  # the first turn warms up
        wall, own = (" ".join(f"{x:.3f}" for x in some) for some in quartiles)
        length = 1 + stats.spec_accepted / max(stats.spec_drafts, 1)
        print(f"| {method} | {wall} | {own} | {stats.spec_drafts} | {length:.2f} |", flush=True)


if __name__ == "__main__":
    main()
