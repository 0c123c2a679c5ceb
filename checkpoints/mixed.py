"""Weights whose rows come from tensors of several forms, kept apart: MixedArrays on the host.

In the form that they have in common, values in Q6_K beside queries and keys in Q4_K would all be int8 in groups of 16,
with scales and biases in float32: 12.5 bits a weight where the file has 4.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from jaxserve.checkpoints.int4 import FLOAT4, INT4, PackedInt4
from jaxserve.checkpoints.quantized import StoredRows, common_form
from jaxserve.pallas_kernels.types import MixedArray, QuantArray

MOST_WIDENED = 1.02  # bytes of a common form over those of the parts, up to which it is taken

Part = np.ndarray | QuantArray | StoredRows


def widens(parts: Sequence[QuantArray], joined: Sequence[QuantArray]) -> bool:
    """Whether the same parts take notably more memory in the form that they have in common than each with blocks of
    one row, which any kind of joining needs."""
    alone = [form[0] for part in parts if (form := common_form([part]))]
    return sum(map(_bytes, joined)) > MOST_WIDENED * sum(map(_bytes, alone))


def by_type(rows: StoredRows) -> MixedArray | None:
    """Rows of a file whose types differ, each type apart. None where they do not, or some row is in no tensor."""
    if len({name for name, _ in rows.parts}) == 1:
        return None
    parts = [StoredRows([part], np.arange(len(part[1])), rows.inputs) for part in rows.parts]
    return mixed_array(parts, rows.source)


def mixed_array(parts: Sequence[Part], source: np.ndarray) -> MixedArray | None:
    """The weight [out, in] whose row k is row source[k], counted through all parts. None where some row is in none.

    Neighbouring rows of one form become a part of the result, those of the same place in each period together.
    """
    if (source < 0).any():
        return None
    sizes, kinds = [part.shape[0] for part in parts], _kinds(parts)
    firsts, before = np.cumsum([0, *sizes]), []
    groups: dict[int, list[Part]] = {}
    for part, number in zip(parts, kinds, strict=True):
        before.append(sum(other.shape[0] for other in groups.setdefault(number, [])))
        groups[number].append(part)
    of = np.searchsorted(firsts, source, side="right") - 1
    kind: np.ndarray = np.array(kinds)[of]
    place = source - firsts[of] + np.array(before)[of]
    period = _period(kind)
    edges = [0, *(1 + np.flatnonzero(np.diff(kind[:period]))), period]
    joined = {number: _joined(some) for number, some in groups.items()}
    spans = list(pairwise(edges))
    made = [_rows(joined[int(kind[a])], place.reshape(-1, period)[:, a:b].reshape(-1)) for a, b in spans]
    return MixedArray(tuple(made), tuple(int(b - a) for a, b in spans))


def _kinds(parts: Sequence[Part]) -> list[int]:
    """A number for each part, equal for those that can be joined as they are."""
    known: list[Part] = []

    def alike(a: Part, b: Part) -> bool:
        if isinstance(a, StoredRows) and isinstance(b, StoredRows):
            return a.parts[0][0] == b.parts[0][0]
        if isinstance(a, QuantArray) and isinstance(b, QuantArray):
            form = common_form([a, b])
            return form is not None and not widens([a, b], form)
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray)

    def number(part: Part) -> int:
        found = next((i for i, other in enumerate(known) if alike(other, part)), len(known))
        if found == len(known):
            known.append(part)
        return found

    return [number(part) for part in parts]


def _period(kind: np.ndarray) -> int:
    """The fewest rows after which the kinds of rows repeat, again and again to the end."""
    out = len(kind)
    return next(n for n in range(1, out + 1) if out % n == 0 and (kind.reshape(-1, n) == kind[:n]).all())


def _joined(parts: list[Part]) -> Part:
    """Parts that are alike below each other."""
    if isinstance(parts[0], StoredRows):
        stored = [(name, data) for part in parts if isinstance(part, StoredRows) for name, data in part.parts]
        return StoredRows(stored, np.arange(sum(len(data) for _, data in stored)), parts[0].inputs)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    form = common_form([part for part in parts if isinstance(part, QuantArray)])
    assert form is not None

    def below(name: str) -> Any:
        values = [getattr(part, name) for part in form]
        if values[0] is None:
            return None
        if all(isinstance(value, PackedInt4) for value in values):
            return PackedInt4(np.concatenate([value.data for value in values]), values[0].dtype)
        return np.concatenate([np.asarray(value) for value in values])

    return replace(form[0], **{name: below(name) for name in ("codes", "scale", "zero", "bias", "gain")})


def _rows(w: Part, places: np.ndarray) -> Part:
    """Some rows of a weight; of a QuantArray, whose blocks have one row."""
    if isinstance(w, StoredRows):
        return replace(w, source=w.source[places])
    if isinstance(w, np.ndarray):
        return w[places]

    def take(values: Any) -> Any:
        if values is None or isinstance(values, PackedInt4):
            return values and values.with_rows(lambda data: data[places])
        return np.asarray(values)[places]

    return replace(w, **{name: take(getattr(w, name)) for name in ("codes", "scale", "zero", "bias", "gain")})


def _bytes(w: QuantArray) -> float:
    """Of a weight in a device's memory, where two numbers of 4 bits share a byte."""
    arrays = [x for x in (w.codes, w.scale, w.zero, w.bias, w.gain) if x is not None]
    return sum(np.prod(x.shape) * (0.5 if x.dtype in (INT4, FLOAT4) else x.dtype.itemsize) for x in arrays)
