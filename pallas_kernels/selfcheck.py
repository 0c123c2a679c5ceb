"""Compares kernels with exact answers on the device at hand, before they are trusted there.

Kernels are compiled for devices on which nobody has run them yet, and drivers and compilers change. A ragged batch, a
write of keys and values, and products of a few sizes show within seconds whether this device computes correctly. Each
check yields findings: an error, and the error that a right kernel may have.

What is detected (tests/kernels/test_selfcheck.py breaks a right kernel in each of these ways):

  attention  a page or the newest token left out, in any row; a softmax scale off by 2% in 16 bits; queries that arrive
             as zeros because a prompt begins at an offset that is no multiple of 8; a window off by one; a missing
             sink; wrongly merged parts of a long row; scales of other tokens; wrong layers (`first_page`); reads of
             stale table entries; NaN from beyond a row's end or before its window; results that differ between equal
             calls
  write      a token in its neighbour's place, a stale scale, written padding, a change of anything else
  matmul     a wrong column; zero points of one group off by one; swapped rows or columns; NaN of one row in others;
             numbers in rows of no expert; errors of one plan, for few or many rows; long sums of float8 products
             that are not promoted to float32

An attention error is that of one token's head: ‖found - exact‖ / ‖exact‖ over head_dim. The largest one counts. eps is
the distance from 1 to the next number of the queries' type. Rounding to this type has a relative error of about 0.2 eps
(root mean square; at most 0.5 eps). A right kernel rounds its results, the probabilities before they multiply the
values, and in a cache of codes the scaled keys and values. Rounded keys change a score by 0.2 eps times the scores'
standard deviation, which is 1 here. Together this is 0.45 eps for a typical head, and below 1 eps for the worst of
about ten thousand heads of 32 dimensions or more. TOLERANCE is 2 eps. A softmax scale that is off by 2% changes the
results by at least 2%, which is 2.6 eps of bfloat16. A long row averages many values, so that the loss of one token
would hardly change it (1/√n). Therefore the values of a row's first and last token are four times as large as the
others.

A product's error is that of one of its rows or columns, in the same norm. A right kernel may round weights, a group's
scale or results to the type of x, which gives 0.35 eps; MATMUL_TOLERANCE is 0.75 eps. A column of few rows is compared
with its norm in 200 rows, and its error may be larger by a factor of 1 + 3/√rows. So a zero point of int4 that is off
by one in one group of a column (0.155 √(group / inputs)) is detected in bfloat16 if a group is 32 of 8,192 inputs or
more, and in float16 always.

Equal calls must give equal bits, REPEATS times: a race between copies and products shows only on devices, and rarely.
Between calls, free memory is filled with NaN, so that results that a kernel does not write are not right by chance.

All checks may run at once, in threads. The device's part is short: programs are compiled by one pool of threads, NumPy
computes exact answers meanwhile, and then one check after the other runs its programs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.pallas_kernels.registry import AttentionProblem, MatmulProblem
from jaxserve.pallas_kernels.selfcheck_cases import (
    LAYER,
    LENGTHS,
    STARTUP,
    Batch,
    Options,
    Rows,
    Write,
    activations,
    exact_attention,
    make_batch,
    make_weight,
    make_write,
    of_one_sign,
    options,
)
from jaxserve.pallas_kernels.selfcheck_exact import exact_gate, grouped_product, product, values
from jaxserve.pallas_kernels.types import BlockArray, KVPages, QuantArray

REPEATS = 20
# in eps of the type of the queries, or of x
TOLERANCE = 2.0
MATMUL_TOLERANCE = 0.75
GATED_TOLERANCE = 1.0  # a gate, its up, the activation and the product are rounded
GATES = 2.0  # root mean square of gates and ups
FLOAT32 = 5e-5  # tolerance of float32: sums in another order, and approximated functions
# One row; part of a tile; one tile; several tiles with a partial last one; enough rows for weights to be dequantized
# first.
MATMUL_ROWS = (1, 17, 64, 200, 520)
PARTS_ROWS = (1, 64, 520)  # for products in parts: 1 row is split, 64 are one part, 520 are dequantized
GATED_ROWS = (1, 64)
FEW_ROWS = 8  # different ones among rows of one sign
OTHER_ROWS = (17, 200)  # for whole products of backends that have parts, which share their kernels
COMPILING = min(os.cpu_count() or 1, 16)  # programs that are compiled at a time
GROUPED_ROWS = (24, 200, 1100)  # for products by expert: tiles have 16 rows, 64, and 128 or more
SHARES = (0.27, 0.0, 0.001, 0.36, 0.0, 0.12)  # of each expert in these rows; the others belong to no expert


Answer = tuple[slice, np.ndarray]  # tokens of a row, and their results


@dataclass(frozen=True)
class Finding:
    """error: as the module defines it; infinite if a result is not finite or equal calls differ. where: its place."""

    what: str
    error: float
    allowed: float
    where: str = ""

    @property
    def right(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.what}: off by {self.error:.2g}{place}, where {self.allowed:.2g} is allowed"


def tolerance(dtype: Any, epsilons: float = TOLERANCE) -> float:
    """`epsilons` eps of a 16-bit type; FLOAT32 for float32."""
    return FLOAT32 if np.dtype(dtype) == np.float32 else epsilons * float(jnp.finfo(dtype).eps)


# Attention


def check_attention(
    attend: Callable[..., jax.Array],
    problem: AttentionProblem,
    *,
    rows: Rows = STARTUP,
    variants: Sequence[str] = ("mixed", "decode", "window"),
    repeats: int = REPEATS,
) -> list[Finding]:
    """Checks `attend`, a `paged_attention`. Returns a finding for each variant. All are compiled in parallel."""
    cases = []
    for variant in variants:
        chosen = _options_of(variant, problem)
        batch = make_batch(problem, Rows(rows.decodes) if variant == "decode" else rows, chosen.window)
        cases.append((variant, batch, chosen, Program(_attention_call(attend, chosen), *batch.arguments())))
    answers = [list(exact_attention(batch, chosen)) for _, batch, chosen, _ in cases]  # while compilers work
    return [
        _judge_attention(f"{variant} rows", batch, exact, program, repeats)
        for (variant, batch, _, program), exact in zip(cases, answers, strict=True)
    ]


def _options_of(variant: str, problem: AttentionProblem) -> Options:
    """mixed, decode: as the problem says. window: with a window. all: with softcap and sinks, too."""
    everything = variant == "all"
    chosen = options(problem, window=everything or variant == "window", softcap=everything, sinks=everything)
    return chosen._replace(decode_only=variant == "decode")


def _attention_call(attend: Callable[..., jax.Array], chosen: Options) -> Callable[..., jax.Array]:
    keywords = {name: value for name, value in chosen._asdict().items() if value is not None and name != "sinks"}
    sinks = {} if chosen.sinks is None else {"sinks": jnp.asarray(chosen.sinks)}
    return lambda *arguments: attend(*arguments, first_page=jnp.int32(LAYER), **sinks, **keywords)


def _judge_attention(what: str, batch: Batch, answers: Sequence[Answer], program: Program, repeats: int) -> Finding:
    used = batch.rows.tokens
    allowed = tolerance(batch.q.dtype)
    found, different = program.repeated((batch.q.shape, batch.q.dtype), repeats, slice(used))
    whole = found.astype(np.float64)
    if not np.isfinite(whole).all():
        return Finding(
            what, float("inf"), allowed, f"token {int(np.argwhere(~np.isfinite(whole))[0][0])} is not finite"
        )
    worst = 0.0
    where = ""
    for row, (tokens, exact) in enumerate(answers):
        error = np.linalg.norm(whole[tokens] - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        if error.max() > worst:
            token, head, member = (int(i) for i in np.unravel_index(error.argmax(), error.shape))
            cached = batch.rows.lengths[row][1]
            worst = float(error.max())
            where = f"row {row} of {cached} cached tokens, its new token {token}, head {head}, {member} of the group"
    if different:
        return Finding(what, float("inf"), allowed, f"{different} of {repeats} equal calls gave another result")
    return Finding(what, worst, allowed, where)


# Writes

OTHER_PAGES = Finding("write", float("inf"), 0.0, "equal calls gave other pages")


def check_write(write: Callable[..., KVPages], problem: AttentionProblem, *, repeats: int = REPEATS) -> list[Finding]:
    """Checks `write`, a `write_kv`: the new keys and values, and that all other memory is bitwise unchanged."""
    case = make_write(problem)
    program = Program(write, *case.arguments())
    others = np.arange(len(case.pages)) != LAYER  # padding may go to the layer's first page
    pages, different = program.repeated(None, repeats, others)
    findings = _judge_write(case, *pages[:2])
    return [*findings, OTHER_PAGES] if different else findings


def _judge_write(case: Write, data: np.ndarray, scale: np.ndarray | None) -> list[Finding]:
    size = data.shape[3]
    slots = case.slots[case.slots >= 0]
    written = np.zeros((data.shape[0], size), bool)
    written[LAYER + slots // size, slots % size] = True
    kept = ~written
    kept[LAYER] = False  # no sequence owns a layer's first page, and padding may go there
    changed = 0
    for before, after in ((case.pages, data), (case.scale, scale)):
        if before is not None and after is not None:
            moved = [np.moveaxis(x, 3, 1)[kept] for x in (before, after)]  # [places, 2, kv_heads, ...]
            changed += sum(a.tobytes() != b.tobytes() for a, b in zip(*moved, strict=True))
    new = np.stack([case.k, case.v], 1)[case.slots >= 0].astype(np.float32)
    found = np.moveaxis(data, 3, 1)[LAYER + slots // size, slots % size].astype(np.float32)
    if scale is None:
        error = np.abs(found - new.astype(data.dtype).astype(np.float32)).max()
        allowed = 0.0
    else:
        own = np.moveaxis(scale, 3, 1)[LAYER + slots // size, slots % size]
        error = _code_error(found, own, new, data.dtype)
        allowed = 0.51
    error = float(error) if np.isfinite(error) else float("inf")
    return [
        Finding("written tokens", error, allowed, "in units of the last place of a code" if scale is not None else ""),
        Finding("places that no token was written to", float(changed), 0.0, "so many have changed"),
    ]


def _code_error(found: np.ndarray, scale: np.ndarray, new: np.ndarray, dtype: np.dtype) -> float:
    """The largest difference of found * scale from new, in units of the last place of its code. Infinite where a scale
    is not the one that maps a head's largest number to the largest code."""
    largest = LENGTHS[np.dtype(dtype).name]
    peak = np.abs(new).max(-1)
    if not (np.abs(scale * largest - peak)[peak > 0] <= 1e-5 * peak[peak > 0]).all():
        return float("inf")
    unit = np.ones_like(new)
    if dtype != np.int8:  # 3 bits of mantissa; numbers below 2 ** -6 are subnormal
        unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(new) / scale[..., None], 2.0**-6))) - 3)
    return float((np.abs(found - new / scale[..., None]) / unit).max())


# Products


def check_matmul(
    multiply: Callable[..., jax.Array],
    problem: MatmulProblem,
    *,
    rows: Sequence[int] = MATMUL_ROWS,
    repeats: int = REPEATS,
) -> list[Finding]:
    """Checks `multiply` with a weight of `problem`'s form and each of these numbers of rows of x."""
    w = make_weight(problem)
    x = activations(problem, max(*rows, 200))
    on_device = jax.device_put(w)

    def multiplied(x: jax.Array, w: QuantArray | BlockArray, count: jax.Array) -> jax.Array:
        return multiply(x, w, count=count)

    programs = [Program(multiplied, x[:count], on_device, np.int32(count)) for count in rows]
    exact = product(x, w)  # while compilers work
    found = [
        _judge_matmul(f"{count} rows", problem, exact, np.arange(count), program, np.int32(count - count // 8), repeats)
        for count, program in zip(rows, programs, strict=True)
    ]
    if problem.activations is None or problem.activations.dtype == "int8" or isinstance(w, BlockArray):
        return found
    assert isinstance(w, QuantArray), "blocks round no inputs to floats"
    return found + _judge_long_sums(problem, np.abs(x[:FEW_ROWS]), of_one_sign(w), programs)


def _judge_long_sums(
    problem: MatmulProblem, x: np.ndarray, w: QuantArray, programs: Sequence[Program]
) -> list[Finding]:
    """Compares the results of programs with a few rows x of one sign, which are repeated."""
    exact = product(x, w)
    on_device = jax.device_put(w)
    typical = np.sqrt(np.mean(np.square(exact), 0))
    allowed = tolerance(problem.x_dtype, MATMUL_TOLERANCE)
    findings = []
    for program in programs:
        count = len(program.arguments[0])
        at = np.arange(count) % len(x)
        found = program.run(x[at], on_device, np.int32(count)).astype(np.float32)
        worst = _worst(found, exact[at], typical) if np.isfinite(found).all() else (float("inf"), "not finite")
        findings.append(Finding(f"{count} rows of one sign", worst[0], allowed, worst[1]))
    return findings


def check_parts(multiply: Callable[..., jax.Array], problem: MatmulProblem, *, repeats: int = REPEATS) -> list[Finding]:
    """Checks `multiply`, a `quant_matmul_parts`, whose parts are added here."""

    def whole(x: jax.Array, w: QuantArray, count: jax.Array) -> jax.Array:
        return multiply(x, w, count=count).astype(jnp.float32).sum(0)

    found = check_matmul(whole, problem, rows=PARTS_ROWS, repeats=repeats)
    return [replace(finding, what=f"parts of {finding.what}") for finding in found]


def check_gated(
    multiply: Callable[..., jax.Array],
    problem: MatmulProblem,
    *,
    rows: Sequence[int] = GATED_ROWS,
    repeats: int = REPEATS,
) -> list[Finding]:
    """Checks `multiply`, a `gated_matmul`, with the problem's activation and each of these numbers of rows of x. Gates
    are of a size at which the activation bends."""
    w = make_weight(problem)
    assert isinstance(w, QuantArray)
    if problem.codes_dtype == problem.x_dtype:  # a weight that is not quantized
        w = replace(w, scale=np.ones_like(w.scale))
    typical = np.sqrt(problem.inputs * np.square(values(w, 0, min(len(w.codes), 64))).mean())
    x = (activations(problem, max(rows)).astype(np.float32) * (GATES / typical)).astype(problem.x_dtype)
    on_device = jax.device_put(w)

    def gated(x: jax.Array, w: QuantArray, _: Any) -> jax.Array:
        return multiply(x, w, problem.activation)

    programs = [Program(gated, x[:count], on_device, np.int32(count)) for count in rows]
    exact = exact_gate(problem.activation, product(x, w))  # while compilers work
    found = []
    for count, program in zip(rows, programs, strict=True):
        what = f"gate of {count} rows"
        fewer = np.int32(count - count // 8)
        found.append(_judge_matmul(what, problem, exact, np.arange(count), program, fewer, repeats, GATED_TOLERANCE))
    return found


def check_grouped(
    multiply: Callable[..., jax.Array],
    problem: MatmulProblem,
    *,
    rows: Sequence[int] = GROUPED_ROWS,
    repeats: int = REPEATS,
) -> list[Finding]:
    """Checks `multiply`, a `grouped_quant_matmul`, with each of these numbers of rows, of experts that have many, one
    and none."""
    w = make_weight(problem, len(SHARES))
    x = activations(problem, max(rows))
    sizes = [np.ceil(np.multiply(SHARES, count)).astype(np.int32) for count in rows]
    largest = max(sizes, key=np.sum)
    # of each expert's rows the first ones are taken
    begins = np.cumsum([0, *largest])
    taken = []
    for own, count in zip(sizes, rows, strict=True):
        many = [*own, count - own.sum()]
        taken.append(np.concatenate([begin + np.arange(n) for begin, n in zip(begins, many, strict=True)]))
    on_device = jax.device_put(w)
    programs = [Program(multiply, x[at], on_device, own) for at, own in zip(taken, sizes, strict=True)]
    exact = grouped_product(x, w, largest)  # while compilers work
    return [
        _judge_matmul(f"experts of {len(at)} rows", problem, exact, at, program, own, repeats)
        for at, program, own in zip(taken, programs, sizes, strict=True)
    ]


def _judge_matmul(
    what: str,
    problem: MatmulProblem,
    exact: np.ndarray,
    at: np.ndarray,
    program: Program,
    fewer: np.ndarray | np.int32,
    repeats: int,
    epsilons: float = MATMUL_TOLERANCE,
) -> Finding:
    """Compares a program's results with the rows `at` of `exact`. fewer: the program's last argument that says which
    leading rows matter; all others and one in the middle become NaN, which must not change the rest."""
    allowed, (x, w, _) = tolerance(problem.x_dtype, epsilons), program.arguments
    # typical: of each column
    rows = len(at)
    typical = np.sqrt(np.mean(np.square(exact), 0))
    exact = exact[at]
    result, different = program.repeated((exact.shape, np.float32), repeats, slice(rows))
    found = result.astype(np.float32)
    if not np.isfinite(found).all():
        return Finding(what, float("inf"), allowed, "not finite")
    error, where = _worst(found, exact, typical)
    if different:
        return Finding(what, float("inf"), allowed, f"{different} of {repeats} equal calls gave another result")
    used = int(fewer.sum())
    spoilt = np.array(x)
    kept = np.flatnonzero(np.arange(used) != used // 2)
    spoilt[used // 2] = spoilt[used:] = np.nan
    again = program.run(spoilt, w, fewer) if rows > 1 else result
    changed = [row for row in kept if again[row].tobytes() != result[row].tobytes()]
    if changed or (fewer.ndim and again[used:].any()):
        said = f"NaN in other rows changes row {changed[0]}" if changed else "a row of no expert is not zero"
        return Finding(what, float("inf"), allowed, said)
    return Finding(what, error, allowed, where)


def _worst(found: np.ndarray, exact: np.ndarray, typical: np.ndarray) -> tuple[float, str]:
    """The largest error of a row or column, and where it is. typical: the size of each column's numbers."""
    squares = np.square(found - exact)
    expected = np.square(exact).sum(1)
    with np.errstate(over="ignore"):  # a row that should be zero
        of_row = np.sqrt(squares.sum(1) / np.maximum(expected, 1e-30))
    of_column = np.sqrt(squares.mean(0)) / np.maximum(typical, 1e-30) / (1 + 3 / np.sqrt(len(found)))
    return max(
        (float(of_row.max()), f"row {of_row.argmax()}"), (float(of_column.max()), f"column {of_column.argmax()}")
    )


# Shared by all checks


_compilers = ThreadPoolExecutor(COMPILING, "compiles-checks")
_device = threading.Lock()  # checks take turns, so that memory that one has filled with NaN is not another's result


class Program:
    """A call that is being compiled, in a thread of the pool that all checks share. Its arguments are put onto the
    device. Nothing else is compiled for a check: NumPy makes inputs and exact answers, and compares."""

    def __init__(self, call: Callable[..., Any], *arguments: Any):
        self.arguments = jax.device_put(arguments)
        self._call = call
        # Where JAX is told to compile nothing, calls are interpreted in their own threads.
        self._compiled = None if jax.config.values["jax_disable_jit"] else _compilers.submit(self._compile)

    def _compile(self) -> Callable[..., Any]:
        return jax.jit(self._with_digests).lower(*self.arguments).compile()

    def _with_digests(self, *arguments: Any) -> tuple[Any, Any]:
        results = self._call(*arguments)
        return results, jax.tree.map(digests, results)

    def _run(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        call = self._with_digests if self._compiled is None else self._compiled.result()
        return call(*(jax.device_put(arguments) if arguments else self.arguments))

    def run(self, *arguments: Any) -> Any:
        """The results on the host, with other arguments if some are given."""
        self.wait()
        with _device:
            return jax.tree.map(np.asarray, self._run(arguments)[0])

    def repeated(
        self, like: tuple[tuple[int, ...], Any] | None, repeats: int, used: Any = slice(None)
    ) -> tuple[Any, int]:
        """The results of the first call, on the host, and how many of `repeats` more calls differ from them in the rows
        `used`. like: shape and dtype of the result whose memory is filled with NaN before; None: of none."""
        self.wait()
        count = 0
        with _device:
            _fill_with_nan(like)
            results, first = jax.tree.map(np.asarray, self._run(()))
            for i in range(repeats):
                if i % 5 == 0:
                    _fill_with_nan(like)
                again = jax.tree.leaves(self._run(())[1])
                pairs = zip(again, jax.tree.leaves(first), strict=True)
                count += any((np.asarray(a)[used] != b[used]).any() for a, b in pairs)
        return results, count

    def wait(self) -> None:
        """Waits for the compiler, whose errors are raised here."""
        if self._compiled is not None:
            self._compiled.result()


def digests(results: jax.Array) -> jax.Array:
    """A number for each row of some results, uint32, which no change of a single number leaves as it is. So the host,
    which compares them, need not read the results of each call."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[results.dtype.itemsize]
    bits = lax.bitcast_convert_type(results, unsigned).astype(jnp.uint32).reshape(len(results), -1)
    odd = 2 * lax.iota(jnp.uint32, bits.shape[1]) + 1  # has an inverse modulo 2 ** 32
    return jnp.sum(bits * odd, axis=1, dtype=jnp.uint32)


def _fill_with_nan(like: tuple[tuple[int, ...], Any] | None) -> None:
    """Fills the memory that a result of this shape and dtype will probably occupy with NaN, and frees it."""
    if like is not None:
        shape, dtype = like
        jax.block_until_ready(jax.device_put(np.full(shape, np.nan, dtype)))
