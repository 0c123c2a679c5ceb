"""The module of each kind of recurrent layer, and the place of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jaxserve.models.delta_net import GatedDeltaNet, delta_sources
from jaxserve.models.kimi_delta import KimiDelta, kimi_sources
from jaxserve.models.layers import times
from jaxserve.models.lightning import Lightning, lightning_sources
from jaxserve.models.mamba import Mamba, scan_sources
from jaxserve.models.mamba2 import Mamba2, mamba_sources
from jaxserve.models.short_conv import ShortConv, conv_sources
from jaxserve.models.sources import Names, Source
from jaxserve.models.spec import (
    BesideSpec,
    GatedDeltaSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from jaxserve.pallas_kernels.operands import Partials

KINDS: dict[type[RecurrentSpec], tuple[Any, Any]] = {
    GatedDeltaSpec: (GatedDeltaNet, delta_sources),
    KimiDeltaSpec: (KimiDelta, kimi_sources),
    LightningSpec: (Lightning, lightning_sources),
    Mamba2Spec: (Mamba2, mamba_sources),
    MambaSpec: (Mamba, scan_sources),
    ShortConvSpec: (ShortConv, conv_sources),
}


def recurrent_layer(spec: RecurrentSpec, hidden_size: int, dtype: Any, name: str = "attention") -> nn.Module:
    """The module that takes the place of attention, or runs beside it under another name."""
    return KINDS[type(spec)][0](spec, hidden_size, dtype, name=name)


def recurrent_sources(
    spec: RecurrentSpec, hidden: int, names: Names, place: str = "attention"
) -> dict[str, list[Source]]:
    """Path within the layer -> the tensors that make it up. The names tell in which form the files have them."""
    found = KINDS[type(spec)][1](spec, hidden, names)
    return {f"{place}/{path}": some for path, some in found.items()}


def with_beside(
    spec: BesideSpec, attention: Callable[..., Partials], hidden_size: int, dtype: Any
) -> Callable[..., Partials]:
    """Attention and the recurrent layer beside it, to be called as one of them."""
    recurrent = recurrent_layer(spec.recurrent, hidden_size, dtype, "beside")

    def both(x: jax.Array, *others: Any) -> Partials:
        of_attention = attention(times(x, spec.attention_in), *others).reduce(x.dtype)
        of_recurrent = recurrent(times(x, spec.recurrent_in), *others).reduce(x.dtype)
        total = times(of_attention, spec.attention_out) + times(of_recurrent, spec.recurrent_out)
        return Partials(total[None])

    return both
