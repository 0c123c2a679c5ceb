"""Stage `correctness`: the checks of `jaxserve.pallas_kernels.selfcheck`, at more and larger sizes, for every backend.

First comes a case of each family, which is a kernel with its types, then the rest; among them those with the fewest
unusual settings first, so that the least important ones are skipped when time runs out. Several processes share the
cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.bench.kernel_shapes import FORMATS, WEIGHTS
from jaxserve.pallas_kernels import kv_write, selfcheck
from jaxserve.pallas_kernels.registry import BACKENDS, AttentionProblem, Device, MatmulProblem, explain, load
from jaxserve.pallas_kernels.selfcheck_cases import DECODES, PROMPTS, STARTUP, Rows
from light import other_kernels
from light.record import Record

CODES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn), "int4": np.dtype(ml_dtypes.int4)}
GROUPS = {128: 4, 64: 8, 256: 2, 96: 3, 80: 7, 32: 1}  # query heads of a key-value head, by head_dim
# Enough long rows that none is split, with first prompts, and a long prompt after a long cached one.
LARGE = Rows((8192, *DECODES[1:], *(1000 + 37 * i for i in range(48))), (*PROMPTS, (1025, 3000)))
SMALL = Rows((300, 1, 16, 65), ((41, 90), (9, 0), (1, 200)))
# The numbers of rows at which the plan of some backend changes, and each plus one.
MATMUL_ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1000)


@dataclass(frozen=True)
class Case:
    """distance: the number of unusual settings. family: the kernel, with the types of its inputs and weights."""

    key: str
    family: tuple[str, ...]
    distance: int
    check: Callable[[], Iterable[selfcheck.Finding]]


def run(record: Record, *, rehearse: bool) -> None:
    for case in in_order(cases(Device.of(jax.devices()[0]), rehearse)):
        if not record.take(case.key):
            continue
        with record.row(case.key) as row:
            findings = list(case.check())
            worst = max(findings, key=lambda f: f.error / max(f.allowed, 1e-30))
            row |= {"error": worst.error, "allowed": worst.allowed, "findings": list(map(str, findings))}
            if wrong := [finding for finding in findings if not finding.right]:
                row |= {"status": "wrong", "reason": "; ".join(map(str, wrong))}


def in_order(found: Iterable[Case]) -> list[Case]:
    """The cases, the first one of each family before all others."""
    by_distance = sorted(found, key=lambda case: case.distance)
    first = {case.key for case in reversed({case.family: case for case in reversed(by_distance)}.values())}
    return sorted(by_distance, key=lambda case: case.key not in first)


def cases(device: Device, rehearse: bool, wrap: Callable[[Any], Any] = lambda kernel: kernel) -> Iterator[Case]:
    """All cases. wrap: makes what is checked of each kernel."""
    for backend in BACKENDS:
        try:
            attention = load("attention", backend)
            matmul = load("matmul", backend)
        except ImportError:
            continue  # the stage `device` reports the reason
        for problem, name, distance in _attention_problems(device.platform, rehearse):
            if explain("attention", device, problem)[backend] is not None:
                continue
            rows = SMALL if rehearse else LARGE if distance == 0 else STARTUP
            types = str(problem.q_dtype), str(problem.kv_dtype)
            variants = _variants(attention, device, problem, rehearse)
            repeats = 2 if rehearse else selfcheck.REPEATS
            check = partial(selfcheck.check_attention, wrap(attention.paged_attention), problem, rows=rows)
            check = partial(check, variants=variants, repeats=repeats)
            yield Case(f"attention {name}, {backend}", ("attention", backend, *types), distance, check)
            write = getattr(attention, "write_kv", kv_write.write_kv)
            if write is not kv_write.write_kv or backend == "xla":
                check = partial(selfcheck.check_write, wrap(write), problem)
                yield Case(f"write {name}, {backend}", ("write", backend, *types), distance, check)
        for w, name, distance in _matmul_problems(device.platform, rehearse):
            if explain("matmul", device, w)[backend] is not None or (backend == "xla" and distance):
                continue
            counts: Sequence[int] = selfcheck.MATMUL_ROWS if rehearse or distance > 1 else MATMUL_ROWS
            types = str(w.x_dtype), str(w.codes_dtype)
            check = partial(selfcheck.check_matmul, wrap(matmul.quant_matmul), w, rows=counts)
            yield Case(f"matmul {name}, {backend}", ("matmul", backend, *types), distance, check)
            if hasattr(matmul, "grouped_quant_matmul"):
                grouped = partial(selfcheck.check_grouped, wrap(matmul.grouped_quant_matmul), w)
                family = ("matmul by expert", backend, *types)
                yield Case(f"matmul by expert {name}, {backend}", family, distance + 1, grouped)
    yield from (Case(*found) for found in other_kernels.cases(device, rehearse, wrap))


def _variants(module: Any, device: Device, problem: AttentionProblem, rehearse: bool) -> tuple[str, ...]:
    variants = ("mixed", "all") if rehearse else ("mixed", "decode", "window", "all")
    extras = replace(problem, softcap=True, sinks=True)
    return variants if module.why_not(device, extras) is None else variants[:-1]


def _attention_problems(platform: str, rehearse: bool) -> Iterator[tuple[AttentionProblem, str, int]]:
    dtypes = ("float32",) if platform == "cpu" else ("bfloat16", "float16", "float32")
    kinds: tuple[str | None, ...] = (None, "int8", "fp8")
    sizes: tuple[tuple[int, ...], ...] = ((128, 64, 256, 96, 80, 32), (16, 64, 128, 8, 256))
    if platform == "tpu":
        sizes = (sizes[0][:3], (128, 16, 64, 256))
    if rehearse:
        kinds = (None, "int8")
        sizes = ((64,), (16,))
    for dtype, kv, head_dim, page in itertools.product(dtypes, kinds, *sizes):
        usual = (dtypes[0], kinds[0], sizes[0][0], sizes[1][0])
        distance = sum(a != b for a, b in zip((dtype, kv, head_dim, page), usual, strict=True))
        q = np.dtype(jnp.dtype(dtype))
        cached = CODES[kv] if kv else q
        heads = 4 if distance == 0 and not rehearse else 2
        problem = AttentionProblem(q, cached, heads, GROUPS[head_dim], head_dim, page, has_scale=kv is not None)
        yield problem, f"{dtype}, {kv or 'same'} cache, head_dim {head_dim}, pages of {page}", distance


def _matmul_problems(platform: str, rehearse: bool) -> Iterator[tuple[MatmulProblem, str, int]]:
    """All formats with all weights and dtypes, and their distances. A rehearsal has only those of distance 0."""
    dtypes = ("float32",) if platform == "cpu" else ("bfloat16", "float16")
    weights = {"8B out": WEIGHTS["8B out"], "8B down": WEIGHTS["8B down"], "8B gate-up": WEIGHTS["8B gate-up"]}
    if rehearse:
        weights = {"small": (320, 256)}
    first = next(iter(weights))
    usual = ("int4 g128", "int8 channel", "fp8 128x128")
    for dtype, name, weight in itertools.product(dtypes, FORMATS, weights):
        codes, block, zero = FORMATS[name]
        distance = (dtype != dtypes[0]) + (name not in usual) + (weight != first)
        if rehearse and distance:
            continue
        out, inputs = weights[weight]
        whole = block[0] or out, block[1] or inputs
        problem = MatmulProblem(np.dtype(jnp.dtype(dtype)), CODES[codes], out, inputs, whole, has_zero=zero)
        yield problem, f"{weight} {name}, {dtype}", distance
