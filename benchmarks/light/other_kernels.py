"""Cases of the stage `correctness` for the kernels besides attention and products of plain quantized weights.

Here are the other forms in which engines use weights (codes shuffled for Hopper, 4-bit floats, blocks of GGUF files,
inputs that are rounded to 8 bits), the kernels that do several operations in one launch, the one that draws tokens,
attention over latents, recurrent layers, and products with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.pallas_kernels import (
    selfcheck,
    selfcheck_draw,
    selfcheck_fused,
    selfcheck_latent,
    selfcheck_lora,
    selfcheck_recurrent,
)
from jaxserve.pallas_kernels.checked_ops import rounding_product
from jaxserve.pallas_kernels.device_ops import adapters_of, choose_ops
from jaxserve.pallas_kernels.latent_attention import reference as latent
from jaxserve.pallas_kernels.quant_matmul import w8a8, ways
from jaxserve.pallas_kernels.registry import (
    BACKENDS,
    AttentionProblem,
    Device,
    LatentProblem,
    MatmulProblem,
    RecurrentProblem,
    explain,
    has_gated_matmul,
    load,
)
from jaxserve.pallas_kernels.selfcheck_cases import Rows
from jaxserve.pallas_kernels.types import BLOCK_KINDS, Activations, stored_latent_width

Check = Callable[[], Any]
Wrap = Callable[[Any], Any]  # makes what is checked of a kernel
Found = tuple[str, tuple[str, ...], int, Check]  # key, family, number of unusual settings, check

SMALL_ROWS = Rows((300, 1, 16, 65), ((41, 90), (9, 0)))  # of a rehearsal
VOCABULARIES = (128256, 32000)
SMALL_VOCABULARY = 1000
# outputs and inputs of a weight
SHAPE = (4096, 14336)
SMALL_SHAPE = (320, 256)
FP4 = np.dtype(ml_dtypes.float4_e2m1fn)
MXFP4 = np.dtype(ml_dtypes.float8_e8m0fnu)  # types of their scales
NVFP4 = np.dtype(ml_dtypes.float8_e4m3fn)  # types of their scales
USUAL = ("int4 g128 shuffled", "int8 channel shuffled", "mxfp4", "Q4_K", "Q6_K", "fp8 dynamic", "int8 dynamic")


def cases(device: Device, rehearse: bool, wrap: Wrap) -> Iterator[Found]:
    dtypes = ("float32",) if device.platform == "cpu" else ("bfloat16", "float16")
    add = adapters_of(device)
    for unusual, dtype in enumerate(np.dtype(jnp.dtype(name)) for name in dtypes):
        for problem, name in weights(dtype, SMALL_SHAPE if rehearse else SHAPE):
            family = f"matmul {name}", str(dtype)
            yield from _products(device, problem, family, unusual + (name not in USUAL), wrap)
        yield from _gated_floats(device, dtype, SMALL_SHAPE if rehearse else SHAPE, unusual, wrap)
        yield from _fused(device, dtype, unusual, wrap)
        check = partial(selfcheck_lora.check_adapters, wrap(add), dtype)
        yield f"adapters {dtype}, {_backend(add)}", ("adapters", str(dtype)), unusual, check
        yield from _latents(device, dtype, unusual, rehearse, wrap)
        yield from _recurrent(device, dtype, unusual, rehearse, wrap)
    draw = choose_ops(device, _attention(device, np.dtype(jnp.dtype(dtypes[0])))).draw
    for unusual, vocab in enumerate((SMALL_VOCABULARY,) if rehearse else VOCABULARIES):
        if draw is not None:
            yield (
                f"draw from {vocab} tokens, triton",
                ("draw",),
                unusual,
                partial(selfcheck_draw.check_draw, wrap(draw), vocab),
            )


def weights(x: np.dtype, shape: tuple[int, int]) -> Iterator[tuple[MatmulProblem, str]]:
    """All forms of weights that are not in the other cases of products, and their names."""
    inputs = shape[1]
    whole = MatmulProblem(x, np.dtype(np.int8), *shape, (1, inputs))
    for bits, codes in ((4, np.dtype(ml_dtypes.int4)), (8, np.dtype(np.int8))):
        for group in (128, 32, inputs):
            form = replace(whole, codes_dtype=codes, block=(1, group), shuffled=True)
            yield form, f"int{bits} {'channel' if group == inputs else f'g{group}'} shuffled"
        yield (
            replace(whole, codes_dtype=codes, block=(1, 128), shuffled=True, has_zero=True),
            f"int{bits} zero shuffled",
        )
    yield replace(whole, codes_dtype=FP4, block=(1, 32), scale_dtype=MXFP4), "mxfp4"
    yield replace(whole, codes_dtype=FP4, block=(1, 16), scale_dtype=NVFP4), "nvfp4"
    for kind, form in BLOCK_KINDS.items():
        yield replace(whole, codes_dtype=np.dtype(np.uint8), block=(1, form.block), kind=kind), kind
    fp8 = replace(whole, codes_dtype=np.dtype(ml_dtypes.float8_e4m3fn))
    for static in (False, True):
        how = "static" if static else "dynamic"
        yield replace(whole, activations=Activations("int8", static=static)), f"int8 {how}"
        yield replace(fp8, activations=Activations("float8_e4m3fn", static=static)), f"fp8 {how}"
    blocks = replace(fp8, block=(128, 128), activations=Activations("float8_e4m3fn", group=128))
    yield blocks, "fp8 128x128 dynamic"


def _products(
    device: Device, problem: MatmulProblem, family: tuple[str, ...], unusual: int, wrap: Wrap
) -> Iterator[Found]:
    name = ", ".join(family)
    if problem.activations is not None:
        if w8a8.why_not(device, problem) is None:
            for parts in (False, True) if device.platform == "gpu" else (False,):
                product = wrap(partial(rounding_product, parts))
                key = f"{name}{' in parts' if parts else ''}, w8a8"
                yield key, (*family, str(parts)), unusual, partial(selfcheck.check_matmul, product, problem)
        return
    for backend, reason in explain("matmul", device, problem).items():
        if reason is not None or backend == "xla" or (problem.shuffled and backend != "mosaic_gpu"):
            continue
        module = load("matmul", backend)
        check: Check = partial(selfcheck.check_matmul, wrap(module.quant_matmul), problem)
        yield f"{name}, {backend}", (*family, backend), unusual, check
        if hasattr(module, "quant_matmul_parts"):
            check = partial(selfcheck.check_parts, wrap(module.quant_matmul_parts), problem)
            yield f"{name} in parts, {backend}", (*family, backend, "in parts"), unusual, check
        gated = replace(problem, activation="silu")
        if has_gated_matmul(module, gated):
            check = partial(selfcheck.check_gated, wrap(module.gated_matmul), gated)
            yield f"{name} and gate, {backend}", (*family, backend, "gate"), unusual, check
        if hasattr(module, "grouped_quant_matmul"):
            grouped = partial(selfcheck.check_grouped, wrap(module.grouped_quant_matmul), problem)
            by_expert = name.replace("matmul", "matmul by expert", 1)
            yield f"{by_expert}, {backend}", (*family, backend, "by expert"), unusual + 1, grouped


def _gated_floats(device: Device, dtype: np.dtype, shape: tuple[int, int], unusual: int, wrap: Wrap) -> Iterator[Found]:
    """The gate at the end of a product with a weight that is not quantized."""
    problem = MatmulProblem(dtype, dtype, *shape, shape, activation="silu")
    for way, _ in ways.candidates(device, problem):
        if way in BACKENDS:
            check = partial(selfcheck.check_gated, wrap(load("matmul", way).gated_matmul), problem)
            yield f"matmul in {dtype} and gate, {way}", ("matmul and gate", str(dtype)), unusual, check


def _fused(device: Device, dtype: np.dtype, unusual: int, wrap: Wrap) -> Iterator[Found]:
    problem = _attention(device, dtype)
    for codes in (dtype, np.dtype(np.int8)):
        cached = replace(problem, kv_dtype=codes, has_scale=codes != dtype)
        said = f"{dtype}, {'same' if codes == dtype else codes} cache"
        types = (str(dtype), str(codes))
        fused = choose_ops(device, cached).fused
        if fused is not None:
            check: Check = partial(selfcheck_fused.check_fused, wrap(fused), cached)
            yield f"fused {said}, triton", ("fused", *types), unusual, check
        for backend, reason in explain("attention", device, cached).items():
            both = getattr(load("attention", backend), "write_and_attend", None) if reason is None else None
            if both is not None:
                attend = load("attention", backend).paged_attention
                check = partial(selfcheck_fused.check_write_and_attend, wrap(both), wrap(attend), cached)
                yield f"write-and-attend {said}, {backend}", ("write-and-attend", *types), unusual, check


def _attention(device: Device, dtype: np.dtype) -> AttentionProblem:
    return AttentionProblem(dtype, dtype, 2, 4, 128, 128 if device.platform == "tpu" else 16)


def _latents(device: Device, dtype: np.dtype, unusual: int, rehearse: bool, wrap: Wrap) -> Iterator[Found]:
    """Attention of DeepSeek's sizes, with the heads of one device and of all of eight."""
    page = 128 if device.platform == "tpu" else 16
    usual = LatentProblem(dtype, dtype, 16, 512, 64, page, width=stored_latent_width(576, device.platform))
    if rehearse:
        usual = replace(usual, heads=4, rank=64, rope=16, width=stored_latent_width(80, device.platform))
    for codes in (dtype, np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)):
        for heads in (usual.heads,) if rehearse else (usual.heads, 128):
            problem = replace(usual, heads=heads, kv_dtype=codes, has_scale=codes != dtype)
            name = f"{dtype}, {'same' if codes == dtype else codes} cache, {heads} heads"
            types = str(dtype), str(codes)
            distance = unusual + (codes != dtype) + (heads != usual.heads)
            for backend in BACKENDS:
                if explain("latent", device, problem).get(backend, "") is not None:
                    continue
                module = load("latent", backend)
                options = {"rows": SMALL_ROWS, "repeats": 2} if rehearse else {}
                check = partial(selfcheck_latent.check_latent, wrap(module.latent_attention), problem, **options)
                yield f"latent {name}, {backend}", ("latent", backend, *types), distance, check
                if module.write_latent is not latent.write_latent or backend == "xla":
                    write = partial(selfcheck_latent.check_write_latent, wrap(module.write_latent), problem)
                    yield f"latent-write {name}, {backend}", ("latent-write", backend, *types), distance, write


def _recurrent(device: Device, dtype: np.dtype, unusual: int, rehearse: bool, wrap: Wrap) -> Iterator[Found]:
    """Recurrent layers of the shapes of Qwen3.5, Granite 4 and LFM2."""
    for operation, usual, small in (
        ("delta_net", (16, 3, 128, 128, 640, 4), (2, 2, 128, 128, 512, 4)),
        ("mamba2", (48, 48, 64, 128, 3072, 4), (4, 2, 64, 128, 256, 4)),
        ("short_conv", (1, 0, 0, 0, 2048, 3), (1, 0, 0, 0, 256, 3)),
    ):
        problem = RecurrentProblem(dtype, *(small if rehearse else usual))
        for backend, reason in explain(operation, device, problem).items():
            if reason is None:
                run = wrap(getattr(load(operation, backend), operation))
                check = partial(selfcheck_recurrent.check_recurrent, operation, run, problem)
                check = partial(check, repeats=2) if rehearse else check
                yield f"{operation} {dtype}, {backend}", (operation, backend, str(dtype)), unusual, check


def _backend(function: Callable[..., Any]) -> str:
    return {"reference": "xla", "tpu": "mosaic_tpu"}.get(name := function.__module__.rsplit(".", 1)[-1], name)
