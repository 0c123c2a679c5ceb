"""The roofline of `jaxserve plan` on a CPU beside measurements: the 100M shape in several forms of weights.

python benchmarks/plan_cpu.py --forms auto,bfloat16 int4,bfloat16

Prints a line of JSON for each form. A probe of other shapes tells the rates, which then predict the steps of the 100M
shape; nothing is fitted to these. `tpot` is measured on decode steps, and `served` on requests that an engine answers.
Everything runs on one core and counts the processor's time, so that other programs matter little; threads do not wait
for each other then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers.model import SHAPES

TOKENS, PROMPT, ROUNDS = 64, 16, 3  # tokens of each request's output and prompt; rounds
FORMS = ("auto,bfloat16", "int4,bfloat16", "auto,float32", "int8,bfloat16")


def measured(folder: str, form: str) -> dict[str, Any]:
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
    found = measure(config, "cpu", Path(folder) / "constants.json", clock=time.process_time)
    roofline = Roofline(Deployment.of(config, "cpu"), found.fitted)
    engine = Engine.load(replace(config, kv_pages=200, max_model_len=96), progress=False)
    served = []
    for batch in (1, 8, 32):
        prompts = random_ids(np.random.default_rng(batch), engine.vocab_size, batch, PROMPT)
        times = [served_seconds(engine, prompts) for _ in range(1 + ROUNDS)][1:]
        predicted = roofline.decode(batch, PROMPT + TOKENS // 2).total
        served.append({"batch": batch, "tpot": statistics.median(times), "predicted": predicted})
    steps = found.beside(roofline)["decode"]
    return {"form": form, "constants": asdict(found.fitted), "steps": steps, "served": served}


def served_seconds(engine: Any, prompts: list[list[int]]) -> float:
    """Processor seconds per token of each of these requests, from the first token of the last until the first ends."""
    from jaxserve.bench.local import fixed_length
    from jaxserve.types import Request

    params = fixed_length(TOKENS)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    got, began, ended = dict.fromkeys(map(str, range(len(prompts))), 0), (0, 0.0), (0, 0.0)
    while engine.has_work:
        for update in engine.step():
            got[update.request_id] += len(update.token_ids)
        now = got["0"], time.process_time()
        if not began[0] and min(got.values()):
            began = now
        if max(got.values()) < TOKENS:
            ended = now
    return (ended[1] - began[1]) / (ended[0] - began[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=FORMS, metavar="QUANTIZATION,DTYPE")
    parser.add_argument("--core", type=int, help="the core to run on; None: the last one that this process may use")
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["100M"]))
        for form in args.forms:
            print(json.dumps(measured(folder, form)), flush=True)


if __name__ == "__main__":
    main()
