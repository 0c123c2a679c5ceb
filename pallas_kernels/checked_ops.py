"""Operations that were tried on this machine's device. Plain XLA replaces those that are wrong there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.device_ops import grouped_floats
from jaxserve.pallas_kernels.kv_write import write_kv
from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.lora import reference as lora
from jaxserve.pallas_kernels.ops import Ops
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.quant_matmul.ways import kernels
from jaxserve.pallas_kernels.registry import (
    AttentionProblem,
    BackendError,
    Device,
    LatentProblem,
    MatmulProblem,
    choose,
    load,
)
from jaxserve.pallas_kernels.types import QuantArray

if TYPE_CHECKING:  # imported only where a device is tried
    from jaxserve.pallas_kernels.selfcheck import Finding

log = logging.getLogger(__name__)
PLAIN = ("xla", "cpu")  # backends of products that are not tried


def checked(ops: Ops, problem: AttentionProblem, backend: str, *, windows: bool = True) -> Ops:
    """Tries attention and the cache write of `ops` on this machine's first device. `windows`: whether the model has
    any.

    If a kernel is wrong, plain XLA replaces it, with a warning. If it was requested by name, BackendError is raised.
    Operations that are plain XLA already are not tried, as nothing could replace them.
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
    if both is not None:  # shares its code with the two others
        as_before = attend is ops.paged_attention and write is ops.write_kv
        check = partial(check_write_and_attend, both, attend, problem)
        both = both if as_before and _is_right("write_and_attend", backend, check) else None
    return replace(ops, paged_attention=attend, write_kv=write, write_and_attend=both)


def checked_latent(ops: Ops, problem: LatentProblem, backend: str) -> Ops:
    """Tries latent attention and the write of latents of `ops`, as `checked` does for other caches."""
    from jaxserve.pallas_kernels.selfcheck_latent import check_latent, check_write_latent

    attend, write = ops.latent_attention, ops.write_latent
    if attend is not latent.latent_attention and not _is_right(
        "latent", backend, lambda: check_latent(attend, problem)
    ):
        attend = latent.latent_attention
    if write is not latent.write_latent and not _is_right(
        "write_latent", backend, lambda: check_write_latent(write, problem)
    ):
        write = latent.write_latent
    return replace(ops, latent_attention=attend, write_latent=write)


def checked_fused(ops: Ops, problem: AttentionProblem) -> Ops:
    """Tries the fused kernels of `ops` on this machine's first device. If one is wrong, returns `ops` without them,
    with a warning."""
    from jaxserve.pallas_kernels.selfcheck_fused import check_fused

    if ops.fused is None or _is_right("fused", "auto", lambda: check_fused(ops.fused, problem)):
        return ops
    return replace(ops, fused=None)


def checked_draw(ops: Ops, vocab: int) -> Ops:
    """Tries the drawing kernel of `ops` on rows of `vocab` tokens. If it is wrong, returns `ops` without it, with a
    warning."""
    from jaxserve.pallas_kernels.selfcheck_draw import check_draw

    draw = ops.draw
    if draw is None or _is_right("draw", "auto", lambda: check_draw(draw, vocab)):
        return ops
    return replace(ops, draw=None)


def checked_adapters(add: Callable[..., jax.Array], dtype: np.dtype) -> Callable[..., jax.Array]:
    """Tries `add`, products with LoRA adapters, on this machine's first device. Returns the plain ones, with a warning,
    if it is wrong."""
    from jaxserve.pallas_kernels.selfcheck_lora import check_adapters

    right = add is lora.add_adapters or _is_right("adapters", "auto", lambda: check_adapters(add, dtype))
    return add if right else lora.add_adapters


def checked_matmul(
    device: Device, problems: Iterable[MatmulProblem], backend: str, grouped: Iterable[MatmulProblem] = ()
) -> str:
    """Returns the backend for products with quantized weights of these forms: `backend`, or xla where `auto` is wrong.

    The products are compared with plain XLA on this machine's first device, as are grouped products with experts'
    weights of the forms `grouped`, where floats have the form of `experts.as_codes`. Raises BackendError where a
    backend that was requested by name cannot do a form, or does it wrong.
    """
    from jaxserve.pallas_kernels.selfcheck import check_grouped, check_matmul, check_parts

    problems = list(problems)
    rounding = [p for p in problems if backend == "auto" and w8a8.why_not(device, p) is None]
    # Where rounded inputs become floats again, the kernels are those of products without rounded inputs.
    others = dict.fromkeys(replace(p, activations=None) for p in problems if p not in rounding)
    chosen = [(problem, name) for problem in others for name in _backends(device, problem, backend)]
    with ThreadPoolExecutor(4) as pool:  # most of the time is spent compiling
        checks = []
        for problem, name in chosen:
            if name in PLAIN:
                continue
            module = load("matmul", name)
            checks.append(pool.submit(check_matmul, module.quant_matmul, problem))
            if hasattr(module, "quant_matmul_parts"):
                checks.append(pool.submit(check_parts, module.quant_matmul_parts, problem))
        for problem in grouped:
            if problem.codes_dtype == problem.x_dtype:
                multiply = grouped_floats(device, problem.x_dtype, backend)
            else:
                name = choose("matmul", device, problem, backend)
                multiply = getattr(load("matmul", name), "grouped_quant_matmul", None) if name not in PLAIN else None
            if multiply is not None:
                checks.append(pool.submit(check_grouped, multiply, problem))
        ways = (False, True) if device.platform == "gpu" else (False,)
        checks += [
            pool.submit(check_matmul, partial(rounding_product, parts), problem)
            for problem in rounding
            for parts in ways
        ]
        right = all(_is_right("matmul", backend, check.result) for check in checks)
    return backend if right else "xla"


def _backends(device: Device, problem: MatmulProblem, backend: str) -> list[str]:
    """Whose kernels multiply by weights of this form."""
    measured = kernels(device, problem) if backend == "auto" else []
    return measured or [choose("matmul", device, problem, backend)]


def rounding_product(parts: bool, x: jax.Array, w: QuantArray, *, count: jax.Array | None = None) -> jax.Array:
    del count
    rows = w8a8.quantize(x, w)
    return w8a8.quant_matmul_parts(rows, w).astype(jnp.float32).sum(0) if parts else w8a8.quant_matmul(rows, w)


def _is_right(operation: str, backend: str, check: Callable[[], Iterable[Finding]]) -> bool:
    """Whether all findings are right. Otherwise warns of the first that is wrong, or raises BackendError if the kernel
    was requested by name."""
    try:
        wrong = next((finding for finding in check() if not finding.right), None)
        if wrong is None:
            return True
        said = f"is wrong on this device: {wrong}"
    except Exception as failure:  # a compiler or driver may raise anything
        said = f"does not run: {failure}"
    if backend != "auto":
        raise BackendError(f"the {operation} backend {backend} {said}")
    log.warning("the %s kernel %s; plain XLA takes its place", operation, said)
    return False
