"""Small bodies that are likely to cost a server much, by hypothesis and by hand, for amplification.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

from jaxserve.limits import MAX_STOP_STRINGS

LONGEST_BODY = 64 * 2**10  # bytes
CONTEXT = 8192  # tokens, of the model
ENDPOINTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip

_UNITS = ("a", " ", "a ", "ab", "\n", "\u00e9", "\U0001f600", "\u4e2d", "0", "{", '\\"', "<", "<|im_end|>", "the ")


def _fill(unit: str, size: int) -> str:
    """Repeats the unit as long as its JSON is not longer than `size`."""
    return unit * max(1, size // max(1, len(msgspec.json.encode(unit)) - 2))


def _nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


def _schema(kind: str, size: int) -> Any:
    count = max(1, size // 40)
    return {
        "wide": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}},
        "enum": {"enum": [f"v{i}" for i in range(size // 10)]},
        "bomb": {"type": "object", "x": [{}] * (size // 3)},
        "nested": {"type": "object", **_nested(min(60, size // 20))},
        "any": {"anyOf": [{"const": i} for i in range(size // 12)]},
    }[kind]


_SCHEMAS = st.sampled_from(("wide", "enum", "bomb", "nested", "any"))
_unit = st.sampled_from(_UNITS)


@st.composite
def _text(draw: st.DrawFn, size: int) -> str:
    return _fill(draw(_unit), size)


@st.composite
def _prompt(draw: st.DrawFn, size: int) -> Any:
    """One or many prompts, as text or tokens."""
    count = draw(st.sampled_from((1, 8, 128, 1024)))
    each = max(1, size // count - 3)
    if draw(st.booleans()):
        tokens = [draw(st.sampled_from((1, 7, 300)))] * max(1, min(each // 2, CONTEXT - 1 if count > 1 else each))
        return tokens if count == 1 else [tokens] * count
    text = draw(_text(each))
    return text if count == 1 else [text] * count


@st.composite
def _sampling(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """Parameters, one of which may be large."""
    fields: dict[str, Any] = {
        "n": draw(st.sampled_from((1, 2, 8, 128))),
        "max_tokens": draw(st.sampled_from((1, 64, 5000))),
        "stream": draw(st.booleans()),
    }
    large = {
        "allowed_token_ids": lambda: [5] * (size // 2),
        "logit_bias": lambda: {str(i): 1 for i in range(min(512, size // 8 + 1))},
        "bad_words": lambda: [draw(_text(min(256, max(1, size // 128))))[:256]] * 128,
        "stop": lambda: [
            draw(_text(min(1000, max(1, size // 64)))) + str(i)
            for i in range(draw(st.sampled_from((1, 4, MAX_STOP_STRINGS))))
        ],
        "stop_token_ids": lambda: list(range(14)),
        "response_format": lambda: {
            "type": "json_schema", "json_schema": {"name": "x", "schema": _schema(draw(_SCHEMAS), size)}
        },
        "structured_outputs": lambda: draw(
            st.sampled_from(
                (
                    {"regex": _fill("(a|b)*", size)},
                    {"choice": [str(i) for i in range(min(1024, size // 8))]},
                    {"grammar": _fill("start: A\n", size)},
                )
            )
        ),
        "metadata": lambda: {str(i): "x" for i in range(size // 12)},
        "user": lambda: _fill("x", size),
        "unknown": lambda: [[]] * (size // 3),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(large)), max_size=2, unique=True)):
        fields[name] = large[name]()
    return fields


@st.composite
def _messages(draw: st.DrawFn, size: int, path: str) -> list[dict[str, Any]]:
    count = draw(st.sampled_from((1, 16, 500)))
    text = draw(_text(max(1, size // count - 40)))
    roles = ("user",) if path.startswith("/v1/messages") else ("user", "system")
    role = draw(st.sampled_from(roles))
    if draw(st.booleans()):
        kind = "input_text" if path == "/v1/responses" else "text"
        content: Any = [{"type": kind, "text": text[: max(1, len(text) // 8)]}] * 6
    else:
        content = text
    return [{"role": role, "content": content}] * count


@st.composite
def _tools(draw: st.DrawFn, size: int, path: str) -> list[dict[str, Any]]:
    count = draw(st.sampled_from((1, 8, 128)))
    schema = _schema(draw(_SCHEMAS), max(1, size // count - 80))
    if path.startswith("/v1/messages"):
        return [{"name": f"f{i}", "input_schema": schema} for i in range(count)]
    if path == "/v1/responses":
        return [{"type": "function", "name": f"f{i}", "parameters": schema} for i in range(count)]
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """Bodies for an endpoint that are likely to cost much."""
    share = draw(st.sampled_from((0.1, 0.5, 0.9)))
    bulk = int(LONGEST_BODY * share)
    rest = int(LONGEST_BODY * (0.95 - share))
    if path == "/detokenize":
        return {"tokens": [draw(st.integers(0, 2000))] * (LONGEST_BODY // 6)}
    body: dict[str, Any] = draw(_sampling(rest)) if path != "/tokenize" else {"return_token_strs": draw(st.booleans())}
    if path == "/v1/completions" or (path == "/tokenize" and draw(st.booleans())):
        body["prompt"] = draw(_prompt(bulk)) if path == "/v1/completions" else draw(_text(bulk))
        if path == "/v1/completions":
            body |= draw(st.sampled_from(({}, {"echo": True}, {"logprobs": 20}, {"echo": True, "logprobs": 5})))
            if isinstance(body["prompt"], list) and isinstance(body["prompt"][0], list | str):
                body["n"] = min(body["n"], max(1, 1024 // len(body["prompt"])))
    else:
        body["input" if path == "/v1/responses" else "messages"] = draw(_messages(bulk, path))
        if draw(st.booleans()):
            body["tools"] = draw(_tools(rest, path))
            if path != "/tokenize":
                kind = {"type": "any"} if path.startswith("/v1/messages") else "required"
                body["tool_choice"] = draw(st.sampled_from((kind, None)))
    if path.startswith("/v1/messages"):
        body["model"] = "m"
    if body.get("stream") and draw(st.booleans()) and path in ENDPOINTS[:2]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


def known_worst() -> Iterator[tuple[str, str, Any]]:
    """Bodies that were once expensive: (endpoint, name, body)."""
    user = [{"role": "user", "content": "hi"}]
    yield "/v1/completions", "1,024 prompts, allowed tokens", {
        "prompt": [[1]] * 1024, "allowed_token_ids": [5] * 25_000, "max_tokens": 4}  # fmt: skip
    yield "/v1/completions", "1,024 prompts with n of 128", {"prompt": ["a"] * 1024, "n": 128}
    yield "/v1/completions", "1,024 prompts", {"prompt": ["a"] * 1024, "max_tokens": 64}
    yield "/v1/completions", "1,024 prompts, usage in each chunk", {
        "prompt": ["a"] * 1024, "max_tokens": 64, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    yield "/v1/completions", "n of 128, a long prompt", {"prompt": [300] * 8000, "n": 128, "max_tokens": 64}
    yield "/v1/completions", "8 long prompts with n of 128", {"prompt": [[7] * 3900] * 8, "n": 128, "max_tokens": 64}
    yield "/v1/completions", "the same, a token each", {"prompt": [[7] * 3900] * 8, "n": 128, "max_tokens": 1}
    stops = ["a" * 900 + str(i) for i in range(MAX_STOP_STRINGS)]
    yield "/v1/completions", "long stop strings, n of 128", {"prompt": "a", "n": 128, "stop": stops, "max_tokens": 64}
    yield "/v1/completions", "bad words", {"prompt": "a", "bad_words": ["the " * 15] * 128}
    yield "/v1/completions", "echo with log-probabilities", {"prompt": [300] * 8000, "echo": True, "logprobs": 5}
    for path in ("/v1/chat/completions", "/v1/responses"):
        flat = path == "/v1/responses"
        name = "input" if flat else "messages"
        function = {"name": "f", "parameters": {"x": [{}] * 20_000}}
        tool = {"type": "function", **(function if flat else {"function": function})}
        yield path, "a tool of empty objects", {name: user, "tools": [tool], "tool_choice": "required"}
    yield "/v1/chat/completions", "1,900 system messages", {"messages": [{"role": "system", "content": "a"}] * 1900}
    yield "/v1/messages", "a tool of empty objects", {
        "model": "m", "max_tokens": 9, "messages": user,
        "tools": [{"name": "f", "input_schema": {"x": [{}] * 20_000}}]}  # fmt: skip
    yield "/v1/messages/count_tokens", "1,500 messages", {"model": "m", "messages": user * 1500}
    yield "/tokenize", "each token's text", {"prompt": "a" * 8000, "return_token_strs": True}
    yield "/detokenize", "the same token", {"tokens": [300] * 16_000}
