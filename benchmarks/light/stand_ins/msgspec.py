"""Stands in for msgspec on a machine that lacks it: enough for the engine in one process, which keeps structs and
checks none of their fields' types. Nothing here encodes messages: the server needs the real one.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json as _json
from types import SimpleNamespace
from typing import Any, ClassVar, dataclass_transform


class ValidationError(ValueError):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """Bounds of a field, which our own types read, and what is said of it."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    multiple_of: float | None = None
    pattern: str | None = None
    min_length: int | None = None
    max_length: int | None = None
    title: str | None = None
    description: str | None = None
    examples: Any = None
    extra_json_schema: Any = None
    extra: Any = None


def field(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, name: str | None = None):
    del name
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory)
    return dataclasses.field() if default is dataclasses.MISSING else dataclasses.field(default=default)


@dataclass_transform(field_specifiers=(field,))
class Struct:
    """A dataclass; of the options `frozen` and `kw_only` matter here."""

    __struct_fields__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
        super().__init_subclass__()
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set):
                setattr(cls, name, dataclasses.field(default_factory=lambda default=default: copy.copy(default)))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only, eq=True)(cls)
        cls.__struct_fields__ = tuple(one.name for one in dataclasses.fields(cls))


def _fields(struct: Any) -> dict[str, Any]:
    return {one.name: getattr(struct, one.name) for one in dataclasses.fields(struct)}


class _Coder:
    """What modules make of messages when they are imported; it can encode and decode none."""

    def __init__(self, *_: Any):
        pass

    def encode(self, message: Any) -> bytes:
        raise NotImplementedError(f"{type(message).__name__} needs msgspec itself")

    decode = encode


msgpack = SimpleNamespace(Encoder=_Coder, Decoder=_Coder)
structs = SimpleNamespace(replace=dataclasses.replace, asdict=_fields, force_setattr=object.__setattr__)
json = SimpleNamespace(decode=_json.loads, encode=lambda value: _json.dumps(value).encode())
