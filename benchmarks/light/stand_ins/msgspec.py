"""Stands in for msgspec on a machine that lacks it: enough for the engine in one process, which keeps structs and
checks none of their fields' types. Nothing here encodes messages: the server needs the real one.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json as _json
from types import SimpleNamespace
from typing import Any, dataclass_transform


class ValidationError(ValueError):
    pass


class Meta:
    """Bounds of a field, which nothing checks here."""

    def __init__(self, **bounds: Any) -> None:
        self.bounds = bounds


def field(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, name: str | None = None):
    del name
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory)
    return dataclasses.field() if default is dataclasses.MISSING else dataclasses.field(default=default)


@dataclass_transform(field_specifiers=(field,))
class Struct:
    """A dataclass; of the options `frozen` and `kw_only` matter here."""

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
        super().__init_subclass__()
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, dataclasses.field(default_factory=lambda default=default: copy.copy(default)))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only, eq=True)(cls)


def _fields(struct: Any) -> dict[str, Any]:
    return {one.name: getattr(struct, one.name) for one in dataclasses.fields(struct)}


structs = SimpleNamespace(replace=dataclasses.replace, asdict=_fields, force_setattr=object.__setattr__)
json = SimpleNamespace(decode=_json.loads, encode=lambda value: _json.dumps(value).encode())
