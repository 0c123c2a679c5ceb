"""`jaxserve tune`: measures on this machine's device which kernels are the fastest, and writes a table of them.

First each product is timed in every way that a device has for it (`pallas_kernels.tuning.products`), and attention of
decodes with every backend. Then the block sizes of the fastest kernels are searched: the search begins with the
kernel's default sizes, varies one size at a time and keeps the fastest. Whatever is wrong, or does not compile, is
skipped and reported. The table has only sizes that save enough time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxserve.bench.kernel_cases import AttentionCase, Case, MatmulCase, first_result, largest_error
from jaxserve.bench.kernel_shapes import cases
from jaxserve.config import ConfigError, EngineConfig, default_page_size
from jaxserve.devices.mesh import num_shards
from jaxserve.devices.targets import rates
from jaxserve.engine.kernel_timing import name_of, problems_of, weights_of
from jaxserve.engine.model_plan import ModelPlan
from jaxserve.models.load import attention_problem
from jaxserve.pallas_kernels import registry, tuning
from jaxserve.pallas_kernels.device_ops import attention_key
from jaxserve.pallas_kernels.quant_matmul import fragments, ways
from jaxserve.pallas_kernels.registry import AttentionProblem, Device, MatmulProblem
from jaxserve.pallas_kernels.tuning import products, timing
from jaxserve.pallas_kernels.tuning.products import PLAIN, Race, short

MIN_SAVING = 0.03  # as a fraction of the time with the default sizes
MODEL_SECONDS = 180.0  # for all of a model
CACHED = 1024  # tokens of each sequence that attention of decodes is timed with
ATTENTION_ROWS = (32, 1, 256)
DECODES = 64  # rows up to which steps decode, usually
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


@dataclass(frozen=True)
class Search:
    """A kernel whose block sizes are to be searched: `backend` runs `case`, and its codes may be shuffled."""

    case: Case
    backend: str
    module: ModuleType
    shuffled: bool = False

    def call(self) -> Callable[..., tuple[Any, Any]]:
        if isinstance(self.case, MatmulCase) and self.backend in ways.WAYS["gpu"]:  # without dequantizing first
            return lambda state, x, w: (state, self.module.quant_matmul(x, w, direct=True))
        return self.case.call(self.module)

    def arguments(self) -> list[tuple[Any, ...]]:
        count = timing.sets_needed(self.case.bytes, jax.default_backend())
        sets = [self.case.arguments(seed) for seed in range(count)]
        if self.shuffled:
            sets = [(x, jax.jit(fragments.shuffle)(w)) for x, w in sets]
        return jax.block_until_ready(sets)


def search(one: Search, measure: Measure, until: Callable[[], bool] = lambda: False) -> Best:
    """Finds the fastest sizes until `until` says that time is over. Raises the default sizes' exceptions, and
    ValueError if their result is wrong."""
    case = one.case
    sets = one.arguments()
    plain = case.arguments(0) if one.shuffled else None  # for exact results, with codes in order

    def trace(sizes: dict[str, int]) -> tuple[timing.Chain, set[str]]:
        jax.clear_caches()  # traced functions keep their block sizes
        with tuning.trial(case.part, one.backend, sizes) as problems:
            return timing.Chain(one.call(), case.state(), sets, later=True), problems

    def seconds(work: timing.Chain) -> float:
        result, arguments = first_result(case, work, sets)
        error = largest_error(*case.exact(result, *(plain if plain is not None else arguments)))
        if not error <= case.tolerance:
            raise ValueError(f"off by {error:.2g} of the largest value")
        return measure(work).seconds

    work, problems = trace({})
    default = seconds(work.compile())
    best = Best({}, default, default, problems)
    with ThreadPoolExecutor(products.THREADS) as pool:
        for name, values in tuning.SIZES[case.part, one.backend].items():
            if until():
                break
            if name == "dequantize":  # a way of its own
                continue
            tried = []
            for sizes in [best.sizes | {name: value} for value in values]:
                try:
                    tried.append((sizes, pool.submit(trace(sizes)[0].compile)))
                except Exception as error:  # a compiler or driver may raise anything
                    best.failed.append(f"{sizes}: {short(error)}")
            for sizes, compiling in tried:
                try:
                    taken = seconds(compiling.result())
                except Exception as error:  # as above
                    best.failed.append(f"{sizes}: {short(error)}")
                    continue
                if taken < min(best.seconds, (1 - MIN_SAVING) * default):
                    best.sizes = sizes
                    best.seconds = taken
    return best


@dataclass
class Tuning:
    """One run: what is measured where, and the table that is written as it goes, as a run may be interrupted."""

    device: Device
    path: Path
    table: dict[str, Any]
    measure: Measure
    until: float
    clock: Callable[[], float]
    measured: int = 0

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of the device's memory: by data sheet, or those of a copy on CPU."""
        if self.device.platform != "cpu":
            return rates(jax.devices()[0]).bandwidth
        return timing.ceilings("cpu")["bytes_per_s"]

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until

    def write(self) -> None:
        self.measured += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.table, indent=1) + "\n")

    def race(self, problems: Mapping[MatmulProblem, str]) -> dict[MatmulProblem, Race]:
        """Times products in every way, and writes the fastest."""
        found = products.run(
            self.device,
            problems,
            products.ROWS,
            until=self.until,
            measure=self.measure,
            plain=True,
            checks=True,
            clock=self.clock,
        )
        for race in found:
            print("\n".join(table_of(race, self.bandwidth)), flush=True)
            if (chosen := race.choice()) is not None:
                entry = chosen.as_json() | {"us": microseconds(race, self.bandwidth)}
                self.table.setdefault("products", {})[ways.key(race.problem)] = entry
                self.write()
        return {race.problem: race for race in found}

    def decode(self, problem: AttentionProblem) -> str | None:
        """Times attention of decodes with every backend, and writes the fastest. Returns it."""
        backends = [name for name, why in registry.explain("attention", self.device, problem).items() if why is None]
        if self.device.platform != "cpu":  # plain XLA copies all pages
            backends = [name for name in backends if name != "xla"]
        times: dict[int, dict[str, float]] = {}
        for rows in ATTENTION_ROWS:
            case = decode_case(problem, rows)
            for name in backends:
                if self.is_over or len(backends) < 2:
                    break
                try:
                    sets = [case.arguments(seed) for seed in range(1 if rows > 1 else 4)]
                    work = timing.Chain(case.call(registry.load("attention", name)), (), sets, name=(rows, name))
                    times.setdefault(rows, {})[name] = self.measure(work).seconds
                except Exception as error:  # a compiler or driver may raise anything
                    times.setdefault(rows, {})[name] = math.inf
                    print(f"decode, {name}, {case.name}: failed: {short(error)}", flush=True)
        complete = {rows: found for rows, found in times.items() if len(found) == len(backends)}
        if not complete:
            return None
        sums = {name: sum(found[name] / min(found.values()) for found in complete.values()) for name in backends}
        best = min(sums, key=sums.__getitem__)
        us = {rows: {name: 1e6 * seconds for name, seconds in found.items()} for rows, found in complete.items()}
        for rows, found in sorted(us.items()):
            floor = 1e6 * decode_case(problem, rows).bytes / self.bandwidth
            said = ", ".join(f"{name} {taken:,.1f} us" for name, taken in found.items())
            print(f"attention of {rows} decodes of {CACHED} tokens: floor {floor:,.1f} us, {said}; {best}", flush=True)
        if self.device.platform == "gpu" and math.isfinite(sums[best]):
            self.table.setdefault("decode", {})[attention_key(problem)] = {"backend": best, "us": us}
            self.write()
        return best

    def sizes(self, searches: Iterable[Search]) -> None:
        """Searches block sizes, and writes those that save time."""
        for one in searches:
            if self.is_over:
                print("no time was left for more block sizes", flush=True)
                return
            case = one.case
            said = f"{one.case.part}, {one.backend}, {one.case.name}"
            try:
                best = search(one, self.measure, lambda: self.is_over)
            except Exception as error:  # as in `search`; other cases may work
                print(f"{said}: failed: {short(error)}", flush=True)
                continue
            print(f"{said}: {best}", flush=True)
            problems = self.table["sizes"].setdefault(case.part, {}).setdefault(one.backend, {})
            for key in sorted(best.problems):
                problems.pop(key, None)
                if best.sizes:
                    problems[key] = {"sizes": best.sizes, "us": 1e6 * best.seconds, "default_us": 1e6 * best.default}
            self.write()


def tune(
    operations: Sequence[str],
    sizes: str = "small",
    page_size: int | None = None,
    out: Path | None = None,
    measure: Measure = products.measure_briefly,
    *,
    config: EngineConfig | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Tunes for this machine's first device and prints the results.

    Args:
      operations: operations to tune.
      sizes: small or full, see `kernel_shapes`; without a model.
      page_size: tokens in a page; None: the engine's default on this device. Without a model.
      out: the table to write; None is the one in the user's folder. Its entries for other problems are kept.
      config: settings with a model, for whose products and attention this tunes.
      seconds: when to end, with what has been measured; None: MODEL_SECONDS with a model, else when all is done.

    Returns:
      An exit code: 1 if there was something to tune but nothing could be measured.

    Raises:
      TuningError: `out` exists and is not a table of this device.
      ConfigError: there is no folder for tables, and `out` is not given; or the model cannot be served.
    """
    device = Device.of(jax.devices()[0])
    path = out or _user_table(device.kind)
    if seconds is None:
        seconds = math.inf if config is None else MODEL_SECONDS
    run = Tuning(device, path, _table(path, device.kind), measure, clock() + seconds, clock)
    if config is None:
        dtype = "float32" if device.platform == "cpu" else "bfloat16"
        chosen = list(cases(sizes, dtype, page_size or default_page_size(device.platform)))
        problems = {one.problem: name_of(one.problem) for one in chosen if isinstance(one, MatmulCase)}
        attention = dict.fromkeys(one.problem for one in chosen if one.part == "decode")
    else:
        plan = ModelPlan.of(config, checks=False)
        problems = {one: name_of(one) for one in problems_of(weights_of(config, plan), plan)}
        attention = attention_of(plan)
        chosen = [decode_case(one, rows) for one in attention for rows in ATTENTION_ROWS]
    chosen = [one for one in chosen if one.part in operations]
    races = run.race(problems) if "matmul" in operations else {}
    decoders = {one: run.decode(one) for one in attention} if "decode" in operations else {}
    others = [one for one in chosen if not isinstance(one, MatmulCase)]
    searches = [*searches_of(races, device), *attention_searches(others, decoders, device)]
    if not searches and not races and not run.measured and not run.is_over:
        print(f"nothing to tune on {device.kind}: no operation has several kernels, or block sizes to choose")
        return 0
    run.sizes(searches)
    tuning.clear()
    print(f"wrote {path}" if run.measured else "nothing was written")
    return 0 if run.measured else 1


def attention_of(plan: ModelPlan) -> dict[AttentionProblem, None]:
    """The attention of a model on one device, if it is that of keys and values."""
    mesh = plan.mesh
    page = plan.one_page
    shares = num_shards(mesh, "cached_tokens")
    devices = num_shards(mesh, "kv_heads")
    device = Device.of(mesh.devices.flat[0])
    sizes = plan.dtype, np.dtype(page.dtype), page.page_size // shares
    problem = attention_problem(plan.model, plan.decoder.kv_heads, devices, device, *sizes)
    return {problem: None} if isinstance(problem, AttentionProblem) and shares == 1 else {}


def decode_case(problem: AttentionProblem, rows: int) -> AttentionCase:
    """Decodes with CACHED tokens each."""
    kv_dtype = {"int8": "int8", "float8_e4m3fn": "fp8"}.get(problem.kv_dtype.name) if problem.has_scale else None
    sizes = problem.kv_heads, problem.group, problem.head_dim, problem.page_size
    return AttentionCase(f"{rows} x {CACHED}", problem.q_dtype.name, ((1, CACHED),) * rows, *sizes, kv_dtype)


def searches_of(races: Mapping[MatmulProblem, Race], device: Device) -> Iterator[Search]:
    """The kernels of the fastest ways whose block sizes can be chosen; few rows first."""
    found = []
    for problem, race in races.items():
        chosen = race.choice()
        if chosen is None or problem.has_bias or problem.activation:
            continue
        codes = {"int4": "int4", "int8": "int8"}.get(problem.codes_dtype.name, "fp8")
        for rows, way in chosen.ways:
            if ("matmul", way) in tuning.SIZES:
                case = MatmulCase(
                    f"{race.name}, {rows} rows", problem.x_dtype.name, codes, problem.block, problem.rows,
                    problem.inputs, rows, problem.has_zero,
                )  # fmt: skip
                found.append((rows, Search(case, way, registry.load("matmul", way), chosen.shuffled)))
    return (one for _, one in sorted(found, key=lambda pair: products.ROWS.index(pair[0])))


def attention_searches(
    chosen: Iterable[Case], decoders: Mapping[AttentionProblem, str | None], device: Device
) -> Iterator[Search]:
    """The same for attention: the backend that decodes fastest, or the one that `auto` takes."""
    for case in chosen:
        backend = decoders.get(case.problem) if case.part == "decode" else None
        backend = backend or registry.choose(case.operation, device, case.problem)
        if (case.part, backend) in tuning.SIZES:
            yield Search(case, backend, registry.load(case.operation, backend))


def microseconds(race: Race, bandwidth: float) -> dict[str, dict[str, float]]:
    """The times of all ways by number of rows, with the floor: the time in which memory delivers the weight."""
    return {
        str(rows): {"floor": 1e6 * products.least_bytes(race.problem, rows) / bandwidth}
        | {str(entry): 1e6 * seconds for entry, seconds in found.items() if math.isfinite(seconds)}
        for rows, found in race.complete().items()
    }


def table_of(race: Race, bandwidth: float) -> Iterator[str]:
    """The lines of a race's table, and a warning where a weight that is not quantized would be faster."""
    chosen = race.choice()
    columns = [PLAIN, *race.entries]
    yield f"\n{race.name}, microseconds{' (codes are shuffled)' if chosen and chosen.shuffled else ''}"
    names = "rows", "floor", race.problem.x_dtype.name, *map(str, race.entries)
    yield "  ".join(f"{name:>9}" for name in names)
    for rows, times in microseconds(race, bandwidth).items():
        marks = {
            entry: "*" if chosen and (entry.way, entry.shuffled) == (chosen.way(int(rows)), chosen.shuffled) else " "
            for entry in columns
        }
        cells = [f"{times[str(one)]:,.1f}{marks[one]}" if str(one) in times else "- " for one in columns]
        values = rows, f"{times['floor']:,.1f}", *cells
        yield "  ".join(f"{value:>{max(len(name), 9)}}" for value, name in zip(values, names, strict=True))
    yield from (f"  failed: {one}" for one in race.failed)
    if chosen is None:
        yield "  no time was left to compare"
    for number, seconds, plain in race.slower_than_plain():
        if number <= DECODES:
            yield (
                f"  warning: at {number} rows a weight in {race.problem.x_dtype} takes {1e6 * plain:,.1f} us, the "
                f"quantized one {1e6 * seconds:,.1f}: this model decodes faster without quantization"
            )


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
