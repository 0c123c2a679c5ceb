"""Other projects' formats of quantized weights, one module each.

A module in this folder is registered by defining `open_format` and `METHODS`, the values of quant_method in config.json
that it reads. It returns weights as QuantArrays of NumPy arrays, whose values
(`jaxserve.checkpoints.quantized.dequantize`) are exactly those of the format's reference implementation.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.checkpoints.formats.packing import method, quant_config
from jaxserve.checkpoints.safetensors import TensorInfo
from jaxserve.pallas_kernels.types import QuantArray


class QuantReader(Protocol):
    """Reads the quantized weights of one checkpoint.

    name: the format's name for `--quantization`, such as "awq".
    description: for the log, such as "AWQ int4 in groups of 128".
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    def parts(self, weight: str) -> tuple[str, ...]:
        """The tensors that store a weight ("model.layers.0.mlp.down_proj.weight"); empty if it is not quantized."""

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray | np.ndarray:
        """Reads the weight [out, in] of this shape. Raises CheckpointError with the tensor's name."""


def find_format(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> QuantReader | None:
    """The reader of a checkpoint with this config.json and these tensors; None if it is not quantized.

    Raises CheckpointError for a quantization_config that no module supports.
    """
    known: list[str] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        known += getattr(module, "METHODS", ())
        if hasattr(module, "open_format") and (reader := module.open_format(config, tensors)) is not None:
            return reader
    if quant_config(config):
        raise CheckpointError(
            f"config.json: quantization_config has quant_method {method(config)!r:.100}; "
            f"understood are {', '.join(sorted(known))}"
        )
    return None
