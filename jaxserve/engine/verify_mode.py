"""`deterministic_mode` "verify": what it is not made for, its one shape of steps, and its runner.

See `execution.verifying` for how it keeps the promise of `determinism`, and `speculation.own_decodes` for what decodes
ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.devices.mesh import num_devices
from jaxserve.execution.cost import StepCost
from jaxserve.execution.kv_cache import CacheLayout
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.step_buffer import step_shapes
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.verifying import VerifyingRunner
from jaxserve.models.decoder import Decoder
from jaxserve.pallas_kernels.types import BlockArray, QuantArray

CPU_TOKENS = 64  # of a step on CPU
# a step on an accelerator has a multiple of GRAIN tokens
GRAIN = 128
MOST_TOKENS = 1024
NOT_COMBINED: dict[str, Any] = {  # settings that must have these values
    "speculative_config": None,
    "num_hosts": 1,
    "decode_context_parallel_size": 1,
    "pipeline_parallel_size": 1,
}


def check(decoder: Decoder, config: EngineConfig, mesh: Mesh, *, pools: bool) -> None:
    """Raises ConfigError, with all reasons, if tokens cannot be verified with these settings. `pools`: the model embeds
    or scores."""
    if reasons := list(_reasons(decoder, config, mesh, pools)):
        raise ConfigError(f"deterministic_mode must not be verify: {'; '.join(reasons)}")


def _reasons(decoder: Decoder, config: EngineConfig, mesh: Mesh, pools: bool) -> Iterator[str]:
    for name, only in NOT_COMBINED.items():
        if (value := getattr(config, name)) != only:
            value = value.method if name == "speculative_config" else value
            yield f"it is not combined with {name} {value} (leave it at {only})"
    if decoder.config.recurrent is not None:
        yield "recurrent layers cannot go back behind tokens that were decoded ahead"
    if pools:
        yield "models that embed or score sample no tokens to verify"
    if config.enable_lora and num_devices(mesh) > 2:
        yield "partial sums of adapters' products on more than two devices have no promised order (enable_lora)"


def check_weights(params: Any, mesh: Mesh) -> None:
    """Raises ConfigError for experts that a CPU multiplies in one of two ways, by how many tokens chose them."""
    if mesh.devices.flat[0].platform != "cpu":
        return
    flat = flatten_dict(params, is_leaf=lambda _, x: not isinstance(x, dict), sep="/")
    quantized = [name for name, x in flat.items() if isinstance(x, QuantArray | BlockArray) and len(x.shape) == 3]
    if quantized:
        raise ConfigError(
            f"deterministic_mode must not be verify on a CPU for these weights: {len(quantized)} stacks of experts, "
            f"{quantized[0]} first, are quantized and not in panels. Groups of 64 inputs and more become panels on one "
            "device; --dequantize makes floats of any"
        )


def tokens_of_step(cost: StepCost | None) -> int:
    """Tokens of each step: as many as take as long as reading the weights, by the data sheet. `cost` is None on CPU."""
    if cost is None:
        return CPU_TOKENS
    return min(max(math.ceil(cost.weights / cost.token / GRAIN), 1) * GRAIN, MOST_TOKENS)


def buckets(config: EngineConfig, layout: CacheLayout, cost: StepCost | None) -> list[StepShape]:
    """The usual buckets for decodes, in which rows decode ahead, and the one bucket of steps. On CPU it does not depend
    on the settings. On accelerators it has no more rows than there are sequences, for whose block tables there is room.
    """
    tokens = tokens_of_step(cost)
    groups = layout.groups.num_groups
    usual = step_shapes(config.max_num_seqs, tokens, layout.page_size, cost=cost, num_groups=groups)
    rows = tokens if cost is None else min(tokens, config.max_num_seqs)
    step = StepShape.of(tokens, rows, layout.page_size, decode_only=False, num_groups=groups)
    return [shape for shape in usual if shape.decode_only] + [step]


def runner_kind(
    config: EngineConfig, usual: type[ModelRunner], params: Any, decoder: Decoder, mesh: Mesh
) -> Callable[..., ModelRunner]:
    """What makes the runner: `usual`, unless tokens are verified. params: the model's parameters, or their shapes."""
    if not config.verifies:
        return usual
    devices = num_devices(mesh)
    cost = StepCost.of(params, decoder.config, mesh.devices.flat[0], devices, decoder.dtype)
    return partial(VerifyingRunner, tokens=tokens_of_step(cost))
