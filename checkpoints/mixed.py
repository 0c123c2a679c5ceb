"""Weights whose rows come from tensors of different forms: MixedArrays on the host, which keep the forms apart.

One form for all rows can be much wider. For example, values in Q6_K and queries and keys in Q4_K have a common form of
int8 in groups of 16, with scales and biases in float32: 12.5 bits per weight, while the file has 4.8.
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

MOST_WIDENED = 1.02  # a common form is used if it takes at most this factor more bytes than the parts

Part = np.ndarray | QuantArray | StoredRows


def widens(parts: Sequence[QuantArray], joined: Sequence[QuantArray]) -> bool:
    """Whether the common form of the parts (`joined`) takes notably more memory than the parts, each with blocks of one
    row, which joining needs in any case."""
    alone = [form[0] for part in parts if (form := common_form([part]))]
    return sum(map(_bytes, joined)) > MOST_WIDENED * sum(map(_bytes, alone))


def by_type(rows: StoredRows) -> MixedArray | None:
    """Rows of a file of several types as a MixedArray. None if all have one type, or if some row is in no tensor."""
    if len({name for name, _ in rows.parts}) == 1:
        return None
    parts = [StoredRows([part], np.arange(len(part[1])), rows.inputs) for part in rows.parts]
    return mixed_array(parts, rows.source)


def mixed_array(parts: Sequence[Part], source: np.ndarray) -> MixedArray | None:
    """The weight [out, in] whose row k is row source[k] of the concatenated `parts`. None if some row is in no part.

    The sequence of forms repeats with a period of rows. Neighbouring rows of one form within a period become a part of
    the result, together with the rows at the same place in the other periods.
    """
    if (source < 0).any():
        return None
    sizes = [part.shape[0] for part in parts]
    kinds = _kinds(parts)
    firsts = np.cumsum([0, *sizes])
    before = []
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
    """A number for each part. Parts that can be joined without widening have the same number."""
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
    """The smallest number of rows after which the kinds of rows repeat until the end."""
    out = len(kind)
    return next(n for n in range(1, out + 1) if out % n == 0 and (kind.reshape(-1, n) == kind[:n]).all())


def _joined(parts: list[Part]) -> Part:
    """The rows of parts of one kind, concatenated."""
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
    """The rows `places` of a weight. If it is a QuantArray, its blocks must have one row."""
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
    """Bytes of a weight in a device's memory. Two 4-bit numbers share a byte."""
    arrays = [x for x in (w.codes, w.scale, w.zero, w.bias, w.gain) if x is not None]
    return sum(np.prod(x.shape) * (0.5 if x.dtype in (INT4, FLOAT4) else x.dtype.itemsize) for x in arrays)
