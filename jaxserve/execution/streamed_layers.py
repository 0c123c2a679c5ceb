"""The last layers of a model whose weights stay in host memory, because the devices have no room for all of them.

A step is several programs: one embeds the tokens and runs the layers that are on the devices, one runs a layer of the
others, and one samples. Layers of equal shape share a program, which gets weights and cache as arguments. So a layer's
weights can be freed when it has been computed, while those of the next one arrive (`layer_uploads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jax.tree_util import PyTreeDef

from jaxserve.devices import layouts
from jaxserve.execution import layer_steps
from jaxserve.execution.forward import nothing_chosen
from jaxserve.execution.kv_cache import KVCache
from jaxserve.execution.layer_groups import LayerPlace
from jaxserve.execution.layer_steps import Begun, Stream
from jaxserve.execution.layer_uploads import MOST, LayerUploads
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.signatures import Signature, Signatures
from jaxserve.execution.slots import SlotState
from jaxserve.execution.step_shape import StepShape
from jaxserve.execution.steps import StepResult
from jaxserve.models.decoder import Decoder
from jaxserve.models.spec import LayerSpec
from jaxserve.models.stages import Part
from jaxserve.scheduling.step_plan import Sampler

BEGIN = -1  # the part of a step that runs the layers that are on the devices; others are numbers of kinds of layers
NO_LAYERS = Part(range(0), around=True)


class StepRunner(Protocol):
    """What a step needs of a `ModelRunner`."""

    cache: KVCache
    slots: SlotState
    _arrays: list[jax.Array]

    def _get(self, name: StepProgram) -> Compiled: ...


class LayerKind(NamedTuple):
    """What layers that share a program have in common."""

    decoder: Decoder  # with the kernels for these weights
    spec: LayerSpec
    structure: PyTreeDef  # of a layer's parameters
    forms: tuple[tuple[Any, ...], ...]  # (shape, dtype, place on the devices) of each array


class HostLayer(NamedTuple):
    """A layer whose weights are in host memory: its number in the model, its kind, and the arrays; or their shapes on
    the devices, which suffice to compile programs."""

    number: int
    kind: LayerKind
    arrays: list[Any]

    @classmethod
    def of(cls, number: int, decoder: Decoder, params: Any) -> HostLayer:
        """params: the layer's parameters on the devices, or their shapes there."""
        arrays, structure = jax.tree.flatten(params)
        forms = tuple((x.shape, x.dtype, layouts.place_of(x)) for x in arrays)
        kind = LayerKind(decoder, decoder.config.layers[number], structure, forms)
        return cls(number, kind, arrays)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on each device, while they are there."""
        return sum(layouts.device_bytes(jax.ShapeDtypeStruct(*form[:2], sharding=form[2])) for form in self.kind.forms)


class StreamedLayers:
    """The layers of a `ModelRunner` whose weights are in host memory: the last ones of the model, in order.

    Attributes:
      kinds: what layers in host memory are like; the number of a kind is the `part` of its program.
      places: of each layer of the model, its part of the cache. Others of a kind differ only in numbers.
    """

    def __init__(self, layers: Sequence[HostLayer]):
        self.device_bytes = sum(layer.device_bytes for layer in layers)
        kinds: list[LayerKind] = []
        for layer in layers:
            if layer.kind not in kinds:
                kinds.append(layer.kind)
        self.kinds = tuple(kinds)
        self._parts_of = [kinds.index(layer.kind) for layer in layers]
        self.places: list[LayerPlace] = []
        self._set_layers(list(layers))

    def _set_layers(self, layers: list[HostLayer]) -> None:
        arrays = [one.arrays for one in layers]
        places = [[form[2] for form in one.kind.forms] for one in layers]
        self.layers = layers
        self.uploads = LayerUploads(arrays, places)

    @property
    def weights(self) -> list[Any]:
        return [x for layer in self.layers for x in layer.arrays]

    def set_weights(self, arrays: Sequence[Any]) -> None:
        """Replaces the weights by others of the same forms."""
        self.uploads.clear()
        rest = iter(arrays)
        self._set_layers([one._replace(arrays=list(islice(rest, len(one.arrays)))) for one in self.layers])

    @property
    def room_bytes(self) -> int:
        """Bytes on each device for the layers that are there at a time."""
        return MOST * max(layer.device_bytes for layer in self.layers)

    def step(self, runner: StepRunner, program: StepProgram, packed: np.ndarray) -> StepResult:
        """As `ModelRunner.step`, in several programs. Waits until the last layers are being computed."""
        shape = program.shape
        begun: Begun = runner._get(_part(shape, BEGIN))(runner._arrays, runner.cache, runner.slots, packed)
        stream, inputs, cache = begun
        runner.cache = cache
        for i, (layer, part) in enumerate(zip(self.layers, self._parts_of, strict=True)):
            run = runner._get(_part(shape, part))
            place = self.places[layer.number]
            given = inputs.at(place), inputs.ropes, inputs.num_tokens
            stream, kept = run(self.uploads.take(i), stream, place.taken(cache), *given)
            place.put(cache, kept)
            self.uploads.used(i, stream.x)
        result = runner._get(program)(runner._arrays, [], runner.slots, packed, stream.x)
        return result._replace(cache=cache, drawn=result.drawn._replace(expert_load=stream.expert_load))

    def programs(self, shapes: Sequence[StepShape]) -> list[StepProgram]:
        """The names of the programs for these buckets, but the last of each step."""
        return [_part(shape, part) for shape in shapes for part in (BEGIN, *range(len(self.kinds)))]

    def signature(self, of: Signatures, program: StepProgram) -> Signature:
        """The signature of one of the programs of a step. `of`: those of the layers that are on the devices."""
        if program.part == BEGIN:
            return self._begin(of, program.shape)
        if program.part is not None:
            first = self.layers[self._parts_of.index(program.part)]
            return self._layer(of, program.shape, self.kinds[program.part], self.places[first.number])
        last = replace(of, model=of.model.clone(stage=NO_LAYERS), streamed=None)
        made = last.step(program)
        params, _, *rest = made.arguments
        results = made.results._replace(cache=[])
        return made._replace(arguments=(params, [], *rest, self._stream(of, program.shape).x), results=results)

    def _begin(self, of: Signatures, shape: StepShape) -> Signature:
        run = of.with_params(partial(layer_steps.begin_step, context=of.context(shape)))
        everywhere: Any = of.everywhere
        results = Begun(everywhere, everywhere, of.cache_sharding)  # type: ignore[arg-type]
        return Signature(run, (1,), (of.params, of.cache, of.slots, of.host(shape.words)), results)

    def _layer(self, of: Signatures, shape: StepShape, kind: LayerKind, place: LayerPlace) -> Signature:
        context = replace(of.context(shape), model=kind.decoder)

        def run(arrays: list[jax.Array], *rest: Any) -> tuple[Stream, Any]:
            params = jax.tree.unflatten(kind.structure, arrays)
            return layer_steps.run_one_layer(params, *rest, spec=kind.spec, context=context)

        inputs = layer_steps.abstract_inputs(of.slots, of.host(shape.words), context)
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of.everywhere), inputs)
        where = jax.tree.map(lambda x: of.host() if isinstance(x, np.int32) else x, inputs.at(place))
        arrays = [jax.ShapeDtypeStruct(*form[:2], sharding=form[2]) for form in kind.forms]
        pages = place.taken(of.cache)
        arguments = arrays, self._stream(of, shape), pages, where, inputs.ropes, inputs.num_tokens
        return Signature(run, (2,), arguments, (of.everywhere, place.taken(of.cache_sharding)))

    def _stream(self, of: Signatures, shape: StepShape) -> Stream:
        place = of.everywhere
        config = of.model.config
        load: Any = jax.ShapeDtypeStruct((1, 3), jnp.int32, sharding=place) if config.num_experts else None
        x: Any = jax.ShapeDtypeStruct((shape.tokens, config.hidden_size), of.model.dtype, sharding=place)
        seen: Any = jax.eval_shape(partial(nothing_chosen, config, shape.tokens))
        seen = None if seen is None else jax.ShapeDtypeStruct(seen.shape, seen.dtype, sharding=place)
        return Stream(x, load, seen)


def _part(shape: StepShape, part: int) -> StepProgram:
    return StepProgram(shape, Sampler.NONE, 1, keeps_hidden=False, part=part)
