"""Which implementation of an operation a device uses, and why not the others.

A backend is a module with the operation's function and `why_not(device, problem)`, which names the reason why it cannot
run that problem there, or returns None.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the command line reads BACKENDS, and must not wait for JAX
    from jaxserve.pallas_kernels.types import Activations

BACKENDS = ("mosaic_gpu", "triton", "mosaic_tpu", "cpu", "xla")
FOLDERS = {"attention": "paged_attention", "latent": "latent_attention", "matmul": "quant_matmul"}


class BackendError(ValueError):
    """The backend that was asked for cannot run, with the reason."""


@dataclass(frozen=True)
class Device:
    """What a kernel must know of a device: platform "cpu", "gpu" or "tpu"; its kind; of GPUs the compute capability."""

    platform: str
    kind: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: Any) -> Device:
        """From a jax.Device, or one of a topology that is only compiled for."""
        platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
        capability = None
        if platform == "gpu":
            text = str(getattr(device, "compute_capability", "0.0"))
            major, _, minor = text.partition(".")
            capability = (int(major), int(minor or 0))
        return cls(platform, device.device_kind, capability)


@dataclass(frozen=True)
class AttentionProblem:
    """What `paged_attention` and `write_kv` are asked to do, sizes per device."""

    q_dtype: np.dtype
    kv_dtype: np.dtype
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    has_scale: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class LatentProblem:
    """What `latent_attention` and `write_latent` are asked to do, sizes per device.

    rank, rope: numbers of a token's latent and of its rotated key. width: of a row in the cache; 0: rank + rope.
    """

    q_dtype: np.dtype
    kv_dtype: np.dtype
    heads: int
    rank: int
    rope: int
    page_size: int
    has_scale: bool = False
    width: int = 0

    @property
    def row_width(self) -> int:
        return self.width or self.rank + self.rope


@dataclass(frozen=True)
class MatmulProblem:
    """What `quant_matmul` is asked to do, sizes per device; `QuantArray` explains the fields."""

    x_dtype: np.dtype
    codes_dtype: np.dtype
    rows: int  # of the weight: outputs
    inputs: int
    block: tuple[int, int]
    has_zero: bool = False
    has_bias: bool = False
    partitioned: bool = False  # one of several devices does a part of it
    kind: str = ""  # of a BlockArray, whose codes are bytes
    scale_dtype: np.dtype | None = None  # of float4_e2m1fn codes, which tells MXFP4 (float8_e8m0fnu) from NVFP4
    shuffled: bool = False
    activations: Activations | None = None  # x is rounded first

    @classmethod
    def of(cls, x: Any, w: Any, partitioned: bool = False) -> MatmulProblem:
        """Of x and a QuantArray or BlockArray, or of their shapes."""
        rows, inputs = w.shape[-2:]
        if not hasattr(w, "codes"):
            small, kind = np.dtype(np.uint8), w.kind
            return cls(np.dtype(x.dtype), small, rows, inputs, w.block, partitioned=partitioned, kind=kind)
        has_zero, has_bias = w.zero is not None, w.bias is not None
        forms = {"partitioned": partitioned, "shuffled": w.shuffled, "activations": w.activations}
        codes = np.dtype(w.codes.dtype)
        scale = np.dtype(w.scale.dtype) if codes.name == "float4_e2m1fn" else None
        return cls(np.dtype(x.dtype), codes, rows, inputs, w.block, has_zero, has_bias, scale_dtype=scale, **forms)


def load(operation: str, backend: str) -> ModuleType:
    """The module of an operation's backend."""
    names = {"mosaic_tpu": "tpu", "xla": "reference", "triton": "triton_gpu"}
    return importlib.import_module(f"{__package__}.{FOLDERS[operation]}.{names.get(backend, backend)}")


def explain(operation: str, device: Device, problem: Any) -> dict[str, str | None]:
    """Each backend and the reason why it cannot be used; None: it can. The first that can is the one `auto` takes."""
    reasons: dict[str, str | None] = {}
    for backend in BACKENDS:
        try:
            reasons[backend] = load(operation, backend).why_not(device, problem)
        except ModuleNotFoundError as error:
            ours = (error.name or "").startswith(f"{__package__}.")
            reasons[backend] = "it does not have this operation" if ours else f"{error.name} is not installed"
    return reasons


def choose(operation: str, device: Device, problem: Any, requested: str = "auto") -> str:
    """The backend to use. Raises BackendError when the requested one cannot run."""
    if requested not in ("auto", *BACKENDS):
        raise BackendError(
            f"there is no {operation} backend {requested!r}; it must be auto or one of {', '.join(BACKENDS)}"
        )
    reasons = explain(operation, device, problem)
    if requested == "auto":
        return next(backend for backend, reason in reasons.items() if reason is None)
    if (reason := reasons[requested]) is not None:
        raise BackendError(f"the {operation} backend {requested} cannot run on {device.kind}: {reason}")
    return requested
