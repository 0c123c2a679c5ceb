"""What the devices run of a step that is several programs: the layers that are always on the devices, and one of the
others. `steps.run_step` is the last program: it has no layers, and continues from the last one's result."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.devices.mesh import replicated
from jaxserve.execution.forward import ForwardContext, LayerInputs, expert_load, layer_inputs, run_layer, run_layers
from jaxserve.execution.kv_cache import KVCache
from jaxserve.execution.slots import SlotState
from jaxserve.execution.steps import read_buffer
from jaxserve.models.decoder import added
from jaxserve.models.spec import LayerSpec
from jaxserve.pallas_kernels.operands import Partials


class Stream(NamedTuple):
    """What a layer passes on to the next one."""

    x: jax.Array  # [tokens, hidden]
    expert_load: jax.Array | None  # int32 [1, 3], of the layers so far, as in `Sampled`; None: there are no experts
    seen: jax.Array | None  # int32 [tokens, top_k], as in `LayerRun`; None: there are no indexers


class Begun(NamedTuple):
    stream: Stream
    inputs: LayerInputs
    cache: KVCache


def begin_step(params, cache: KVCache, slots: SlotState, packed: jax.Array, *, context: ForwardContext) -> Begun:
    """Embeds a step's tokens and runs the layers of `context.model.stage`, the first ones. `cache` is donated.
    The slots stay as they are: the step's last program advances them. See `steps.run_step`."""
    _, slots, batch, _ = read_buffer(packed, slots, context.shape, None)
    ran = run_layers(params, cache, slots, batch, context)
    load = jnp.zeros((1, 3), jnp.int32) if context.model.config.num_experts else None
    stream = _stream(ran.x, ran.y, ran.chosen, ran.seen, load, ran.inputs.num_tokens, context)
    return Begun(stream, ran.inputs, ran.cache)


def abstract_inputs(slots: SlotState, packed: jax.ShapeDtypeStruct, context: ForwardContext) -> LayerInputs:
    """The shapes of what `begin_step` returns as `inputs`."""

    def inputs(slots: SlotState, packed: jax.Array) -> LayerInputs:
        _, slots, batch, _ = read_buffer(packed, slots, context.shape, None)
        return layer_inputs(slots, batch, context)

    return jax.eval_shape(inputs, slots, packed)


def run_one_layer(
    params, stream: Stream, pages: Any, where: tuple, ropes: Any, num_tokens: jax.Array,
    *, spec: LayerSpec, context: ForwardContext,
) -> tuple[Stream, Any]:  # fmt: skip
    """Runs a layer of the shape `spec` on what the layer before passed on, and on its array of the cache, `pages`,
    which is donated. `where` is the result of `LayerInputs.at`; `ropes` and `num_tokens` are from LayerInputs."""
    x, y, pages, chosen, seen, _ = run_layer(
        params, stream.x, None, ropes, pages, where, stream.seen,
        module=context.model.layer(spec), ops=context.model.ops.counting(num_tokens), kind=context.layout.kind,
        mesh=context.mesh, decode_only=context.shape.decode_only,
    )  # fmt: skip
    return _stream(x, y, chosen, seen, stream.expert_load, num_tokens, context), pages


def _stream(
    x: jax.Array, y: Partials | None, chosen: list[jax.Array], seen: jax.Array | None, load: jax.Array | None,
    count: jax.Array, context: ForwardContext,
) -> Stream:  # fmt: skip
    own = expert_load(chosen, context.model, count)
    total = load if own is None or load is None else load + own
    return Stream(jax.lax.with_sharding_constraint(added(x, y), replicated(context.mesh)), total, seen)
