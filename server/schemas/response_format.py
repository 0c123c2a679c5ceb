"""Converts the fields that ask for a form of the output to a grammar: OpenAI's, vLLM's, SGLang's and llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jaxserve.limits import MAX_CHOICES, MAX_GRAMMAR
from jaxserve.types import Grammar, InvalidRequestError

FORMATS = "text, json_object or json_schema"
_NO_EFFECT = ("disable_fallback", "backend")  # options of structured_outputs that say how the form is enforced
_KINDS = {"json": "json", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "lark"}

# The schemas of these fields in /openapi.json.
_SCHEMA = {"type": "object", "description": "A JSON schema"}
RESPONSE_FORMAT: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": {"anyOf": [_SCHEMA, {"type": "null"}]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "properties": {"schema": _SCHEMA}, "required": ["schema"]},
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_FORMS: dict[str, dict[str, Any]] = {
    "json": _SCHEMA,
    "json_object": {"const": True},
    "regex": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR, "format": "regex"},
    "choice": {
        "type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES
    },
    "grammar": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR, "description": "Lark or GBNF"},
}  # fmt: skip
STRUCTURED_OUTPUTS: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        *(
            {
                "type": "object",
                "properties": {
                    **{name: {"type": "null"} for name in _FORMS},
                    "enable_in_reasoning": {"type": "boolean"},
                    **{name: {} for name in _NO_EFFECT},
                    kind: form,
                },
                "required": [kind],
                "additionalProperties": False,
            }
            for kind, form in _FORMS.items()
        ),
    ]
}


# A JSON schema as an object, or as its text.
JSON_SCHEMA: dict[str, Any] = {
    "x-replaced-by": {
        "anyOf": [_SCHEMA, {"enum": [None, ""]}],
        "description": "An object, or its JSON as a string; excludes other fields that ask for a form",
    }
}


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar that one of FORM_FIELDS asks for; None: any text. Raises InvalidRequestError, naming the field.

    If structured_outputs holds only `enable_in_reasoning`, another field may ask for the form.
    """
    given = {name: value for name in FORM_FIELDS if (value := fields.get(name)) is not None}
    found = [grammar for name, value in given.items() if (grammar := _within(name, value)) is not None]
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[0].field} and {found[1].field} both ask for a form: give one", found[1].field
        )
    return found[0] if found else None


def _within(field: str, value: Any) -> Grammar | None:
    try:
        grammar = FORM_FIELDS[field](value)
        return grammar and msgspec.structs.replace(grammar, field=field)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error}", field) from None


def _of_format(value: Any) -> Grammar | None:
    match _object(value).get("type"):
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")
            return Grammar("json_object") if schema is None else Grammar("json", json.dumps(schema))
        case "json_schema":
            wrapper = value.get("json_schema")
            if not isinstance(wrapper, dict) or "schema" not in wrapper:
                raise InvalidRequestError("json_schema must be an object with the schema under `schema`")
            return Grammar("json", json.dumps(wrapper["schema"]))
    raise InvalidRequestError(f"type must be {FORMATS}, got {value.get('type')!r:.64}")


def _of_outputs(value: Any) -> Grammar | None:
    if not isinstance(_object(value).get("enable_in_reasoning", False), bool):
        raise InvalidRequestError("enable_in_reasoning must be true or false")
    if set(value) == {"enable_in_reasoning"}:
        return None
    others = value.keys() - _KINDS.keys() - {"enable_in_reasoning", *_NO_EFFECT}
    if ignored := [name for name in sorted(others) if value[name] not in (None, False, "")]:
        raise InvalidRequestError(f"{ignored[0][:64]!r} is not supported; give one of {', '.join(_KINDS)}")
    given = {name: form for name, form in value.items() if name in _KINDS and form not in (None, False)}
    if len(given) != 1:
        raise InvalidRequestError(f"give exactly one of {', '.join(_KINDS)}")
    ((name, form),) = given.items()
    if name == "json_object":
        return Grammar("json_object")
    if name == "choice" or (name == "json" and not isinstance(form, str)):
        form = json.dumps(form)
    return Grammar(_KINDS[name], form)  # type: ignore[arg-type]


def _of_schema(value: dict[str, Any] | str) -> Grammar | None:
    if value == "":
        return None
    return Grammar("json", value if isinstance(value, str) else json.dumps(value))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"it must be an object, got {value!r:.64}")
    return value


# The fields that ask for a form, and what reads each. An empty text asks for nothing.
FORM_FIELDS: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": _of_format,
    "structured_outputs": _of_outputs,
    "regex": lambda value: Grammar("regex", value) if value else None,
    "ebnf": lambda value: Grammar("lark", value) if value else None,
    "grammar": lambda value: Grammar("lark", value) if value else None,
    "json_schema": _of_schema,
}


def binds_reasoning(structured_outputs: Any) -> bool:
    """Whether the form applies from the first token on, and not only after the reasoning."""
    return isinstance(structured_outputs, dict) and structured_outputs.get("enable_in_reasoning") is True
