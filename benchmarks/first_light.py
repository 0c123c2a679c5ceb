"""The first half hour on a machine with a GPU or TPU and no network: checks correctness, measures speed.

  python benchmarks/first_light.py --out DIR                  all stages, the most important ones first
  python benchmarks/first_light.py --out DIR --limit 590      stop after so many seconds; run it again to continue
  python benchmarks/first_light.py --table DIR                the results as Markdown
  python benchmarks/first_light.py --out DIR --rehearse       the same code at small sizes, on CPU too

Stages, each in a process of its own with its own time limit, each leaving DIR/STAGE.json, whole after every row:

  device       names, versions, clocks, bandwidth of a copy, rate of a matmul
  correctness  every backend against exact answers (pallas_kernels/selfcheck.py, at more and larger sizes)
  resources    registers, spills and shared memory of the kernels, programs per multiprocessor
  engine-bf16, engine-fp8, engine-int4   an 8B shape with dummy weights: its start, gaps between steps, decoding beside
               the floor
  kernels      benchmarks/kernels.py --sizes full, beside cuBLAS, torch's attention and FlashInfer where they import
  peers        transformers' continuous batching on the same shape

A stage whose file says "complete" is skipped (delete the file to run it again), an interrupted one continues after
its last row. A row that fails keeps its traceback, and the stage continues. A process that dies or hangs is restarted,
twice at the same row.
Needs jax, flax, transformers and their dependencies. For msgspec and llguidance, which the engine imports too, there
are stand-ins that are used if they are not installed. Settings of the device are read, never changed. Not yet run on a
GPU or TPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from light import resources, table
from light.record import RESTART, OutOfTimeError, Record, new, read, write

REHEARSAL = 240.0  # seconds; least time of a stage in a rehearsal
GRACE = 15  # seconds after its limit until a process is killed


@dataclass(frozen=True)
class Stage:
    """seconds: most time over all runs. A rehearsal ends by itself, and gets at least REHEARSAL."""

    name: str
    seconds: float


# 26.5 minutes in total; a stage that ends early leaves its time to the others.
STAGES = (
    Stage("device", 60),
    Stage("correctness", 420),
    Stage("resources", 90),
    Stage("engine-bf16", 200),
    Stage("engine-fp8", 160),
    Stage("engine-int4", 160),
    Stage("kernels", 330),
    Stage("peers", 170),
)
NAMES = tuple(stage.name for stage in STAGES)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="where results go, and what is done already is found")
    where.add_argument("--table", type=Path, metavar="DIR", help="print the results that are there, and run nothing")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="STAGE", help=", ".join(NAMES))
    parser.add_argument(
        "--limit", type=float, default=28 * 60, metavar="SECONDS", help="of this call, all stages together"
    )
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on whatever device is at hand")
    parser.add_argument("--stage", choices=NAMES, help=argparse.SUPPRESS)  # this is the stage's own process
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.table is not None:
        print(table.markdown(args.table))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage is not None:
        return run_stage(args.stage, args.out, rehearse=args.rehearse, seconds=args.limit)
    deadline = time.monotonic() + args.limit
    for stage in STAGES:
        if stage.name in args.only:
            again(args.out / f"{stage.name}.json")
            drive(stage, args.out, args.rehearse, deadline)
    print(f"\n{table.markdown(args.out)}")
    return 0 if all((read(args.out / f"{name}.json") or {}).get("status") == "complete" for name in args.only) else 1


def again(path: Path) -> None:
    """Lets a stage that failed in an earlier call continue after its rows."""
    document = read(path)
    if document is not None and document["status"] == "failed":
        kept = {name: value for name, value in document.items() if name not in ("reason", "output")}
        write(path, kept | {"status": "running"})


def drive(stage: Stage, out: Path, rehearse: bool, deadline: float) -> None:
    """Runs a stage's process, and restarts it if it ends early, until the stage's or the call's time is used up."""
    path = out / f"{stage.name}.json"
    while True:
        document = read(path) or new(stage.name)
        if document["status"] != "running":
            return
        allowed = max(stage.seconds, REHEARSAL) if rehearse else stage.seconds
        left, remaining = allowed - document["seconds"], deadline - time.monotonic()
        if remaining < GRACE:
            print(f"{stage.name}: no time is left in this call", flush=True)
            return
        if left <= 1:
            write(path, document | {"status": "complete", "reason": "the stage's time is used up"})
            return
        print(f"{stage.name}, at most {min(left, remaining):.0f} s", flush=True)
        code, output = in_process(stage.name, out, rehearse, min(left, remaining - GRACE / 2))
        after = read(path) or document
        if code is None and remaining < left:  # the call's time was up; not counted as a failure of the row
            after.get("tries", {}).pop(after.pop("at", ""), None)
            write(path, after)
            return
        if after["status"] == "running" and code not in (0, None, RESTART) and "at" not in after:
            reason = f"its process ended with {code} outside of any row"
            write(path, after | {"status": "failed", "reason": reason, "output": output[-4000:]})
        elif code is None and after["status"] == "running":
            after["seconds"] = max(after["seconds"], document["seconds"] + left)
            write(path, after)


def in_process(name: str, out: Path, rehearse: bool, seconds: float) -> tuple[int | None, str]:
    """Exit code of a stage's process, None if it had to be stopped; and its standard error."""
    command = [sys.executable, __file__, "--out", str(out), "--stage", name, "--limit", str(seconds)]
    environment = {**os.environ, **(resources.ENVIRONMENT if name == "resources" else {})}
    if name in ("kernels", "peers"):
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # peers need memory too
    if name.startswith("engine-") and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")  # as in `jaxserve serve`
    with tempfile.TemporaryFile() as errors:
        command += ["--rehearse"] * rehearse
        process = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(seconds + GRACE / 3)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped", flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        return code, errors.read().decode(errors="replace")


def run_stage(name: str, out: Path, *, rehearse: bool, seconds: float) -> int:
    """The body of a stage's process."""
    record = Record(out / f"{name}.json", name, seconds)
    try:
        if name == "device":
            from light.device import run

            run(record, rehearse=rehearse)
        elif name == "correctness":
            from light.correctness import run as run_correctness

            run_correctness(record, rehearse=rehearse)
        elif name == "resources":
            resources.run(record, rehearse=rehearse)
        elif name.startswith("engine-"):
            from light.engine import run as run_engine

            scheme = name.removeprefix("engine-")
            with tempfile.TemporaryDirectory() as folder:
                quantization = "auto" if scheme == "bf16" else scheme
                run_engine(record, rehearse=rehearse, quantization=quantization, where=Path(folder))
        else:
            from light import others

            (others.run_kernels if name == "kernels" else others.run_peers)(record, rehearse=rehearse)
    except OutOfTimeError:  # `drive` knows whether it was the stage's or the call's time
        record.write()
        return 0
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
