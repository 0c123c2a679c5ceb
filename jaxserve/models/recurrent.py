"""The module of each kind of recurrent layer, and the place of its tensors."""

from __future__ import annotations

from typing import Any

import flax.linen as nn

from jaxserve.models.delta_net import GatedDeltaNet, delta_sources
from jaxserve.models.kimi_delta import KimiDelta, kimi_sources
from jaxserve.models.mamba2 import Mamba2, mamba_sources
from jaxserve.models.short_conv import ShortConv, conv_sources
from jaxserve.models.sources import Names, Source
from jaxserve.models.spec import GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec

KINDS: dict[type[RecurrentSpec], tuple[Any, Any]] = {
    GatedDeltaSpec: (GatedDeltaNet, delta_sources),
    KimiDeltaSpec: (KimiDelta, kimi_sources),
    Mamba2Spec: (Mamba2, mamba_sources),
    ShortConvSpec: (ShortConv, conv_sources),
}


def recurrent_layer(spec: RecurrentSpec, hidden_size: int, dtype: Any) -> nn.Module:
    """The module that takes the place of attention."""
    return KINDS[type(spec)][0](spec, hidden_size, dtype, name="attention")


def recurrent_sources(spec: RecurrentSpec, hidden: int, names: Names) -> dict[str, list[Source]]:
    """Path within the layer -> the tensors that make it up. The names tell in which form the files have them."""
    found = KINDS[type(spec)][1](spec, hidden, names)
    return {f"attention/{path}": some for path, some in found.items()}
