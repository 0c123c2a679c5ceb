"""Nine minutes on a machine with a GPU or TPU and no network: what is correct there, and how fast it is.

  python benchmarks/first_light.py --out DIR --minutes 9      all stages, what is least known first
  python benchmarks/first_light.py --table DIR                the results as Markdown
  python benchmarks/first_light.py --out DIR --rehearse       the same code at small sizes, on CPU too
  python benchmarks/first_light.py --out DIR --compile-for h200x1     compiles what it would run there, on any machine

Stages are processes side by side, as many as half of the cores and the device's memory allow: compiling takes most of
the time. While one measures, all others stand still. They begin in this order:

  device         names, versions, clocks; bandwidth of a copy, rate of a matmul (run.json)
  decode-bf16, decode-int4, decode-fp8, decode-fp8-dynamic    an 8B shape with dummy weights: decoding of 32 rows, of
                 one and in bf16 of 256 beside the floor, a step's time by kernel, what XLA records in command buffers
                 (decode.json)
  tune           `jaxserve tune` for this shape in int4 and fp8, and its tables (tune.json)
  correctness    every kernel against exact answers (pallas_kernels/selfcheck.py, at more and larger sizes), one case of
                 each family first; in several processes, which share the cases (correctness.json)
  server         a server's start with an empty and a filled cache, and load from 1, 32 and 256 at a time (server.json)
  kernels        benchmarks/kernels.py --sizes full, beside cuBLAS, torch's attention and FlashInfer where they import
                 (kernels.json)
  peers          transformers' continuous batching on the same shape (decode.json)

DIR gets these six files, none larger than 1 MB, each whole after every row. What is there is not measured again, so
that a run which was cut off goes on where it is called again with the same DIR. A row that fails keeps its traceback,
and the stage goes on. A process that dies is started again, behind the row that it died at.

Needs jax, flax, transformers and their dependencies; the server needs all of jaxserve's. For msgspec and llguidance,
which the engine imports too, there are stand-ins that are used if they are not installed. Settings of the device are
read, never changed.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from light import driver, recorded, table
from light.driver import Stage
from light.record import OutOfTimeError, Record, reopen

from jaxserve import jax_pools
from jaxserve.pallas_kernels.alone import RUN

USUAL = 9.0  # minutes
DAY = 24 * 60.0  # minutes
CLOSING = 5.0  # seconds at the end for what runs to be stopped
ROW = 240.0  # most seconds of a row, those in which its process stands still included
PR_SET_PDEATHSIG = 1  # from linux/prctl.h

DEVICE = Stage("device", "run", 42)
BF16 = Stage("decode-bf16", "decode", 54)
TUNE = Stage("tune", "tune", 10)
INT4, FP8, W8A8 = (Stage(f"decode-{form}", "decode", 16) for form in ("int4", "fp8", "fp8-dynamic"))
CORRECTNESS = Stage("correctness", "correctness", 3)
SERVER = Stage("server", "server", 58)
KERNELS = Stage("kernels", "kernels", 24)
PEERS = Stage("peers", "decode", 60)
STAGES = (DEVICE, BF16, INT4, TUNE, CORRECTNESS, FP8, W8A8, CORRECTNESS, SERVER, KERNELS, *[CORRECTNESS] * 4, PEERS)
NAMES = tuple(dict.fromkeys(stage.name for stage in STAGES))
AHEAD = tuple(name for name in NAMES if name.startswith(("decode-", "correctness", "kernels")))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="where results go, and what is done already is found")
    where.add_argument("--table", type=Path, metavar="DIR", help="print the results that are there, and run nothing")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="STAGE", help=", ".join(NAMES))
    parser.add_argument(
        "--minutes", type=float, help="all stages together; then what runs is cut off; None: 9, or to compile a day"
    )
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on whatever device is at hand")
    parser.add_argument("--compile-for", metavar="TARGET", help="run nothing: compile for a device that is not here")
    parser.add_argument("--stage", choices=NAMES, help=argparse.SUPPRESS)  # this is the stage's own process
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # seconds since 1970
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.table is not None:
        print(table.markdown(args.table))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.stage is not None:
        return run_stage(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the stages, too
    minutes = args.minutes or (DAY if args.compile_for else USUAL)
    until = time.time() + 60 * minutes - CLOSING
    stages = [stage for stage in STAGES if stage.name in args.only and (not args.compile_for or stage.name in AHEAD)]
    for stage in stages:
        reopen(args.out / f"{stage.file}.json")
    with tempfile.TemporaryDirectory(prefix="first-light-") as scratch:
        many = driver.cores() if args.compile_for else max(driver.cores() // 2, 2)
        limits: dict[str, Any] = {"slots": many, "gib": math.inf if args.compile_for else driver.device_gib()}
        limits["row_seconds"] = math.inf if args.compile_for or args.rehearse else ROW

        def command(stage: Stage, starts: int) -> tuple[list[str], dict[str, str]]:
            return process_of(stage, starts, args, until, Path(scratch))

        whole = driver.Driver(stages, command, args.out, Path(scratch), until, **limits).run()
    said = table.compiled(args.out, args.compile_for) if args.compile_for else table.markdown(args.out)
    print(f"\n{said}")
    return 0 if whole else 1


def process_of(
    stage: Stage, starts: int, args: argparse.Namespace, until: float, scratch: Path
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a stage's process."""
    command = [sys.executable, __file__, "--out", str(args.out), "--stage", stage.name, "--until", str(until)]
    command += ["--rehearse"] * args.rehearse
    environment = {**os.environ, RUN: str(scratch)}
    environment |= {"JAXSERVE_CACHE": f"{scratch}/cache", "JAXSERVE_TUNING": f"{scratch}/tuning"}
    environment["CUDA_CACHE_PATH"] = f"{scratch}/cuda-{stage.name}"  # a process may be stopped while it locks it
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share the device
    jax_pools.reserve(0.9, environment)  # as `jaxserve serve`
    if args.compile_for:
        command += ["--compile-for", args.compile_for]
        return command, environment | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
    if stage.name.startswith("decode-"):
        environment |= recorded.environment(scratch / stage.name, in_profiles=starts == 1)
    return command, environment


def run_stage(args: argparse.Namespace) -> int:
    """The body of a stage's process."""
    if sys.platform == "linux":  # it may stand still when the driver ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    (stage, *_) = [stage for stage in STAGES if stage.name == args.stage]
    record = Record(args.out / f"{stage.file}.json", args.until)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.compile_for:
                from light import ahead

                ahead.run(record, stage.name, args.compile_for, Path(folder), small=args.rehearse)
            else:
                measure(stage.name, record, Path(folder), rehearse=args.rehearse)
    except OutOfTimeError:
        pass
    return 0


def measure(name: str, record: Record, folder: Path, *, rehearse: bool) -> None:
    if name == "device":
        from light import device

        device.run(record)
    elif name.startswith("decode-"):
        from light import decode

        decode.run(record, name.removeprefix("decode-"), folder, rehearse=rehearse)
    elif name == "tune":
        from light import tuning

        tuning.run(record, folder, rehearse=rehearse)
    elif name == "correctness":
        from light import correctness

        correctness.run(record, rehearse=rehearse)
    elif name == "server":
        from light import server

        server.run(record, rehearse=rehearse)
    else:
        from light import others

        (others.run_kernels if name == "kernels" else others.run_peers)(record, rehearse=rehearse)


if __name__ == "__main__":
    sys.exit(main())
