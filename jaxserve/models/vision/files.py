"""The encoder's tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, cast

from jaxserve.checkpoints.load import Pieces
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.sources import Names, Source, whole
from jaxserve.models.vision.encoder import ImageEncoder
from jaxserve.models.vision.spec import Gated, Joined, Normed, Step
from jaxserve.models.weights import layer_sources, norm_sources


@dataclass(frozen=True)
class EncoderFiles(Checkpoint):
    """A model's files, of which the encoder's tensors are read.

    Attributes:
      names: role -> name of a tensor. Beside those of layers these are "patch", "table", "before" and the names of the
        projector's steps; behind those of taps "{i}" is the tap's number.
    """

    names: Names = ()  # type: ignore[assignment]

    @classmethod
    def of(cls, files: Checkpoint, names: Names) -> EncoderFiles:
        """`names` with the beginning that they have in these files; see `Family.layouts`."""
        return cls(files.hf, files.family, files.tensors, files.reader, names)

    def pieces(self, decoder: Any) -> dict[str, Pieces]:
        return encoder_pieces(decoder, self.names)

    def ignored(self, decoder: Any) -> Callable[[str], bool]:
        return lambda name: True  # the language model's; what it does not read is in the log already


def encoder_pieces(encoder: ImageEncoder, names: Names) -> dict[str, Pieces]:
    """Path in an encoder's parameters -> the tensors that make it up."""
    config = encoder.config
    hidden = config.hidden_size
    pieces: dict[str, Pieces] = {}

    def add(sources: dict[str, list[Source]], prefix: str = "", layer: int | None = None) -> None:
        pieces.update({prefix + path: [s.piece(names, layer) for s in some] for path, some in sources.items()})

    # In files it is a convolution whose steps are as large as its window, or a matrix.
    shape = (hidden, config.patch) if config.colours_last else (hidden, *config.patch_shape)
    take = partial(_in_order, 3 if config.colours_last else 1)
    add({"patch/kernel": [Source("patch.weight", shape, whole, take=take)]})
    if config.patch_bias:
        add({"patch/bias": [Source("patch.bias", (hidden,), whole)]})
    if config.table is not None:
        rows = (config.table, config.table) if config.table_is_grid else (config.table**2,)
        add({"table": [Source("table.weight", (*rows, hidden), whole, take=lambda t: t.reshape(-1, hidden))]})
    if config.before is not None:
        add(norm_sources("before", config.before, hidden))
    for i, layer in enumerate(config.layers):
        add(layer_sources(cast(Any, encoder), layer, names), f"layers_{i}/", i)
    add(_projector(config.projector), "projector/")
    for i, tap in enumerate(config.taps):
        add(_projector(tap.steps), f"taps_{i}/", i)
    return pieces


def _in_order(count: int, matrix: Any) -> Any:
    """A matrix [outputs, channels * count], or a convolution, as a matrix with the channels of the first of `count`
    rows, then those of the next."""
    return matrix.reshape(len(matrix), -1, count).swapaxes(1, 2).reshape(len(matrix), -1)


def _projector(steps: tuple[Step, ...]) -> dict[str, list[Source]]:
    sources: dict[str, list[Source]] = {}
    for step in steps:
        match step:
            case Joined():
                continue
            case Normed(name=name, norm=norm, size=size):
                sources |= norm_sources(name, norm, size)
            case Gated():
                shape = step.outputs, step.inputs
                for name in (step.gate, step.up):
                    sources[f"{name}/kernel"] = [Source(f"{name}.weight", shape, whole)]
            case _:
                count = step.alternating
                inputs = (step.inputs // count, *2 * (isqrt(count),)) if step.convolved else (step.inputs,)
                take = partial(_in_order, count) if count > 1 else None
                sources[f"{step.name}/kernel"] = [
                    Source(f"{step.name}.weight", (step.outputs, *inputs), whole, take=take)
                ]
                if step.bias:
                    sources[f"{step.name}/bias"] = [Source(f"{step.name}.bias", (step.outputs,), whole)]
    return sources
