"""Cost of structured output: decode throughput with a JSON schema on every request, relative to without.

    python -m benchmarks.structured --batch 32 --tokens 200 --repeats 7

Runs alternate, so that other programs disturb both alike; the result is the median of the ratios. The schema asks for
more than fits, so that every request generates all of its tokens in both runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from jaxserve import LLM, SamplingParams
from jaxserve.types import Grammar

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["admin", "editor", "reader"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,10}$"}, "maxItems": 4},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": False,
    },
}


def measure(llm: LLM, params: SamplingParams, batch: int) -> float:
    """Tokens per second."""
    prompts = [[5 + i, 6, 7, 8] for i in range(batch)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert tokens == batch * (params.max_tokens or 0), "a request ended early"
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    llm = LLM(args.model, max_num_seqs=args.batch)
    llm.engine.compile()
    free = SamplingParams(max_tokens=args.tokens, temperature=1.0, ignore_eos=True, seed=1)
    bound = SamplingParams(max_tokens=args.tokens, temperature=1.0, seed=1, grammar=Grammar("json", json.dumps(SCHEMA)))
    for params in (free, bound):
        measure(llm, params, args.batch)
    ratios = []
    for _ in range(args.repeats):
        without = measure(llm, free, args.batch)
        structured = measure(llm, bound, args.batch)
        ratios.append(structured / without)
        print(f"{without:8.0f} tok/s without, {structured:8.0f} with a schema: {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
