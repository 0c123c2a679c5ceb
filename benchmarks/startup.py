"""What a start compiles for devices that are not here: its programs, and what each costs to trace, lower and compile.

  python benchmarks/startup.py --target h200x1                       an 8B shape in bfloat16
  python benchmarks/startup.py --target h200x1 --quantization int4
  python benchmarks/startup.py --target v6e-1 --layers 2 --json startup.json

Seconds are processor time of this process, one program after the other, so that other processes change them little.
Compiling for a GPU here includes no autotuning, which needs the device. Layers that are alike are traced and lowered
once, so that two of them (the default) cost as much to trace as 32; `--layers` has more of them compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import jax
from light.decode import SHAPE, folder_of

from jaxserve.commands.ahead import Planned, plan_ahead
from jaxserve.config import EngineConfig
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.signatures import CREATE_CACHE, CREATE_SLOTS, ProgramName


@dataclass(frozen=True)
class Cost:
    """Processor seconds of one program. forward: it runs the model, or its output head."""

    name: str
    forward: bool
    trace: float
    lower: float
    compile: float


def planned(where: Path, target: str, quantization: str, layers: int) -> Planned:
    """The engine of an 8B shape, for 256 sequences, and steps of 8,192 tokens on devices with much memory."""
    folder = folder_of(SHAPE | {"num_hidden_layers": layers}, where)
    quantized: Any = {} if quantization == "bf16" else {"quantization": quantization}
    return plan_ahead(EngineConfig(model=str(folder), load_format="dummy", max_num_seqs=256, **quantized), target)


def costs(made: Planned, compiles: bool = True) -> Iterator[Cost]:
    """What each program of a start costs, in the order in which a start compiles them."""
    runner = made.runner
    for name in [*runner.names(made.shapes), CREATE_SLOTS, CREATE_CACHE]:
        traced, tracing = timed(lambda name=name: runner.trace(name))
        with runner.tracing():
            lowered, lowering = timed(traced.lower)
        compiling = timed(lambda lowered=lowered: runner.compiled(lowered))[1] if compiles else 0.0
        yield Cost(str(name), is_forward(name), tracing, lowering, compiling)


def is_forward(name: ProgramName) -> bool:
    return isinstance(name, StepProgram) or name.kind in ("sample_deferred", "score_prompt", "propose")


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return call(), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200x1", help="such as h200x1 or v6e-1 (default: %(default)s)")
    parser.add_argument("--quantization", default="bf16", help="bf16, int4, int8 or fp8 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="trace and lower only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as where:
        made = planned(Path(where), args.target, args.quantization, args.layers)
        print(f"{args.target}, an 8B shape in {args.quantization}, {args.layers} layers")
        print(f"{'program':24} {'trace':>7} {'lower':>7} {'compile':>8}  seconds")
        found = []
        for one in costs(made, not args.no_compile):
            found.append(one)
            print(f"{one.name:24} {one.trace:7.2f} {one.lower:7.2f} {one.compile:8.2f}", flush=True)
    forward = [one for one in found if one.forward]
    for what, some in (("the model", forward), ("auxiliary", [one for one in found if not one.forward])):
        times = [sum(getattr(one, part) for one in some) for part in ("trace", "lower", "compile")]
        print(f"{f'{len(some)} programs of {what}':24} {times[0]:7.2f} {times[1]:7.2f} {times[2]:8.2f}")
    if args.json:
        facts = {"target": args.target, "quantization": args.quantization, "layers": args.layers}
        args.json.write_text(json.dumps(facts | {"programs": [asdict(one) for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
