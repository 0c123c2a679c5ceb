"""`jaxserve tune`: times the kernels' block sizes on this machine's device, and writes a table of the best.

The search begins with the kernel's default sizes, varies one size at a time and keeps the fastest. Sizes with wrong
results, or that do not compile, are skipped and reported. The table has only sizes that save enough time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxserve.bench import timing
from jaxserve.bench.kernel_cases import Case, first_result, largest_error
from jaxserve.bench.kernel_shapes import cases
from jaxserve.config import ConfigError
from jaxserve.pallas_kernels import registry, tuning
from jaxserve.pallas_kernels.registry import Device
from jaxserve.pallas_kernels.types import default_page_size

GAIN = 0.03  # least saving, as a fraction of the time with the default sizes
Measure = Callable[[timing.Work], timing.Timing]


@dataclass
class Best:
    """The result for one case and backend."""

    sizes: dict[str, int]
    seconds: float
    default: float  # seconds with the default sizes
    problems: set[str]  # keys of the table
    failed: list[str] = field(default_factory=list)  # sizes that were skipped, and why

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items()) or "the plan's own sizes"
        times = f"{1e6 * self.seconds:,.1f} us, the plan's own {1e6 * self.default:,.1f}"
        return "\n    left out ".join([f"{sizes}: {times}", *self.failed])


def backends(case: Case, device: Device) -> Iterator[tuple[str, ModuleType]]:
    """The backends that have sizes to choose and run the case on the device."""
    for backend, reason in registry.explain(case.operation, device, case.problem).items():
        if reason is None and (case.part, backend) in tuning.SIZES:
            yield backend, registry.load(case.operation, backend)


def search(case: Case, backend: str, module: ModuleType, measure: Measure = timing.measure) -> Best:
    """Finds the fastest sizes. Raises the default sizes' exceptions, and ValueError if their result is wrong."""
    count = timing.sets_needed(case.bytes, jax.default_backend())
    sets = jax.block_until_ready([case.arguments(seed) for seed in range(count)])

    def seconds(sizes: dict[str, int]) -> tuple[float, set[str]]:
        jax.clear_caches()  # traced functions keep their block sizes
        with tuning.trial(case.part, backend, sizes) as problems:
            work = timing.Chain(case.call(module), case.state(), sets)
        result, arguments = first_result(case, work, sets)
        error = largest_error(*case.exact(result, *arguments))
        if not error <= case.tolerance:
            raise ValueError(f"off by {error:.2g} of the largest value")
        return measure(work).seconds, problems

    default, problems = seconds({})
    best = Best({}, default, default, problems)
    for name, values in tuning.SIZES[case.part, backend].items():
        for sizes in [best.sizes | {name: value} for value in values]:
            try:
                taken, _ = seconds(sizes)
            except Exception as error:  # a compiler or driver may raise anything
                best.failed.append(f"{sizes}: {_short(error)}")
                continue
            if taken < min(best.seconds, (1 - GAIN) * default):
                best.sizes, best.seconds = sizes, taken
    return best


def tune(
    operations: Sequence[str],
    sizes: str = "small",
    page_size: int | None = None,
    out: Path | None = None,
    measure: Measure = timing.measure,
) -> int:
    """Tunes for this machine's first device and prints the results.

    Args:
      operations: operations to tune; those without sizes to choose are skipped.
      sizes: small or full, see `kernel_shapes`.
      page_size: tokens in a page; None: the engine's default on this device.
      out: the table to write; None is the one in the user's folder. Its entries for other problems are kept.

    Returns:
      An exit code: 1 if there was something to tune but nothing could be measured.

    Raises:
      TuningError: `out` exists and is not a table of this device.
      ConfigError: there is no folder for tables, and `out` is not given.
    """
    device = Device.of(jax.devices()[0])
    path = out or _user_table(device.kind)
    table = _table(path, device.kind)
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    page_size = page_size or default_page_size(device.platform)
    chosen = [case for case in cases(sizes, dtype, page_size) if case.part in operations]
    work = [(case, *found) for case in chosen for found in backends(case, device)]
    if not work:
        print(f"nothing to tune on {device.kind}: no kernel that runs there has block sizes to choose")
        return 0
    measured = 0
    for case, backend, module in work:
        try:
            best = search(case, backend, module, measure)
        except Exception as error:  # as in `search`; other cases may work
            print(f"{case.part}, {backend}, {case.name}: failed: {_short(error)}", flush=True)
            continue
        measured += 1
        print(f"{case.part}, {backend}, {case.name}: {best}", flush=True)
        problems = table["sizes"].setdefault(case.part, {}).setdefault(backend, {})
        for key in sorted(best.problems):
            problems.pop(key, None)
            if best.sizes:
                problems[key] = {"sizes": best.sizes, "us": 1e6 * best.seconds, "default_us": 1e6 * best.default}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")  # now, as a run may be interrupted
    tuning.clear()
    print(f"wrote {path}" if measured else "nothing was written")
    return 0 if measured else 1


def _user_table(kind: str) -> Path:
    folder = tuning.user_folder()
    if folder is None:
        raise ConfigError("JAXSERVE_TUNING is empty, so there is no folder for the table; give --out FILE")
    return folder / tuning.file_name(kind)


def _table(path: Path, kind: str) -> dict[str, Any]:
    """Reads the table, or makes a new one."""
    comment = f"jaxserve tune, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    if not path.exists():
        return {"device": kind, "comment": comment, "sizes": {}}
    tuning.read(path, kind)
    return json.loads(path.read_text()) | {"comment": comment}


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
