"""What the devices run of a step that is several programs: the layers that are always on the devices, and one of the
others. `steps.run_step` is the last program: it has no layers, and continues from the last one's result."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.devices.mesh import replicated
from jaxserve.execution.forward import LayerInputs, expert_load, layer_inputs, run_layer, run_layers
from jaxserve.execution.kv_cache import CacheLayout, KVCache
from jaxserve.execution.slots import SlotState
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.steps import read_buffer
from jaxserve.models.decoder import Decoder, added
from jaxserve.models.spec import LayerSpec
from jaxserve.pallas_kernels.parts import Parts


class Stream(NamedTuple):
    """What a layer passes on to the next one."""

    x: jax.Array  # [tokens, hidden]
    expert_load: jax.Array | None  # int32 [1, 3], of the layers so far, as in `Sampled`; None: there are no experts


class Begun(NamedTuple):
    stream: Stream
    inputs: LayerInputs
    cache: KVCache


def begin_step(
    params,
    cache: KVCache,
    slots: SlotState,
    packed: jax.Array,
    *,
    model: Decoder,
    shape: StepShape,
    layout: CacheLayout,
    mesh: Mesh,
) -> Begun:
    """Embeds a step's tokens and runs the layers of `model.stage`, which are the first ones. `cache` is donated. The
    slots stay as they are: the step's last program advances them. See `steps.run_step`."""
    _, slots, batch, _ = read_buffer(packed, slots, shape, None)
    model = model.counting(batch.q_start[-1])
    ran = run_layers(params, cache, slots, batch, model=model, shape=shape, layout=layout, mesh=mesh)
    load = jnp.zeros((1, 3), jnp.int32) if model.config.num_experts else None
    return Begun(_stream(ran.x, ran.y, ran.chosen, load, model, ran.inputs.num_tokens, mesh), ran.inputs, ran.cache)


def abstract_inputs(
    slots: SlotState, packed: jax.ShapeDtypeStruct, *, model: Decoder, shape: StepShape, layout: CacheLayout
) -> LayerInputs:
    """The shapes of what `begin_step` returns as `inputs`."""

    def inputs(slots: SlotState, packed: jax.Array) -> LayerInputs:
        _, slots, batch, _ = read_buffer(packed, slots, shape, None)
        return layer_inputs(slots, batch, model=model, shape=shape, layout=layout)

    return jax.eval_shape(inputs, slots, packed)


def run_one_layer(
    params, stream: Stream, pages: Any, where: tuple, ropes: Any, num_tokens: jax.Array,
    *, model: Decoder, spec: LayerSpec, shape: StepShape, layout: CacheLayout, mesh: Mesh,
) -> tuple[Stream, Any]:  # fmt: skip
    """Runs a layer of the shape `spec` on what the layer before passed on, and on its array of the cache, `pages`,
    which is donated. `where` is the result of `LayerInputs.at`; `ropes` and `num_tokens` are from LayerInputs."""
    model = model.counting(num_tokens)
    module = model.layer(spec, parent=None)
    options: Any = {"module": module, "kind": layout.kind, "mesh": mesh, "decode_only": shape.decode_only}
    x, y, pages, chosen = run_layer(params, stream.x, None, ropes, pages, where, **options)
    return _stream(x, y, chosen, stream.expert_load, model, num_tokens, mesh), pages


def _stream(
    x: jax.Array, y: Parts | None, chosen: list[jax.Array], load: jax.Array | None, model: Decoder, count: jax.Array,
    mesh: Mesh,
) -> Stream:  # fmt: skip
    own = expert_load(chosen, model, count)
    total = load if own is None or load is None else load + own
    return Stream(jax.lax.with_sharding_constraint(added(x, y), replicated(mesh)), total)
