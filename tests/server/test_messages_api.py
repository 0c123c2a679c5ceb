"""/v1/messages through Anthropic's client, and its bytes."""

from __future__ import annotations

import json

import anthropic
import pytest

MODEL = "test-model"
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def client(scripted):
    return scripted.anthropic()


def body(text: str, **options) -> dict:
    message = {"role": "user", "content": f"SAY({text})SAY"}
    return {"model": MODEL, "max_tokens": 500, "messages": [message], **options}


def test_message(client):
    message = client.messages.create(**body("Hello 😀."))
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello 😀.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.cache_read_input_tokens == 1
    counted = client.messages.count_tokens(**{k: v for k, v in body("Hello 😀.").items() if k != "max_tokens"})
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_ends(client):
    message = client.messages.create(**body("one two three", stop_sequences=["two"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    assert message.content[0].text == "one "
    assert client.messages.create(**body("one two three", max_tokens=2)).stop_reason == "max_tokens"


def test_tools_and_thinking(client):
    text = f"<think>Hm.</think>Let me look. {CALL}{CALL}"
    message = client.messages.create(**body(text, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024}))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "Hm."
    assert message.content[1].text == "Let me look."
    assert [block.input for block in message.content[2:]] == [{"city": "Köln"}] * 2
    assert message.stop_reason == "tool_use"

    with client.messages.stream(**body(text, tools=TOOLS)) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[2:]] == [{"city": "Köln"}] * 2
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", message.usage.output_tokens)


def test_forced_calls(client):
    named = {"type": "tool", "name": "get_weather"}
    message = client.messages.create(**body('{"city": "Rom"}', tools=TOOLS, tool_choice=named))
    assert [(block.name, block.input) for block in message.content] == [("get_weather", {"city": "Rom"})]
    text = '[{"name": "get_weather", "parameters": {"city": "Rom"}}]'
    message = client.messages.create(**body(text, tools=TOOLS, tool_choice={"type": "any"}))
    assert [(block.name, block.input) for block in message.content] == [("get_weather", {"city": "Rom"})]


def both(client, text: str, **options) -> list:
    """The message whole and from a stream."""
    with client.messages.stream(**body(text, **options)) as stream:
        return [client.messages.create(**body(text, **options)), stream.get_final_message()]


def test_text_around_calls_and_one_call(client):
    text = f"Before.\n{CALL}\nAfter.{CALL}"
    for message in both(client, text, tools=TOOLS):
        assert [block.type for block in message.content] == ["text", "tool_use", "text", "tool_use"]
        assert [block.text for block in message.content[::2]] == ["Before.", "\n\nAfter."]
    for message in both(client, text, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}):
        assert [block.type for block in message.content] == ["text", "tool_use", "text"]
        assert message.stop_reason == "tool_use"


def test_a_call_that_was_cut(client):
    text = '[{"name": "get_weather", "parameters": {"city": "Rom"}}, {"name": "get_weather", "parameters": {}}]'
    numbers = set()
    for limit in range(1, 100, 4):
        for message in both(client, text, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=limit):
            assert all(block.type == "tool_use" for block in message.content)
            if message.stop_reason == "max_tokens":
                numbers.add(len(message.content))
        if message.stop_reason == "tool_use":
            break
    assert {0, 1} <= numbers


def test_the_next_turn(client, scripted):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "So? SAY(Wet.)SAY"}]},
    ]  # fmt: skip
    message = client.messages.create(model=MODEL, max_tokens=99, system="Be brief.", messages=messages, tools=TOOLS)
    assert message.content[0].text == "Wet."
    prefilled = [*messages, {"role": "assistant", "content": "It is"}]
    assert client.messages.create(model=MODEL, max_tokens=99, messages=prefilled).content[0].text == "Wet."


def events(response) -> list[tuple[str, dict]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    assert all(len(block) == 2 for block in blocks)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_order_of_events(scripted):
    response = scripted.http().post("/v1/messages", json=body(f"Well. {CALL}", tools=TOOLS, stream=True))
    told = events(response)
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told if name != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    assert told[0][1]["message"]["usage"]["output_tokens"] == 0
    open_block = None
    for name, data in told:
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
        elif name == "content_block_delta":
            assert data["index"] == open_block
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert [data["index"] for name, data in told if name == "content_block_start"] == [0, 1]


@pytest.mark.parametrize(
    ("status", "kind", "options"),
    [
        (404, "not_found_error", {"model": "other"}),
        (400, "invalid_request_error", {"max_tokens": 0}),
        (400, "invalid_request_error", {"messages": []}),
        (400, "invalid_request_error", {"messages": [{"role": "tool", "content": "x"}]}),
        (400, "invalid_request_error", {"tool_choice": {"type": "tool", "name": "f"}}),
        (400, "invalid_request_error", {"output_format": {"type": "text"}}),
        (400, "invalid_request_error", {"output_config": {"format": {"type": "json_schema"}}}),
        (400, "invalid_request_error", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
        (400, "invalid_request_error", {"messages": [{"role": "user", "content": [{"type": "novelty"}]}]}),
        (400, "invalid_request_error", {"tools": [{"name": "x" * 129}]}),
        (400, "invalid_request_error", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (400, "invalid_request_error", {"max_tokens": None}),
    ],
)
def test_errors_have_anthropics_shape(scripted, status, kind, options):
    response = scripted.http().post("/v1/messages", json=body("x", **options))
    assert (response.status_code, response.json()["type"]) == (status, "error")
    assert response.json()["error"]["type"] == kind


def test_error_type_of_the_client(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**body("x", model="other"))
