"""A model of which some layers' weights stay in host memory, because the devices have no room for all of them.

A step is several programs: one embeds the tokens and runs the layers that are on the devices, one runs a layer of the
others, and one samples. Layers of equal shape share a program, which gets weights and cache as arguments. So a layer's
weights can be freed when it has been computed, while those of the next one arrive (`layer_uploads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from jaxserve.devices import layouts
from jaxserve.execution import layer_steps
from jaxserve.execution.kv_cache import CacheLayout, LayerPlace
from jaxserve.execution.layer_steps import Begun, Stream
from jaxserve.execution.layer_uploads import MOST, LayerUploads
from jaxserve.execution.programs import StepProgram
from jaxserve.execution.runner import ModelRunner
from jaxserve.execution.sampling import Sampled
from jaxserve.execution.signatures import ProgramName, Signature, Signatures
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.decoder import Decoder
from jaxserve.models.spec import LayerSpec
from jaxserve.models.stages import Part
from jaxserve.scheduling.step_plan import Sampler

BEGIN = -1  # the part of a step that runs the layers that are on the devices; others are numbers of kinds of layers
NO_LAYERS = Part(range(0), around=True)


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


@dataclass(frozen=True)
class StreamingSignatures(Signatures):
    """The programs of a `StreamingRunner`. The model's stage is the layers that are on the devices.

    Attributes:
      kinds: what layers in host memory are like; the number of a kind is the `part` of its program.
      places: of each kind, a layer's part of the cache. Others of the kind differ only in numbers.
    """

    kinds: tuple[LayerKind, ...] = ()
    places: tuple[LayerPlace, ...] = ()

    def step(self, program: StepProgram) -> Signature:
        if program.part == BEGIN:
            return self._begin(program.shape)
        if program.part is not None:
            return self._layer(program.shape, self.kinds[program.part], self.places[program.part])
        last = replace(self, model=self.model.clone(stage=NO_LAYERS))
        made = Signatures.step(last, program)
        params, _, *rest = made.arguments
        results = made.results._replace(cache=[])
        return made._replace(arguments=(params, [], *rest, self._stream(program.shape).x), results=results)

    def _begin(self, shape: StepShape) -> Signature:
        options: Any = {"model": self.model, "shape": shape, "layout": self.layout, "mesh": self.mesh}
        run = self._with_params(partial(layer_steps.begin_step, **options))
        everywhere: Any = self._everywhere
        results = Begun(everywhere, everywhere, self._cache_sharding)  # type: ignore[arg-type]
        return Signature(run, (1,), (self.params, self._cache, self.slots, self._host(shape.words)), results)

    def _layer(self, shape: StepShape, kind: LayerKind, place: LayerPlace) -> Signature:
        options: Any = {"model": kind.decoder, "spec": kind.spec, "shape": shape}
        options |= {"layout": self.layout, "mesh": self.mesh}

        def run(arrays: list[jax.Array], *rest: Any) -> tuple[Stream, Any]:
            return layer_steps.run_one_layer(jax.tree.unflatten(kind.structure, arrays), *rest, **options)

        given = {name: options[name] for name in ("model", "shape", "layout")}
        inputs = layer_steps.abstract_inputs(self.slots, self._host(shape.words), **given)
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), inputs)
        where = (*inputs.at(place)[:-1], self._host())
        arrays = [jax.ShapeDtypeStruct(*form[:2], sharding=form[2]) for form in kind.forms]
        pages = self._cache[place.array]
        arguments = arrays, self._stream(shape), pages, where, inputs.ropes, inputs.num_tokens
        return Signature(run, (2,), arguments, (self._everywhere, self._cache_sharding[place.array]))

    def _stream(self, shape: StepShape) -> Stream:
        place = self._everywhere
        config = self.model.config
        load: Any = jax.ShapeDtypeStruct((1, 3), jnp.int32, sharding=place) if config.num_experts else None
        x: Any = jax.ShapeDtypeStruct((shape.tokens, config.hidden_size), self.model.dtype, sharding=place)
        return Stream(x, load)


class StreamingRunner(ModelRunner):
    """A `ModelRunner` that has the weights of `layers` in host memory: the last layers of the model, in order.

    `step` waits until its last layers are being computed. It samples one token for a row.

    Args:
      model: its stage is the layers that are on the devices, the first ones.
      params: the parameters of this stage, and of everything that is in no layer.
    """

    signatures_kind = StreamingSignatures

    def __init__(self, model: Decoder, params: Any, layers: Sequence[HostLayer], *args: Any, **options: Any):
        super().__init__(model, params, *args, max_tokens_per_call=1, **options)
        self._set_layers(list(layers))
        self.streamed_bytes = sum(layer.device_bytes for layer in layers)
        kinds: list[LayerKind] = []
        for layer in layers:
            if layer.kind not in kinds:
                kinds.append(layer.kind)
        self.kinds, self._parts_of = tuple(kinds), [kinds.index(layer.kind) for layer in layers]

    def _set_layers(self, layers: list[HostLayer]) -> None:
        arrays = [one.arrays for one in layers]
        places = [[form[2] for form in one.kind.forms] for one in layers]
        self.layers, self.uploads = layers, LayerUploads(arrays, places)

    @property
    def weights(self) -> list[jax.Array]:
        """As in `ModelRunner`, and behind them the weights in host memory."""
        return [*self._arrays, *(x for layer in self.layers for x in layer.arrays)]

    @weights.setter
    def weights(self, arrays: list[jax.Array]) -> None:
        self.uploads.clear()
        rest = iter(arrays)
        self._arrays = list(islice(rest, len(self._arrays)))
        self._set_layers([one._replace(arrays=list(islice(rest, len(one.arrays)))) for one in self.layers])

    def release(self) -> None:
        """As in `ModelRunner`. Weights in host memory stay there."""
        self.uploads.clear()
        super().release()

    def set_cache_size(self, layout: CacheLayout, max_blocks: int) -> None:
        super().set_cache_size(layout, max_blocks)
        self._places = layout.places(self.model.config.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device: those that stay there, and MOST layers of the others."""
        return super().weight_bytes + MOST * max(layer.device_bytes for layer in self.layers)

    def step(self, program: StepProgram, packed: np.ndarray) -> tuple[Sampled, jax.Array | None]:
        """See `ModelRunner.step`."""
        shape = program.shape
        begun: Begun = self._get(_part(shape, BEGIN))(self._arrays, self.cache, self.slots, packed)
        stream, inputs, self.cache = begun
        for i, (layer, part) in enumerate(zip(self.layers, self._parts_of, strict=True)):
            run = self._get(_part(shape, part))
            place = self._places[layer.number]
            given = inputs.at(place), inputs.ropes, inputs.num_tokens
            stream, self.cache[place.array] = run(self.uploads.take(i), stream, self.cache[place.array], *given)
            self.uploads.used(i, stream.x)
        result = self._get(program)(self._arrays, [], self.slots, packed, stream.x)
        self.slots = result.slots
        self._hidden = result.hidden
        return result.drawn._replace(expert_load=stream.expert_load), result.hidden

    def names(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        return [*super().names(shapes), *self._parts(shapes)]

    def largest(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        tell = [[shape for shape in shapes if shape.decode_only is decodes][-1:] for decodes in (True, False)]
        return [*super().largest(shapes), *self._parts([shape for some in tell for shape in some])]

    def _parts(self, shapes: Sequence[StepShape]) -> list[ProgramName]:
        return [_part(shape, part) for shape in shapes for part in (BEGIN, *range(len(self.kinds)))]

    @property
    def signatures(self) -> Signatures:
        firsts = [self.layers[self._parts_of.index(part)] for part in range(len(self.kinds))]
        places = tuple(self._places[layer.number] for layer in firsts)
        return replace(super().signatures, kinds=self.kinds, places=places)  # type: ignore[call-arg]


def _part(shape: StepShape, part: int) -> StepProgram:
    return StepProgram(shape, Sampler.NONE, 1, keeps_hidden=False, part=part)
