"""Chooses which implementation of an operation a device uses, and explains why not the others.

A backend is a module with the operation's function, and with `why_not(device, problem)`. This returns the reason why
the backend cannot run that problem on that device, or None where it can.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the command line reads BACKENDS without loading JAX
    from jaxserve.pallas_kernels.types import Activations

BACKENDS = ("mosaic_gpu", "triton", "mosaic_tpu", "cpu", "xla")
# Where a backend can run at all; plain XLA runs everywhere.
PLATFORMS = {"mosaic_gpu": "gpu", "triton": "gpu", "mosaic_tpu": "tpu", "cpu": "cpu"}
FOLDERS = {
    "attention": "paged_attention", "latent": "latent_attention", "matmul": "quant_matmul", "delta_net": "delta_net",
    "mamba2": "mamba2", "short_conv": "short_conv", "segment_attention": "segment_attention",
}  # fmt: skip


class BackendError(ValueError):
    """The requested backend cannot run. The message has the reason."""


@dataclass(frozen=True)
class Device:
    """The properties of a device that kernels depend on: platform ("cpu", "gpu" or "tpu"), kind, and a GPU's compute
    capability.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: Any) -> Device:
        """Takes a jax.Device, or a device of a topology for ahead-of-time compiling."""
        platform = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
        capability = None
        if platform == "gpu":
            text = str(getattr(device, "compute_capability", "0.0"))
            major, _, minor = text.partition(".")
            capability = (int(major), int(minor or 0))
        return cls(platform, device.device_kind, capability)


@dataclass(frozen=True)
class AttentionProblem:
    """One problem of `paged_attention` and `write_kv`. Sizes are those on one device."""

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
    """One problem of `latent_attention` and `write_latent`. Sizes are those on one device.

    rank, rope: sizes of a token's latent and of its rotated key. width: size of a row in the cache; 0: rank + rope.
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
class SegmentProblem:
    """One problem of `segment_attention`. Sizes are those on one device."""

    dtype: np.dtype
    heads: int
    head_dim: int


@dataclass(frozen=True)
class RecurrentProblem:
    """One problem of an operation of recurrent layers: `delta_net`, `mamba2` or `short_conv`. Sizes are those on one
    device.

    dtype: of the new tokens' inputs.
    heads: of keys in `delta_net`, which `group` matrices share; of matrices in `mamba2`, `group` of which share B, C.
    rows, columns: of a matrix. `short_conv` has none, and one head.
    channels, width: of the convolution; those of each key head in `delta_net`, of all heads elsewhere.
    silu: it follows the convolution, where there are matrices.
    """

    dtype: np.dtype
    heads: int
    group: int
    rows: int
    columns: int
    channels: int
    width: int
    silu: bool = True


@dataclass(frozen=True)
class MatmulProblem:
    """One problem of `quant_matmul`. Sizes are those on one device; `QuantArray` explains the fields."""

    x_dtype: np.dtype
    codes_dtype: np.dtype
    rows: int  # of the weight, which are outputs
    inputs: int
    block: tuple[int, int]
    has_zero: bool = False
    has_bias: bool = False
    partitioned: bool = False  # each of several devices computes a part
    kind: str = ""  # of a BlockArray, whose codes are bytes
    scale_dtype: np.dtype | None = None  # of float4_e2m1fn codes; distinguishes MXFP4 (float8_e8m0fnu) from NVFP4
    shuffled: bool = False
    activations: Activations | None = None  # x is rounded like this before the product
    # The outputs are gates and ups in turn, which this activation joins in the same launch; "": not.
    activation: str = ""

    @classmethod
    def of(cls, x: Any, w: Any, partitioned: bool = False) -> MatmulProblem:
        """The problem of x and a QuantArray or BlockArray, given as arrays or as shapes."""
        rows, inputs = w.shape[-2:]
        if not hasattr(w, "codes"):
            small = np.dtype(np.uint8)
            kind = w.kind
            return cls(np.dtype(x.dtype), small, rows, inputs, w.block, partitioned=partitioned, kind=kind)
        has_zero = w.zero is not None
        has_bias = w.bias is not None
        forms = {"partitioned": partitioned, "shuffled": w.shuffled, "activations": w.activations}
        codes = np.dtype(w.codes.dtype)
        scale = np.dtype(w.scale.dtype) if codes.name == "float4_e2m1fn" else None
        return cls(np.dtype(x.dtype), codes, rows, inputs, w.block, has_zero, has_bias, scale_dtype=scale, **forms)


def load(operation: str, backend: str) -> ModuleType:
    """Imports the module of an operation's backend."""
    names = {"mosaic_tpu": "tpu", "xla": "reference", "triton": "triton_gpu"}
    return importlib.import_module(f"{__package__}.{FOLDERS[operation]}.{names.get(backend, backend)}")


def has_gated_matmul(module: Any, problem: MatmulProblem) -> bool:
    """Whether a backend of "matmul" multiplies with these weights and computes the problem's gate in one launch."""
    return hasattr(module, "gated_matmul") and module.why_not_gated(problem) is None


def explain(operation: str, device: Device, problem: Any) -> dict[str, str | None]:
    """Maps each backend to the reason why it cannot run, or to None where it can. `auto` takes the first with None."""
    return {backend: _why_not(operation, backend, device, problem) for backend in BACKENDS}


def _why_not(operation: str, backend: str, device: Device, problem: Any) -> str | None:
    try:
        return load(operation, backend).why_not(device, problem)
    except ModuleNotFoundError as error:
        ours = (error.name or "").startswith(f"{__package__}.")
        return "it does not have this operation" if ours else f"{error.name} is not installed"


def choose(operation: str, device: Device, problem: Any, requested: str = "auto") -> str:
    """Returns the backend to use. Raises BackendError if the requested one cannot run."""
    if requested not in ("auto", *BACKENDS):
        raise BackendError(
            f"there is no {operation} backend {requested!r}; it must be auto or one of {', '.join(BACKENDS)}"
        )
    if requested == "auto":  # modules of other platforms are not even imported: some take a second
        fitting = (one for one in BACKENDS if PLATFORMS.get(one, device.platform) == device.platform)
        return next(one for one in fitting if _why_not(operation, one, device, problem) is None)
    if (reason := _why_not(operation, requested, device, problem)) is not None:
        raise BackendError(f"the {operation} backend {requested} cannot run on {device.kind}: {reason}")
    return requested
