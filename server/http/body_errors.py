"""Error messages about a request's body. They name the field, what is allowed and what was given."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import msgspec

from jaxserve.server.http.errors import APIError

_WORDS = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
# Behind the error there may be what is no JSON, a number that is too large for msgspec, or a nesting that is too deep.
_UNREADABLE = msgspec.DecodeError, RecursionError
_MOST_SHOWN = 64  # characters of a value that a message quotes


def explain(error: msgspec.ValidationError, body: str) -> APIError:
    """The answer (400) to a body of the wrong form. Its `param` is the top-level field."""
    text, _, where = str(error).rpartition(" - at ")
    if not text:  # the error is about the body as a whole
        text = str(error)
        missing = re.search("missing required field `(.*)`", text)
        return APIError(400, _in_words(text), param=missing[1] if missing else None)
    is_key = where.startswith("`key`")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")
    param = re.split(r"[.\[]", path)[0] or None
    text = _in_words(text)
    if text.startswith("Expected "):
        subject = f"a key of {path}" if is_key else path
        if (key := _wrong_key(text, body, path, is_key)) is not None:
            shown = _shown(key, by_length=False)
            subject = f"the key {shown} of {path}" if is_key else path.replace("...", shown)
        text = text.replace("Expected", f"{subject} must be", 1)
    else:
        text = f"{path}: {text}"
    if ", got" not in text and not is_key and "..." not in path:
        with contextlib.suppress(*_UNREADABLE):
            text += f", got {_shown(_value_at(body, path), by_length='of length' in text)}"
    return APIError(400, text, param=param)


def _in_words(text: str) -> str:
    """Replaces Python's names of types by JSON's."""

    def words(match: re.Match[str]) -> str:
        names = match[1].split(" | ")
        return " or ".join(_WORDS[name] for name in names) if set(names) <= _WORDS.keys() else match[0]

    return re.sub("`([^`]*)`", words, text)


def _wrong_key(text: str, body: str, path: str, is_key: bool) -> str | None:
    """The key that an error is about, or whose value it is about; msgspec does not tell it. None: it is not clear."""
    with contextlib.suppress(*_UNREADABLE, LookupError, TypeError):
        found = _value_at(body, path.removesuffix("[...]"))
        if is_key and (pattern := re.search("matching regex '(.*)'", text)) is not None:
            return next((key for key in found if not re.search(pattern[1], key)), None)
        if path.endswith("[...]") and "Expected a number" in text:
            wrong = (bool, str, list, dict, type(None))
            return next((key for key, value in found.items() if isinstance(value, wrong)), None)
    return None


def _value_at(body: str, path: str) -> Any:
    value = msgspec.json.decode(body)
    for name, index in _STEP.findall("." + path):
        value = value[name] if name else value[int(index)]
    return value


def _shown(value: Any, by_length: bool) -> str:
    if by_length:
        return f"one of length {len(value)}"
    shown = msgspec.json.encode(value).decode()
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"


def with_whole_numbers(body: str) -> bytes:
    """The body with numbers such as 16.0, which JSON Schema counts as integers, written as 16. Raises ValidationError
    for numbers too large for msgspec."""
    return msgspec.json.encode(_whole(msgspec.json.decode(body)))


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_whole(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value
