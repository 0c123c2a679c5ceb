"""Random JSON schemas whose instances are short, for tests of structured output."""

import random
from typing import Any

PATTERNS = ("^[a-z]{1,6}$", "^(ab|cd)+e?$", "^\\d{3}-\\d{2}$", "^#[0-9a-fA-F]{6}$", "[xyz]{2}", "^v[0-9]+\\.[0-9]$")
FORMATS = ("date", "uuid", "ipv4", "ipv6")
NAMES = ("id", "name", "größe", "a b", "x-y", 'quote"d', "nested", "list")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b", "c"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def random_schema(seed: int) -> dict[str, Any]:
    """An object whose parts may refer to definitions."""
    rng = random.Random(seed)
    definitions = {f"d{i}": _any(rng, 1, []) for i in range(rng.randrange(3))}
    schema = _object(rng, 3, list(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _any(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, _plain]
    if depth:
        kinds += [_object, _array, _tuple, _either]
    if refs:
        kinds.append(lambda rng, depth, refs: {"$ref": f"#/$defs/{rng.choice(refs)}"})
    return rng.choice(kinds)(rng, depth - 1, refs)


def _string(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    match rng.randrange(3):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}


def _integer(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    low_key = rng.choice(["minimum", "exclusiveMinimum"])
    high_key = rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": "integer", low_key: low, high_key: low + rng.randrange(2, 500)}


def _number(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "exclusiveMaximum": round(low + rng.uniform(0.5, 9), 1)}


def _choice(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    values = rng.sample(["red", "grün", 1, -2.5, None, True, {"k": [1, "v"]}, []], rng.randrange(1, 5))
    return {"const": values[0]} if len(values) == 1 else {"enum": values}


def _plain(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(rng, depth - 1, refs) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    low = rng.randrange(2)
    return {"type": "array", "items": _any(rng, depth - 1, refs), "minItems": low, "maxItems": low + rng.randrange(2)}


def _tuple(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    items = [_any(rng, 0, refs) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _either(rng: random.Random, depth: int, refs: list[str]) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth, refs) for _ in range(rng.randrange(2, 4))]}
