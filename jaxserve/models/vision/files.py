"""The encoder's tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any, cast

import numpy as np

from jaxserve.checkpoints.load import Pieces
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.rope import head_order
from jaxserve.models.sources import Names, Source, whole
from jaxserve.models.vision.clipped import clipped_sources
from jaxserve.models.vision.encoder import ImageEncoder
from jaxserve.models.vision.spec import EncoderConfig, Gated, Joined, Normed, Pooled, Step
from jaxserve.models.weights import layer_sources, norm_sources


@dataclass(frozen=True)
class EncoderFiles(Checkpoint):
    """A model's files, of which the encoder's tensors are read.

    Attributes:
      names: role -> name of a tensor. Beside those of layers these are "patch", "table", "before" and the names of the
        projector's steps; behind those of taps "{i}" is the tap's number. "class_token", "newline",
        "attention_scale" and "mlp_scale" are tensors themselves.
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

    if config.patch_norm is not None:
        take = partial(_of_patches, config)
        of_norm = norm_sources("patch_norm", config.patch_norm, config.patch)
        add({path: [replace(source, take=take) for source in some] for path, some in of_norm.items()})
    # In files it is a convolution whose steps are as large as its window, or a matrix.
    is_matrix = config.colours_last or config.patch_matrix
    shape: tuple[int, ...] = (hidden, config.patch) if is_matrix else (hidden, *config.patch_shape)
    add({"patch/kernel": [Source("patch.weight", shape, whole, take=partial(_of_patches, config))]})
    if config.patch_bias:
        add({"patch/bias": [Source("patch.bias", (hidden,), whole)]})
    if config.table is not None:
        add({"table": [_table(config)]})
    if config.class_token is not None:
        axes = (1, 1) if config.class_token == "first" else ()
        add({"class_token": [Source("class_token", (*axes, hidden), whole, take=lambda t: t.reshape(hidden))]})
    if config.before is not None:
        add(norm_sources("before", config.before, hidden))
    if config.newline:
        add({"newline": [Source("newline", (config.out_size,), whole)]})
    for i, layer in enumerate(config.layers):
        if config.clipped:
            order = head_order(config.ropes["default"], layer.attention.head_dim)  # type: ignore[union-attr]
            add(clipped_sources(layer, hidden, order), f"layers_{i}/", i)
        else:
            add(layer_sources(cast(Any, encoder), layer, names), f"layers_{i}/", i)
    add(_projector(config.projector), "projector/")
    for i, tap in enumerate(config.taps):
        add(_projector(tap.steps), f"taps_{i}/", i)
    return pieces


def _of_patches(config: EncoderConfig, matrix: Any) -> Any:
    """The projection of patches as a matrix [hidden, numbers of a patch]; or a vector of these numbers."""
    shape = matrix.shape[:1] if matrix.ndim > 1 else ()
    if config.colours_last:
        colours, *pixels = config.patch_shape
        matrix = np.moveaxis(matrix.reshape(*shape, *pixels, colours), -1, len(shape))
    return matrix.reshape(*shape, -1)


def _table(config: EncoderConfig) -> Source:
    """The table of positions, whose last entry is that of the class token, if there is one; of columns, then of rows,
    where these have vectors of their own."""
    hidden = config.hidden_size
    side = config.table or 0
    if config.interpolation == "sum":
        shape = (side, 2, hidden) if config.in_pairs else (2, side, hidden)
        return Source("table.weight", shape, whole, take=partial(_of_axes, config))
    if config.class_token == "first":
        return Source("table.weight", (1, config.entries, hidden), whole, take=lambda t: np.roll(t[0], -1, axis=0))
    rows = (side, side) if config.table_is_grid else (config.entries,)
    return Source("table.weight", (*rows, hidden), whole, take=lambda t: t.reshape(-1, hidden))


def _of_axes(config: EncoderConfig, table: Any) -> Any:
    return (np.moveaxis(table, 1, 0) if config.in_pairs else table).reshape(-1, config.hidden_size)


def _in_order(count: int, matrix: Any) -> Any:
    """A matrix [outputs, channels * count], or a convolution, as a matrix with the channels of the first of `count`
    rows, then those of the next."""
    return matrix.reshape(len(matrix), -1, count).swapaxes(1, 2).reshape(len(matrix), -1)


def _projector(steps: tuple[Step, ...]) -> dict[str, list[Source]]:
    sources: dict[str, list[Source]] = {}
    for step in steps:
        match step:
            case Joined() | Pooled(standard=""):
                continue
            case Pooled(standard=name, size=size):
                sources |= {f"{name}_{part}": [Source(f"{name}_{part}", (size,), whole)] for part in ("bias", "scale")}
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
