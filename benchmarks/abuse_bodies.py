"""Small bodies that ask for much work, for the scenario `amplification` of abuse.py."""

from __future__ import annotations

import json
from typing import Any

_BOMB = 16 * 2**20  # bytes
_USER = [{"role": "user", "content": "hi"}]


def amplified_bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body)."""

    def body(**fields: Any) -> bytes:
        return json.dumps({"model": model, **fields}, separators=(",", ":")).encode()

    def bomb(begin: str, end: str) -> bytes:
        """JSON with many empty objects between `begin` and `end`."""
        return body().removesuffix(b"}") + f",{begin}".encode() + b"{}," * (_BOMB // 3) + b"{}" + end.encode()

    user = json.dumps(_USER)
    function = '"tools":[{"type":"function","function":{"name":"f","parameters":{"x":['
    schema = '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"x":['
    chat = "/v1/chat/completions"
    messages = "/v1/messages"
    return {
        "1,024 prompts, 131,072 allowed tokens": (
            "/v1/completions", body(prompt=[[1]] * 1024, allowed_token_ids=[5] * 2**17, max_tokens=2)),
        "1,024 prompts with n of 128": ("/v1/completions", body(prompt=["a"] * 1024, n=128)),
        "1,024 prompts": ("/v1/completions", body(prompt=["a"] * 1024, max_tokens=2)),
        "bomb in tools": (chat, bomb(f'"messages":{user},{function}', "]}}}]}")),
        "bomb in response_format": (chat, bomb(f'"messages":{user},{schema}', "]}}}}")),
        "bomb in structured_outputs": (chat, bomb(f'"messages":{user},"structured_outputs":{{"json":{{"x":[', "]}}}")),
        "bomb in input_schema": (
            messages, bomb(f'"max_tokens":1,"messages":{user},"tools":[{{"name":"f","input_schema":{{"x":[', "]}}]}")),
        "bomb in messages": (chat, bomb('"messages":[{"role":"user","content":[', "]}]}")),
        "bomb in metadata": ("/v1/responses", bomb('"input":"hi","metadata":{"x":[', "]}}")),
        "a million strings": ("/v1/completions", body(prompt=["a"] * 2**20)),
        "2 MB to tokenize": ("/tokenize", body(prompt="the " * 2**19)),
    }  # fmt: skip
