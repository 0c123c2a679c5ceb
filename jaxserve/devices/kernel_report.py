"""`jaxserve kernels`: which kernels a device runs, and why it does not run the others."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve.config import default_page_size
from jaxserve.pallas_kernels import tuning
from jaxserve.pallas_kernels.quant_matmul import w8a8
from jaxserve.pallas_kernels.registry import (
    AttentionProblem,
    Device,
    LatentProblem,
    MatmulProblem,
    RecurrentProblem,
    SegmentProblem,
    explain,
)
from jaxserve.pallas_kernels.types import Activations, stored_latent_width


def describe(device: Device, head_dim: int = 128, group: int = 4, page_size: int | None = None) -> Iterator[str]:
    """The report's lines: for each operation and dtype all backends, with the reason why one cannot run. `page_size`:
    tokens in a page; None is the engine's default on this device."""
    page_size = page_size or default_page_size(device.platform)
    dtype = np.dtype(np.float32) if device.platform == "cpu" else np.dtype(jnp.bfloat16)
    fp8 = np.dtype(ml_dtypes.float8_e4m3fn)
    int4 = np.dtype(ml_dtypes.int4)
    yield f"{device.kind} ({device.platform}), activations in {dtype}"
    for kv in (dtype, np.dtype(np.int8), fp8):
        problem = AttentionProblem(dtype, kv, 8, group, head_dim, page_size, has_scale=kv != dtype)
        name = f"attention, {kv} cache, head_dim {head_dim}, group {group}, pages of {page_size} tokens"
        yield from _backends(name, explain("attention", device, problem))
    width = stored_latent_width(576, device.platform)
    for kv in (dtype, np.dtype(np.int8), fp8):
        latents = LatentProblem(dtype, kv, 16, 512, 64, page_size, has_scale=kv != dtype, width=width)
        name = f"latent attention, {kv} cache, 512 + 64 numbers a token, 16 heads, pages of {page_size} tokens"
        yield from _backends(name, explain("latent", device, latents))
    for operation, sizes, name in (
        ("delta_net", (16, 2, 128, 128, 512, 4), "gated delta rule, 16 key heads, 32 matrices of 128 x 128"),
        ("mamba2", (48, 48, 64, 128, 3072, 4), "Mamba-2, 48 matrices of 64 x 128"),
        ("short_conv", (1, 0, 0, 0, 2048, 3), "short convolution over 3 tokens, 2048 channels"),
    ):
        yield from _backends(name, explain(operation, device, RecurrentProblem(dtype, *sizes)))
    segments = SegmentProblem(dtype, 16, 64)
    yield from _backends("attention of image encoders, 16 heads of 64", explain("segment_attention", device, segments))
    fp4 = np.dtype(ml_dtypes.float4_e2m1fn)
    e8m0 = np.dtype(ml_dtypes.float8_e8m0fnu)
    for codes, block, scale, name in (
        (np.dtype(np.int8), (1, 4096), None, "int8 per channel"),
        (int4, (1, 128), None, "int4, groups of 128"),
        (fp8, (128, 128), None, "fp8, blocks of 128 x 128"),
        (fp4, (1, 32), e8m0, "MXFP4"),
        (fp4, (1, 16), fp8, "NVFP4"),
        ("Q4_K", (1, 256), None, "GGUF's blocks, Q4_K and others"),
    ):
        if isinstance(codes, str):  # only GPUs keep GGUF's blocks
            if device.platform != "gpu":
                continue
            matmul = MatmulProblem(dtype, np.dtype(np.uint8), 4096, 4096, block, kind=codes)
            yield from _backends(f"matmul, {name}", explain("matmul", device, matmul))
            continue
        if codes == fp4 and device.platform == "cpu":
            continue
        matmul = MatmulProblem(dtype, codes, 4096, 4096, block, scale_dtype=scale)
        yield from _backends(f"matmul, {name}", explain("matmul", device, matmul))
    yield from _rounded_inputs(device, dtype)
    if measured := tuning.tables(device.kind).products:
        yield ""
        yield f"of {len(measured)} shapes of weights a table of jaxserve tune says the fastest way, which auto takes"
    if device.platform == "cpu":
        yield ""
        yield "one CPU with a C++ compiler keeps matrices in panels: floats of 16 bits as they are, GGUF's Q4_0 to Q8_0"
        yield "and Q4_K to Q6_K, MXFP4 and NVFP4 in the file's width, int8 and int4 in groups of 64 inputs and more;"
        yield "products with quantized panels round activations to 8 bits (--matmul-backend cpu: not)"
        yield "without panels 4-bit floats become int8 in groups of 32 and 16"


def _rounded_inputs(device: Device, dtype: np.dtype) -> Iterator[str]:
    """Lines on 8-bit weights whose checkpoints ask for 8-bit inputs of their products too (W8A8)."""
    int8 = np.dtype(np.int8)
    fp8 = np.dtype(ml_dtypes.float8_e4m3fn)
    for codes, block, wanted in (
        (int8, (1, 4096), Activations("int8")),
        (fp8, (1, 4096), Activations(fp8.name)),
        (fp8, (1, 4096), Activations(fp8.name, static=True)),
        (fp8, (128, 128), Activations(fp8.name, group=128)),
    ):
        reason = w8a8.why_not(device, MatmulProblem(dtype, codes, 4096, 4096, block, activations=wanted))
        yield ""
        yield f"matmul, {codes} with activations {wanted} (--activation-quantization auto)"
        if reason is None:
            ours = device.platform == "gpu"
            yield f"    products of 8-bit numbers on the matrix unit{', in Triton (w8a8_triton)' if ours else ''}"
        else:
            yield f"    activations as they are, as in matmul above: {reason}"


def _backends(name: str, reasons: dict[str, str | None]) -> Iterator[str]:
    yield ""
    yield name
    used = next(backend for backend, reason in reasons.items() if reason is None)
    for backend, reason in reasons.items():
        mark, said = ("*", "used") if backend == used else (" ", reason or "can run")
        if backend == "xla" and name.startswith("matmul"):
            said += "; XLA may hold a dequantized copy of the weights"
        yield f"  {mark} {backend:10}  {said}"
