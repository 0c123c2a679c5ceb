"""How others store quantized weights, one file each.

A module in this folder that defines `open_format`, and the `METHODS` (quant_method in config.json) that it
understands, is found by itself. A weight comes out as a QuantArray of NumPy
arrays whose values (`jaxserve.checkpoints.quantized.dequantize`) are exactly those of the format's own reference.
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

    name: what the format is called, "awq" say; `--quantization` insists on it.
    description: for the log, "AWQ int4 in groups of 128".
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    def parts(self, weight: str) -> tuple[str, ...]:
        """The tensors that make up a weight ("model.layers.0.mlp.down_proj.weight"); empty: it is stored as it is."""

    def read(self, weight: str, shape: tuple[int, int]) -> QuantArray | np.ndarray:
        """The weight [out, in], which must have this shape. Raises CheckpointError that names the tensor."""


def find_format(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> QuantReader | None:
    """The reader of a checkpoint with this config.json and these tensors; None: nothing in it is quantized.

    Raises CheckpointError for a quantization_config that no module here understands.
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
