"""Races of the ways to multiply by quantized weights (`quant_matmul.ways`) on this machine's first device; and by other
weights where the gate of an MLP follows, which is then timed with the product.

Each way is timed for some numbers of rows. Threads compile them side by side. Then they are timed one at a time, since
compiling for a GPU runs products on it. At the end of the time that a race may take, what has been measured counts: of
each number of rows either all ways or none.

A weight is arranged once for all numbers of rows. So the choice is an arrangement, and for each number of rows the
fastest way that it allows. Of two arrangements the one with the least sum counts, over the numbers of rows, of

    SHARES * time of its fastest way / time of the fastest way of all

in which the rows of decodes weigh most.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.quant_matmul import fragments, ways
from jaxserve.pallas_kernels.registry import Device, MatmulProblem
from jaxserve.pallas_kernels.selfcheck_exact import exact_gate
from jaxserve.pallas_kernels.tuning import Product
from jaxserve.pallas_kernels.tuning.timing import Chain, Timing, Work, measure, sets_needed
from jaxserve.pallas_kernels.types import QuantArray

log = logging.getLogger(__name__)

ROWS = (32, 1, 256, 8, 64, 1024)  # the most important ones first
DECODE_ROWS = (32, 1, 256)
SHARES = {1: 4, 8: 4, 32: 4, 64: 2, 256: 2, 1024: 1}
EACH_SECONDS = 0.06  # approximate time of measuring a way
AT_ONCE = 4  # problems whose weights are on the device at a time
COMPILING = 0.6  # part of the time in which ways are compiled before they are timed
THREADS = min(os.cpu_count() or 1, 16)  # that compile
CHECKED = 16  # rows and outputs of each result that are compared with float64
TOLERANCE = {"float32": 1e-4}  # of an error relative to the largest value, by dtype of x; others: LOOSE
LOOSE = 0.02  # ways that round the weight to 16 bits are as good as such a weight

Measure = Callable[[Work], Timing]


class Entry(NamedTuple):
    """A way for weights whose codes are shuffled for it, or are in order. PLAIN: a weight in the dtype of x."""

    way: str
    shuffled: bool = False

    def __str__(self) -> str:
        return f"{self.way} shuffled" if self.shuffled and self.way == "dequantize" else self.way


PLAIN = Entry("plain")
IN_ORDER = Entry("")  # any way for codes in order


def measure_briefly(work: Work) -> Timing:
    return measure(work, EACH_SECONDS)


@dataclass
class Race:
    """The times of all ways for one weight.

    Attributes:
      seconds: by number of rows and way. Ways that failed are infinitely slow.
      failed: what failed, and why.
    """

    problem: MatmulProblem
    name: str
    entries: list[Entry]
    seconds: dict[int, dict[Entry, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def complete(self) -> dict[int, dict[Entry, float]]:
        """The times of the numbers of rows for which every way was tried and one did not fail, in ascending order."""
        return {
            rows: found
            for rows, found in sorted(self.seconds.items())
            if all(entry in found for entry in self.entries) and min(map(found.__getitem__, self.entries)) < math.inf
        }

    def fastest(self, rows: int, shuffled: bool) -> tuple[float, str]:
        """The least time and its way, for codes in this order; infinite if there is none."""
        found = self.seconds[rows]
        return min(((found[one], one.way) for one in self.entries if one.shuffled is shuffled), default=(math.inf, ""))

    def choice(self) -> Product | None:
        """See above; None if nothing is complete."""
        complete = self.complete()
        sums = {}
        for shuffled in (False, True):
            times = [(rows, self.fastest(rows, shuffled)[0]) for rows in complete]
            best = {rows: min(found[entry] for entry in self.entries) for rows, found in complete.items()}
            sums[shuffled] = sum(SHARES.get(rows, 1) * seconds / best[rows] for rows, seconds in times)
        if not complete or min(sums.values()) == math.inf:
            return None
        shuffled = min(sums, key=sums.__getitem__)
        return Product(shuffled, tuple((rows, self.fastest(rows, shuffled)[1]) for rows in complete))

    def slower_than_plain(self) -> Iterator[tuple[int, float, float]]:
        """(rows, seconds by the choice, seconds of a weight in the dtype of x) where the latter is faster."""
        if (chosen := self.choice()) is not None:
            for rows, found in self.complete().items():
                seconds, _ = self.fastest(rows, chosen.shuffled)
                if found.get(PLAIN, math.inf) < seconds:
                    yield rows, seconds, found[PLAIN]


def run(
    device: Device,
    problems: Mapping[MatmulProblem, str],
    rows: Sequence[int] = ROWS,
    *,
    until: float = math.inf,
    measure: Measure = measure_briefly,
    plain: bool = False,
    checks: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> list[Race]:
    """Races for problems with their names, in this order; without races for those with one way only.

    Args:
      rows: numbers of rows, the most important first.
      until: the time of `clock` at which to end.
      plain: weights in the dtype of x are timed, too.
      checks: results are compared with float64; a way that is wrong has failed.
    """
    races = []
    for problem, name in problems.items():
        entries = [Entry(*one) for one in ways.candidates(device, problem)]
        if ways.key(problem) is not None and len(entries) > 1:
            races.append(Race(problem, name, entries))
    pool = ThreadPoolExecutor(THREADS)
    try:
        for at in range(0, len(races), AT_ONCE):
            _Heat(device, races[at : at + AT_ONCE], pool, until, measure, checks, clock).run(rows, plain)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return races


@dataclass
class _Heat:
    """Some races at a time."""

    device: Device
    races: list[Race]
    pool: ThreadPoolExecutor
    until: float
    measure: Measure
    checks: bool
    clock: Callable[[], float]
    compiling: dict[Future, tuple[Race, int, Entry]] = field(default_factory=dict)
    making: dict[MatmulProblem, Future] = field(default_factory=dict)
    shapes: dict[MatmulProblem, Arrays] = field(default_factory=dict)

    def run(self, rows: Sequence[int], plain: bool) -> None:
        now = self.clock()
        until = now + COMPILING * (self.until - now)
        for race in self.races:
            make = partial(make_arrays, race.problem, tuple(rows), plain, any(one.shuffled for one in race.entries))
            self.shapes[race.problem] = jax.eval_shape(make)
            self.making[race.problem] = self.pool.submit(jax.jit(make))
        for count in rows:
            for race in self.races:
                beside = [PLAIN] if plain and not ways.is_float(race.problem) else []
                for entry in [*race.entries, *beside]:
                    if self.clock() < until:
                        self._begin(race, count, entry)
        wait(self.compiling, self._seconds_to(until))
        for one in [one for one in self.compiling if one.cancel()]:
            del self.compiling[one]
        while self.compiling and self.clock() < self.until:
            done, _ = wait(self.compiling, self._seconds_to(self.until), FIRST_COMPLETED)
            for one in [one for one in self.compiling if one in done]:
                race, count, entry = self.compiling.pop(one)
                if self.clock() < self.until:
                    self._take(race, count, entry, one)

    def _seconds_to(self, end: float) -> float | None:
        return None if end == math.inf else max(end - self.clock(), 0.0)

    def _begin(self, race: Race, rows: int, entry: Entry) -> None:
        """Traces the way, and has a thread compile it."""
        partials = self.device.platform == "gpu"  # as models use it there

        def call(state: Any, x: jax.Array, w: Any) -> tuple[Any, jax.Array]:
            if entry == PLAIN:
                return state, jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
            if ways.is_float(race.problem):
                return state, ways.gated_product(entry.way, x, w, race.problem.activation)
            return state, ways.product(entry.way, x, w, partials=partials)

        try:
            sets = self.shapes[race.problem].sets(rows, entry)
            work = Chain(call, (), sets, later=True, name=(race.name, rows, entry))
        except Exception as error:  # a compiler may raise anything
            self._fail(race, rows, entry, error)
            return
        self.compiling[self.pool.submit(work.compile)] = race, rows, entry

    def _take(self, race: Race, rows: int, entry: Entry, compiled: Future) -> None:
        """Times a way that has been compiled."""
        try:
            work = compiled.result()
            arrays = self.making[race.problem].result()
            work.use(arrays.sets(rows, entry))
            if self.checks and entry != PLAIN:
                _check(race.problem, work, *arrays.sets(rows, IN_ORDER)[0])
            race.seconds.setdefault(rows, {})[entry] = self.measure(work).seconds
        except Exception as error:  # a compiler or driver may raise anything
            self._fail(race, rows, entry, error)

    def _fail(self, race: Race, rows: int, entry: Entry, error: Exception) -> None:
        race.seconds.setdefault(rows, {})[entry] = math.inf
        race.failed.append(f"{entry}, {rows} rows: {short(error)}")
        log.info("%s: %s", race.name, race.failed[-1])


class Arrays(NamedTuple):
    """Inputs and weights, or their shapes, which together exceed the device's cache: lists of equal lengths, by number
    of rows, and by how the weights are stored."""

    x: dict[int, list[Any]]
    weights: dict[Entry, list[Any]]

    def sets(self, rows: int, entry: Entry) -> list[tuple[Any, Any]]:
        stored = entry if entry == PLAIN else IN_ORDER._replace(shuffled=entry.shuffled)
        return list(zip(self.x[rows], self.weights[stored], strict=True))


def make_arrays(problem: MatmulProblem, rows: Sequence[int], plain: bool, shuffled: bool) -> Arrays:
    """Random arrays. One program makes all of them, as each program takes time to compile."""
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 6))
    w = ways.form(problem)
    width = jax.dtypes.itemsize_bits(problem.codes_dtype)
    count = sets_needed(problem.rows * problem.inputs * width // 8, jax.default_backend())

    def numbers(shape: tuple[int, ...]) -> jax.Array:
        """-128 to 127; a byte of random bits for each takes a quarter of the memory of floats."""
        bits = jax.random.bits(next(keys), (count, *shape), jnp.uint8)
        return jax.lax.bitcast_convert_type(bits, jnp.int8)

    def floats(shape: tuple[int, ...]) -> jax.Array:
        return numbers(shape).astype(problem.x_dtype) / 64

    codes = numbers(w.shape)
    codes = (codes >> 4 if width == 4 else codes).astype(problem.codes_dtype)
    one = jnp.ones((), problem.x_dtype)
    scale = jnp.broadcast_to(one, (count, 1, 1)) if ways.is_float(problem) else jnp.abs(floats(w.scale.shape)) + one
    zero = numbers(w.scale.shape) >> 4 if problem.has_zero else None
    bias = floats(w.scale.shape) if problem.has_bias else None
    stacked = QuantArray(codes, scale, zero, bias, problem.block)
    weights: dict[Entry, Any] = {IN_ORDER: stacked}
    if shuffled:
        weights[IN_ORDER._replace(shuffled=True)] = fragments.shuffle(stacked)
    if plain and not ways.is_float(problem):
        weights[PLAIN] = floats(w.shape)
    x = floats((max(rows), problem.inputs))
    separate = {name: [jax.tree.map(lambda a, i=i: a[i], one) for i in range(count)] for name, one in weights.items()}
    return Arrays({number: [x[i, :number] for i in range(count)] for number in rows}, separate)


def _check(problem: MatmulProblem, work: Chain, x: jax.Array, w: QuantArray) -> None:
    """Raises ValueError if the first result of `work` is not that of float64. w: the weight with its codes in order."""
    work.enqueue(1)
    work.wait()
    found = np.asarray(work.outputs[0]).astype(np.float64)
    found = found.sum(0) if found.ndim == 3 else found
    chosen = sampled(*found.shape)
    numbers = (np.asarray(x), jax.tree.map(np.asarray, w))
    if problem.activation:
        pairs = (2 * chosen[1][:, None] + np.arange(2)).reshape(-1)
        exact = exact_gate(problem.activation, exact_product(*numbers, chosen[0], pairs))
    else:
        exact = exact_product(*numbers, *chosen)
    error = np.abs(found[np.ix_(*chosen)] - exact).max() / np.abs(exact).max()
    if not error <= TOLERANCE.get(problem.x_dtype.name, LOOSE):
        raise ValueError(f"off by {error:.2g} of the largest value")


def sampled(rows: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Some rows and outputs of a result."""
    rng = np.random.default_rng(0)
    first, second = (np.sort(rng.permutation(size)[:CHECKED]) for size in (rows, outputs))
    return first, second


def exact_product(x: np.ndarray, w: QuantArray, rows: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Some rows and outputs of the product, in float64."""

    def spread(values: Any) -> np.ndarray:
        chosen = values[outputs // w.block[0]].astype(np.float64)
        return np.repeat(chosen, w.block[1], 1)[:, : w.shape[1]]

    weight = w.codes[outputs].astype(np.float64)
    if w.zero is not None:
        weight -= spread(w.zero)
    weight *= spread(w.scale)
    if w.bias is not None:
        weight += spread(w.bias)
    return x[rows].astype(np.float64) @ weight.T


def short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def least_bytes(problem: MatmulProblem, rows: int) -> int:
    """The least bytes that a product must read and write."""
    w = ways.form(problem)
    blocks = w.scale.shape[0] * w.scale.shape[1]
    scales = problem.x_dtype.itemsize * (1 + problem.has_bias) + problem.has_zero
    codes = problem.rows * problem.inputs * jax.dtypes.itemsize_bits(problem.codes_dtype) // 8
    outputs = problem.rows // 2 if problem.activation else problem.rows
    return codes + blocks * scales + rows * problem.x_dtype.itemsize * (problem.inputs + outputs)
