"""The engine's parameters, plain or quantized, as an Orbax checkpoint. Each device reads only its own part of it.

In a model's folder the checkpoint is the folder `orbax`. Parameters are named by path, "layers_0/mlp/down/kernel". The
arrays of a quantized one are "layers_0/mlp/down/kernel/block=1x128/codes" and so on. If its products round their
inputs, the name has a suffix, as in "…/block=1x4096,inputs=int8:0::0.0/codes": type, group (0: none), "static" or
nothing, and ceiling (0: none).

Functions import the orbax package themselves, as it takes 30 MiB and 0.2 s and most models do not need it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.pallas_kernels.types import Activations, QuantArray

CHECKPOINT = "orbax"
_ARRAYS = tuple(f.name for f in fields(QuantArray) if f.name not in ("block", "shuffled", "activations"))
_QUANTIZED = re.compile(r"(.+)/block=(\d+)x(\d+)(?:,inputs=([\w.:]+))?/(\w+)")

Abstract = jax.ShapeDtypeStruct | QuantArray  # QuantArrays of ShapeDtypeStructs


def is_saved(folder: Path) -> bool:
    return (folder / CHECKPOINT).is_dir()


def save(folder: Path, params: Mapping[str, Any]) -> None:
    """Writes arrays and QuantArrays by path into a folder without a checkpoint."""
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save((folder / CHECKPOINT).absolute(), unflatten_dict(_arrays(params), sep="/"))


def _arrays(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces each QuantArray by one entry per array."""
    flat: dict[str, Any] = {}
    for path, value in params.items():
        if isinstance(value, QuantArray):
            parts = {name: getattr(value, name) for name in _ARRAYS}
            prefix = f"{path}/block={value.block[0]}x{value.block[1]}{_suffix(value.activations)}"
            flat |= {f"{prefix}/{name}": part for name, part in parts.items() if part is not None}
        else:
            flat[path] = value
    return flat


def _suffix(wanted: Activations | None) -> str:
    if wanted is None:
        return ""
    return f",inputs={wanted.dtype}:{wanted.group or 0}:{'static' if wanted.static else ''}:{wanted.ceiling or 0.0}"


def _activations(text: str | None) -> Activations | None:
    """The reverse of `_suffix`, for the text after "inputs="."""
    if text is None:
        return None
    dtype, group, static, ceiling = text.split(":")
    return Activations(dtype, int(group) or None, bool(static), float(ceiling) or None)


def _joined(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `_arrays`."""
    params: dict[str, Any] = {}
    for path, value in flat.items():
        if found := _QUANTIZED.fullmatch(path):
            owner, rows, inputs, wanted, name = found.groups()
            settings = {"block": (int(rows), int(inputs)), "activations": _activations(wanted)}
            params.setdefault(owner, settings)[name] = value
        else:
            params[path] = value
    return {path: QuantArray(**value) if isinstance(value, dict) else value for path, value in params.items()}


def describe(folder: Path) -> dict[str, Abstract]:
    """Shapes and dtypes of the saved parameters. Raises CheckpointError if there is no readable checkpoint."""
    import orbax.checkpoint as ocp

    try:
        tree = ocp.PyTreeCheckpointer().metadata((folder / CHECKPOINT).absolute()).item_metadata.tree
    except Exception as error:  # Orbax raises many unrelated types
        raise CheckpointError(f"{folder} holds no readable Orbax checkpoint: {error}") from error
    return _joined({path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in flatten_dict(tree, sep="/").items()})


def restore(folder: Path, abstract: Mapping[str, Abstract], resizable: Collection[str] = ()) -> dict[str, Any]:
    """Reads the parameters of `abstract` into its shardings and dtypes; the saved ones may have others.

    A `resizable` parameter may have another number of rows: rows are cut off, or filled with zeros. Raises
    CheckpointError for parameters that are missing, left over, of another shape, or quantized differently.
    """
    import orbax.checkpoint as ocp

    stored = _arrays(describe(folder))
    wanted = _arrays(abstract)
    if differing := sorted(stored.keys() ^ wanted.keys()):
        raise CheckpointError(
            f"{folder / CHECKPOINT}: {len(differing)} arrays are saved but not asked for, or the other way round: "
            f"{', '.join(differing[:8])}"
        )
    for path, target in wanted.items():
        found = _QUANTIZED.fullmatch(path)
        same = slice(1 if (found[1] if found else path) in resizable else 0, None)
        if stored[path].shape[same] != target.shape[same]:
            raise CheckpointError(
                f"{folder / CHECKPOINT}: {path} is saved with shape {list(stored[path].shape)}, but "
                f"{list(target.shape)} is needed; convert the model for this tensor_parallel_size"
            )
    arguments = {
        path: ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype, strict=False
        )
        for path, target in wanted.items()
    }
    nested = unflatten_dict(arguments, sep="/")
    tree = ocp.PyTreeCheckpointer().restore((folder / CHECKPOINT).absolute(), restore_args=nested)
    return _joined(flatten_dict(tree, sep="/"))
