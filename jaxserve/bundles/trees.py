"""Pytrees of the engine as JSON, and back. Nothing is unpickled: only the classes that the caller lists are made.

A node is null, the number of a leaf, {"list": [...]}, {"tuple": [...]}, {"dict": {...}} or {"class": name, "fields":
{...}}. Fields of dataclasses that are not arrays (`PLAIN`) are values in JSON, checked by their annotations.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec

from jaxserve.pallas_kernels.types import BlockArray, MixedArray, PanelArray, QuantArray

PLAIN: dict[type, tuple[str, ...]] = {
    QuantArray: ("block", "shuffled", "activations"),
    PanelArray: ("shape", "arithmetic"),
    BlockArray: ("kind",),
    MixedArray: ("widths",),
}


def describe(structure: Any) -> Any:
    """A pytree's structure (a PyTreeDef) as JSON; leaves are their numbers."""
    return _encoded(jax.tree.unflatten(structure, range(structure.num_leaves)))


def _encoded(node: Any) -> Any:
    if node is None or isinstance(node, int):
        return node
    kind = type(node)
    if kind in (list, tuple):
        return {kind.__name__: [_encoded(one) for one in node]}
    if kind is dict:
        return {"dict": {name: _encoded(one) for name, one in node.items()}}
    plain = PLAIN.get(kind, ())
    names = getattr(node, "_fields", ()) if isinstance(node, tuple) else list(kind.__dataclass_fields__)
    fields = {
        name: msgspec.to_builtins(getattr(node, name)) if name in plain else _encoded(getattr(node, name))
        for name in names
    }
    return {"class": kind.__name__, "fields": fields}


def build(node: Any, leaves: Sequence[Any], classes: Mapping[str, type]) -> Any:
    """The pytree that `describe` described, with these leaves. Raises ValueError for anything else."""
    if node is None:
        return None
    if type(node) is int:
        if not 0 <= node < len(leaves):
            raise ValueError(f"there is no leaf {node}")
        return leaves[node]
    if not isinstance(node, dict):
        raise ValueError(f"not a node of a tree: {node!r}")
    if set(node) == {"class", "fields"}:
        return _object(node, leaves, classes)
    (kind, inner), *rest = node.items()
    if rest or kind not in ("list", "tuple", "dict"):
        raise ValueError(f"not a node of a tree: {list(node)}")
    if kind == "dict":
        return {name: build(one, leaves, classes) for name, one in inner.items()}
    made = [build(one, leaves, classes) for one in inner]
    return tuple(made) if kind == "tuple" else made


def _object(node: dict[str, Any], leaves: Sequence[Any], classes: Mapping[str, type]) -> Any:
    kind = classes.get(node["class"])
    if kind is None:
        raise ValueError(f"a class that trees do not have: {node['class']!r}")
    plain = PLAIN.get(kind, ())
    hints = typing.get_type_hints(kind) if plain else {}
    return kind(**{
        name: msgspec.convert(value, hints[name]) if name in plain else build(value, leaves, classes)
        for name, value in node["fields"].items()
    })  # fmt: skip
