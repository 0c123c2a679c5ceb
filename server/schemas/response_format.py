"""Converts `response_format` and `structured_outputs` to a grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jaxserve.limits import MAX_CHOICES, MAX_GRAMMAR
from jaxserve.types import Grammar, InvalidRequestError

FORMATS = "text, json_object or json_schema"
_KINDS = {"json": "json", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "lark"}

# The schemas of both fields in /openapi.json.
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
                    kind: form,
                },
                "required": [kind],
            }
            for kind, form in _FORMS.items()
        ),
    ]
}


def grammar_of(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """The grammar that OpenAI's or vLLM's field asks for; None: any text. Raises InvalidRequestError, naming the field.

    If structured_outputs holds only `enable_in_reasoning`, a response_format may be given as well.
    """
    one = _within("response_format", _of_format, response_format)
    other = _within("structured_outputs", _of_outputs, structured_outputs)
    if one is not None and other is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both ask for a form: give one", "structured_outputs"
        )
    return one or other


def _within(field: str, read: Any, value: Any) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be an object", field)
    try:
        grammar = read(value)
        return grammar and msgspec.structs.replace(grammar, field=field)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error}", field) from None


def _of_format(value: dict[str, Any]) -> Grammar | None:
    match value.get("type"):
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


def _of_outputs(value: dict[str, Any]) -> Grammar | None:
    if not isinstance(value.get("enable_in_reasoning", False), bool):
        raise InvalidRequestError("enable_in_reasoning must be true or false")
    if set(value) == {"enable_in_reasoning"}:
        return None
    given = {name: form for name, form in value.items() if name in _KINDS and form not in (None, False)}
    if len(given) != 1:
        raise InvalidRequestError(f"give exactly one of {', '.join(_KINDS)}")
    ((name, form),) = given.items()
    if name == "json_object":
        return Grammar("json_object")
    if name == "choice" or (name == "json" and not isinstance(form, str)):
        form = json.dumps(form)
    return Grammar(_KINDS[name], form)  # type: ignore[arg-type]


def binds_reasoning(structured_outputs: Any) -> bool:
    """Whether the form applies from the first token on, and not only after the reasoning."""
    return isinstance(structured_outputs, dict) and structured_outputs.get("enable_in_reasoning") is True
