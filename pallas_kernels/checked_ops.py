"""Operations that were tried on this machine's device, and plain XLA in the place of those that are wrong there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.registry import AttentionProblem, BackendError, Device, MatmulProblem, choose, load
from jaxserve.pallas_kernels.types import QuantArray

if TYPE_CHECKING:  # which is imported where a device is tried
    from jaxserve.pallas_kernels.selfcheck import Finding

log = logging.getLogger(__name__)


def checked(ops: Ops, problem: AttentionProblem, backend: str, *, windows: bool = True) -> Ops:
    """The same, after its attention and its write to the cache were tried on the first of this machine's devices; with
    windows where the model has some.

    A kernel that is wrong there gives way to plain XLA, with a warning; when it was asked for by name, to BackendError.
    What is plain XLA already is not tried: there would be nothing to take its place.
    """
    from jaxserve.pallas_kernels.selfcheck import check_attention, check_write
    from jaxserve.pallas_kernels.selfcheck_fused import check_write_and_attend

    variants = ("mixed", "decode", "window") if windows else ("mixed", "decode")
    attend, write = ops.paged_attention, ops.write_kv
    if attend is not reference.paged_attention and not _is_right(
        "attention", backend, lambda: check_attention(attend, problem, variants=variants)
    ):
        attend = reference.paged_attention
    if write is not write_kv and not _is_right("write_kv", backend, lambda: check_write(write, problem)):
        write = write_kv
    both = ops.write_and_attend
    if both is not None:  # it shares its code with the two
        as_before = attend is ops.paged_attention and write is ops.write_kv
        check = partial(check_write_and_attend, both, attend, problem)
        both = both if as_before and _is_right("write_and_attend", backend, check) else None
    return replace(ops, paged_attention=attend, write_kv=write, write_and_attend=both)


def checked_fused(ops: Ops, problem: AttentionProblem) -> Ops:
    """The same, after its fused kernels were tried on the first of this machine's devices; without them, and with a
    warning, where one is wrong."""
    from jaxserve.pallas_kernels.selfcheck_fused import check_fused

    if ops.fused is None or _is_right("fused", "auto", lambda: check_fused(ops.fused, problem)):
        return ops
    return replace(ops, fused=None)


def checked_draw(ops: Ops, vocab: int) -> Ops:
    """The same, after the kernel that draws was tried on rows of so many tokens; without it, and with a warning, where
    it is wrong."""
    from jaxserve.pallas_kernels.selfcheck_draw import check_draw

    draw = ops.draw
    if draw is None or _is_right("draw", "auto", lambda: check_draw(draw, vocab)):
        return ops
    return replace(ops, draw=None)


def checked_matmul(
    device: Device, problems: Iterable[MatmulProblem], backend: str, grouped: Iterable[MatmulProblem] = ()
) -> str:
    """The backend to use for products with quantized weights of these forms, after what it does was compared with plain
    XLA on the first of this machine's devices: `backend`, or xla where that was auto and is wrong.

    grouped: forms of experts' weights, whose grouped products are tried as well.

    Raises BackendError for one asked for by name that cannot do a form, or does it wrong.
    """
    from jaxserve.pallas_kernels.selfcheck import check_grouped, check_matmul, check_parts

    problems = list(problems)
    rounding = [p for p in problems if backend == "auto" and w8a8.why_not(device, p) is None]
    # Where rounded inputs are computed with as floats, the kernels are those of the weights alone.
    others = dict.fromkeys(replace(p, activations=None) for p in problems if p not in rounding)
    chosen = [(problem, choose("matmul", device, problem, backend)) for problem in others]
    with ThreadPoolExecutor(4) as pool:  # most of the time goes to compiling
        checks = []
        for problem, name in chosen:
            if name in ("xla", "cpu"):
                continue
            module = load("matmul", name)
            checks.append(pool.submit(check_matmul, module.quant_matmul, problem))
            if hasattr(module, "quant_matmul_parts"):
                checks.append(pool.submit(check_parts, module.quant_matmul_parts, problem))
        for problem in grouped:
            name = choose("matmul", device, problem, backend)
            multiply = getattr(load("matmul", name), "grouped_quant_matmul", None)
            if name not in ("xla", "cpu") and not problem.kind and multiply is not None:
                checks.append(pool.submit(check_grouped, multiply, problem))
        ways = (False, True) if device.platform == "gpu" else (False,)
        checks += [
            pool.submit(check_matmul, partial(_rounding_product, parts), problem)
            for problem in rounding
            for parts in ways
        ]
        right = all(_is_right("matmul", backend, check.result) for check in checks)
    return backend if right else "xla"


def _rounding_product(parts: bool, x: jax.Array, w: QuantArray) -> jax.Array:
    rows = w8a8.quantize(x, w)
    return w8a8.quant_matmul_parts(rows, w).astype(jnp.float32).sum(0) if parts else w8a8.quant_matmul(rows, w)


def _is_right(operation: str, backend: str, check: Callable[[], Iterable[Finding]]) -> bool:
    """Whether all findings are right; warns of the first that is not, or raises BackendError where the kernel was asked
    for by name."""
    try:
        wrong = next((finding for finding in check() if not finding.right), None)
        if wrong is None:
            return True
        said = f"is wrong on this device: {wrong}"
    except Exception as failure:  # whatever a compiler or a driver may raise
        said = f"does not run: {failure}"
    if backend != "auto":
        raise BackendError(f"the {operation} backend {backend} {said}")
    log.warning("the %s kernel %s; plain XLA takes its place", operation, said)
    return False
