"""Generates invalid requests of many kinds, for abuse.py."""

from __future__ import annotations

import json
import random
from typing import Any

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": "def f(", "max_tokens": 4},
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"model": "demo", "input": "Hi", "max_output_tokens": 16},
    "/v1/messages": {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/tokenize": {"model": "demo", "prompt": "Hi"},
    "/detokenize": {"model": "demo", "tokens": [5, 6]},
}
# Invalid values of required fields, and of the sampling endpoints' optional fields.
REQUIRED = ("prompt", "messages", "input", "tokens")
NEVER: tuple[Any, ...] = ({"a": 1}, True, -1.5, [[["x"]]], [None], [{"role": 5}], 10**30)
RANGES: dict[str, tuple[Any, ...]] = {
    "temperature": (11, -1, "hot", [], {}, True),
    "top_p": (-0.5, 1.5, "x", [1], {}),
    "max_tokens": (-2, 1.5, "x", 2**70, [], {}),
    "stop": (5, {}, [1], ["a"] * 65, [""]),
    "n": (0, -5, 1000, "x", 1.5),
    "stream": ("yes", 1, [], {}),
    "seed": ("x", 2**70, 1.5, []),
    "logit_bias": ({"x": 1}, [1], 5, {"99999999": 1}),
}
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FROBNICATE", "get")
HEADS = (
    b"Content-Length: x", b"Content-Length: -5", b"Content-Length: 1\r\nContent-Length: 2", b"no colon here",
    b": no name", b"Bad Name: x", b"X: \x00", b" folded: x", b"Transfer-Encoding: gzip", b"Content-Length: 99999999999",
    b"Transfer-Encoding: chunked\r\n\r\nzz", b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
)  # fmt: skip
LINES = (
    b"POST /v1/completions", b"POST  HTTP/1.1", b"POST /v1/completions HTTP/9.9", b"POST /v1/completions HTTQ/1.1",
    b"\x16\x03\x01\x02\x00\x01\x00\x01", b"PRI * HTTP/2.0", b"POST /\xff HTTP/1.1", b"POST /a b HTTP/1.1", b"<html>",
)  # fmt: skip


class Malformed:
    """Generates requests as (kind, bytes), in an order that depends only on `seed`."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._kinds = [name for name in dir(self) if not name.startswith("_") and name != "draw"]

    def draw(self) -> tuple[str, bytes]:
        kind = self._random.choice(self._kinds)
        return kind.replace("_", " "), getattr(self, kind)()

    def _body(self) -> tuple[str, dict[str, Any]]:
        path = self._random.choice(list(BODIES))
        return path, dict(BODIES[path])

    def _request(self, path: str, body: bytes, method: str = "POST", kind: str = "application/json") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def broken_json(self) -> bytes:
        path, body = self._body()
        data = bytearray(json.dumps(body).encode())
        while _is_json(data):
            at = self._random.randrange(len(data))
            match self._random.randrange(3):
                case 0:
                    data[at] = self._random.randrange(256)
                case 1:
                    del data[at : at + self._random.randint(1, 9)]
                case 2:
                    data[at:at] = self._random.randbytes(self._random.randint(1, 9))
            if not data:
                data += b"{"
        return self._request(path, bytes(data))

    def wrong_types(self) -> bytes:
        path, body = self._body()
        name = next(name for name in REQUIRED if name in body)
        body[name] = self._random.choice(NEVER)
        return self._request(path, json.dumps(body).encode())

    def wrong_values(self) -> bytes:
        name = self._random.choice(list(RANGES))
        body = BODIES["/v1/completions"] | {name: self._random.choice(RANGES[name])}
        return self._request("/v1/completions", json.dumps(body).encode())

    def not_an_object(self) -> bytes:
        value = self._random.choice((None, 1, "x", [], [{}], True, {}))
        return self._request(self._body()[0], json.dumps(value).encode())

    def invalid_utf8(self) -> bytes:
        path, body = self._body()
        bad = self._random.choice((b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80", b"\xc0\xaf"))
        return self._request(path, json.dumps(body).encode().replace(b'"demo"', b'"' + bad + b'"'))

    def nested(self) -> bytes:
        path, body = self._body()
        depth = self._random.randrange(2000, 50_000)
        deep = self._random.choice((b"[", b'{"a":')) * depth
        return self._request(path, json.dumps(body).encode()[:-1] + b', "x": ' + deep)

    def content_type(self) -> bytes:
        path, body = self._body()
        kind = self._random.choice(("text/plain", "", "application/xml", "multipart/form-data", "application/jsonx"))
        return self._request(path, json.dumps(body).encode(), kind=kind)

    def method(self) -> bytes:
        return self._request(self._body()[0], b"", self._random.choice(METHODS))

    def path(self) -> bytes:
        name = "".join(self._random.choices("abcdefgh%./~?&=", k=self._random.randint(1, 60)))
        return self._request("/nowhere/" + name, b"{}")

    def model(self) -> bytes:
        path, body = self._body()
        name = self._random.choice(("", "x", "../demo", "demo\0", "д" * 1000, 5, [], {}))
        return self._request(path, json.dumps(body | {"model": name}).encode())

    def header(self) -> bytes:
        return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + self._random.choice(HEADS) + b"\r\n\r\n"

    def request_line(self) -> bytes:
        return self._random.choice(LINES) + b"\r\nHost: localhost\r\n\r\n"

    def random_bytes(self) -> bytes:
        return self._random.randbytes(self._random.randint(1, 500)) + b"\r\n\r\n"


def _is_json(data: bytes | bytearray) -> bool:
    try:
        json.loads(data.decode())
    except (ValueError, RecursionError):
        return False
    return True
