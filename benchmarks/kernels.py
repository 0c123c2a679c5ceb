"""Compares our kernels with each other and with other libraries': correctness, then time relative to the device's
limits.

  python benchmarks/kernels.py                                   small sizes, on whatever device is at hand
  python benchmarks/kernels.py --sizes full --json benchmarks/results/kernels-h200.json --plot kernels.png

For each case every backend that the registry lets run there computes the same inputs, and so do the peers that can be
imported: torch's matmul (cuBLAS) and scaled-dot-product attention, FlashInfer, JAX's bundled ragged paged attention on
TPUs, and XLA's own matmul without quantization. A result is compared with plain XLA's as a whole, and where it is large
some hundred values of it with NumPy in float64; wrong results are reported and not timed. Failures are reported with
their reason, and the run continues.

  us        median time of a call, of many that are queued together, over inputs that do not fit the cache
            (pallas_kernels/tuning/timing.py); * where launching the calls took as long as running them
  floor     the larger of: the fewest bytes that must be moved over the bandwidth of a copy, operations over the rate of
            a large matmul in 16 bits (float32 on CPU); both measured in this run
  of floor  floor / us; above 1.00 only if data stay in the cache
  error     the largest difference from float64, over the largest value; norm: ‖difference to plain XLA‖ / ‖plain XLA‖
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory too

import jax
import jax.numpy as jnp
import numpy as np
from peers.kernel_backends import PEERS, Backend

from jaxserve.bench import report
from jaxserve.bench.kernel_cases import Case, first_result, largest_error, norm_error
from jaxserve.bench.kernel_shapes import OPERATIONS, cases
from jaxserve.config import default_page_size
from jaxserve.devices.compile_cache import enable_compile_cache
from jaxserve.pallas_kernels.registry import BACKENDS, Device
from jaxserve.pallas_kernels.tuning import timing

Contestant = Any  # with name, why_not and prepare, as `peers.kernel_backends.Backend`
Row = dict[str, Any]
LIMITS = {"small": 120, "full": 450}  # seconds
PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "jax-triton", "triton", "torch",
            "flashinfer-python")  # fmt: skip
COLORS = dict(zip((*BACKENDS, *(peer.name for peer in PEERS)), (f"C{i}" for i in range(10)), strict=False))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", choices=["small", "full"], default="small", help="full: those of Llama 3 8B and 70B")
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="which operations")
    parser.add_argument("--backends", nargs="+", choices=list(COLORS), default=list(COLORS), metavar="NAME",
                        help=f"which of {', '.join(COLORS)}")  # fmt: skip
    parser.add_argument("--page-size", type=int, metavar="TOKENS",
                        help="tokens per page of the cache; None: 128 on TPU, else 16")  # fmt: skip
    limits = ", ".join(f"{seconds} with {sizes} sizes" for sizes, seconds in LIMITS.items())
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"start no case after that; None: {limits}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="plot the fractions of the floor (needs matplotlib)")
    return parser.parse_args(argv)


def contestants(names: Sequence[str]) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants that can be imported, and why the others cannot."""
    found: list[Contestant] = [Backend(name) for name in BACKENDS if name in names]
    absent = {}
    for peer in PEERS:
        if peer.name in names:
            try:
                found.append(peer())
            except ImportError as error:
                absent[peer.name] = str(error)
    return found, absent


class Comparison:
    """One case on one device, for every contestant."""

    def __init__(self, case: Case, ceilings: dict[str, float]) -> None:
        self.case, self.device = case, Device.of(jax.devices()[0])
        self.floor = max(case.bytes / ceilings["bytes_per_s"], case.flops / ceilings["flops_per_s"])
        count = timing.sets_needed(case.bytes, self.device.platform)
        self.sets = jax.block_until_ready([case.arguments(seed) for seed in range(count)])
        self.plain = Backend("xla").prepare(case, self.sets)
        self.expected, self.arguments = first_result(case, self.plain, self.sets)

    def rows(self, contestants: Sequence[Contestant]) -> Iterator[Row]:
        """A row for each contestant that runs the case, or fails at it."""
        able = [(one, one.why_not(self.case, self.device)) for one in contestants]
        able = [one for one, reason in able if reason is None]
        with ThreadPoolExecutor(1 if self.device.platform == "cpu" else 4) as pool:  # compiling takes most of the time
            works = [None if one.name == "xla" else pool.submit(one.prepare, self.case, self.sets) for one in able]
            for one, work in zip(able, works, strict=True):
                try:
                    yield self.row(one.name) | self.judge(self.plain if work is None else work.result())
                except Exception as error:  # whatever a compiler or a driver may raise
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    yield self.row(one.name) | {"status": "failed", "reason": reason[:500]}

    def row(self, name: str) -> Row:
        case = self.case
        return {"operation": case.part, "case": case.name, "backend": name, "bytes": case.bytes, "flops": case.flops,
                "floor_us": 1e6 * self.floor, "input_sets": len(self.sets)}  # fmt: skip

    def judge(self, work: timing.Work) -> Row:
        """Measures the error and, if that is small, the time."""
        result = self.expected
        if work is not self.plain:  # overwrite freed memory, so that values that a kernel fails to write are NaN
            jax.block_until_ready([jnp.full_like(result, np.nan) for _ in range(work.calls)])
            result, _ = first_result(self.case, work, self.sets)
        errors = {"error": largest_error(*self.case.exact(result, *self.arguments)),
                  "norm_error": float(norm_error(result, self.expected))}  # fmt: skip
        if not max(errors.values()) <= self.case.tolerance:
            return errors | {"status": "wrong", "reason": f"more than {self.case.tolerance:.2g} off"}
        measured = timing.measure(work)
        return errors | {
            "status": "ok", "us": 1e6 * measured.seconds, "fraction": self.floor / measured.seconds,
            "samples_us": [1e6 * seconds for seconds in measured.samples], "host_bound": measured.host_bound,
        }  # fmt: skip


def compare_all(chosen: Sequence[Case], able: Sequence[Contestant], ceilings: dict[str, float], limit: float):
    """Yields rows. Cases that would begin after `limit` seconds are skipped and reported."""
    start = time.perf_counter()
    for case in chosen:
        named = {"operation": case.part, "case": case.name, "backend": "-"}
        if time.perf_counter() - start > limit:
            yield named | {"status": "left out", "reason": f"{limit:.0f} s had passed; see --limit"}
            continue
        try:
            yield from Comparison(case, ceilings).rows(able)
        except Exception as error:  # such as too little memory for the inputs or for plain XLA
            yield named | {"status": "failed", "reason": f"plain XLA: {' '.join(str(error).split())[:500]}"}


HEADER = ("operation", "case", "backend", "us", "floor us", "of floor", "GB/s", "TFLOP/s", "error", "norm")
FORMAT = "{:10} {:34} {:11} {:>11} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8}"


def line(row: Row) -> str:
    """A row as text."""
    names = [row["operation"], row["case"], row["backend"]]
    if "us" not in row:
        errors = f" (error {row['error']:.1e}, norm {row['norm_error']:.1e})" if "error" in row else ""
        return FORMAT.format(*names, *[""] * 7).rstrip() + f" {row['status']}: {row['reason']}{errors}"
    seconds = 1e-6 * row["us"]
    return FORMAT.format(
        *names, f"{row['us']:,.1f}{'*' if row['host_bound'] else ''}", f"{row['floor_us']:,.1f}",
        f"{row['fraction']:.2f}", f"{1e-9 * row['bytes'] / seconds:,.0f}", f"{1e-12 * row['flops'] / seconds:,.2f}",
        f"{row['error']:.1e}", f"{row['norm_error']:.1e}",
    )  # fmt: skip


def plot(rows: Sequence[Row], title: str) -> Any:
    """A figure with a plot per operation, a group of bars per case and a bar per backend: floor over time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    done = [row for row in rows if "us" in row]
    operations = list(dict.fromkeys(row["operation"] for row in done))
    labels = {op: list(dict.fromkeys(row["case"] for row in done if row["operation"] == op)) for op in operations}
    heights = [len(labels[op]) + 1 for op in operations]
    most = max([1.0, *(row["fraction"] for row in done)])
    figure = Figure(figsize=(10, 1 + 0.45 * sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    backends = list(dict.fromkeys(row["backend"] for row in done))
    for axes, op in zip(np.ravel(figure.subplots(len(operations), 1, height_ratios=heights)), operations, strict=True):
        for i, name in enumerate(backends):
            mine = [row for row in done if row["operation"] == op and row["backend"] == name]
            places = [labels[op].index(row["case"]) + 0.8 * ((i + 0.5) / len(backends) - 0.5) for row in mine]
            axes.barh(places, [row["fraction"] for row in mine], 0.8 / len(backends), color=COLORS[name])
        axes.set(title=op, yticks=range(len(labels[op])), ylim=(len(labels[op]) - 0.5, -0.5), xlim=(0, 1.05 * most))
        axes.set_yticklabels(labels[op], fontsize="small")
        axes.axvline(1.0, color="0.4", linestyle="--")
        axes.grid(axis="x", alpha=0.3)
    figure.axes[-1].set_xlabel("fraction of the floor: least time / measured time")
    handles = [Patch(color=COLORS[name], label=name) for name in backends]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(backends))
    return figure


def machine() -> dict[str, Any]:
    """This machine, with the versions of all libraries."""
    facts = report.machine(device=True)
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    report.check_writable(args.json, args.plot)
    if args.plot is not None:
        from jaxserve.bench.plot import require_matplotlib

        require_matplotlib()
    enable_compile_cache()
    facts = machine()
    platform = Device.of(jax.devices()[0]).platform
    ceilings = timing.ceilings(platform)
    dtype = "float32" if platform == "cpu" else "bfloat16"
    args.page_size = args.page_size or default_page_size(platform)
    chosen = [case for case in cases(args.sizes, dtype, args.page_size) if case.part in args.op]
    able, absent = contestants(args.backends)
    for one in able:
        reasons = [one.why_not(case, Device.of(jax.devices()[0])) for case in chosen]
        if all(reasons):
            absent[one.name] = "; ".join(dict.fromkeys(reasons))
    title = (f"{facts['device']}, jax {facts['jax']}: copies {1e-9 * ceilings['bytes_per_s']:,.0f} GB/s, "
             f"matmul {1e-12 * ceilings['flops_per_s']:,.2f} TFLOP/s")  # fmt: skip
    print(f"{report.machine_line(facts)}\n{title}")
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    print(f"\n{FORMAT.format(*HEADER)}", flush=True)
    rows = []
    for row in compare_all(chosen, able, ceilings, LIMITS[args.sizes] if args.limit is None else args.limit):
        rows.append(row)
        print(line(row), flush=True)
        if args.json is not None:  # after every row, as a run may be interrupted
            args.json.write_text(document(args, argv, facts, ceilings, absent, rows))
    if args.plot is not None:
        plot(rows, title).savefig(args.plot, dpi=120, format="png")
    counts = {status: sum(row["status"] == status for row in rows) for status in ("ok", "wrong", "failed", "left out")}
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["wrong"] or counts["failed"] or not counts["ok"] else 0


def document(args: argparse.Namespace, argv: Sequence[str] | None, facts, ceilings, absent, rows) -> str:
    """The results as JSON."""
    return report.dumps(
        {
            "benchmark": "kernels",
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "command": ["python", "benchmarks/kernels.py", *(sys.argv[1:] if argv is None else argv)],
            "machine": facts,
            "settings": {name: getattr(args, name) for name in ("sizes", "op", "backends", "page_size")},
            "ceilings": ceilings,
            "absent": absent,
            "results": rows,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
