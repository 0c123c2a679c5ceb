"""Experts whose inner size devices store with zeros at its end, so that each device's part has whole groups.

gpt-oss in MXFP4 has a scale for 32 inputs. Eight devices would have 360 of its 2,880 inner numbers each, and their
parts would cut the groups down to 8 inputs. The TPU's kernel multiplies no groups of less than 16. So the size becomes
3,072, and a device has 384. The zeros change no result, because a gated MLP's inner number is 0 where gate and up are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoints.int4 import PackedInt4
from jaxserve.devices.mesh import num_shards
from jaxserve.models.spec import LayerSpec, ModelConfig
from jaxserve.pallas_kernels.types import QuantArray

PLATFORMS = ("tpu",)
GROUP = 32  # inputs that share a scale in MXFP4, the largest group that a usual width does not fit
LEAST = 16  # inputs of the smallest groups that the kernel multiplies


def with_whole_groups(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The model with the size that these devices store of its experts (`MLPSpec.stored_size`)."""
    parts = num_shards(mesh, "expert_mlp")
    if mesh.devices.flat[0].platform not in PLATFORMS or parts == 1:
        return config

    def stored(layer: LayerSpec) -> LayerSpec:
        if layer.mlp is None or layer.mlp.experts is None:
            return layer
        size = layer.mlp.size
        if math.gcd(size // parts, GROUP) >= LEAST:
            return layer
        whole = GROUP * parts
        return replace(layer, mlp=replace(layer.mlp, stored_size=-(-size // whole) * whole))

    return replace(config, layers=tuple(map(stored, config.layers)))


def as_in_files(decoder: Any) -> Any:
    """The decoder with experts as wide as the checkpoint has them."""
    layers = tuple(
        layer if layer.mlp is None else replace(layer, mlp=replace(layer.mlp, stored_size=None))
        for layer in decoder.config.layers
    )
    return decoder.clone(config=replace(decoder.config, layers=layers))


def filled(path: str, host: Any, target: jax.ShapeDtypeStruct) -> Any:
    """An array or QuantArray of experts on the host, with zeros up to the shape of `target`; others as they are."""
    if "/experts_" not in path or host.shape == target.shape:
        return host
    if isinstance(host, np.ndarray):
        return _with_zeros(host, target.shape)
    assert isinstance(host, QuantArray)
    assert host.order is None, "experts in the order of GPTQ's desc_act are served by one device only"
    block = tuple(
        new if size == all_of else size for size, all_of, new in zip(host.block, host.shape, target.shape, strict=True)
    )

    def of_blocks(values: np.ndarray | None) -> np.ndarray | None:
        if values is None:
            return None
        blocks = (-(-size // of) for size, of in zip(target.shape, block, strict=True))
        counts = (1 if count == 1 else wanted for count, wanted in zip(values.shape, blocks, strict=True))
        return _with_zeros(np.asarray(values), tuple(counts))

    gain = None if host.gain is None else _with_zeros(host.gain, (target.shape[0], 1))
    scale, zero, bias = map(of_blocks, (host.scale, host.zero, host.bias))
    codes = _with_zeros(host.codes, target.shape)
    return replace(host, codes=codes, scale=scale, zero=zero, bias=bias, gain=gain, block=(block[0], block[1]))


def _with_zeros(values: Any, shape: tuple[int, ...]) -> Any:
    if values.shape == shape:
        return values
    if isinstance(values, PackedInt4):
        return PackedInt4(_with_zeros(values.data, (*shape[:-1], shape[-1] // 2)), values.dtype)
    made = np.zeros(shape, values.dtype)
    made[tuple(map(slice, values.shape))] = values
    return made
