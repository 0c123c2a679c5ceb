"""/v1/responses through the official client, and its events."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest
from serving import wait_until
from test_messages_api import events

from jaxserve.server.http.errors import APIError
from jaxserve.server.http.keys import ApiKey
from jaxserve.server.http.response_store import ResponseStore, StoredResponse
from jaxserve.server.http.shared_responses import SharedResponseStore

MODEL = "test-model"
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def client(scripted):
    return scripted.openai()


def ask(client, text: str, **options):
    return client.responses.create(model=MODEL, input=f"SAY({text})SAY", **options)


def test_response(client):
    result = ask(client, "Hello 😀.", instructions="Be brief.", metadata={"a": "b"}, user="u")
    assert (result.object, result.status, result.output_text) == ("response", "completed", "Hello 😀.")
    assert (result.instructions, result.metadata, result.user) == ("Be brief.", {"a": "b"}, "u")
    assert [item.type for item in result.output] == ["message"]
    assert result.usage.total_tokens == result.usage.input_tokens + result.usage.output_tokens
    assert result.usage.input_tokens_details.cached_tokens == 1
    short = ask(client, "Hello there, you all.", max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert short.output[0].status == "incomplete"


def test_tools_and_reasoning(client):
    result = ask(client, f"<think>Hm.</think>Look. {CALL}{CALL}", tools=TOOLS)
    assert [item.type for item in result.output] == ["reasoning", "message", "function_call", "function_call"]
    assert result.output[0].content[0].text == "Hm."
    assert json.loads(result.output[2].arguments) == {"city": "Köln"}
    assert result.usage.output_tokens_details.reasoning_tokens > 0
    named = {"type": "function", "name": "get_weather"}
    assert ask(client, "{}", tools=TOOLS, tool_choice=named).output[0].arguments == "{}"


def test_memory(client):
    """previous_response_id brings back what was said, but not the instructions."""
    first = ask(client, "My name is Bob.", instructions="SECRET")
    second = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Go on."}], previous_response_id=first.id
    )
    assert second.output_text == "My name is Bob."  # of the first input, which is there again
    assert second.usage.input_tokens > first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: ask(client, "x", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    unstored = ask(client, "x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_items_as_input(client, scripted):
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain SAY(Wet.)SAY"},
    ]
    assert client.responses.create(model=MODEL, input=items, tools=TOOLS).output_text == "Wet."


def test_background(client):
    result = client.responses.create(model=MODEL, input="SAYSLOWLY(" + "word " * 200 + ")SAY", background=True)
    assert result.status == "queued"
    wait_until(lambda: client.responses.retrieve(result.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="not been completed"):
        ask(client, "x", previous_response_id=result.id)
    assert client.responses.cancel(result.id).status == "cancelled"
    assert client.responses.retrieve(result.id).status == "cancelled"

    done = ask(client, "Done.", background=True)
    for _ in range(100):
        if (latest := client.responses.retrieve(done.id)).status not in ("queued", "in_progress"):
            break
        time.sleep(0.02)
    assert (latest.status, latest.output_text) == ("completed", "Done.")
    assert client.responses.cancel(done.id).status == "completed"
    with pytest.raises(openai.BadRequestError, match="in the background"):
        client.responses.cancel(ask(client, "x").id)


def test_events_in_the_background_begin_with_the_queue(client):
    told = list(ask(client, "Done.", background=True, stream=True))
    assert [event.type for event in told[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in told[:3]] == ["queued", "queued", "in_progress"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_compacting_is_not_served(scripted, method):
    answer = scripted.http().request(method, "/v1/responses/compact", json={"model": MODEL, "input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "/v1/responses/compact" in answer.json()["error"]["message"]


def test_order_of_events(scripted):
    """Every event has its number, and each item and part begins and ends around its deltas."""
    body = {"model": MODEL, "input": f"SAY(<think>Hm.</think>Look. {CALL})SAY", "tools": TOOLS, "stream": True}
    told = events(scripted.http().post("/v1/responses", json=body))
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    assert all(name == data["type"] for name, data in told)
    names = [name.removeprefix("response.") for name, _ in told]
    part = ["content_part.added", "content_part.done"]
    assert [name for name in names if not name.endswith(".delta")] == [
        "created", "in_progress",
        "output_item.added", part[0], "reasoning_text.done", part[1], "output_item.done",
        "output_item.added", part[0], "output_text.done", part[1], "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for kind, text in (("output_text", "Look."), ("reasoning_text", "Hm.")):
        assert "".join(data["delta"] for name, data in told if name == f"response.{kind}.delta") == text
    last = told[-1][1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert scripted.http().get(f"/v1/responses/{last['id']}").json() == last


def both(client, text: str, **options) -> list:
    """The response whole and from a stream."""
    with client.responses.stream(model=MODEL, input=f"SAY({text})SAY", **options) as stream:
        return [ask(client, text, **options), list(stream)[-1].response]


def items(response) -> list[tuple[str, str, str]]:
    """Each item's type, status, and text or arguments."""
    return [
        (item.type, item.status, item.content[0].text if item.type == "message" else item.arguments)
        for item in response.output
    ]


@pytest.mark.parametrize(
    ("text", "options", "kinds"),
    [
        (f"Before.\n{CALL}\nAfter.", {}, ["message", "function_call", "message"]),
        (f"{CALL}After.{CALL}", {}, ["function_call", "message", "function_call"]),
        (f"Look. {CALL}{CALL}", {"parallel_tool_calls": False}, ["message", "function_call"]),
    ],
)
def test_items_come_in_the_order_of_the_text(client, text, options, kinds):
    result, told = both(client, text, tools=TOOLS, **options)
    assert [(item.type, item.status) for item in result.output] == [(kind, "completed") for kind in kinds]
    assert items(result) == items(told)


def test_items_of_a_response_that_was_cut(client):
    """A call that is whole is completed, and what is unfinished is no item, whole and streamed."""
    text = '[{"name": "get_weather", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Rom"}}]'
    seen = set()
    for limit in range(4, 100, 3):
        result, told = both(client, text, tools=TOOLS, tool_choice="required", max_output_tokens=limit)
        if result.status == "completed":
            break
        assert items(result) == items(told)
        assert (result.status, told.status, result.output_text) == ("incomplete", "incomplete", "")
        seen.add(tuple((item.type, item.status) for item in result.output))
    call = "function_call"
    assert ((call, "completed"),) in seen
    assert ((call, "completed"), (call, "incomplete")) in seen


def test_stream_through_the_client(client):
    with client.responses.stream(model=MODEL, input="SAY(Hello you.)SAY") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello you."


def test_logprobs(client):
    result = ask(client, "Hi.", include=["message.output_text.logprobs"], top_logprobs=2)
    entries = result.output[0].content[0].logprobs
    assert len(entries) == result.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("input", {"input": []}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}),
        ("background", {"background": True, "store": False}),
        ("conversation", {"conversation": "c"}),
        ("temperature", {"temperature": 11}),
        ("truncation", {"truncation": "middle"}),
    ],
)
def test_bad_fields(scripted, param, options):
    response = scripted.http().post("/v1/responses", json={"model": MODEL, "input": "x", **options})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_store_is_bounded():
    store = ResponseStore(limit=3, max_bytes=100)
    for name in "abcd":
        store.put(name, StoredResponse(None, b"x" * 10, b""))
    with pytest.raises(APIError):
        store.get("a", None)
    store.put("e", StoredResponse(None, b"x" * 85, b""))
    assert store.get("e", None)
    assert store.get("d", None)
    with pytest.raises(APIError):
        store.get("c", None)
    store.remove("e")
    store.put("d", StoredResponse(None, b"", b""))
    assert store._bytes == 0


@pytest.fixture
def shared(tmp_path):
    """The stores of two API servers of one server."""
    stores = [SharedResponseStore(str(tmp_path / "responses"), 3, number) for number in range(2)]
    yield stores
    for store in stores:
        store.close()


def test_api_servers_share_their_responses(shared):
    one, other = shared
    mine = ApiKey("mine")
    one.put("a", StoredResponse(mine, b"{}", b"[1]", items=b"[2]", output_ids=("item",), background=True))
    assert other.get("a", mine) == StoredResponse(mine, b"{}", b"[1]", items=b"[2]", background=True)
    assert other.with_item("item", mine) == other.get("a", mine)
    assert other.with_item("another", mine) is None
    for owner in (ApiKey("theirs"), None):
        assert other.with_item("item", owner) is None
        with pytest.raises(APIError):
            other.get("a", owner)
    for name in "bcd":
        one.put(name, StoredResponse(None, b"x", b""))
    other.remove("b")
    for name, owner in (("a", mine), ("b", None)):
        with pytest.raises(APIError):
            one.get(name, owner)
    assert one.with_item("item", mine) is None


async def followed(store, name: str, after: int) -> bytes:
    return b"".join([data async for data in store.get(name, None).log.follow(after)])


def test_a_response_is_followed_and_stopped_from_another_api_server(shared):
    one, other = shared

    async def run() -> None:
        log = one.log_for("a")
        one.put("a", StoredResponse(None, b"{}", b"", log=log, background=True, running=True))
        log.add([b"first ", b"second "])
        task = asyncio.create_task(asyncio.sleep(60))
        one.watch("a", task)
        following = asyncio.create_task(followed(other, "a", 0))
        stopping = asyncio.create_task(other.stop("a"))
        await asyncio.wait([task])
        assert task.cancelled()
        assert other.get("a", None).running
        log.add([b"third"])
        log.close()
        await stopping
        assert await following == b"second third"
        assert not other.get("a", None).running

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_an_api_server_left_unfinished_has_failed(shared):
    one, other = shared
    body = b'{"id": "a", "status": "in_progress"}'
    one.put("a", StoredResponse(None, body, b"", log=one.log_for("a"), background=True, running=True))
    other.abandon(1)
    assert other.get("a", None).response == body
    other.abandon(0)
    response = json.loads(other.get("a", None).response)
    assert (response["id"], response["status"], response["error"]["code"]) == ("a", "failed", "server_error")
    assert b"response.failed" in asyncio.run(followed(other, "a", -1))
