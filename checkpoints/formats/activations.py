"""Rounding of products' inputs, as a checkpoint's config describes it; see `types.Activations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import FLOATS, Tensors, fetch, group_size
from jaxserve.pallas_kernels.types import Activations

CODES = {"int": "int8", "float": "float8_e4m3fn"}
FBGEMM_CEILING = 1200.0  # default of activation_scale_ub, as in transformers' FbgemmFp8Config

# How inputs are rounded (None: not at all), and the unsupported setting if the checkpoint asks for one (else "").
Wanted = tuple[Activations | None, str]


def of_compressed(settings: object) -> Wanted:
    """From `input_activations` of a config group of compressed-tensors.

    A dynamic scale per tensor becomes one per token: the grid is finer, and a token's result does not depend on the
    other tokens of the step.
    """
    if not settings:
        return None, ""
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: input_activations must be an object, not {settings!r:.100}")
    bits = settings.get("num_bits", 8)
    kind = settings.get("type", "int")
    strategy = settings.get("strategy")
    if bits != 8 or kind not in CODES:
        return None, f"{kind!r:.20} with {bits!r:.20} bits"
    if settings.get("symmetric", True) is False:
        return None, "zero points"
    dynamic = settings.get("dynamic", False)
    if dynamic is False and strategy in ("tensor", None):
        return Activations(CODES[kind], static=True), ""
    if dynamic is True and strategy in ("token", "tensor", None):
        return Activations(CODES[kind]), ""
    if dynamic is True and strategy == "group":
        return Activations(CODES[kind], group_size(settings)), ""
    return None, f"strategy {strategy!r:.20} with dynamic {dynamic!r:.20}"


def of_fp8(method: str, settings: Mapping[str, Any], block: tuple[int, int] | None) -> Wanted:
    """From the settings of quant_method fp8, fbgemm_fp8 or modelopt; `block`: the weights' block, if they have one."""
    fp8 = CODES["float"]
    if method == "fbgemm_fp8":
        ceiling = settings.get("activation_scale_ub", FBGEMM_CEILING)
        if type(ceiling) not in (int, float) or not 0 < ceiling < np.inf:
            raise CheckpointError(f"config.json: activation_scale_ub is {ceiling!r:.100}, not a positive number")
        return Activations(fp8, ceiling=float(ceiling)), ""
    if method == "modelopt":
        return Activations(fp8, static=settings.get("quant_algo") == "FP8"), ""
    scheme = settings.get("activation_scheme", "dynamic")
    if scheme == "dynamic":
        return Activations(fp8, block[1] if block else None), ""
    if scheme == "static" and block is None:
        return Activations(fp8, static=True), ""
    return None, f"activation_scheme {scheme!r:.20}" + (" with blocks" if block else "")


def input_scale_name(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.input_scale"


def with_scale(tensors: Tensors, weight: str, activations: Activations | None) -> dict[str, Any]:
    """The fields `activations` and `input_scale` of a QuantArray; empty if the file lacks a static scale."""
    if activations is None or not activations.static:
        return {"activations": activations}
    if (name := input_scale_name(weight)) not in tensors:
        return {}
    scale = fetch(tensors, name, FLOATS, (), (1,), (1, 1)).astype(np.float32).reshape(1, 1)
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(f"tensor {name!r} is {scale.item()}, not a positive number")
    return {"activations": activations, "input_scale": scale}


def describe(wanted: Wanted) -> str:
    """For the log, after the weights' description; "" if the checkpoint does not ask for rounding."""
    activations, why_not = wanted
    if activations is not None:
        return f", activations {activations}"
    return f", activations as they are ({why_not} are not read)" if why_not else ""
