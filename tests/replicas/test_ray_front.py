"""The front of a Ray application over replicas that are stand-ins: what clients get when replicas fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'jaxserve[ray]'")
from ray.exceptions import RayError
from starlette.applications import Starlette
from starlette.routing import Route

from jaxserve.prefix_routing import prompt_blocks
from jaxserve.ray.front import Front
from jaxserve.ray.replica import Call, Head

EVENTS = [("content-type", "text/event-stream; charset=utf-8")]
Script = Callable[[Call], list[Any]]


class Stream:
    """What a call returns: the parts of the script one after the other; an exception among them is raised."""

    def __init__(self, parts: list[Any]):
        self.cancelled = False
        self._parts = self._run(parts)

    async def _run(self, parts: list[Any]) -> AsyncIterator[Any]:
        for part in parts:
            await asyncio.sleep(0)
            if isinstance(part, Exception):
                raise part
            yield part

    def __aiter__(self) -> Stream:
        return self

    def __anext__(self) -> Any:
        return anext(self._parts)

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """A handle: each call goes to the next script. `every` answers what all replicas are asked."""

    def __init__(self, *scripts: list[Any], every: Callable[[Call], list[Any]] = lambda call: []):
        self._scripts = list(scripts)
        self._every = every
        self.calls: list[Call] = []
        self.streams: list[Stream] = []

    def options(self, **options: Any) -> Replicas:
        return self

    def remote(self, call: Call) -> Stream:
        self.calls.append(call)
        self.streams.append(Stream(self._scripts.pop(0)))
        return self.streams[-1]

    def broadcast(self, method: str, call: Call) -> Any:
        answers = self._every(call)

        class Results:
            async def results_async(self, **options: Any) -> list[Any]:
                return answers

        return Results()


def ask(replicas: Replicas, path: str = "/v1/completions", body: Any = None, method: str = "POST") -> httpx.Response:
    front = Front(replicas, max_body_bytes=1000)  # type: ignore[arg-type]
    app = Starlette(routes=[Route("/{path:path}", front.__call__, methods=["GET", "POST", "DELETE"])])

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


def head(status: int = 200, replica: str = "a", headers: Any = ()) -> Head:
    return Head(status, list(headers), replica)


def test_an_answer_is_passed_on():
    body = {"prompt": "x" * 300}
    replicas = Replicas([head(201, headers=[("X-Request-Id", "7"), ("content-length", "4")]), b"ab", b"cd"])
    answer = ask(replicas, "/v1/completions?a=%20b", body)
    assert (answer.status_code, answer.content, answer.headers["x-request-id"]) == (201, b"abcd", "7")
    (call,) = replicas.calls
    assert (call.method, call.target, json.loads(call.body)) == ("POST", "/v1/completions?a=%20b", body)
    assert call.blocks == prompt_blocks(call.body) != ()


def test_a_request_that_is_lost_before_its_answer_is_given_to_another():
    assert ask(Replicas([RayError("died")], [head(), b"ok"])).content == b"ok"
    refused = ask(Replicas([RayError("died")], [RayError("died")]))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "replica_unavailable"
    assert ask(Replicas([RayError("")], [RayError("")]), "/v1/messages").json()["type"] == "error"


def test_a_replica_that_refuses_is_avoided():
    replicas = Replicas([head(503, "a"), b"full"], [head(200, "b"), b"ok"])
    assert ask(replicas).content == b"ok"
    assert [call.avoid for call in replicas.calls] == [frozenset(), {"a"}]
    assert replicas.streams[0].cancelled
    last = ask(Replicas([head(503, "a"), b"full"], [head(503, "b"), b"full, too"]))
    assert (last.status_code, last.content) == (503, b"full, too")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_whose_replica_is_lost_ends_with_an_error(path):
    replicas = Replicas([head(headers=EVENTS), b'data: {"a', b'": 1}\n\ndata: {"b', RayError("died")])
    *events, last = ask(replicas, path).text.strip().split("\n\n")
    assert events == ['data: {"a": 1}']  # and not the half of one
    name, _, data = last.rpartition("data: ")
    assert name == ("event: error\n" if path == "/v1/messages" else "")
    assert "has been lost" in json.loads(data)["error"]["message"]


def test_events_are_passed_on_whole():
    parts = [b"data: 1\n", b"\ndata: 2\n\n", b"data: 3\n\ndata", b": 4\n\n", b": the last"]
    assert ask(Replicas([head(headers=EVENTS), *parts])).content == b"".join(parts)


def test_another_answer_whose_replica_is_lost_is_cut():
    """The server that sends it closes the connection, and clients miss the rest by its length."""
    with pytest.raises(RayError):
        ask(Replicas([head(headers=[("content-length", "9")]), b"half", RayError("died")]))


def test_long_bodies_are_refused():
    answer = ask(Replicas(), body="x" * 1000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_metrics_are_those_of_all_replicas():
    text = b"# HELP m M\n# TYPE m gauge\nm 1\n"
    replicas = Replicas(every=lambda call: [(head(), text), RayError("died"), (head(replica="b"), text)])
    lines = ask(replicas, "/metrics", method="GET").text.splitlines()
    assert lines == ["# HELP m M", "# TYPE m gauge", 'm{replica="a"} 1', 'm{replica="b"} 1']
    hidden = Replicas(every=lambda call: [(head(), text), (head(401), b"who are you?")])
    assert ask(hidden, "/metrics", method="GET").status_code == 401


def test_administration_reaches_all_and_tells_of_a_failure():
    assert ask(Replicas(every=lambda call: [(head(), b"done")] * 2), "/reset_prefix_cache").content == b"done"
    failed = Replicas(every=lambda call: [(head(), b"done"), (head(404), b"not here")])
    assert ask(failed, "/v1/load_lora_adapter").status_code == 404


def test_stored_responses_are_found():
    def every(call: Call) -> list[Any]:
        assert call.method == "GET"
        found = call.target == "/v1/responses/resp_1"
        return [(head(404, "a"), b"no"), (head(200 if found else 404, "b"), b"yes"), (head(404, "c"), b"no")]

    assert ask(Replicas(every=every), "/v1/responses/resp_1", method="GET").content == b"yes"
    assert ask(Replicas(every=every), "/v1/responses/resp_2", method="GET").status_code == 404
    replicas = Replicas([head(replica="b"), b"more"], every=every)
    assert ask(replicas, "/v1/responses", {"input": "go on", "previous_response_id": "resp_1"}).content == b"more"
    assert replicas.calls[0].avoid == {"a", "c"}
    assert ask(Replicas([head(), b"3"]), "/v1/responses/input_tokens", {"input": "a"}).content == b"3"
    odd = Replicas([head(404), b"unknown"], every=every)  # it is no name that could stand in a path
    assert ask(odd, "/v1/responses", {"input": "go on", "previous_response_id": "../v1"}).status_code == 404
    assert odd.calls[0].avoid == frozenset()
