"""The roofline of `jaxserve plan` on a CPU beside measurements: the 100M shape in several forms of weights.

python benchmarks/plan_cpu.py --forms auto,bfloat16 int4,bfloat16
python benchmarks/plan_cpu.py --wall --keep    by the clock; kept in benchmarks/results/plan-cpu.json
python benchmarks/plan_cpu.py --table          what is kept there, as in docs/plan.md

Prints a line of JSON for each form. A probe of other shapes tells the rates, which then predict the steps of the 100M
shape; nothing is fitted to these. `steps` are decode steps, and `served` requests that an engine answers. Everything
runs on one core and counts the processor's time, so that other programs matter little; threads do not wait for each
other then. With --wall everything runs on all cores by the clock, which needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers.model import SHAPES

Clock = Callable[[], float]

RESULT = Path(__file__).parent / "results" / "plan-cpu.json"
TOKENS = 64  # of each request's output
PROMPT = 16  # tokens
ROUNDS = 5  # of which the shortest counts
NAMES = {
    "auto,float32": "float32", "auto,bfloat16": "bfloat16", "int8,bfloat16": "int8 (head in bfloat16)",
    "int4,bfloat16": "int4 (head in bfloat16)",
}  # fmt: skip


def measured(folder: str, form: str, clock: Clock) -> dict[str, Any]:
    """The steps of the shape in one form: measured, predicted, and in an engine that answers requests."""
    import numpy as np

    from jaxserve.bench.local import random_ids
    from jaxserve.config import EngineConfig
    from jaxserve.engine.engine import Engine
    from jaxserve.plan.deployment import Deployment
    from jaxserve.plan.measuring import measure
    from jaxserve.plan.roofline import Roofline

    quantization, dtype = form.split(",")
    config = EngineConfig(
        model=folder, load_format="dummy", quantization=quantization, dtype=dtype, kv_pages=2100, max_model_len=1056,
        max_num_seqs=32, prefix_caching=False,
    )  # fmt: skip
    found = measure(config, "cpu", Path(folder) / "constants.json", clock=clock)
    roofline = Roofline(Deployment.of(config, "cpu"), found.fitted)
    engine = Engine.load(replace(config, kv_pages=200, max_model_len=96), progress=False)
    served = []
    for batch in (1, 8, 32):
        prompts = random_ids(np.random.default_rng(batch), engine.vocab_size, batch, PROMPT)
        times = [served_seconds(engine, prompts, clock) for _ in range(1 + ROUNDS)][1:]
        predicted = roofline.decode(batch, PROMPT + TOKENS // 2).total
        served.append({"batch": batch, "tpot": min(times), "median": statistics.median(times), "predicted": predicted})
    steps = found.beside(roofline)["decode"]
    return {"constants": asdict(found.fitted), "steps": steps, "served": served}


def served_seconds(engine: Any, prompts: list[list[int]], clock: Clock) -> float:
    """Seconds per token of each of these requests, from the first token of the last until the first ends."""
    from jaxserve.bench.local import fixed_length
    from jaxserve.types import Request

    params = fixed_length(TOKENS)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    got = dict.fromkeys(map(str, range(len(prompts))), 0)
    began = (0, 0.0)
    ended = (0, 0.0)
    while engine.has_work:
        for update in engine.step():
            got[update.request_id] += len(update.token_ids)
        now = got["0"], clock()
        if not began[0] and min(got.values()):
            began = now
        if max(got.values()) < TOKENS:
            ended = now
    return (ended[1] - began[1]) / (ended[0] - began[0])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: measured and predicted milliseconds of each form."""
    lines = ["| weights | batch | context | measured ms | predicted ms | error |", "|---|---|---|---|---|---|"]
    for one in found:
        name = NAMES[one["form"]]
        rows = [(name, f"{row['context']:,}", row) for row in one["steps"]]
        rows += [(f"{name}, served", f"{PROMPT + 1} to {PROMPT + TOKENS}", row) for row in one["served"]]
        for label, context, row in rows:
            times = f"{1e3 * row['tpot']:.2f} | {1e3 * row['predicted']:.2f}"
            error = 100 * (row["predicted"] / row["tpot"] - 1)
            lines.append(f"| {label} | {row['batch']} | {context} | {times} | {error:+.0f}% |")
    return "\n".join(lines)


def keep(found: Mapping[str, Any]) -> None:
    """Replaces the result of a form in RESULT."""
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else []
    by_form = {one["form"]: one for one in [*kept, found]}
    RESULT.write_text(json.dumps([by_form[form] for form in NAMES if form in by_form], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=list(NAMES), choices=list(NAMES), metavar="QUANTIZATION,DTYPE")
    parser.add_argument("--core", type=int, help="the core to run on; None: the last one that this process may use")
    parser.add_argument("--wall", action="store_true", help="the clock on all cores, not one core's processor time")
    parser.add_argument("--keep", action="store_true", help=f"also write {RESULT.name}")
    parser.add_argument("--table", action="store_true", help=f"print the table of {RESULT.name}, and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULT.read_text())))
        return
    if not args.wall:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    clock = time.perf_counter if args.wall else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["100M"]))
        for form in args.forms:
            found = {"form": form, "clock": "wall" if args.wall else "processor"} | measured(folder, form, clock)
            print(json.dumps(found), flush=True)
            if args.keep:
                keep(found)


if __name__ == "__main__":
    main()
